"""Deployment and measurement stages in an inline sweep, on networks of a few weights."""

from __future__ import annotations

import io
import math
import shutil
import time
import zipfile
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composition import composed
from small_workloads import classification_data
from torch import Tensor, nn

import pruning
from orchestrator.catalogue.formats import FORMATS
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.plain_data import digest
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job, MeasuringFields
from orchestrator.deploy import dense_runtimes, deployment_stages
from orchestrator.deploy.dense_runtimes import DenseRuntimes
from orchestrator.deploy.formats.format import Codec, Run
from orchestrator.deploy.latency_measuring import Measuring
from orchestrator.store.backends import seal, unseal
from orchestrator.sweep.conductor import run
from orchestrator.sweep.outcome import Outcome
from orchestrator.views.report.columns import measured_columns
from orchestrator.views.report.plain_files import measured as summary
from orchestrator.workloads.splits import TensorSplit

SETTINGS = (
    *("cluster=inline", "tracking=none", "schedule=one_shot", "schedule.sparsity=0.5", "method=ln_structured"),
    *("train.epochs=1", "train.batch_size=8", "finetune.epochs=1", "prune.exclude=['2.weight']"),
    *("deploy=shrink", "deploy.batch_sizes=[1, 100]", "deploy.seconds=0.02", "deploy.blocks=2"),
)


def swept(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, model: str = "linear") -> Outcome:
    config = composed(*SETTINGS, *overrides)
    own: dict[str, Any] = {
        "model": {"_target_": f"small_workloads.{model}", "name": "own"},
        "data": {"_target_": "small_workloads.classification_data", "name": "own"},
    }
    if model == "linear":
        own["model"]["classes"] = None
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "orchestrator.views.report.report_files.draw", lambda *_: {}
    )  # drawing figures takes as long as the sweep
    return run([Job((), {**config, **own})])


def of_kind(outcome: Outcome, kind: str) -> list[StageRecord]:
    return [record for record in outcome.records.values() if record.kind == kind]


def test_a_sweep_deploys_and_measures_and_only_its_measurements_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = swept(monkeypatch, tmp_path / "other")
    one = swept(monkeypatch, tmp_path / "one", "deploy.formats=[shrink, torch]")
    programs = [record for record in one.records.values() if record.spec["fields"].get("format") == "torch"]
    (measured,) = of_kind(other, "measure")
    dense, pruned = sorted(of_kind(other, "deploy"), key=lambda record: record.sparsity)

    assert one.status == "finished"
    assert (dense.measurements["parameters"], pruned.measurements["parameters"]) == (4 * 8 + 8 + 16 + 2, 30)
    assert (dense.measurements["bytes"], pruned.measurements["bytes"]) == (4 * 58, 4 * 30)
    assert (measured.measurements["dense_bytes"], measured.measurements["bytes"]) == (4 * 58, 4 * 30)
    assert pruned.measurements["difference"] < 1e-5
    assert pruned.details["form"] == "module"
    assert {name for name in measured.measurements if name not in ("seconds", "others")} == {
        *("bytes", "parameters", "dense_bytes"),
        *(f"{name}/{size}" for size in (1, 100) for name in ("latency_ms", "dense_ms")),
        *(f"{name}/{size}" for size in (1, 100) for name in ("memory", "dense_memory")),
        *(f"{name}/{size}" for size in (1, 100) for name in ("speedup", "speedup_low", "speedup_high")),
    }
    for size in (1, 100):
        low, ratio, high = (measured.measurements[f"speedup{end}/{size}"] for end in ("_low", "", "_high"))
        assert 0 < low <= ratio <= high < math.inf
    assert {"processor", "torch", "threads", "runtime"} <= set(measured.environment)
    assert {key: one.records[key].result() for key in other.records} == {
        key: record.result() for key, record in other.records.items()
    }
    assert measured.measurements != one.records[measured.key].measurements
    assert max(other.records.values(), key=lambda record: record.started) is measured
    assert all("network.pt2" in record.files for record in programs if record.kind == "deploy")
    assert [record.measurements["speedup/1"] > 0 for record in programs if record.kind == "measure"] == [True]
    assert run([Job((), one.plan.trials[0].config)]).records == one.records


def test_each_figure_is_that_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.deploy.latency_measuring.peak_memory", lambda make, _: make()())
    order: Any = SimpleNamespace(cancelled=lambda: False)
    measuring = Measuring(MeasuringFields(seconds=0.01, blocks=3), order, torch.device("cpu"))

    def dense() -> int:
        time.sleep(2e-3)
        return 300

    found = measuring.figures(lambda: dense, lambda: lambda: 100, 8)

    assert (found["dense_memory/8"], found["memory/8"]) == (300, 100)
    assert found["dense_ms/8"] >= 2 > found["latency_ms/8"]
    assert found["speedup_low/8"] > 1


def test_a_token_is_timed_as_a_prompt_is() -> None:
    order: Any = SimpleNamespace(cancelled=lambda: False)
    measuring = Measuring(MeasuringFields(seconds=0.01, blocks=3), order, torch.device("cpu"))

    found = measuring.token(lambda: partial(time.sleep, 2e-3), lambda: int, 8)

    assert found["dense_token_ms/8"] >= 2 > found["token_ms/8"]
    assert 1 < found["token_speedup_low/8"] <= found["token_speedup/8"] <= found["token_speedup_high/8"]


@pytest.mark.slow
def test_a_sparse_network_is_measured_against_the_fastest_dense_runtime_and_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes, to_sparse = list[list[int]](), pruning.to_sparse

    def spied(model: nn.Module, example: Any, *, examples: Any, **more: Any) -> nn.Module:
        sizes.append([len(each[0]) for each in examples])
        return to_sparse(model, example, examples=examples, **more)

    def others(_: DenseRuntimes, example: Any) -> dict[str, Any]:
        return {"instant 1.0": lambda: lambda: None} if len(example[0]) == 3 else {}

    monkeypatch.setattr(pruning, "to_sparse", spied)
    monkeypatch.setattr(dense_runtimes, "GRAPHS", ())
    monkeypatch.setattr(DenseRuntimes, "_others", others)
    monkeypatch.setattr(DenseRuntimes, "fastest_int8", lambda *_: ("instant int8", lambda: lambda: None))
    overrides = ("deploy.formats=[sparse]", "method=l1_unstructured", "deploy.batch_sizes=[1, 3]")
    outcome = swept(monkeypatch, tmp_path / "sweep", *overrides)
    (measured,) = of_kind(outcome, "measure")
    found = measured.measurements

    assert outcome.status == "finished"
    assert sizes == [[1, 2], [1, 2], [1, 3]], "both deployments, then the measured network alone"
    assert measured.environment["dense_runtime/3"] == "instant 1.0"
    assert measured.environment["dense_runtime/1"].startswith("torch ")
    assert found["speedup/3"] * 2 < found["speedup_pytorch/3"]
    assert found["dense_ms/3"] < found["pytorch_ms/3"]
    for end in ("", "_low", "_high"):
        assert found[f"speedup{end}/1"] == found[f"speedup_pytorch{end}/1"]
    assert {f"sparse_network.{end}" for end in ("py", "safetensors", "json")} <= set(
        of_kind(outcome, "deploy")[0].files
    )
    assert all(record.measurements["difference"] < 1e-4 for record in of_kind(outcome, "deploy"))
    comparison = compare_trials(outcome.plan, outcome.records, {})
    (point,) = comparison.operating_points
    headings = [column.name for column in measured_columns([point], "sparse")]
    assert headings.count("of PyTorch") == headings.count("of int8") == 2
    assert float(summary(point.deployed[1])["sparse_3_speedup_int8_mean"]) == pytest.approx(found["speedup_int8/3"])
    assert {"sparse kB", "at batch 1", "at batch 3"} <= set(headings)
    assert summary(point.deployed[1])["sparse_3_dense_runtime"] == "instant 1.0"


class Small(nn.Sequential):
    """A network whose calls take a few microseconds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.ReLU())


def test_a_runtime_that_is_wrong_or_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiled(_: DenseRuntimes, __: Any) -> None:
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(dense_runtimes, "GRAPHS", ("torch",))
    monkeypatch.setattr(DenseRuntimes, "_compiled", compiled)
    monkeypatch.setattr(DenseRuntimes, "_graph", lambda *_: lambda: lambda: torch.ones(3, 4))
    row = replace(FORMATS["torch"], packages=("numpy",))
    wrong = Codec(lambda *_: None, load_nothing, (), "torch", "", row=row)
    monkeypatch.setattr(dense_runtimes, "CODECS", {"torch": wrong})
    runtimes = DenseRuntimes(Small().eval(), (torch.ones(2, 6),), tmp_path, 1)

    name, make = runtimes.fastest((torch.ones(3, 6),))

    assert (name, make) == (f"torch {torch.__version__}", None)
    compiled_name, other = runtimes.left_out
    assert compiled_name.startswith("torch.compile")
    assert runtimes.left_out[compiled_name] == "RuntimeError: no C++ compiler"
    assert other.startswith("numpy ")
    assert runtimes.left_out[other].startswith("ValueError: its outputs differ by")


@pytest.mark.slow
def test_a_network_in_8_bits_is_measured_against_the_fastest_dense_runtime_in_8_bits_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(dense_runtimes, "GRAPHS", ())
    monkeypatch.setattr(DenseRuntimes, "_others", lambda *_: {})
    monkeypatch.setattr("orchestrator.deploy.latency_measuring.peak_memory", lambda *_: 1)
    broken = {"numpy": lambda *_: 1 / 0, "onnxruntime": dense_runtimes.IN_INT8["onnxruntime"]}
    monkeypatch.setattr(dense_runtimes, "IN_INT8", broken)
    example = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)
    order: Any = SimpleNamespace(cancelled=lambda: False)
    measuring = Measuring(MeasuringFields(seconds=0.01, blocks=3), order, torch.device("cpu"))
    runtimes = DenseRuntimes(Small().eval(), example, tmp_path, 1, int8=True)

    found = measuring.figures_against_fastest(runtimes, lambda: partial(time.sleep, 2e-3), example, 4)

    name, make = runtimes.fastest_int8(example) or ("", lambda: lambda: None)
    assert measuring.environment["int8_runtime/4"] == name == f"onnxruntime {version('onnxruntime')} int8"
    assert 0 < float((make()() - runtimes._network(*example)).detach().abs().max()) < 0.05  # type: ignore[operator]
    assert found["speedup_int8_low/4"] <= found["speedup_int8/4"] <= found["speedup_int8_high/4"] < 1
    assert found["int8_ms/4"] < 2 < found["latency_ms/4"]
    assert measuring.warnings[0] == (
        f"the dense network was not measured in numpy {version('numpy')} int8 (ZeroDivisionError: division by zero)"
    )
    monkeypatch.setattr(FORMATS["onnx_int8"].__class__, "missing_packages", lambda _: ("onnxruntime",))
    without = DenseRuntimes(Small().eval(), example, tmp_path, 1, int8=True)
    assert without.fastest_int8(example) is None
    assert without.left_out == {"8 bits": "onnxruntime not installed; install the extra `export`"}


def load_nothing(_: Path, __: int) -> Run:
    raise AssertionError


@pytest.mark.slow
def test_the_dense_network_runs_in_every_runtime_that_is_installed(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    runtimes = DenseRuntimes(network, (torch.randn(2, 3, 8, 8),), tmp_path, 1)
    example = (torch.randn(4, 3, 8, 8),)
    found = dict(runtimes._others(example))

    assert [name.partition(" ")[0] for name in found] == ["torch.compile", "onnxruntime", "openvino"]
    assert not runtimes.left_out
    for make in found.values():
        for _ in range(3):  # each block makes the call again
            assert torch.allclose(make()(), network(*example), atol=1e-5)  # type: ignore[arg-type]


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def with_code(program: bytes, code: object) -> bytes:
    """Return a program of torch.export in which the weights are pickles of `code`."""
    file, pickled = io.BytesIO(), io.BytesIO()
    torch.save(code, pickled)
    with zipfile.ZipFile(io.BytesIO(program)) as whole, zipfile.ZipFile(file, "w") as made:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("weights_config.json"):
                content = content.replace(b'"use_pickle": false', b'"use_pickle": true')
            elif "/data/weights/" in name:
                content = pickled.getvalue()
            made.writestr(name, content)
    return file.getvalue()


@pytest.mark.slow
def test_no_code_in_a_deployment_of_the_store_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcome = swept(monkeypatch, tmp_path / "sweep", "deploy.formats=[torch]", "deploy.batch_sizes=[1]")
    (measured,), ran = of_kind(outcome, "measure"), tmp_path / "ran"
    for record in of_kind(outcome, "deploy"):
        folder = Path("store", "stages", record.key)
        program = with_code((folder / "network.pt2").read_bytes(), Planted(ran))
        (folder / "network.pt2").write_bytes(program)
        sealed = unseal((folder / "record.json").read_bytes())
        sealed["record"]["files"]["network.pt2"] = {"sha256": digest(program), "bytes": len(program)}
        (folder / "record.json").write_bytes(seal(sealed))
    shutil.rmtree(Path("store", "stages", measured.key))

    again = run([Job((), outcome.plan.trials[0].config)])

    assert not ran.exists()
    assert again.records[measured.key].result() == measured.result()


@pytest.mark.filterwarnings("ignore:channels of layer.weight are outputs")
def test_a_network_that_cannot_be_traced_costs_its_deployment_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = swept(
        monkeypatch, tmp_path / "sweep", "prune.exclude=[]", "prune.include=[layer.weight]", model="Branching"
    )
    (reason,) = {failure.message for failure in outcome.causes.values()}

    assert outcome.status == "failed"
    assert reason.startswith("the network cannot be shrunk: ")
    assert "pass deploy=none" in reason
    assert "\n" not in reason
    assert {record.kind for record in outcome.records.values()} == {"dense", "round", "deploy"}
    assert "50.00" in capsys.readouterr().out  # of the comparison


def test_in_a_format_that_changes_outputs_what_networks_achieve_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[int] = []

    def write(_: nn.Module, example: Any, folder: Path) -> None:
        given.append(len(example[0]))
        (folder / "always").write_bytes(b"1")

    def load(_: Path, __: int) -> Run:
        return lambda example: torch.tensor([[0.0, 1.0]]).expand(len(example[0]), 2)

    row = replace(FORMATS["torch"], tolerance=math.inf)
    monkeypatch.setattr(
        deployment_stages, "CODECS", {"torch": Codec(write, load, ("always",), "torch", "", 50, row=row)}
    )
    monkeypatch.setattr(deployment_stages, "FORMATS", {"torch": row})
    outcome = swept(monkeypatch, tmp_path / "sweep", "deploy.formats=[torch]", "deploy.batch_sizes=[1]")
    (measured,), splits = of_kind(outcome, "measure"), classification_data()
    achieved = {f"{name}/accuracy": float(splits[name][1].float().mean()) for name in ("val", "test")}

    assert given == [50, 50], "examples of the training split, for the dense network and the pruned one"
    for record in (measured, *of_kind(outcome, "deploy")):
        assert record.after == pytest.approx(achieved)
    assert measured.details == {"dense": pytest.approx(achieved)}
    assert min(record.measurements["difference"] for record in of_kind(outcome, "deploy")) > 0.1
    assert outcome.status == "finished"


@pytest.mark.slow
def test_a_smaller_transformer_that_must_differ_has_figures_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    config.architectures = ["ViTForImageClassification"]
    config.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    given = ("model=huggingface", "model.path=vit", "model.architecture=AutoModelForImageClassification")
    given += ("data=digits", "unit=residual", "method=magnitude", "deploy=huggingface", "deploy.batch_sizes=[1]")
    given += ("finetune.epochs=0", "prune.exclude=[]")
    jobs = [Job((), composed(*SETTINGS, *given))]

    outcome = run(jobs)

    (measured,) = of_kind(outcome, "measure")
    (own, dense) = sorted(of_kind(outcome, "deploy"), key=lambda record: record.measurements["parameters"])
    assert outcome.status == "finished"
    assert own.measurements["difference"] > 1e-3
    assert own.after == measured.after
    assert {"val/accuracy", "test/accuracy"} <= set(own.after)
    assert dense.measurements["difference"] < 1e-5
    assert not dense.after


@pytest.mark.slow
def test_outputs_are_held_to_those_of_the_masked_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pruning.shrink", lambda model, _: nn.Sequential(model, nn.Linear(2, 2)))
    outcome = swept(monkeypatch, tmp_path / "sweep")

    assert "differ from those of the masked network by" in next(iter(outcome.causes.values())).message


class Answer:
    """A type that torch.export does not know."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(super().forward(x))


def test_what_else_a_network_returns_is_left_out_of_its_deployment() -> None:
    split = TensorSplit(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))
    model, half = Odd(4, 2).train(), SimpleNamespace(sparsity=lambda: 0.5)
    network: Any = SimpleNamespace(model=model, masks=half, data=SimpleNamespace(val=split))

    smaller = deployment_stages._smaller(network)

    assert torch.equal(smaller(torch.ones(1, 4)), model(torch.ones(1, 4)).logits)
    assert model.training
