"""Each kernel computes random layers like PyTorch in float64, with equal bits for any number of threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.kernels.sparse_layer import kernel_named
from pruning.kernels.sparse_weight import LayerShape, Setting, SparseWeight

ALL = float("-inf")
LAYERS = 500
"""Random layers, half of them convolutions; each kernel and setting computes each."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sparse(shape: tuple[int, ...], drawn: random.Random, generator: torch.Generator) -> Tensor:
    """A random weight, some with empty rows or columns."""
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < drawn.choice([0, 0.5, 0.9, 0.99, 1])] = 0
    if drawn.random() < 0.3:
        weight[:: drawn.choice([2, 3])] = 0
    if drawn.random() < 0.3:
        weight[:, :: drawn.choice([2, 3])] = 0
    return weight


def linear(drawn: random.Random, generator: torch.Generator) -> tuple[LayerShape, Tensor, Tensor, Tensor, None]:
    inputs, outputs = drawn.choice([1, 3, 16, 31, 33, 64, 100, 257]), drawn.choice([1, 2, 15, 16, 17, 64, 65, 130])
    weight, bias = sparse((outputs, inputs), drawn, generator), torch.randn(outputs, generator=generator)
    x = torch.randn(drawn.choice([1, 2, 3, 5, 8, 16, 17, 33, 64, 70]), inputs, generator=generator)
    layer = LayerShape("linear", inputs, outputs, low=drawn.choice([0.0, ALL]), high=drawn.choice([6.0, -ALL]))
    return layer, weight, bias, x, None


def convolution(
    drawn: random.Random, generator: torch.Generator
) -> tuple[LayerShape, Tensor, Tensor, Tensor, Tensor | None]:
    groups = drawn.choice([1, 1, 2, 4])
    inputs, outputs = groups * drawn.choice([1, 3, 16]), groups * drawn.choice([1, 5, 16, 70])
    if drawn.random() < 0.2:
        groups = outputs = inputs
    kernel = drawn.choice([1, 2, 3, 5]), drawn.choice([1, 3, 4])
    stride, dilation = ((drawn.choice(of), drawn.choice(of)) for of in ([1, 1, 2, 3], [1, 1, 2]))
    padding = tuple(drawn.choice([0, 1, 2]) for _ in range(4))
    flat = drawn.random() < 0.25
    if flat:  # one-dimensional
        kernel, stride, dilation = (1, kernel[1]), (1, stride[1]), (1, dilation[1])
        padding = 0, padding[1], 0, padding[3]
    weight = sparse((outputs, inputs // groups, *kernel[flat:]), drawn, generator)
    bias = torch.randn(outputs, generator=generator)
    sizes = drawn.choice([5, 8, 13]), drawn.choice([7, 9, 16, 33])
    x = torch.randn(drawn.choice([1, 2, 7, 33]), inputs, *sizes[flat:])
    top, left, bottom, right = padding
    layer = LayerShape(
        *("convolution", inputs, outputs, flat, kernel, stride, (top, left, bottom, right), dilation, groups),
        low=drawn.choice([0.0, ALL]),
    )
    shape = layer.output(x.shape)
    if min(shape) < 1:
        return convolution(drawn, generator)
    return layer, weight, bias, x, torch.randn(shape, generator=generator) if drawn.random() < 0.5 else None


def expected(layer: LayerShape, weight: Tensor, bias: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    """PyTorch's outputs, in float64."""
    weight, bias, x = weight.double(), bias.double(), x.double()
    if layer.kind == "linear":
        found = F.linear(x, weight, bias)
    else:
        top, left, bottom, right = layer.padding
        padded = F.pad(x, (left, right, top, bottom)[: 2 * (x.ndim - 2)])
        stride, dilation = layer.stride[layer.flat :], layer.dilation[layer.flat :]
        call = F.conv1d if layer.flat else F.conv2d
        found = call(padded, weight, bias, stride, 0, dilation, layer.groups)
    return (found if added is None else found + added).clamp(layer.low, layer.high)


def settings(layer: LayerShape, weight: SparseWeight, x: Tensor) -> Iterator[tuple[str, Setting]]:
    for name, row in KERNELS.items():
        if layer.kind in row.kinds:
            for setting in kernel_named(name).settings(weight, layer, layer.examples(x.shape)):
                yield name, setting


MANY = [pytest.mark.slow, pytest.mark.many]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=MANY) for part in range(1, 5))])
def test_random_layers_are_computed_like_float64_on_any_number_of_threads(part: int) -> None:
    drawn, used = random.Random(part), set()
    for number in range(part * LAYERS // 5, (part + 1) * LAYERS // 5, 1 if part else 3):
        generator = torch.Generator().manual_seed(number)
        layer, dense, bias, x, added = (convolution if number % 2 else linear)(drawn, generator)
        weight = SparseWeight.of(dense)
        weight.check()
        assert torch.equal(weight.dense(), dense)
        target = expected(layer, dense, bias, x, added)
        for name, setting in settings(layer, weight, x):
            arrays = kernel_named(name).pack(weight, layer, setting)
            run, found = kernel_named(name).bind(layer, setting, arrays, bias, x.shape), dict[int, Tensor]()
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                found[threads] = run(x, added)
            used.add(name)
            case = (number, name, setting, layer, tuple(x.shape))
            assert found[1].shape == target.shape, case
            off = (found[1] - target).abs().max() / target.abs().max().clamp_min(1e-30)
            assert off < 1e-5, (case, float(off))
            if name != DENSE:
                assert all(torch.equal(found[1], found[threads]) for threads in (2, 4)), case
    assert used == {name for name, _ in _everywhere()}


def _everywhere() -> Iterator[tuple[str, Setting]]:
    weight = SparseWeight.of(torch.ones(4, 4))
    yield from settings(LayerShape("linear", 4, 4), weight, torch.ones(1, 4))
    weight = SparseWeight.of(torch.ones(4, 4, 1, 1))
    yield from settings(LayerShape("convolution", 4, 4), weight, torch.ones(1, 4, 2, 2))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_reach_the_outputs_that_keep_a_weight_for_them(kind: Any, bad: float) -> None:
    draw = torch.Generator().manual_seed(0)
    shape = (40, 70) if kind == "linear" else (40, 7, 3, 3)
    weight = torch.randn(shape, generator=draw)
    weight[torch.rand(shape, generator=draw) < 0.8] = 0
    x = torch.randn((2, 70) if kind == "linear" else (2, 7, 6, 6), generator=draw)
    x.view(2, -1)[:, 37] = bad
    size = {"linear": {}, "convolution": {"kernel": (3, 3), "padding": (1, 1, 1, 1)}}[kind]
    layer = LayerShape(kind, weight.shape[1], 40, **size)  # type: ignore[arg-type]
    clean = expected(
        layer,
        weight,
        torch.zeros(40),
        torch.zeros_like(x).view(2, -1).index_fill(1, torch.tensor(37), 1).view_as(x),
        None,
    )
    for name, setting in settings(layer, SparseWeight.of(weight), x):
        if name == DENSE:
            continue
        arrays, bias = kernel_named(name).pack(SparseWeight.of(weight), layer, setting), torch.zeros(40)
        found = kernel_named(name).bind(layer, setting, arrays, bias, x.shape)(x, None)
        assert torch.equal(~found.isfinite(), clean != 0), name
        assert torch.equal(found.isnan(), (clean != 0) & (bad != bad)), name
