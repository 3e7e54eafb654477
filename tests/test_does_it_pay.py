"""Runtimes on pruned layers: each computes the pruned layer, and the page shows the figures of the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.pages import does_it_pay as tool
from scripts.pages import does_it_pay_page as its_page
from scripts.pages.sparse_runtimes import RUNTIMES, Layer, absent, pruned

ROOT = Path(__file__).parent.parent
LINEAR, CONV = Layer(16, 8, 3), Layer(4, 8, 2, kernel=3, size=5)


@pytest.mark.parametrize("layer", [LINEAR, CONV], ids=lambda layer: layer.name)
def test_the_patterns_are_what_they_are_called(layer: Layer) -> None:
    dense = layer.weights()[0]
    entries, (two_of_four, _), (fewer, bias) = (
        pruned(layer, pattern, sparsity)[0] if pattern == "unstructured" else pruned(layer, pattern, sparsity)
        for pattern, sparsity in (("unstructured", 0.75), ("2:4", 0.5), ("channels", 0.75))
    )

    assert int((entries == 0).sum()) == round(0.75 * dense.numel())
    assert torch.equal(entries[entries != 0], dense[entries != 0])
    assert ((two_of_four.flatten(1).reshape(-1, 4) != 0).sum(1) == 2).all()
    assert fewer.shape == (2, *dense.shape[1:])
    assert bias.shape == (2,)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layer", [LINEAR, CONV], ids=lambda layer: layer.name)
@pytest.mark.parametrize(
    "runtime", [each for each in RUNTIMES if "compile" not in each.name], ids=lambda each: each.name
)
def test_a_runtime_computes_the_pruned_layer(runtime: Any, layer: Layer) -> None:
    if reason := absent().get(runtime.name):
        pytest.skip(reason)
    for pattern, sparsity in (("unstructured", 0.75), ("2:4", 0.5), ("channels", 0.5)):
        weights, example = pruned(layer, pattern, sparsity), layer.example()
        expected = layer.apply(example, *weights)
        found = runtime.make(layer, weights, example, 0.0 if pattern == "channels" else sparsity)()

        assert found.shape == expected.shape
        assert float((found - expected).abs().max() / expected.abs().max()) < runtime.tolerance


def test_a_measurement_has_an_interval_and_refuses_wrong_outputs() -> None:
    found = tool.measure(tool.Cell(LINEAR, RUNTIMES[0], "unstructured", 0.5), blocks=2, seconds=0.001)

    assert found["low"] < found["speedup"] < found["high"]
    assert (found["layer"], found["runtime"], found["sparsity"]) == ("linear 16→8, batch 3", "PyTorch", 0.5)
    wrong = replace(RUNTIMES[0], make=lambda layer, weights, example, _: lambda: layer.apply(example, *weights) * 1.01)
    with pytest.raises(AssertionError, match=r"outputs are off by 1\.0e-02"):
        tool.measure(tool.Cell(LINEAR, wrong, "unstructured", 0.5), blocks=2, seconds=0.001)


def cell(sparsity: float, low: float, **changes: Any) -> dict[str, Any]:
    named = {"layer": "l", "runtime": "r", "pattern": "unstructured", "sparsity": sparsity}
    return {**named, "speedup": low + 0.1, "low": low, "high": low + 0.2, "dense_seconds": 1, "load": 0.5} | changes


def test_break_even_is_where_all_that_is_sparser_pays() -> None:
    assert its_page.break_even([cell(0.5, 0.9), cell(0.9, 1.2), cell(0.99, 1.5)]) == 0.9
    assert its_page.break_even([cell(0.5, 1.2), cell(0.9, 1.0), cell(0.99, 1.5)]) == 0.99
    assert its_page.break_even([cell(0.5, 1.2), cell(0.99, 1.04)]) is None


def test_what_is_interrupted_goes_on_and_another_machine_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(of: Any, blocks: int, seconds: float) -> dict[str, Any]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(of)
        return cell(of.sparsity, 1.0, layer=of.layer.name, runtime=of.runtime.name, pattern=of.pattern)

    monkeypatch.setattr(tool, "measure", measured)
    monkeypatch.setattr(tool, "absent", lambda: {each.name: "away" for each in RUNTIMES[1:]})
    file = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        tool.run(tool.QUICK, 2, 0.01, file, anew=False)
    assert len(json.loads(file.read_text())["cells"]) == 2

    asked.clear()
    assert len(tool.run(tool.QUICK, 2, 0.01, file, anew=False)["cells"]) == 4
    assert [each.sparsity for each in asked] == [0.5, 0.75]
    assert [each["sparsity"] for each in json.loads(file.read_text())["cells"]] == [0.9, 0.5, 0.5, 0.75]
    asked.clear()
    assert len(tool.run(tool.QUICK, 2, 0.01, file, anew=False)["cells"]) == 4
    assert asked == []
    with pytest.raises(KeyboardInterrupt):
        tool.run(tool.QUICK, 3, 0.01, file, anew=False)


def test_a_runtime_that_is_not_there_is_said() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())
    record["circumstances"]["absent"] = {"OpenVINO fp32": "openvino is not installed"}

    assert "OpenVINO fp32 was not measured: openvino is not installed." in its_page.page(record)


def test_the_page_and_the_figure_are_what_the_record_gives() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())

    assert (ROOT / "docs" / "does-it-pay.md").read_text() == its_page.page(record)
    assert (ROOT / "docs" / "does-it-pay.svg").read_bytes() == its_page.figure(record)
    assert {(each["layer"], each["runtime"], each["pattern"], each["sparsity"]) for each in record["cells"]} == {
        (each.layer.name, each.runtime.name, each.pattern, each.sparsity) for each in tool.cells(tool.LAYERS)
    }
