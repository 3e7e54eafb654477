"""`to_sparse` with int8: bytes where they are faster, equal to rounding by hand, and said in the report."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.catalogue.kernels import KERNELS
from pruning.compact import sparse_graph, sparse_network
from pruning.kernels.byte_kernels import rounded
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, kernel_named
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _bytes_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels of bytes wherever they are offered, whatever the machine's timer says."""
    measured: Callable[..., KernelChoice] = sparse_graph.chosen

    def chosen(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> KernelChoice:
        choice = measured(weight, layer, bias, x, added)
        for name in (each for each, row in KERNELS.items() if row.rounds and layer.kind in row.kinds):
            for setting in kernel_named(name).settings(weight, layer, choice.examples):
                return replace(choice, kernel=name, setting=dict(setting))
        return choice

    monkeypatch.setattr(sparse_graph, "chosen", chosen)
    monkeypatch.setattr(sparse_network, "NOISE", 0.0)


class Residual(nn.Module):
    """A network with a shortcut, a normalisation, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1, groups=2)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.norm(self.conv(x))).relu()
        logits: Tensor = self.head(nn.functional.silu(self.down(x)).mean((2, 3)))
        return logits


def network() -> Residual:
    torch.manual_seed(0)
    model = Residual().eval()
    model.norm.running_var.uniform_(0.5, 2)
    pruning.prune(model, "l1_unstructured", sparsity=0.8, parameters=["conv.weight", "down.weight", "head.weight"])
    pruning.remove_all(model)
    return model


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 12, 10, generator=torch.Generator().manual_seed(seed))


def by_hand(model: Residual, x: Tensor, batches: Tensor) -> Tensor:
    """The network with weights and inputs of three layers rounded as the issue of bytes says, in floats."""
    model = copy.deepcopy(model).double()
    ranges: dict[nn.Module, tuple[float, float]] = {}

    def measured(module: nn.Module, given: tuple[Tensor]) -> None:
        ranges[module] = min(0.0, float(given[0].min())), max(0.0, float(given[0].max()))

    def inputs(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        low, high = ranges[module]
        scale = (high - low) / 255
        zero = round(-low / scale)
        return (((given[0] / scale).round() + zero).clamp(0, 255).sub(zero) * scale,)

    layers = (model.conv, model.down, model.head)
    held = [layer.register_forward_pre_hook(measured) for layer in layers]
    with torch.no_grad():
        model(batches.double())
        for each in held:
            each.remove()
        for layer in layers:
            folded = torch.ones(len(layer.weight), 1, 1, 1).double()
            if layer is model.conv:
                folded = (model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()).view(-1, 1, 1, 1)
            factor = folded.view(-1, *[1] * (layer.weight.ndim - 1))
            whole, scales = rounded((layer.weight * factor).float())
            layer.weight.copy_(whole * scales.view(factor.shape[:1] + (1,) * (layer.weight.ndim - 1)) / factor)
            layer.register_forward_pre_hook(inputs)
        return model(x.double())


@pytest.mark.usefixtures("_bytes_win")
def test_outputs_are_those_of_rounding_by_hand_at_any_batch_size_and_beyond_the_range() -> None:
    model, batches = network(), images(16)
    sparse = pruning.to_sparse(model, batches[:2], examples=[batches[:1], batches[:4]], int8=True, batches=[batches])

    for x in (batches[:1], images(7, 2), 5 * images(3, 3)):
        with torch.no_grad():
            found, target = sparse(x), by_hand(model, x, batches)
        assert float((found - target).norm() / target.norm()) < 1e-6
    with torch.no_grad():
        off, exact = sparse(batches[:4]) - model(batches[:4]), model(batches[:4])
    assert 1e-4 < float(off.abs().max() / exact.abs().max()) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("_bytes_win")
def test_the_report_says_by_how_much_each_layer_moves_its_outputs() -> None:
    batches = images(8)
    sparse = pruning.to_sparse(network(), batches[:2], int8=True, batches=[batches])
    found = {layer.name: layer for layer in sparse.sparse.layers}

    assert found["stem"].error == 0.0, "no zeros: it stays dense"
    for name in ("conv", "down", "head"):
        assert found[name].choices[0].rounds
        assert 1e-4 < found[name].error < 0.05
    head, stem, *_ = sparse.report().splitlines()
    assert head.split() == ["layer", "sparsity", "rows", "kernel", "speed-up", "error"]
    assert stem.split()[-1] == "0%"
    assert re.search(r"outputs differ by \d", sparse.report())
    assert sparse.sparse.error > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_bytes_win")
def test_copies_and_pickles_have_equal_bits() -> None:
    batches = images(4)
    sparse = pruning.to_sparse(network(), batches[:2], int8=True)
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(sparse), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(batches), sparse(batches))


@pytest.mark.slow
def test_without_int8_nothing_is_rounded() -> None:
    batches = images(4)
    sparse = pruning.to_sparse(network(), batches[:2])

    assert all(layer.error == 0 for layer in sparse.sparse.layers)
    assert "error" not in sparse.report().splitlines()[0]
    for module in sparse.modules():
        if isinstance(module, SparseLayer):
            assert module.plan.layer.rounding is None
            assert not any(KERNELS[choice.kernel].rounds for choice in module.plan.choices)


@pytest.mark.slow
def test_calibration_that_cannot_be_is_refused_in_a_sentence() -> None:
    model, x = network(), images(4)
    with pytest.raises(ValueError, match=r"`batches` \(1 of them\) calibrate int8 kernels; pass int8=True with them"):
        pruning.to_sparse(model, x, batches=[x])
    with pytest.raises(
        TypeError, match=r"`batches` \(a Tensor\) must be a list of inputs; pass \[images\[:1\], images"
    ):
        pruning.to_sparse(model, x, int8=True, batches=x)
    with pytest.raises(ValueError, match=r"inputs of the layer stem \(from .* to .*\) must be finite in all `batches`"):
        pruning.to_sparse(model, x, int8=True, batches=[x, torch.full_like(x, float("nan"))])
    with pytest.raises(ValueError, match=r"`batches` \(shape \(4, 2, 12, 10\)\) must be an input of Residual"):
        pruning.to_sparse(model, x, int8=True, batches=[x[:, :2]])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"`batches` \(empty\) must hold inputs of the network; leave it out to calibrate with `examples`"),
        (3, r"`batches` \(a int\) must be a list of inputs"),
        ([[images(2)]], r"`batches\[0\]` \(a list\) must be the network's input; pass a tensor, a tuple"),
        ([images(2), (images(2), 3)], r"`batches\[1\]` \(arguments: 2 by position, none by name\) must be passed as"),
        ([{"x": images(2)}], r"0 by position, x by name\) must be passed as `example` is \(arguments: 1 by position"),
    ],
)
def test_batches_in_another_form_than_the_example_are_named(given: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        pruning.to_sparse(network(), images(2), int8=True, batches=given)


@pytest.mark.slow
def test_batches_may_be_read_once() -> None:
    sparse = pruning.to_sparse(network(), images(2), int8=True, batches=(images(2, seed) for seed in range(3)))
    assert sparse.sparse.layers


class Blocks(nn.Module):
    """Residual blocks of one width, the last of which is pooled; with `shortcut`, an input is added."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.shortcut = shortcut
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for one, other in zip(self.convs[::2], self.convs[1::2], strict=True):
            found = other(one(x).relu())
            x = (x[:, :, ::1, ::1] + found if self.shortcut else found).relu()  # a slice of all, as ResNets have
        return x.mean((2, 3))


def blocks(shortcut: bool) -> Blocks:
    torch.manual_seed(0)
    model = Blocks(shortcut).eval()
    pruning.prune(model, "l1_unstructured", sparsity=0.6)
    pruning.remove_all(model)
    return model


@pytest.mark.usefixtures("_bytes_win")
@pytest.mark.parametrize("shortcut", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bytes_between_layers_change_no_bit_but_those_that_are_added(
    shortcut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = blocks(shortcut), images(8)
    handed_on = pruning.to_sparse(model, batches[:2], int8=True, batches=[batches])
    monkeypatch.setattr(sparse_network, "hand_on_bytes", lambda *_: None)
    floats = pruning.to_sparse(model, batches[:2], int8=True, batches=[batches])

    made = [layer.name for layer in handed_on.sparse.layers if layer.hands_on]
    assert made == ["stem", "convs.0", "convs.1", "convs.2"]
    assert "to bytes" in handed_on.report()
    assert not any(layer.hands_on for layer in floats.sparse.layers)
    with torch.no_grad():
        off = (handed_on(batches) - floats(batches)).abs().max() / floats(batches).abs().max()
    assert (float(off) == 0) != shortcut
    assert float(off) < 0.01
    buffer = io.BytesIO()
    torch.save(handed_on, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(batches), handed_on(batches))
    compiled = torch.compile(handed_on, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batches), handed_on(batches))


@pytest.mark.usefixtures("_bytes_win")
def test_outputs_that_another_operation_reads_stay_floats() -> None:
    class Read(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.convs[0](self.stem(x))
            return self.convs[1](x).mean((2, 3)) + x.sigmoid().mean((2, 3))

    torch.manual_seed(0)
    model = Read(shortcut=False).eval()
    pruning.prune(model, "l1_unstructured", sparsity=0.6)
    sparse = pruning.to_sparse(model, images(2), int8=True)
    assert {layer.name: layer.hands_on for layer in sparse.sparse.layers} == {
        "stem": True,
        "convs.0": False,
        "convs.1": False,
    }
