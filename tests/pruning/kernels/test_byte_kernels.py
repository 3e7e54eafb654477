"""Kernels of bytes give the bits of a reference in whole numbers, for any number of threads and instruction set."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pruning.catalogue.kernels import KERNELS
from pruning.kernels import group_kernels
from pruning.kernels.byte_kernels import rounded
from pruning.kernels.byte_tensors import bytes_of, floats_of
from pruning.kernels.compiling import MORE_FLAGS
from pruning.kernels.library import library
from pruning.kernels.sparse_layer import kernel_named
from pruning.kernels.sparse_weight import ByteScale, LayerShape, Setting, SparseWeight
from tests.pruning.kernels.test_kernels import ALL, MANY, convolution, expected, linear

DRAWN = [
    range(0, 100, 9),
    pytest.param(range(0, 100, 3), marks=pytest.mark.slow),
    *(pytest.param(range(first, first + 100), marks=MANY) for first in range(100, 500, 100)),
]
"""Numbers of random layers."""
BYTES = [name for name, row in KERNELS.items() if row.rounds]
EVERYWHERE = {name for name in BYTES if library().has_lookup() or name != "lookup_int8"}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _groups_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer the kernels of groups on all processors: without AMX they compute with vectors."""
    monkeypatch.setattr(group_kernels, "library", lambda: SimpleNamespace(has_tiles=lambda: 1))


def offered(layer: LayerShape, weight: SparseWeight, x: Tensor) -> Iterator[tuple[str, Setting]]:
    for name in BYTES:
        if layer.kind in KERNELS[name].kinds:
            for setting in kernel_named(name).settings(weight, layer, layer.examples(x.shape)):
                yield name, setting


def run(name: str, setting: Setting, layer: LayerShape, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    arrays = kernel_named(name).pack(SparseWeight.of(weight), layer, setting)
    return kernel_named(name).bind(layer, setting, arrays, bias, x.shape)(x, None)


def multiplied(one: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    """Return one * scale + other, rounded once to float32."""
    wide = [each.numpy().astype(np.longdouble) for each in (one, scale, other)]
    return torch.from_numpy((wide[0] * wide[1] + wide[2]).astype(np.float32))


def reference(layer: LayerShape, weight: Tensor, bias: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    """Whole sums in float64, which are exact; then sum * scale + bias, rounded once to float32."""
    assert layer.rounding
    inverse = torch.tensor(1 / layer.rounding.scale, dtype=torch.float32)
    inputs = ((x * inverse).round() + layer.rounding.zero).clamp(0, 255) - layer.rounding.zero
    whole, scales = rounded(weight)
    sums = expected(replace(layer, low=ALL, high=-ALL), whole, torch.zeros_like(bias), inputs, None)
    view = [-1] if layer.kind == "linear" else [-1, *[1] * (x.ndim - 2)]
    found = multiplied(sums.float(), (scales * layer.rounding.scale).view(view), bias.view(view))
    return (found if added is None else found + added).clamp(layer.low, layer.high)


@pytest.mark.parametrize("numbers", DRAWN, ids=str)
def test_random_layers_have_the_bits_of_whole_sums_on_any_number_of_threads(numbers: range) -> None:
    used, saturated = set(), 0
    for number in numbers:
        drawn, generator = random.Random(number), torch.Generator().manual_seed(number)
        layer, weight, bias, x, added = (convolution if number % 2 else linear)(drawn, generator)
        rounding = ByteScale(drawn.choice([0.003, 0.01, 0.04]), drawn.choice([0, 37, 128, 255]))
        layer = replace(layer, rounding=rounding)
        target = reference(layer, weight, bias, x, added)
        beyond = (x / rounding.scale + rounding.zero - 127.5).abs() > 129
        saturated += int(beyond.any())
        for name, setting in offered(layer, SparseWeight.of(weight), x):
            arrays = kernel_named(name).pack(SparseWeight.of(weight), layer, setting)
            call = kernel_named(name).bind(layer, setting, arrays, bias, x.shape)
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                assert torch.equal(call(x, added), target), (number, name, setting, layer, tuple(x.shape), threads)
            used.add(name)
    assert used == EVERYWHERE
    assert saturated > len(numbers) / 3


@pytest.mark.parametrize("numbers", DRAWN, ids=str)
def test_bytes_between_layers_are_the_rounded_floats(numbers: range) -> None:
    used = set()
    for number in numbers:
        drawn, generator = random.Random(number), torch.Generator().manual_seed(number)
        layer, weight, bias, x, added = (convolution if number % 2 else linear)(drawn, generator)
        given, made, more = (ByteScale(drawn.choice([0.01, 0.03]), drawn.choice([0, 100, 255])) for _ in range(3))
        layer = replace(layer, rounding=given, takes_bytes=layer.inputs // layer.groups % 4 == 0 or layer.groups == 1)
        whole = replace(layer, takes_bytes=False)
        if added is not None and drawn.random() < 0.7:
            layer = replace(layer, added=more)
            plain = reference(replace(whole, low=ALL, high=-ALL), weight, bias, x, None)
            held = bytes_of(added, more, layer)
            steps = floats_of(held, ByteScale(1.0, more.zero), layer.outputs, layer)
            target = multiplied(steps, torch.tensor(more.scale), plain).clamp(layer.low, layer.high)
        else:
            held, target = added, reference(whole, weight, bias, x, added)
        if drawn.random() < 0.7:
            layer = replace(layer, made=made)
            target = bytes_of(target, made, layer)
        assert tuple(target.shape) == layer.output(x.shape)
        inputs = bytes_of(x, given, layer) if layer.takes_bytes else x
        layer.check(inputs.shape)
        for name, setting in offered(layer, SparseWeight.of(weight), inputs):
            arrays = kernel_named(name).pack(SparseWeight.of(weight), layer, setting)
            call = kernel_named(name).bind(layer, setting, arrays, bias, inputs.shape)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(call(inputs, held), target), (number, name, setting, layer, tuple(x.shape), threads)
            used.add(name)
    assert used == EVERYWHERE


@pytest.mark.parametrize("name", sorted(EVERYWHERE))
def test_pytorch_computes_a_layer_between_bytes_too(name: str) -> None:
    """Where no compiler is: float32 may round a half to the other side."""
    draw, scale, kind = torch.Generator().manual_seed(0), ByteScale(0.02, 128), KERNELS[name].kinds[0]
    size: Any = (3, 3) if kind == "convolution" else ()
    numbers: Any = {"kernel": (3, 3), "padding": (1, 1, 1, 1), "added": scale} if size else {}
    layer = LayerShape(kind, 6, 10, **numbers, rounding=scale, takes_bytes=True, made=scale)  # type: ignore[arg-type]
    whole, scales = rounded(torch.randn(10, 6, *size, generator=draw) / 9)
    weight, bias = SparseWeight.of(whole * scales.view(-1, 1, *[1] * len(size))), torch.randn(10, generator=draw)
    x, more = (torch.randn(5, count, *(7, 4)[: len(size)], generator=draw) for count in (6, 10))
    given, added = bytes_of(x, scale, layer), bytes_of(more, scale, layer) if size else None
    outputs = []
    for each in (name, "dense"):
        setting = next(iter(kernel_named(each).settings(weight, layer, 5)))
        arrays = kernel_named(each).pack(weight, layer, setting)
        outputs.append(kernel_named(each).bind(layer, setting, arrays, bias, given.shape)(given, added))

    one, other = (each.contiguous().view(torch.uint8).int() for each in outputs)
    assert int((one - other).abs().max()) <= 1
    assert len(one.unique()) > 20


def test_a_sum_by_hand() -> None:
    layer = LayerShape("linear", 5, 2, rounding=ByteScale(0.5, 10))
    weight = torch.tensor([[1.0, 0.0, -127.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    x = torch.tensor([[1.0, 9.0, 0.74, 9.0, 400.0]])  # bytes 12, 28, 11, 28 and, as 810 is too large, 255
    (name, setting), *_ = offered(layer, SparseWeight.of(weight), x)

    found = run(name, setting, layer, weight, torch.tensor([0.25, -3.0]), x)

    assert found.tolist() == [[0.5 * (2 - 127 + 2 * 245) + 0.25, -3.0]]


def test_the_largest_sums_are_exact_and_longer_rows_are_left_to_floats() -> None:
    longest = (2**31 - 1) // (255 * 127)
    layer = LayerShape("linear", longest, 2, rounding=ByteScale(1.0, 0))
    weight = torch.ones(2, longest)
    weight[1] = -1
    x = torch.full((1, longest), 255.0)
    for name, setting in offered(layer, SparseWeight.of(weight), x):
        arrays = kernel_named(name).pack(SparseWeight.of(weight), layer, setting)
        arrays[-2] = torch.ones(2)  # the sums themselves
        found = kernel_named(name).bind(layer, setting, arrays, torch.zeros(2), x.shape)(x, None)
        assert found[0].tolist() == [float(np.float32(255 * 127 * longest)), -float(np.float32(255 * 127 * longest))]

    longer = SparseWeight.of(torch.ones(2, longest + 1))
    assert not list(offered(replace(layer, inputs=longest + 1), longer, torch.ones(1, longest + 1)))


def test_zero_points_times_the_sums_of_weights_are_exact_beyond_the_whole_numbers_of_float32() -> None:
    layer = LayerShape("linear", 4096, 3, rounding=ByteScale(0.01, 201))
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.rand(3, 4096, generator=draw), torch.randn(2, 4096, generator=draw)
    assert int(201 * rounded(weight)[0].sum(1).min()) > 2**25

    for name, setting in offered(layer, SparseWeight.of(weight), x):
        found = run(name, setting, layer, weight, torch.zeros(3), x)
        assert torch.equal(found, reference(layer, weight, torch.zeros(3), x, None)), name


def test_what_bytes_cannot_hold_is_left_to_floats() -> None:
    layer, x = LayerShape("linear", 8, 4, rounding=ByteScale(0.1, 0)), torch.ones(64, 8)
    assert list(offered(layer, SparseWeight.of(torch.ones(4, 8)), x))
    assert not list(offered(replace(layer, rounding=None), SparseWeight.of(torch.ones(4, 8)), x)), "not calibrated"
    assert not list(offered(layer, SparseWeight.of(torch.full((4, 8), float("inf"))), x))
    depthwise = LayerShape("convolution", 8, 8, kernel=(3, 3), groups=8, rounding=ByteScale(0.1, 0))
    assert not list(offered(depthwise, SparseWeight.of(torch.ones(8, 1, 3, 3)), torch.ones(1, 8, 4, 4)))


def test_inputs_that_are_not_finite_are_taken_to_the_nearest_byte_and_nan_to_the_lowest() -> None:
    layer, weight = LayerShape("linear", 4, 1, rounding=ByteScale(1.0, 100)), torch.ones(1, 4) * 127
    x = torch.tensor([[float("inf"), -float("inf"), float("nan"), 0.0]])
    (name, setting), *_ = offered(layer, SparseWeight.of(weight), x)

    assert run(name, setting, layer, weight, torch.zeros(1), x).tolist() == [[127.0 * (155 - 100 - 100)]]


def cpu_flags() -> set[str]:
    """Return the flags of Linux's /proc/cpuinfo."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


@pytest.mark.skipif("amx_int8" not in cpu_flags(), reason="this processor has no AMX (amx_int8)")
def test_tiles_are_used_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get(MORE_FLAGS):
        assert library().has_tiles()
    monkeypatch.undo()
    layer, x = LayerShape("linear", 8, 4, rounding=ByteScale(0.1, 0)), torch.ones(64, 8)
    names = {name for name, _ in offered(layer, SparseWeight.of(torch.ones(4, 8)), x)}
    assert ("columns_amx" in names) == bool(library().has_tiles())


@pytest.mark.parametrize("outputs", [1, 16, 37])
@pytest.mark.parametrize("examples", [1, 16, 70])
def test_groups_read_each_block_in_which_any_output_has_a_weight(outputs: int, examples: int) -> None:
    """Group 0 has 17 blocks, two tiles; group 1 none; group 2 one."""
    draw, rounding = torch.Generator().manual_seed(0), ByteScale(0.02, 100)
    layer, weight = LayerShape("linear", 94, outputs, rounding=rounding), torch.zeros(outputs, 94)
    for block in range(17):
        weight[block % min(16, outputs), 4 * block + block % 4] = 1 + block
    if outputs > 32:
        weight[36, 93] = -1
    x, bias = torch.randn(examples, 94, generator=draw), torch.randn(outputs, generator=draw)
    arrays = group_kernels.COLUMNS.pack(SparseWeight.of(weight), layer, {"doublings": 0})

    assert arrays[0].tolist() == [0, 32, 32, 48][: -(-outputs // 16) + 1]
    assert arrays[1][:17].tolist() == list(range(17))
    assert torch.count_nonzero(arrays[2]) == torch.count_nonzero(weight)
    found = run("columns_amx", {"doublings": 0}, layer, weight, bias, x)
    assert torch.equal(found, reference(layer, weight, bias, x, None))


def test_groups_of_outputs_within_groups_of_channels_alone() -> None:
    layer, x = LayerShape("convolution", 16, 32, groups=2, rounding=ByteScale(0.1, 0)), torch.ones(1, 16, 4, 4)
    for outputs, expected_names in ((32, {"pixels_int8", "pixels_amx"}), (16, {"pixels_int8"})):
        weight = SparseWeight.of(torch.ones(outputs, 8, 1, 1))
        assert {name for name, _ in offered(replace(layer, outputs=outputs), weight, x)} == expected_names


def test_rounded_weights_round_to_themselves_with_their_scales() -> None:
    weight = torch.randn(300, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 300)[:, None]
    weight[7] = 0
    whole, scales = rounded(weight)

    assert torch.equal(whole.abs().amax(1), torch.full((300,), 127.0).index_fill(0, torch.tensor(7), 0.0))
    assert torch.equal(whole[weight == 0], torch.zeros(50))
    assert bool(((whole * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all())
    again, same = rounded(whole * scales[:, None])
    assert torch.equal(again, whole)
    assert torch.equal(same[scales != 1], scales[scales != 1])
