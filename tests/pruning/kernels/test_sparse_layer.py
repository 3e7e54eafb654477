"""A sparse layer never reads outside its inputs, takes what PyTorch's layer takes, and refuses the rest unharmed."""

from __future__ import annotations

import copy
import io
import os
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, kernel_named
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

INPUTS, OUTPUTS = 20, 24


def layers(kind: Any) -> list[tuple[str, SparseLayer, Tensor]]:
    """Return a layer for each kernel and setting, with the dense weight."""
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn((OUTPUTS, INPUTS, *((3, 3) if kind == "convolution" else ())), generator=draw)
    dense[torch.rand(dense.shape, generator=draw) < 0.8] = 0
    size: dict[str, Any] = {"kernel": (3, 3), "padding": (1, 1, 1, 1)} if kind == "convolution" else {}
    layer, weight = LayerShape(kind, INPUTS, OUTPUTS, low=0.0, **size), SparseWeight.of(dense)
    bias = torch.randn(OUTPUTS, generator=draw)
    return [
        (name, SparseLayer(layer, weight, bias, [KernelChoice(3, name, dict(setting), 1.0, 1.0)]), dense)
        for name, row in KERNELS.items()
        if kind in row.kinds
        for setting in kernel_named(name).settings(weight, layer, 3)
    ]


def expected(layer: SparseLayer, dense: Tensor, x: Tensor, added: Tensor | None = None) -> Tensor:
    call: Any = F.linear if dense.ndim == 2 else (lambda x, w, b: F.conv2d(x, w, b, 1, 1))
    found: Tensor = call(x.double(), dense.double(), layer.bias.double())  # type: ignore[operator]
    return (found if added is None else found + added.double()).relu()


def agree(found: Tensor, target: Tensor) -> None:
    assert (found.dtype, found.shape) == (torch.float32, target.shape)
    assert not found.numel() or (found - target).abs().max() <= 1e-5 * target.abs().max()


IMAGES = torch.randn(3, INPUTS, 6, 5, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(2))
FITTING: dict[str, list[Tensor]] = {
    "linear": [ROWS, ROWS[0], ROWS[:0], ROWS[:1].expand(5, INPUTS), ROWS.view(3, 1, INPUTS), ROWS.new_empty(2, 0, 20)],
    "convolution": [IMAGES, IMAGES[:0], IMAGES[1:], IMAGES[..., :1, :1], IMAGES.to(memory_format=torch.channels_last)],
}
FITTING["linear"] += [torch.randn(INPUTS, 7).t(), torch.randn(9, 2 * INPUTS)[:, ::2], torch.randn(70, INPUTS)]
FITTING["convolution"] += [IMAGES.transpose(2, 3), IMAGES.flip(0)[:, :, ::2], IMAGES[:1].expand(4, -1, -1, -1)]
UNFIT: dict[str, list[Tensor]] = {
    "linear": [ROWS[:, 1:], torch.ones(3, INPUTS + 1), torch.tensor(1.0), torch.ones(3, 0), IMAGES],
    "convolution": [IMAGES[:, 1:], torch.ones(3, INPUTS + 1, 6, 5), IMAGES[0], IMAGES[None], ROWS, IMAGES[:, :0]],
}
UNFIT["convolution"] += [IMAGES[:, :, :0], IMAGES[..., :0]]


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_inputs_of_any_layout_and_size_that_fit_are_computed(kind: str) -> None:
    for _, layer, dense in layers(kind):
        for x in FITTING[kind]:
            agree(layer(x), expected(layer, dense, x))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_inputs_of_other_shapes_are_refused_before_a_kernel_reads_them(kind: str) -> None:
    for _, layer, dense in layers(kind):
        for x in UNFIT[kind]:
            for call in (layer, torch.compile(layer, backend="eager") if x is UNFIT[kind][0] else layer):
                with pytest.raises((ValueError, RuntimeError), match="of a sparse layer must"):
                    call(x)
            with pytest.raises(ValueError, match="of a sparse layer must"):
                torch.ops.pruning.sparse_layer(x, layer.arrays, layer.bias, None, layer._text)
        agree(layer(FITTING[kind][0]), expected(layer, dense, FITTING[kind][0]))
    torch._dynamo.reset()


def test_the_tensor_to_add_broadcasts_or_is_refused() -> None:
    for _, layer, dense in layers("convolution"):
        shape = (3, OUTPUTS, 6, 5)
        more = torch.randn(shape)
        laid_out = more.to(memory_format=torch.channels_last)
        for added in (more, more[:1], more[:, :, :1], more[0], torch.tensor([2.0]), laid_out):
            agree(layer(IMAGES, added), expected(layer, dense, IMAGES, added))
        for added in (more[:2], more[:, 1:], more[None], more.new_empty(0)):
            with pytest.raises(ValueError, match=r"must broadcast to the output's shape \(3, 24, 6, 5\)"):
                layer(IMAGES, added)
        with pytest.raises(ValueError, match="float64 on cpu"):
            layer(IMAGES, more.double())
        with pytest.raises(RuntimeError, match="computes no gradients"):
            layer(IMAGES, more.requires_grad_())


def test_dtypes_devices_and_gradients_are_refused_in_a_sentence() -> None:
    for _, layer, _ in layers("linear"):
        for x in (ROWS.double(), ROWS.half(), ROWS.long(), ROWS.to("meta")):
            with pytest.raises(ValueError, match="of a sparse layer must be float32 on the CPU"):
                layer(x)
        x = ROWS.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"run it under torch\.no_grad"):
            layer(x)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.ops.pruning.sparse_layer(x, layer.arrays, layer.bias, None, layer._text).sum().backward()
        with torch.no_grad():
            assert not layer(x).requires_grad
        with torch.inference_mode():
            assert layer(x).is_inference()


def test_outputs_are_made_on_the_cpu_whatever_the_default_device_and_dtype_are() -> None:
    for _, layer, dense in layers("linear") + layers("convolution"):
        x = ROWS if dense.ndim == 2 else IMAGES
        with torch.device("meta"):
            found = layer(x)
        agree(found, expected(layer, dense, x))


@pytest.mark.parametrize("convert", ["double", "half", "bfloat16", "meta", "to_empty"])
def test_conversions_are_refused_and_leave_the_layer_unharmed(convert: str) -> None:
    calls: dict[str, Any] = {"meta": lambda m: m.to("meta"), "to_empty": lambda m: m.to_empty(device="cpu")}
    for _, layer, dense in layers("linear"):
        kept = {name: array.clone() for name, array in layer.named_buffers()}
        with pytest.raises(ValueError, match=r"a sparse layer .*(must stay float32 on the CPU|positions)"):
            calls.get(convert, lambda m: getattr(m, convert)())(layer)
        assert all(torch.equal(array, kept[name]) for name, array in layer.named_buffers())
        agree(layer(ROWS), expected(layer, dense, ROWS))


def test_harmless_conversions_are_allowed() -> None:
    for _, layer, dense in layers("convolution"):
        agree(layer(IMAGES), expected(layer, dense, IMAGES))
        for convert in (layer.float, layer.cpu, layer.share_memory):
            convert()
            agree(layer(IMAGES), expected(layer, dense, IMAGES))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_may_change_values_but_no_position(assign: bool) -> None:
    for _, layer, dense in layers("linear"):
        agree(layer(ROWS), expected(layer, dense, ROWS))
        state = {key: 2 * value if value.is_floating_point() else value for key, value in layer.state_dict().items()}
        layer.load_state_dict(copy.deepcopy(state), assign=assign)
        agree(layer(ROWS), expected(layer, 2 * dense, ROWS))
        for key, value in state.items():
            if value.is_floating_point() or not value.numel():
                continue
            for other in (value + 1, value.flip(0) + 1, value.long(), value.to("meta")):
                with pytest.raises(ValueError, match=f"`{key}` differs from the positions"):
                    layer.load_state_dict({**state, key: other}, assign=assign)
        agree(layer(ROWS), expected(layer, 2 * dense, ROWS))


def test_calls_follow_arrays_that_are_replaced_for_a_while() -> None:
    for _, layer, dense in layers("linear"):
        agree(layer(ROWS), expected(layer, dense, ROWS))
        for rows in (ROWS, torch.cat([ROWS, ROWS])):
            replaced = {key: 2 * each if each.is_floating_point() else each for key, each in layer.state_dict().items()}
            agree(torch.func.functional_call(layer, replaced, (rows,)), 2 * expected(layer, dense, rows))
            del replaced
            _ = [torch.full((OUTPUTS * INPUTS,), 1e9) for _ in range(50)]
            agree(layer(rows), expected(layer, dense, rows))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_recorded_calls_are_recorded_as_operations(kind: str) -> None:
    x = ROWS if kind == "linear" else IMAGES
    other = torch.cat([x, x + 1])
    for _, layer, dense in layers(kind):
        with torch.no_grad():
            agree(make_fx(layer)(x)(x + 1), expected(layer, dense, x + 1))
            agree(torch.jit.trace(layer, x, check_trace=False)(other), expected(layer, dense, other))
        torch.library.opcheck(
            torch.ops.pruning.sparse_layer.default,
            (x, layer.arrays, layer.bias, None, layer._text),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_threads_and_copies_compute_the_same_bits(kind: str) -> None:
    x = ROWS if kind == "linear" else IMAGES
    for name, layer, _ in layers(kind):
        saved = io.BytesIO()
        torch.save(layer, saved)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        fresh, found = copy.deepcopy(layer), list[Tensor]()
        sizes = [torch.cat([x] * (1 + each % 5)) for each in range(12)]
        start = threading.Barrier(len(sizes))

        def call(each: Tensor) -> None:
            start.wait()  # noqa: B023
            found.append(fresh(each)[:3])  # noqa: B023

        threads = [threading.Thread(target=call, args=(each,)) for each in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(sizes)
        if name != DENSE:
            assert all(torch.equal(layer(x), each) for each in [*found, loaded(x), copy.deepcopy(fresh)(x)])


def test_a_forked_process_computes_the_same_bits_on_one_thread() -> None:
    """On more threads it would wait for those of its parent, like PyTorch's layers: DataLoader sets one thread, too."""
    for _, layer, _ in layers("linear"):
        target = layer(ROWS)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            os._exit(0 if torch.equal(layer(ROWS), target) else 1)
        assert os.waitpid(child, 0)[1] == 0
