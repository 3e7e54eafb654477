"""A sequence of sparse layers in one call gives the bits of its layers, called one after the other."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.kernels.dense_steps import DenseStep, StepPlan
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, kernel_named
from pruning.kernels.sparse_sequence import SparseSequence, Wiring, _offsets, _runs
from pruning.kernels.sparse_weight import ByteScale, LayerShape, SparseWeight

WIDTH, SEQUENCES = 12, 24
SCALES = (ByteScale(0.03, 128), ByteScale(0.01, 0), ByteScale(0.02, 40))


def layer(draw: random.Random, shape: LayerShape, name: str | None = None) -> SparseLayer:
    """Return a layer of a drawn kernel, or of the named one."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    size = (shape.outputs, shape.inputs, *(() if shape.kind == "linear" else shape.kernel))
    weight = SparseWeight.of(torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) < 0.3))
    offers = [
        (each, dict(setting))
        for each, row in KERNELS.items()
        if shape.kind in row.kinds and each != DENSE and (row.rounds or not shape.in_bytes)
        for setting in kernel_named(each).settings(weight, shape, 3)
    ]
    kernel, setting = (name, {}) if name else draw.choice(offers)
    bias = torch.randn(shape.outputs, generator=generator)
    return SparseLayer(shape, weight, bias, [KernelChoice(3, kernel, setting, 1.0, 1.0)])


def step(draw: random.Random, width: int) -> DenseStep:
    """Return a drawn activation, or a normalisation of the last dimension."""
    name = draw.choice(["gelu", "gelu_tanh", "silu", "layer_norm"])
    tensors = [torch.linspace(-1, 2, width), torch.linspace(0, 1, width)]
    return DenseStep(StepPlan(name, number=1e-5), *(tensors if name == "layer_norm" else ()))


def sequence(seed: int) -> tuple[SparseSequence, list[Tensor]]:
    """Return a sequence of drawn layers, each of which reads drawn tensors, as floats or bytes, and its inputs."""
    draw = random.Random(seed)
    kind: Any = draw.choice(["linear", "convolution"])
    size: dict[str, Any] = {"kernel": (3, 3), "padding": (1, 1, 1, 1)} if kind == "convolution" else {}
    given = draw.randint(1, 2)
    scales: list[ByteScale | None] = [None] * given
    layers: dict[str, SparseLayer | DenseStep] = {}
    reads: list[tuple[int, ...]] = []
    for place in range(draw.randint(2, 6)):
        x = draw.randrange(len(scales))
        if scales[x] is None and draw.random() < 0.3:
            layers[f"step_{place}"] = step(draw, 6 if kind == "convolution" else WIDTH)
            reads.append((x,))
            scales.append(None)
            continue
        addends = [each for each, scale in enumerate(scales) if kind == "convolution" or scale is None]
        added = draw.choice([None, *addends])
        made = draw.choice([None, *SCALES])
        shape = LayerShape(kind, WIDTH, WIDTH, low=draw.choice([0.0, -1.0]), **size)
        shape = replace(shape, rounding=scales[x] or draw.choice([None, *SCALES]), takes_bytes=scales[x] is not None)
        shape = replace(shape, added=None if added is None else scales[added], made=made)
        if shape.in_bytes and shape.rounding is None:
            shape = replace(shape, rounding=SCALES[0])
        layers[f"layer_{place}"] = layer(draw, shape)
        reads.append((x,) if added is None else (x, added))
        scales.append(made)
    unread = set(range(len(scales))) - {each for read in reads for each in read}
    returned = sorted({each for each in unread if each >= given} | {draw.randrange(given, len(scales))})
    used = sorted(set(range(given)) - unread)
    numbers = {old: new for new, old in enumerate([*used, *range(given, len(scales))])}
    wiring = Wiring(
        len(used),
        tuple(tuple(numbers[each] for each in read) for read in reads),
        tuple(numbers[each] for each in returned),
    )
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(3, WIDTH, *((5, 6) if size else ()), generator=generator) for _ in used]
    return SparseSequence(layers, wiring), inputs


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def equal(one: Any, other: Any) -> bool:
    pairs = zip(as_tuple(one), as_tuple(other), strict=True)
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("seed", range(SEQUENCES))
@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_has_the_bits_of_the_layers(seed: int, threads: int) -> None:
    whole, inputs = sequence(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for given in (inputs, [torch.cat([x, -x]) for x in inputs], [x[:1] for x in inputs]):
            assert equal(whole(*given), whole._in_turn(*given))
            assert next(reversed(whole._calls.values())) != whole._in_turn, "C computes it"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_outputs_that_are_still_read_share_no_memory(seed: int) -> None:
    whole, inputs = sequence(seed)
    runs = list(_runs(whole.layers, whole.wiring.reads, [(x.shape, x.dtype) for x in inputs]))
    offsets, size = _offsets(runs, whole.wiring)
    last = whole.wiring.last_reads()
    spans = {}
    for number, start in offsets.items():
        run = runs[number - whole.wiring.given]
        end = start + run.like.numel() * run.like.itemsize
        assert not start % 64
        assert end <= size
        spans[number] = (start, end, number - whole.wiring.given, last[number])
    for one in spans.values():
        for other in spans.values():
            together = one[2] <= other[3] and other[2] <= one[3]
            assert one is other or not together or one[1] <= other[0] or other[1] <= one[0]
    assert size <= sum(-(-(end - start) // 64) * 64 for start, end, *_ in spans.values())


def test_a_long_chain_needs_the_memory_of_two_outputs() -> None:
    draw = random.Random(0)
    layers = {f"layer_{place}": layer(draw, LayerShape("linear", 16, 16), "rows") for place in range(9)}
    chain = Wiring(1, tuple((place,) for place in range(9)), (9,))
    whole = SparseSequence(layers, chain)
    x = torch.randn(4, 16)
    runs = list(_runs(whole.layers, chain.reads, [(x.shape, x.dtype)]))

    assert _offsets(runs, chain)[1] == 2 * 4 * 16 * 4
    assert equal(whole(x), whole._in_turn(x))


def chain(*names: str | None) -> tuple[SparseSequence, Tensor]:
    """Return a sequence in which each layer reads the one before and adds the input, and its input."""
    draw = random.Random(1)
    layers = {f"layer_{place}": layer(draw, LayerShape("linear", 8, 8), name) for place, name in enumerate(names)}
    wiring = Wiring(1, tuple((place, 0) if place else (place,) for place in range(len(names))), (len(names),))
    return SparseSequence(layers, wiring), torch.randn(5, 8)


def test_other_biases_copies_and_pickles() -> None:
    whole, x = chain("rows", "rows")
    target = whole(x)
    state = {name: value + 1 if "bias" in name else value for name, value in whole.state_dict().items()}
    moved = torch.func.functional_call(whole, state, (x,))

    assert not torch.equal(moved, target)
    assert equal(moved, torch.func.functional_call(whole, state, (x,)))
    assert torch.equal(whole(x), target), "the module's own biases again"
    for other in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert torch.equal(other(x), target)
        other.load_state_dict(state)
        assert torch.equal(other(x), moved)
    assert torch.equal(whole(x), target)


def test_a_bias_without_memory_is_refused() -> None:
    whole, x = chain("rows", "rows")
    meta = {"layer_0.bias": torch.empty(8, device="meta")}
    with pytest.raises(ValueError, match=r"float32 on meta.* must be float32 on the CPU"):
        torch.func.functional_call(whole, meta, (x,))
    with pytest.raises(ValueError, match=r"float32 on meta.* must be float32 on the CPU"):
        torch.func.functional_call(whole.layers[0], {"bias": meta["layer_0.bias"]}, (x,))


def test_a_layer_of_pytorch_and_empty_inputs_are_computed_in_turn() -> None:
    whole, x = chain("rows", DENSE, "rows")

    assert equal(whole(x), whole._in_turn(x))
    assert whole(x[:0]).shape == (0, 8)


def test_hooks_of_a_layer_are_called() -> None:
    whole, x = chain("rows", "rows")
    seen, target = [], whole(x)
    held = whole.layers[0].register_forward_hook(lambda *given: seen.append(given[2]))

    assert torch.equal(whole(x), target)
    assert len(seen) == 1
    held.remove()
    whole(x)
    assert len(seen) == 1


def test_hooks_of_all_modules_are_called_for_each_layer() -> None:
    whole, x = chain("rows", "rows")
    seen: list[str] = []
    whole(x)
    held = register_module_forward_hook(lambda *given: seen.append(type(given[0]).__name__))
    try:
        whole(x)
    finally:
        held.remove()

    assert seen == ["SparseLayer", "SparseLayer", "SparseSequence"]


def test_calls_that_are_recorded_see_each_layer() -> None:
    whole, x = chain("rows", "rows")
    graph = torch.fx.experimental.proxy_tensor.make_fx(whole)(x)

    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.pruning.sparse_layer.default)) == 2
    assert torch.equal(graph(x), whole(x))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.ones(5, 7), "must have the shape"),
        (torch.ones(5, 8, dtype=torch.float64), "must be float32 on"),
        (torch.ones(5, 8, requires_grad=True), "computes no gradients"),
    ],
)
def test_inputs_are_refused_as_by_a_layer(given: Tensor, said: str) -> None:
    whole, _ = chain("rows", "rows")

    with pytest.raises((ValueError, RuntimeError), match=said):
        whole(given)


def test_bytes_of_another_meaning_are_not_read_as_floats() -> None:
    draw = random.Random(2)
    maker = layer(draw, LayerShape("linear", 8, 32, rounding=SCALES[0], made=SCALES[1]))
    reader = layer(draw, LayerShape("linear", 8, 8), "rows")  # takes floats, of the shape that the bytes have
    whole = SparseSequence({"one": maker, "two": reader}, Wiring(1, ((0,), (1,)), (2,)))

    with pytest.raises(ValueError, match=r"torch.int32 .*must be float32"):
        whole(torch.randn(5, 8))


def test_a_conversion_of_one_layer_is_refused() -> None:
    whole, x = chain("rows", "rows")
    target = whole(x)
    with pytest.raises(ValueError, match="must stay float32 on the CPU"):
        whole.double()
    assert torch.equal(whole.float()(x), target)


def test_memory_that_moves_is_followed() -> None:
    whole, x = chain("rows", "rows")
    target = whole(x)
    for layer in whole.layers:
        layer.share_memory()
    assert torch.equal(whole(x), target)
    ForkingPickler.dumps(whole)  # as torch.multiprocessing sends it: its memory moves
    assert torch.equal(whole(x), target)
    assert torch.equal(whole.layers[0](x), whole.layers[0](x.clone()))
    whole.layers[0].bias.data = whole.layers[0].bias + 1  # type: ignore[operator]
    assert not torch.equal(whole(x), target)
    assert equal(whole(x), whole._in_turn(x))


def test_a_layer_that_is_replaced_computes() -> None:
    whole, x = chain("rows", "rows")
    other, _ = chain("rows", "rows", "rows")
    whole(x)
    whole.layer_0 = other.layers[1]

    assert equal(whole(x), whole._in_turn(x))
