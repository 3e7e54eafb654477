"""Code and commands of the how-to pages: they run as shown, and quoted messages exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import pruning
from orchestrator.__main__ import main as orchestrate
from orchestrator.compare.baseline import false_alarms, read_baseline
from orchestrator.workloads import data_loading

ROOT = Path(__file__).parent.parent
WITHOUT_FIGURES = ROOT / "tests" / "without_figures"


def snippets(page: str, *names: str) -> list[str]:
    """Return the Python blocks of a page with these names, in the order of the page."""
    shown = re.findall(r"^```python ?(\w*)\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    return [code for name, code in shown if name in names]


@pytest.mark.slow  # imports three large libraries
def test_each_way_to_keep_masks_in_a_loop_leaves_the_network_pruned(tmp_path: Path) -> None:
    pruned = "assert not network[0].weight[~masks['0.weight']].any()\nassert network[0].weight.any()\n"
    of_gpt = "name = 'transformer.h.0.mlp.c_fc.weight'\n" + (
        "assert not model.get_parameter(name)[~masks_of_gpt[name]].any()\nassert model.get_parameter(name).any()\n"
    )
    shown = snippets("how-to/own-training-loops.md", "", "lightning", "transformers", "accelerate")
    told = [part + (of_gpt if "GPT2Config" in part else pruned) for part in shown]
    (tmp_path / "shown.py").write_text("\n".join(told))

    done = subprocess.run(
        [sys.executable, "shown.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )

    assert len(shown) == 5
    assert done.returncode == 0, done.stderr


def digests(folder: Path, target: str) -> list[tuple[int, str]]:
    """Train a small sweep in `folder` with `target`, in its own process; return round and weights digest of each."""
    asked = {"_target_": target, "scheduler": "null", "epochs": "2", "select": "last"}
    own = [f"{node}.{key}={value}" for node in ("train", "finetune") for key, value in asked.items()]
    others = ["cluster=inline", "tracking=none", "model=mlp", "schedule.sparsity=0.75", "schedule.rounds=2"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *others, *own],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{WITHOUT_FIGURES}:{ROOT}:{folder}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(file.read_text())["record"] for file in folder.glob("store/stages/*/record.json")]
    return sorted((record["round"], record["weights_digest"]) for record in records)


@pytest.fixture(scope="module")
def by_our_loop(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Weights of the same sweep, trained by the built-in loop."""
    return digests(tmp_path_factory.mktemp("ours"), "null")


@pytest.mark.slow  # imports Lightning
@pytest.mark.parametrize("function", ["train", "train_by_lightning"])
def test_a_sweep_trains_by_the_functions_that_are_shown(
    function: str, tmp_path: Path, by_our_loop: list[tuple[int, str]]
) -> None:
    shown = snippets("how-to/own-training-loops.md", "mine", "mine_lightning")
    (tmp_path / "mine.py").write_text("\n\n".join(shown))

    assert len(by_our_loop) == 3
    assert digests(tmp_path, f"mine.{function}") == by_our_loop


def test_the_stream_that_is_shown_is_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = snippets("how-to/streams.md", "shards")
    (tmp_path / "shards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate([*(f"train-{index}" for index in range(8)), "val", "test"]):
        torch.save([(torch.tensor([10.0 * number + place]), place) for place in range(3)], f"{name}.pt")

    found = data_loading.load({"_target_": "shards.load", "num_workers": 2, "steps_per_epoch": 8})
    train, test = (
        [inputs for inputs, _ in split.batches(3, device=torch.device("cpu"), seed=1)]
        for split in (found.train, found.test)
    )

    assert sorted(int(inputs[0]) // 10 for inputs in train) == list(range(8))
    assert [int(value) for inputs in test for value in inputs] == [90, 91, 92]


@pytest.mark.slow
def test_a_network_is_pruned_and_runs_on_its_nonzeros_as_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,), (measured,) = (snippets("how-to/sparse.md", name) for name in ("sparse", "measure"))
    threads, names = torch.get_num_threads(), dict[str, Any]()
    monkeypatch.setattr(
        "pruning.measure.latency.compare_latency", lambda *makes, **_: SimpleNamespace(ratio=len(makes))
    )

    try:
        exec(code, names)
        printed = capsys.readouterr().out
        exec(measured, names)
    finally:
        torch.set_num_threads(threads)

    with torch.no_grad():
        torch.testing.assert_close(names["outputs"], names["model"](names["images"]), rtol=1e-4, atol=1e-5)
    assert [layer.name for layer in names["faster"].sparse.layers] == ["0", "2", "4"]
    shown, found = ((ROOT / "docs/how-to/sparse.md").read_text(), printed)
    assert re.findall(r"^ *(layer +sparsity.*)$", shown, re.M)[0].split() == found.splitlines()[0].split()


def test_masks_change_in_a_training_as_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (trained,), (resumed,), (own,) = (
        snippets("how-to/sparse-training.md", name) for name in ("sparse_training", "resume", "own")
    )
    names = dict[str, Any]()

    exec(trained, names)
    begun, moved = names["masks"], names["dynamics"].masks
    assert moved.kept() == begun.kept() != moved.sizes()
    assert moved != begun
    assert "sparsity 0.9" in capsys.readouterr().out
    exec(resumed, names)
    assert names["again"].masks == moved
    names["again"].release()

    exec(own, names)
    rotating, model = names["Rotating"](every=2), names["model"]
    rotating.attach(model, moved, names["optimizer"], length=5, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        torch.autograd.backward(model(torch.randn(4, 64)).square().mean())
        names["optimizer"].step()
    assert rotating.masks.kept() == begun.kept()
    assert [update.step for update in rotating.updates] == [2, 4]
    assert all(update.grown == update.dropped > 0 for update in rotating.updates)


def test_a_network_is_pruned_block_by_block_as_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ("layerwise", "layerwise_resume", "layerwise_own")
    (code,), (resumed,), (own,) = (snippets("how-to/layerwise.md", name) for name in shown)
    names = dict[str, Any]()

    exec(code, names)
    exec(resumed, names)
    sparsity = pruning.sparsity(names["model"])
    exec(own, names)

    assert "3.down.weight 50% zeros" in capsys.readouterr().out
    assert names["own"].masks.sparsity() == pytest.approx(0.6, abs=0.01)
    assert [len(result.layers) for result in names["saved"]] == [2, 4, 6, 8]
    assert sparsity == pytest.approx(0.59, abs=0.02), "floor(0.6 n) of each row"


@pytest.mark.slow
def test_experts_are_removed_and_loaded_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from small_mixtures import TOKENS, network_of

    (code,) = snippets("how-to/experts.md", "experts")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": network_of("mixtral"), "tokens": TOKENS}
    exec(code, names)

    loaded = type(names["model"]).from_pretrained("pruned", dtype=torch.float64, experts_implementation="eager")
    assert loaded.config.num_local_experts == 6
    torch.testing.assert_close(loaded(TOKENS).logits, names["model"](TOKENS).logits)


def test_the_reference_lists_all_dynamics() -> None:
    section = (ROOT / "docs/reference/methods.md").read_text().split("## Masks that change within a training")[1]
    listed = {name for row in re.findall(r"^\| (`.*?`) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)}

    assert listed == set(pruning.dynamics.DYNAMICS)


def test_what_the_page_on_torch_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = snippets("reference/torch.md", "")
    names: dict[str, Any] = {}

    for code in shown:
        exec(code, names)

    assert len(shown) == 3
    assert not names["model"][2].weight[~names["masks"]["2.weight"]].any()
    assert not torch.nn.utils.prune.is_pruned(names["model"])


def test_the_workflow_of_the_gate_can_be_copied() -> None:
    page = (ROOT / "docs" / "how-to" / "gate.md").read_text()
    (workflow,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)

    steps = yaml.safe_load(workflow)["jobs"]["gate"]["steps"]
    assert "python -m orchestrator.gate baseline.json --junit gate.xml" in [step.get("run") for step in steps]
    assert read_baseline(shown.encode()).points[0].margins == {"test/accuracy": 0.05}


def test_the_gate_gives_as_many_false_alarms_as_its_page_says() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| (\d.*%) \|$", (ROOT / "docs" / "how-to" / "gate.md").read_text(), re.MULTILINE)

    assert len(rows) == 5
    for margin, cells in rows:
        for seeds, told in zip((2, 3, 5, 8, 12), cells.split("% | "), strict=True):
            assert 100 * false_alarms(seeds, 1 / float(margin), 1) == pytest.approx(float(told.strip("%")), abs=0.6)


def test_the_messages_on_the_page_on_troubles_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    files = [path for room in ("orchestrator", "hydra_plugins") for path in (ROOT / room).rglob("*.py")]
    code = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    messages = [message for table in tables for message in re.findall(r"^\| `(.*?)`", table, re.MULTILINE)]
    pieces = [piece.strip() for message in messages for piece in message.split("...")]

    assert len(messages) > 20
    assert [piece for piece in pieces if piece not in code] == []


@pytest.mark.slow  # three small sweeps
def test_the_walk_through_regression_runs_as_it_is_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "regression.md").read_text()
    (module,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "diabetes.py").write_text(module)
    printed = []
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        done = subprocess.run(
            ["bash", "-ec", block.replace("python -m", f"{sys.executable} -m")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{WITHOUT_FIGURES}:{ROOT}", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == ("ends with status 1" in block), done.stdout + done.stderr
        printed.append(done.stdout)

    sweep, written, _, failed, again, rewritten, _, passed = printed
    assert "3 of 3 points would miss the margin" in written
    assert "1 of 3 points would miss the margin" in rewritten
    assert "2 fail" in failed
    assert "0 fail" in passed
    assert [" yes " in each for each in (sweep, again)] == [False, True]


@pytest.mark.slow  # a small sweep, and an export
def test_an_exported_graph_runs_in_onnx_runtime_as_it_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (code,) = snippets("how-to/export.md", "onnxruntime")
    (tmp_path / "infer.py").write_text(code)
    sweep = ["orchestrator", "schedule=one_shot", "schedule.sparsity=0.5", "train.epochs=1", "finetune.epochs=1"]
    export = ["orchestrator.export", "--to", "onnx", "--output", "network"]
    for command in (["-m", *sweep, "cluster=inline", "tracking=none"], ["-m", *export], ["infer.py"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{WITHOUT_FIGURES}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    name, labels = done.stdout.splitlines()
    assert name.startswith("input ['")
    assert len(labels.strip("[]").split()) == 16


@pytest.mark.slow  # three small sweeps
def test_the_notebook_of_searches_answers_its_three_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib import pyplot

    cells = json.loads((ROOT / "docs/tutorials/answers.ipynb").read_text())["cells"]
    coded = [cell for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "")  # the notebook sets it
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    names = dict[str, Any]()

    for source in ("".join(cell["source"]) for cell in coded):
        if source.startswith("!python -m "):
            words = shlex.split(source.replace("\\\n", "").replace("$small", names["small"]))
            monkeypatch.setattr(sys, "argv", words[2:])
            orchestrate()
        else:
            exec(source, names)
    shown = capsys.readouterr().out.splitlines()
    pyplot.close("all")

    assert not any(cell["outputs"] or cell["execution_count"] for cell in coded), "run it, and keep what it shows out"
    for start in ("l1_unstructured: ", "best: ", "frontier of accuracy on validation against macs: "):
        assert [line for line in shown if line.startswith(start)], start
    assert names["axes"].has_data()
