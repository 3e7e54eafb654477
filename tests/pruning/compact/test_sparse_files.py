"""A sparse network's files give the same outputs, and damaged files are refused in a sentence."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from pruning.catalogue.kernels import DENSE
from pruning.compact import sparse_files
from pruning.compact.sparse_files import LAYERS, TENSORS, load_layers, save_layers
from pruning.compact.stored_weights import _forms, bytes_in, parts_of, taken
from pruning.kernels import group_kernels, library, lookup_kernel
from pruning.kernels.byte_kernels import rounded
from pruning.kernels.byte_tensors import split_in_blocks
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer
from pruning.kernels.sparse_weight import ByteScale, LayerShape, SparseWeight

NAMES = ("layers.conv", "layers.flat", "layers.linear", "layers.whole", "scale", "table", "again")


class Network(nn.Module):
    """The operations between the layers of `network`."""

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        found = layers.conv(x, x.new_ones(len(x), 4, 3, 3)) * self.scale
        found = layers.flat(found.flatten(2))
        outputs: Tensor = layers.whole(layers.linear(found.flatten(1))) @ self.table + self.again[0]
        return outputs


def drawn(*shape: int, sparsity: float = 0.9) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) >= sparsity)


def layer(shape: LayerShape, weight: Tensor, *choices: tuple[int, str, dict[str, int]]) -> SparseLayer:
    made = [KernelChoice(size, name, setting, 1e-5, 2e-5) for size, name, setting in choices]
    return SparseLayer(shape, SparseWeight.of(weight), drawn(shape.outputs, sparsity=0), made)


def network(*, in_bytes: bool = True) -> fx.GraphModule:
    """Return a network with kernels of all kinds, a dense layer, plain tensors, and a pruned table of two names.

    Args:
        in_bytes: run one layer in bytes, instead of its rounded weight in floats.
    """
    root = nn.Module()
    root.layers = nn.Module()
    conv = LayerShape(
        *("convolution", 4, 4, False, (3, 3), (2, 2), (1, 1, 1, 1)), groups=2, low=0.0
    )  # 6 x 6 pixels become 3 x 3
    pixels = {"block": 18, "vectors": 2}
    root.layers.conv = layer(conv, drawn(4, 2, 3, 3, sparsity=0.7), (1, "pixels", pixels), (8, DENSE, {}))
    flat = LayerShape("convolution", 4, 4, True, (1, 3), padding=(0, 1, 0, 1), rounding=ByteScale(0.05, 128))
    whole, scales = rounded(drawn(4, 4, 3))
    kernel = ("pixels_int8", {"block": 3, "vectors": 4}) if in_bytes else (DENSE, {})
    root.layers.flat = layer(flat, whole * scales[:, None, None], (1, *kernel))
    blocks = {"block": 36, "doublings": 0}
    linear = LayerShape("linear", 36, 20, high=3.0)
    root.layers.linear = layer(linear, drawn(20, 36), (1, "rows", {}), (2, "columns", blocks))
    root.layers.whole = layer(LayerShape("linear", 20, 10), drawn(10, 20, sparsity=0), (1, DENSE, {}))
    root.register_buffer("scale", torch.tensor(2.0))
    root.register_buffer("table", drawn(10, 10))
    root.register_buffer("again", root.table)
    return fx.GraphModule(root, _graph())


def _graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ones = graph.call_method("new_ones", (x, (graph.call_function(len, (x,)), 4, 3, 3)))
    found = graph.call_function(torch.mul, (graph.call_module("layers.conv", (x, ones)), graph.get_attr("scale")))
    found = graph.call_module("layers.flat", (graph.call_function(torch.flatten, (found, 2)),))
    found = graph.call_module("layers.linear", (graph.call_function(torch.flatten, (found, 1)),))
    found = graph.call_function(torch.matmul, (graph.call_module("layers.whole", (found,)), graph.get_attr("table")))
    row = graph.call_function(torch.select, (graph.get_attr("again"), 0, 0))
    graph.output(graph.call_function(torch.add, (found, row)))
    return graph


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.fx warns of names that it does not find in the root
        save_layers(network(), tmp_path)
    return tmp_path


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_loaded_network_gives_equal_bits_and_keeps_only_its_kernels_arrays(folder: Path, batch: int) -> None:
    saved, found = network(), load_layers(folder, Network(), NAMES)
    x = torch.randn(batch, 4, 6, 6, generator=torch.Generator().manual_seed(batch))

    assert torch.equal(found(x), saved(x))
    assert found.again is found.table
    kept = sum(each.nbytes for each in saved.buffers())
    assert sum(each.nbytes for each in found.buffers()) == kept
    for module in found.modules():
        if isinstance(module, SparseLayer):
            assert not any(isinstance(each, SparseWeight) for each in vars(module).values())


def test_weights_are_stored_as_nonzeros_where_these_take_fewer_bytes(folder: Path) -> None:
    held, content = load_file(folder / TENSORS), json.loads((folder / LAYERS).read_text())

    assert content["nonzeros"] == {
        "table": [10, 10],
        "layers.conv.weight": [4, 2, 3, 3],
        "layers.flat.weight": [4, 4, 3],
        "layers.linear.weight": [20, 36],
    }
    assert content["tied"] == {"again": "table"} or content["tied"] == {"table": "again"}
    assert held["layers.whole.weight"].shape == (10, 20)
    weight = drawn(20, 36)
    assert torch.equal(held["layers.linear.weight.kept"], torch.from_numpy(np.packbits(weight.numpy() != 0)))
    assert torch.equal(held["layers.linear.weight.values"], weight[weight != 0])
    whole, scales = rounded(drawn(4, 4, 3))
    assert torch.equal(held["layers.flat.weight.values"], SparseWeight.of(whole).values.to(torch.int8))
    assert torch.equal(held["layers.flat.weight.scales"], scales)


def in_fours(outputs: int, inputs: int, *kernel: int, sparsity: float) -> Tensor:
    """A random weight with zeros in blocks of four inputs; blocks that are kept may have zeros in them."""
    kept = drawn(outputs, -(-inputs // 4), *kernel, sparsity=sparsity) != 0
    weight = drawn(outputs, inputs, *kernel, sparsity=0.05)
    return weight * kept.repeat_interleave(4, 1)[:, :inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(20, 36), (16, 37), (9, 2), (8, 6, 3, 3), (8, 16, 1, 5), (5, 12, 3)])
def test_each_form_of_a_weight_gives_it_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for weight in (in_fours(*shape, sparsity=0.8), drawn(*shape), drawn(*shape, sparsity=0.998), drawn(*shape) * 0):
        whole, scales = rounded(weight)
        given = whole.to(dtype) if dtype is torch.int8 else weight
        forms = [form for cells in (given.unsqueeze(-1), split_in_blocks(given)) for form in _forms(cells)]
        assert bytes_in(parts_of(given)) == min(map(bytes_in, forms))
        for form in forms:
            held = {f"w.{name}": part for name, part in (form | {"scales": scales}).items()}
            found = taken("w", shape, held, 4 * weight.numel())
            found.check()
            expected = whole * scales.view(-1, *[1] * (len(shape) - 1)) if dtype is torch.int8 else weight
            assert torch.equal(found.dense(), expected)
            assert not held


def test_a_weight_in_8_bits_takes_a_byte_for_each_kept_weight_and_a_bit_for_each_block() -> None:
    weight = rounded(in_fours(256, 512, sparsity=0.9))[0].to(torch.int8)
    blocks = int((split_in_blocks(weight) != 0).any(-1).sum())
    assert bytes_in(parts_of(weight)) == 4 * blocks + weight.numel() // 32
    assert bytes_in(parts_of(weight)) < 0.15 * weight.numel()
    single = rounded(drawn(256, 512, sparsity=0.5))[0].to(torch.int8)
    assert bytes_in(parts_of(single)) < 0.65 * single.numel()


def older(folder: Path) -> None:
    """Rewrite two layers' weights as version 2 has them."""
    held = load_file(folder / TENSORS)
    for layer, dense in (("linear", drawn(20, 36)), ("flat", rounded(drawn(4, 4, 3))[0])):
        weight = SparseWeight.of(dense)
        del held[f"layers.{layer}.weight.kept"]
        for name, part in (("columns", weight.columns.to(torch.uint16)), ("starts", weight.starts)):
            held[f"layers.{layer}.weight.{name}"] = part
    save_file(held, folder / TENSORS)
    changed(folder, "version", to=2)
    content = json.loads((folder / LAYERS).read_text())
    del content["sequences"], content["steps"]
    (folder / LAYERS).write_text(json.dumps(content))


def test_files_of_version_2_are_read(folder: Path) -> None:
    x, before = torch.ones(2, 4, 6, 6), load_layers(folder, Network(), NAMES)
    older(folder)
    assert torch.equal(load_layers(folder, Network(), NAMES)(x), before(x))


def test_wide_rows_have_columns_of_32_bits(tmp_path: Path) -> None:
    root = nn.Module()
    root.register_buffer("table", torch.zeros(2, 2**16 + 1))
    root.get_buffer("table")[1, 2**16] = 5
    graph = fx.Graph()
    graph.output(graph.get_attr("table"))
    save_layers(fx.GraphModule(root, graph), tmp_path)

    assert load_file(tmp_path / TENSORS)["table.columns"].dtype is torch.int32
    assert torch.equal(load_layers(tmp_path, nn.Module(), ["table"]).table, root.get_buffer("table"))


def test_a_loaded_layer_cannot_be_saved_again(folder: Path) -> None:
    found: Any = load_layers(folder, Network(), NAMES)
    assert torch.equal(found.layers.whole.weight().dense(), drawn(10, 20, sparsity=0))
    with pytest.raises(ValueError, match="a sparse layer that was loaded keeps no weights; use those in its file"):
        found.layers.linear.weight()


def refused_or_harmless(folder: Path) -> bool:
    """Load a folder and run it; return whether it was refused, in a sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = load_layers(folder, Network(), NAMES)
        except ValueError as error:
            said = str(error)
            assert said.endswith("; export the network again."), said
            assert str(folder) in said, said
            assert len(said) < 900, said
            return True
        with contextlib.suppress(ValueError, RuntimeError):  # layers that no longer fit together
            found(torch.ones(2, 4, 6, 6))
        return False


@pytest.mark.parametrize("file", [TENSORS, LAYERS])
def test_a_truncated_file_is_refused(folder: Path, file: str) -> None:
    whole = (folder / file).read_bytes()
    for end in sorted({0, 1, 7, 8, 9, *range(0, len(whole) - 2, max(1, len(whole) // 40)), len(whole) - 3}):
        (folder / file).write_bytes(whole[:end])
        assert refused_or_harmless(folder), end
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError):
        load_layers(folder, Network(), NAMES)


def test_flipped_bits_are_refused_or_harmless(folder: Path) -> None:
    whole, draw = (folder / TENSORS).read_bytes(), random.Random(0)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 4])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (folder / TENSORS).write_bytes(bytes(content))
        refused_or_harmless(folder)


BAD = (None, True, -1, 0, 1, 9, 2**31 - 1, 2**70, -0.5, "rows", [1], {"a": 1})
DEEP = [[[[[[[[]]]]]]]]


def places(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in held if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ():
        yield from places(held[key], (*path, key))


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)], ids=["sample", "every"])
def test_every_altered_field_is_refused_or_harmless(folder: Path, step: int) -> None:
    right = json.loads((folder / LAYERS).read_text())
    tried = refused = 0
    for path, bad in [*product(places(right), (*BAD, DEEP, "remove", "add"))][::step]:
        text = json.dumps(altered(right, path, bad))
        if text == json.dumps(right):
            continue
        (folder / LAYERS).write_text(text)
        tried += 1
        refused += refused_or_harmless(folder)
    assert tried > 1500 / step
    assert refused > 0.8 * tried


def altered(right: Any, path: tuple[Any, ...], bad: Any) -> Any:
    """Return a copy with another value at a place, without the place, or with an unknown key there."""
    content = {"all": copy.deepcopy(right)}
    holder: Any = content
    for step in ("all", *path)[:-1]:
        holder = holder[step]
    last = ("all", *path)[-1]
    if bad == "remove" and path:
        del holder[last]
    elif bad == "add":
        if isinstance(holder[last], dict):
            holder[last]["unknown"] = 1
    elif type(bad) is not type(holder[last]) or bad != holder[last]:
        holder[last] = bad
    return content.get("all")


def changed(folder: Path, *path: Any, to: Any) -> None:
    """Change one field of layers.json."""
    content = json.loads((folder / LAYERS).read_text())
    holder = content
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = to
    (folder / LAYERS).write_text(json.dumps(content))


SHAPE = ("layers", "layers.conv", "shape")
FLAT = ("layers", "layers.flat", "shape")
LINEAR = ("layers", "layers.linear", "shape")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 6, "must have the version 2 or 3 or 4 or 5"),
        (("version",), True, "must have the version 2 or 3 or 4 or 5"),
        ((*SHAPE, "kind"), "linear", "is linear, and must have the default numbers of a convolution"),
        ((*SHAPE, "groups"), 3, "`groups` of layer 'layers.conv' must divide"),
        ((*SHAPE, "groups"), 4, r"must have the shape \(4, 1, 3, 3\)"),
        ((*SHAPE, "kernel"), [3, 2**20], "`kernel` of layer 'layers.conv' must be a whole number from 1 to 32768"),
        ((*SHAPE, "kernel"), [9, 1], "must have the shape"),
        ((*SHAPE, "stride"), [0, 1], "`stride`"),
        ((*SHAPE, "stride"), [2], "`stride` of layer 'layers.conv' must be a list of 2 numbers"),
        ((*SHAPE, "dilation"), [1, 2**40], "`dilation`"),
        ((*SHAPE, "padding"), [1, 1, 1, -1], "`padding`"),
        ((*SHAPE, "flat"), True, "must have the default numbers down"),
        ((*SHAPE, "low"), 1e31, "`low` and `high`"),
        ((*SHAPE, "high"), -1.0, "`low` of layer 'layers.conv' must be at most `high`"),
        ((*LINEAR, "inputs"), 37, r"must have the shape \(20, 37\)"),
        ((*LINEAR, "outputs"), 2**31, "`outputs`"),
        ((*LINEAR, "outputs"), 21, r"must have the shape \(21, 36\)"),
        (("layers", "layers.linear", "choices"), [], "must hold 1 to 64 choices"),
        (("layers", "layers.linear", "choices", 0, "kernel"), "pixels", "must be one of dense, rows, lookup, columns"),
        (("layers", "layers.linear", "choices", 0, "kernel"), "../rows", "must be one of"),
        (("layers", "layers.linear", "choices", 0, "examples"), 0, "`examples`"),
        (("layers", "layers.linear", "choices", 0, "seconds"), 0, "a positive number of seconds"),
        (("layers", "layers.linear", "choices", 1, "setting", "block"), -1, "`block`"),
        (("layers", "layers.linear", "choices", 1, "setting", "block"), "36", "`block`"),
        ((*FLAT, "rounding"), 5, "`rounding` of layer 'layers.flat' must have the fields scale, zero"),
        ((*FLAT, "rounding", "scale"), 0.0, "the scale in `rounding` .* must be a number from 1e-37 to 1e37"),
        ((*FLAT, "rounding", "zero"), 256, "the zero in `rounding` of layer 'layers.flat' must be a whole number"),
        ((*FLAT, "takes_bytes"), 1, "`takes_bytes` of layer 'layers.flat' must be true or false"),
        ((*SHAPE, "takes_bytes"), True, "and true only with a `rounding`"),
        ((*SHAPE, "made"), {"scale": 1.0, "zero": 0}, "must be one of dense, pixels_int8"),
        ((*LINEAR, "made"), {"scale": 1.0, "zero": 0}, "must be one of dense, lookup_int8, columns_int8"),
        (("nonzeros", "layers.linear.weight"), [20, 40], "a bit for each of 800 entries"),
        (("nonzeros", "layers.linear.weight"), [40, 18], r"must have the shape \(20, 36\)"),
        (("nonzeros", "layers.linear.weight"), [20, 2**30], "would take more than the"),
        (("nonzeros", "layers.linear.weight"), [20, 2**26], "would take more than the"),
        (("nonzeros", "other"), [2, 2], "'other': it must have values, with columns and starts"),
        (("tied",), {"again": "forward"}, "is tied to an unknown one"),
        (("tied",), {}, "do not agree with the network's code, such as 'again'"),
        (("tied",), {"forward": "table"}, "do not agree with the network's code"),
        (("tied",), {"layers.conv.array_0": "table"}, "do not agree with the network's code"),
    ],
)
def test_a_field_that_no_layer_can_have_is_named(folder: Path, path: tuple[Any, ...], value: Any, said: str) -> None:
    changed(folder, *path, to=value)
    with pytest.raises(ValueError, match=said):
        load_layers(folder, Network(), NAMES)
    assert refused_or_harmless(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("columns", torch.full((67,), 65535, dtype=torch.uint16)),
        ("columns", torch.full((67,), -1, dtype=torch.int32)),
        ("columns", torch.arange(67, dtype=torch.int64)),
        ("starts", torch.tensor([0, 2**31 - 1, -(2**31), -1, *[67] * 17], dtype=torch.int32)),
        ("starts", torch.arange(21, dtype=torch.int32).flip(0)),
        ("starts", torch.tensor([0, *[66] * 20], dtype=torch.int32)),
        ("columns", None),
        ("starts", None),
        ("values", torch.ones(1)),
        ("values", torch.ones(67, dtype=torch.float16)),
        ("values", torch.ones(67, 4)),
        ("values", torch.ones(67, 1)),
        ("values", torch.ones(67, dtype=torch.int8)),
        ("kept", torch.zeros(90, dtype=torch.uint8)),
    ],
)
def test_nonzeros_outside_their_weight_are_refused(folder: Path, name: str, value: Tensor | None) -> None:
    older(folder)
    replaced(folder, name, value)
    assert refused_or_harmless(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept", torch.zeros(90, dtype=torch.uint8)),
        ("kept", torch.full((90,), 255, dtype=torch.uint8)),
        ("kept", torch.zeros(89, dtype=torch.uint8)),
        ("kept", torch.zeros(90)),
        ("kept", None),
        ("values", torch.ones(66)),
        ("values", torch.ones(67, 4)),
        ("values", torch.ones(67, dtype=torch.int8)),
    ],
)
def test_bits_that_do_not_agree_with_their_values_are_refused(folder: Path, name: str, value: Tensor | None) -> None:
    replaced(folder, name, value)
    assert refused_or_harmless(folder)


def replaced(folder: Path, name: str, value: Tensor | None) -> None:
    """Replace a part of the linear layer's weight, or remove it."""
    held = load_file(folder / TENSORS)
    held.pop(f"layers.linear.weight.{name}", None)
    save_file(held if value is None else {**held, f"layers.linear.weight.{name}": value}, folder / TENSORS)


@pytest.mark.parametrize("bias", [torch.ones(19), torch.ones(20).double(), torch.ones(20, 1), None])
def test_a_bias_of_another_shape_is_refused(folder: Path, bias: Tensor | None) -> None:
    held = load_file(folder / TENSORS)
    del held["layers.linear.bias"]
    save_file(held if bias is None else {**held, "layers.linear.bias": bias}, folder / TENSORS)
    with pytest.raises(ValueError, match=r"the bias of layer 'layers.linear' must have 20 float32 entries"):
        load_layers(folder, Network(), NAMES)


@pytest.mark.parametrize(
    "text", ["", "[]", "NaN", "{", "[" * 10**5, '{"version": 1}', '{"version": Infinity}', "1" * 5000, "\x00", "\udcff"]
)
def test_what_is_no_json_is_refused(folder: Path, text: str) -> None:
    (folder / LAYERS).write_bytes(text.encode(errors="surrogateescape"))
    assert refused_or_harmless(folder)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("block", 0),
        ("block", 5),
        ("block", 2**31 - 1),
        ("doublings", 4),
        ("doublings", 63),
        ("doublings", 2**31 - 1),
        ("more", 1),
    ],
)
def test_a_setting_that_its_kernel_does_not_offer_never_reaches_the_kernel(
    folder: Path, name: str, setting: int
) -> None:
    changed(folder, "layers", "layers.linear", "choices", 1, "setting", name, to=setting)
    with pytest.warns(UserWarning, match=r"layer layers.linear runs on other kernels, perhaps slower: this machine or"):
        found: Any = load_layers(folder, Network(), NAMES)
    assert found.layers.linear.plan.choices[1].setting == {"block": 36, "doublings": 0}
    x = torch.ones(2, 4, 6, 6)
    assert torch.equal(found(x), network()(x))


def test_the_number_of_vectors_is_one_that_the_kernel_offers(folder: Path) -> None:
    for vectors in (0, 9, 2**31 - 1):
        changed(folder, *SHAPE[:2], "choices", 0, "setting", "vectors", to=vectors)
        with pytest.warns(UserWarning, match="layers.conv"):
            found: Any = load_layers(folder, Network(), NAMES)
        assert found.layers.conv.plan.choices[0].setting["vectors"] in (2, 4, 8)


def test_a_processor_without_a_kernel_takes_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(folder, "layers", "layers.linear", "choices", 0, "kernel", to="lookup")
    monkeypatch.setattr(lookup_kernel, "library", lambda: type("Old", (), {"has_lookup": lambda _: False})())
    with pytest.warns(UserWarning, match="layer layers.linear runs on other kernels"):
        found: Any = load_layers(folder, Network(), NAMES)
    assert [each.kernel for each in found.layers.linear.plan.choices] == ["rows", "columns"]
    x = torch.ones(1, 4, 6, 6)
    assert torch.allclose(found(x), network()(x), atol=1e-5)


@pytest.mark.parametrize("kernel", ["lookup_int8", "columns_amx"])
def test_a_processor_without_a_kernel_of_bytes_takes_another_one_with_equal_bits(
    kernel: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(folder, "layers", "layers.linear", "shape", "rounding", to={"scale": 0.05, "zero": 10})
    setting = {"doublings": 0} if kernel == "columns_amx" else {}
    changed(folder, "layers", "layers.linear", "choices", 0, "kernel", to=kernel)
    changed(folder, "layers", "layers.linear", "choices", 0, "setting", to=setting)
    old = SimpleNamespace(has_lookup=lambda: 0, has_tiles=lambda: 0)
    monkeypatch.setattr(lookup_kernel, "library", lambda: old)
    monkeypatch.setattr(group_kernels, "library", lambda: old)
    with pytest.warns(UserWarning, match="layer layers.linear runs on other kernels, perhaps slower: "):
        found: Any = load_layers(folder, Network(), NAMES)
    assert [each.kernel for each in found.layers.linear.plan.choices] == ["columns_int8", "columns"]


def test_groups_of_outputs_are_saved_and_loaded_with_equal_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without AMX compute the sums of groups with vectors."""
    outputs, x = [], torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(group_kernels, "library", lambda: SimpleNamespace(has_tiles=lambda: 1))
    for kernel, setting in (("columns_int8", {"block": 9, "doublings": 0}), ("columns_amx", {"doublings": 0})):
        saved, shape = network(), LayerShape("linear", 36, 20, high=3.0, rounding=ByteScale(0.05, 10))
        saved.layers.linear = layer(shape, drawn(20, 36), (1, kernel, setting))
        (folder := tmp_path / kernel).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.fx warns of names that it does not find in the root
            save_layers(saved, folder)
        found: Any = load_layers(folder, Network(), NAMES)
        assert [each.kernel for each in found.layers.linear.plan.choices] == [kernel]
        outputs += [saved(x), found(x)]

    assert all(torch.equal(each, outputs[0]) for each in outputs)


def test_without_a_compiler_all_layers_are_dense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise KernelsUnavailable("no C compiler (cc, gcc or clang) is installed; install one, for example gcc.")

    saved, x = network(in_bytes=False), torch.ones(3, 4, 6, 6)
    expected = saved(x)
    monkeypatch.setattr(sparse_files, "library", missing)
    monkeypatch.setattr(library, "library", missing)
    with pytest.warns(UserWarning, match=r"3 layers .* perhaps slower, and in float32 in place of 8 bits: no C comp"):
        found: Any = load_layers(folder, Network(), NAMES)
    assert torch.allclose(found(x), expected, atol=1e-5)
    assert {each.kernel for module in found.layers.children() for each in module.plan.choices} == {DENSE}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("starts", torch.tensor(4, dtype=torch.int32), "`starts` must be one row of torch.int32"),
        ("starts", torch.tensor([0, 9, 2, 3, 4], dtype=torch.int32), "the starts of rows must ascend"),
        ("scales", None, "its scales must have 4 finite float32 entries"),
        ("scales", torch.ones(3), "its scales must have 4 finite float32 entries"),
        ("scales", torch.tensor([1.0, 1.0, torch.nan, 1.0]), "must have 4 finite float32 entries"),
        ("scales", torch.ones(4, dtype=torch.float64), "must have 4 finite float32 entries"),
    ],
)
def test_a_weight_of_bytes_needs_rows_and_scales(folder: Path, name: str, value: Tensor | None, said: str) -> None:
    older(folder)
    held = load_file(folder / TENSORS)
    del held[f"layers.flat.weight.{name}"]
    if value is not None:
        held[f"layers.flat.weight.{name}"] = value
    save_file(held, folder / TENSORS)

    with pytest.raises(ValueError, match=said):
        load_layers(folder, Network(), NAMES)
