"""Command `python -m orchestrator.export`: a network is exported whole or not at all, with a README."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orchestrator.__main__ import main as orchestrate
from orchestrator.commands.export_command import main as export
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import Run
from orchestrator.export.export_folder import chosen_formats
from orchestrator.export.readme import _latency
from orchestrator.store import saved_sweep
from orchestrator.store.store import Store
from pruning.catalogue import rows

LOOSE = replace(CODECS["torch"].row, tolerance=math.inf)
SWEEP = (
    *("model=mlp", "model.hidden=[12]", "train.epochs=1", "finetune.epochs=0", "schedule.rounds=1", "seed=0"),
    *("method=ln_structured", "schedule.sparsity=0.25,0.75", "cluster=inline", "tracking=none"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished sweep with two trials."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["orchestrator", "-m", *SWEEP])
        patch.setattr(
            "orchestrator.views.report.report_files.draw", lambda *_: {}
        )  # drawing figures takes as long as the sweep
        orchestrate()
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of the command; asserts that it left no files."""
    before = sorted(Path.cwd().iterdir())
    assert export(arguments) == 2
    assert sorted(Path.cwd().iterdir()) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_format_that_is_named_twice_is_written_once() -> None:
    assert [each.name for each in chosen_formats(["torch", "onnx", "torch"])] == ["torch", "onnx"]


def test_the_readme_lists_latencies_from_the_smallest_batch_on() -> None:
    names = ("latency_ms", "dense_ms", "speedup", "speedup_low", "speedup_high")
    figures = {f"{name}/{size}": 1.0 for name in names for size in (8, 64, 1)}
    figures |= {f"token_speedup{end}/8": 1.5 for end in ("", "_low", "_high")} | {
        "token_ms/8": 2.0,
        "dense_token_ms/8": 3.0,
    }
    record = SimpleNamespace(kind="measure", measurements=figures, environment={"processor": "a CPU"}, host="")
    typed = SimpleNamespace(format="onnx", measure=SimpleNamespace(batch_sizes=(8, 64, 1)))
    lineage = [SimpleNamespace(key="round")]
    plan = SimpleNamespace(stages={"measure": SimpleNamespace(typed=typed)}, lineage=lambda _: lineage)
    sweep: Any = SimpleNamespace(records={"measure": record}, plan=plan)
    choice: Any = SimpleNamespace(stage="round")

    said = list(_latency(sweep, choice))
    rows = [row for row in said if "milliseconds at" in row]

    assert [re.findall(r"batch (\d+) as onnx, on a CPU", row) for row in rows] == [["1"], ["8"], ["64"]]
    place = said.index("| milliseconds of one more token at batch 8 as onnx | 2.00 | 3.00 |")
    assert said[place + 1].startswith("| speed-up of a token at batch 8 as onnx | 1.50× [1.50, 1.50] |")


@pytest.mark.slow
def test_the_readme_s_code_runs_without_this_project(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "new" / "network"
    assert export(["--best", "val/accuracy>=0", "--to", "safetensors", "--to", "torch", "--output", str(made)]) == 0

    assert re.search(
        r"\n--best 'val/accuracy>=0': val/accuracy 0\.\d+ \(mean over 1 seed\); 2 met it\n", capsys.readouterr().out
    )
    assert sorted(path.name for path in made.iterdir()) == [
        *("README.md", "network.pt2", "network.py", "network.safetensors"),
    ]
    page = (made / "README.md").read_text()
    assert re.match(r"# \w+ pruned by ln_structured to 75.00%\n", page), "the fewest bytes"
    assert "pruned by ln_structured to a sparsity of 75.00%" in page
    store = Store("store")
    sweep = saved_sweep.load(store, store.sweeps()[0])
    trial = next(trial for trial in sweep.plan.trials if trial.config["schedule"]["sparsity"] == 0.75)
    record = sweep.records[trial.stages[-1]]
    assert f"| accuracy on test | {100 * record.after['test/accuracy']:.2f}% |" in page
    assert re.search(r"\| parameters \| [1-9]\d\d \| 910 \|", page)
    blocks = re.findall(r"```python \w+\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    assert blocks[0].startswith("import torch\nimport network\n\n"), "imports first"
    code = "import sys\nsys.path.insert(0, '')\nsys.modules.update(orchestrator=None, pruning=None)\n"
    for block in blocks:
        code += f"{block}\nassert outputs.shape == (2, 10)\n"
    subprocess.run([sys.executable, "-I", "-c", code], cwd=made, check=True)
    assert {each.dtype for each in load_file(made / "network.safetensors").values()} == {torch.float32}


def test_what_cannot_be_done_is_told_in_a_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--to", "safetensors", "--output", "out")
    assert (
        "`--to` must be given, once or several times; type one of safetensors, torch, onnx, onnx_int8, op"
        in refusal(capsys, "--output", "out")
    )
    said = refusal(capsys, "--to", "onx", "--output", "out")
    assert "`--to` (='onx') must be one of safetensors" in said
    assert said.rstrip().endswith("; did you mean onnx?")
    assert "`SWEEP` (='x') does not exist" in refusal(capsys, "x", *out)
    assert "`--trial` (='y') is not in the sweep" in refusal(capsys, "--trial", "y", *out)
    assert "`--best` (='z') must be conditions" in refusal(capsys, "--best", "z", *out)
    assert "is met by no trial: the closest is" in refusal(capsys, "--best", "val/accuracy>1", *out)
    assert "type val/accuracy>=0.97" in refusal(capsys, "--best", "val/accuracy>=97", *out)
    below = refusal(capsys, "--to", "torch", "--output", "store/store.json/net")
    assert below.startswith("`--output` (=store/store.json/net) cannot be written: ")
    assert below.endswith("store.json is not a directory; name another folder.\n")
    there = refusal(capsys, "--trial", "sparsity=0.75", "--to", "torch", "--output", "store")
    assert "`--output` (='store') must be a new or empty folder; name another folder." in there


def test_names_are_looked_at_before_packages(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None if name == "onnxscript" else name)
    onnx = ("--to", "onnx", "--output", "out")

    assert "`SWEEP` (='nosuch') does not exist" in refusal(capsys, "nosuch", *onnx)
    assert "`--trial` (='nosuch') is not in the sweep" in refusal(capsys, "--trial", "nosuch", *onnx)
    lacking = "the format onnx needs onnxscript; install the extra `export`, as by pip install"
    assert refusal(capsys, "--trial", "sparsity=0.75", *onnx).startswith(lacking)
    assert refusal(capsys, "--best", "val/accuracy>=0", *onnx).startswith(lacking)


def test_an_export_with_other_outputs_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    monkeypatch.setattr("orchestrator.commands.export_command.shrunk", lambda model, example: other)
    said = refusal(capsys, "--trial", "sparsity=0.75", "--to", "safetensors", "--output", "out")
    assert re.search(
        r"as safetensors differ from those of the masked network by .* must differ by at most 1e-05; take another form",
        said,
    )


def test_what_is_achieved_in_a_format_that_changes_outputs_is_told(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_: Path, __: int) -> Run:
        return lambda example: torch.eye(10)[:1].expand(len(example[0]), 10)

    noughts = replace(CODECS["torch"], loader=load, row=LOOSE, calibration=20)
    monkeypatch.setitem(CODECS, "torch", noughts)  # type: ignore[arg-type]  # it is a dict
    assert export(["--trial", "sparsity=0.75", "--to", "torch", "--output", str(tmp_path / "out")]) == 0

    page, said = (tmp_path / "out" / "README.md").read_text(), capsys.readouterr().out
    (line,) = re.findall(r"The outputs in the format torch differ, and reach: (.*)\n", page)
    figures = re.findall(r"(accuracy|top5) (\d+\.\d\d)% on (validation|test)", line)
    assert [(name, split) for name, _, split in figures][:2] == [("accuracy", "validation"), ("accuracy", "test")]
    assert all(5 < float(value) < 15 for name, value, _ in figures if name == "accuracy"), "as many as are noughts"
    assert f"accuracy on validation {figures[0][1]}%" in said


def ran(path: str) -> torch.nn.Module:
    """Stand for a loss, and record the call."""
    Path(path).touch()
    return torch.nn.CrossEntropyLoss()


@pytest.mark.parametrize("kinds", [("dense",), ("round",), ("dense", "round")])
def test_code_that_any_stage_names_at_any_depth_runs_only_if_asked_to(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kinds: list[str]
) -> None:
    shutil.copytree(here / "store", tmp_path / "store")
    monkeypatch.setitem(CODECS, "torch", replace(CODECS["torch"], row=LOOSE))  # type: ignore[arg-type]
    store = Store(str(tmp_path / "store"))
    (name,) = store.sweeps()
    data = store.load_sweep(name)
    loss = {"_target_": "test_export.ran", "path": str(tmp_path / "ran")}
    measures = {"f1": {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 10}}
    tasks = data["plan"]["parts"]["task"]
    tasks.append({"kind": "torchmetrics", "measures": measures, "criterion": loss})
    for _, spec in data["plan"]["stages"]:
        if spec["kind"] in kinds:
            spec["fields"]["task"] = {"part": len(tasks) - 1}
    store.save_sweep(name, data)

    asked = ("--store", store.uri, "--trial", "sparsity=0.75", "--to", "torch", "--output", "out")
    said = refusal(capsys, *asked)

    assert "`task._target_` (=" in said
    assert "of the sweep is code that must run" in said
    assert not (tmp_path / "ran").exists()


OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = self.fc(x.flatten(1))
        return x if x.sum() > 0 else x + 0
"""


@pytest.mark.slow
def test_own_code_runs_only_if_asked_to_and_what_cannot_be_traced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exported_own.py").write_text(OWN)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "theirs.yaml").write_text("_target_: exported_own.Net\nclasses: null\n")
    own = [argument for argument in SWEEP if not argument.startswith(("model", "method", "schedule.sparsity"))]
    arguments = [
        "orchestrator",
        "--config-dir",
        "mine",
        "-m",
        "model=theirs",
        "method=magnitude",
        "schedule.sparsity=0.5",
        *own,
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    orchestrate()
    capsys.readouterr()

    out = ("--to", "torch", "--output", "out")
    said = refusal(capsys, *out)
    assert "`model._target_` (=exported_own.Net) of the sweep is code that must run" in said
    assert "pass --run-own-code" in said
    assert "Net cannot be traced by torch.export" in refusal(capsys, *out, "--run-own-code")

    (tmp_path / "exported_own.py").write_text(f"{OWN}# edited\n")
    monkeypatch.delitem(sys.modules, "exported_own")  # as in a new process
    assert refusal(capsys, *out, "--run-own-code") == (
        "`exported_own` is not what the sweep was planned with: it was edited since, and Python imports it from "
        f"{tmp_path}/exported_own.py; put its source back, or run the sweep again.\n"
    )
