"""Reparametrization of pruned parameters: names, identities, and zeros in every use."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pruning


def pruned(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias)
    return pruning.l1_unstructured(layer, "weight", 0.5)


def dead_entries(layer: nn.Module) -> torch.Tensor:
    return layer.weight[layer.weight_mask == 0]  # type: ignore[index]


class TestState:
    def test_names_places_and_identities(self) -> None:
        layer = nn.Linear(6, 4)
        parameter, grad = layer.weight, torch.ones(4, 6)
        parameter.grad = grad
        pruning.l1_unstructured(layer, "weight", 0.5)
        assert layer.weight_orig is parameter
        assert layer.weight_orig.grad is grad
        assert [name for name, _ in layer.named_parameters()] == ["weight_orig", "bias"]
        assert [name for name, _ in layer.named_buffers()] == ["weight_mask"]
        assert list(layer.state_dict()) == ["weight_orig", "bias", "weight_mask"]
        assert layer.weight_mask.dtype == parameter.dtype
        assert torch.equal(layer.weight, parameter * layer.weight_mask)
        assert len(layer._forward_pre_hooks) == 1
        pruning.remove(layer, "weight")
        assert layer.weight is parameter
        assert layer.weight.grad is grad
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
        assert not dict(layer.named_buffers())
        assert not layer._forward_pre_hooks
        assert "weight" not in vars(layer)

    def test_remove_makes_zeros_permanent(self) -> None:
        layer = pruned()
        expected, outputs = layer.weight.detach().clone(), layer(torch.ones(1, 6))
        pruning.remove(layer, "weight")
        assert torch.equal(layer.weight, expected)
        assert int((layer.weight == 0).sum()) == 12
        assert torch.equal(layer(torch.ones(1, 6)), outputs)

    def test_pruned_and_removed_by_turns_with_one_optimizer(self) -> None:
        layer = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            pruning.l1_unstructured(layer, "weight", 0.25)
            before = layer.weight.detach().clone()
            layer(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            layer(torch.ones(2, 6))
            assert not torch.equal(layer.weight, before)
            assert not dead_entries(layer).any()
            pruning.remove(layer, "weight")

    def test_two_parameters_of_one_module(self) -> None:
        layer = pruned()
        pruning.random_unstructured(layer, "bias", 2)
        assert list(dict(layer.named_parameters())) == ["weight_orig", "bias_orig"]
        pruning.remove(layer, "weight")
        layer(torch.ones(1, 6)).sum().backward()
        assert list(dict(layer.named_parameters())) == ["weight", "bias_orig"]
        assert pruning.is_pruned(layer)
        pruning.remove(layer, "bias")
        assert not pruning.is_pruned(layer)

    def test_is_pruned_looks_inside(self) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
        assert not pruning.is_pruned(model)
        pruning.identity(model[1][0], "bias")
        assert pruning.is_pruned(model)

    def test_taken_names_are_refused(self) -> None:
        layer = nn.Linear(2, 2)
        layer.weight_mask = "mine"  # type: ignore[assignment]
        with pytest.raises(AttributeError, match="'weight_mask'; rename it"):
            pruning.identity(layer, "weight")
        assert layer.weight_mask == "mine"
        assert not pruning.is_pruned(layer)

    def test_frozen_parameters_stay_frozen(self) -> None:
        layer = nn.Linear(6, 4)
        layer.weight.requires_grad_(False)
        pruning.l1_unstructured(layer, "weight", 0.5)
        assert not layer.weight.requires_grad
        layer(torch.ones(1, 6)).sum().backward()
        assert layer.weight_orig.grad is None


def test_reparam_keeps_what_is_pruned_and_masks_gradients() -> None:
    layer = nn.Linear(6, 4)
    before = layer.weight.detach().clone()
    pruning.l1_unstructured(layer, "weight", 0.5)
    assert torch.equal(layer.weight_orig, before)
    assert not isinstance(layer.weight, nn.Parameter)
    layer(torch.ones(1, 6)).sum().backward()
    assert torch.equal(layer.weight_orig.grad, layer.weight_mask)


def test_reparam_remove_spares_tensors_that_share_the_old_storage() -> None:
    layer = nn.Linear(6, 4)
    state = layer.state_dict()
    pruning.l1_unstructured(layer, "weight", 0.5)
    pruning.remove(layer, "weight")
    assert state["weight"].all()


def moved(layer: nn.Linear, how: str) -> None:
    """Make pruned entries of `weight_orig` nonzero."""
    ones = torch.ones_like(layer.weight_orig)
    if how == "in place":
        with torch.no_grad():
            layer.weight_orig.add_(1.0)
    elif how == "optimizer":
        layer.weight_orig.grad = ones
        torch.optim.SGD([layer.weight_orig], lr=1.0).step()
    elif how == "new data":
        layer.weight_orig.data = ones
    elif how == "load_state_dict":
        layer.load_state_dict({**layer.state_dict(), "weight_orig": ones})
    elif how == "load a mask":
        layer.load_state_dict({**layer.state_dict(), "weight_mask": layer.weight_mask.roll(1)})
    elif how == "assign":
        layer.load_state_dict({**layer.state_dict(), "weight_orig": ones}, assign=True)
    elif how == "new parameter":
        layer.weight_orig = nn.Parameter(ones)
    elif how == "dtype":
        moved(layer.double(), "in place")


WAYS = ["in place", "optimizer", "new data", "load_state_dict", "load a mask", "assign", "new parameter", "dtype"]


@pytest.mark.parametrize("how", WAYS)
def test_pruned_entries_are_zero_whenever_they_are_used(how: str) -> None:
    layer = pruned()
    moved(layer, how)
    inputs = torch.eye(6, dtype=layer.weight_orig.dtype)
    outputs = layer(inputs) - layer.bias
    assert torch.allclose(outputs.t(), layer.weight_orig * layer.weight_mask, atol=1e-6)
    assert not dead_entries(layer).any()


def test_a_mask_written_by_hand_holds_from_the_next_forward() -> None:
    layer = pruned()
    layer(torch.ones(1, 6))
    layer.weight_mask[0] = 0
    assert layer(torch.ones(1, 6))[0, 0] == layer.bias[0]
    assert not layer.weight[0].any()


def test_a_parameter_assigned_over_the_pruned_one_is_refused() -> None:
    layer = pruned()
    layer.weight = nn.Parameter(torch.ones(4, 6))
    for _ in range(2):
        with pytest.raises(TypeError, match="assign to `weight_orig`, or call `remove` first"):
            layer(torch.ones(1, 6))
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    pruning.l1_unstructured(conv[0], "weight", 0.5)
    with pytest.raises(TypeError):  # as in torch; without the error, the fused layer would use the old weight
        nn.utils.fusion.fuse_conv_bn_eval(*conv)(torch.ones(1, 3, 5, 5))


def test_pruning_in_an_older_hook_of_the_forward() -> None:
    layer = nn.Linear(6, 4)

    def prune(module: nn.Module, _inputs: object) -> None:
        pruning.l1_unstructured(module, "weight", 5)

    layer.register_forward_pre_hook(prune)
    for round_ in (1, 2, 3):
        outputs = layer(torch.ones(1, 6))
        assert int((layer.weight_mask == 0).sum()) == 5 * round_
        assert torch.allclose(outputs, (layer.weight_orig * layer.weight_mask).sum(1) + layer.bias)
        outputs.sum().backward()


def test_pruning_within_autocast_holds_at_once() -> None:
    layer = pruning.identity(nn.Linear(6, 4, bias=False), "weight")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 6)).any()
        pruning.l1_unstructured(layer, "weight", 1.0)
        assert not layer(torch.ones(1, 6)).any()


def test_an_expanded_parameter_is_held() -> None:
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(torch.arange(1.0, 6.0).expand(4, 5))
    mask = torch.ones(4, 5)
    mask[0, 0] = 0
    pruning.custom_from_mask(layer, "weight", mask)
    assert layer.weight.tolist() == [[0, 2, 3, 4, 5], *[[1, 2, 3, 4, 5]] * 3]


def test_a_structure_made_on_meta_takes_a_pruned_state() -> None:
    layer, loaded = nn.Linear(6, 4, device="meta"), pruned()
    for prune in (
        lambda: pruning.l1_unstructured(layer, "weight", 0.5),
        lambda: pruning.ln_structured(layer, "weight", 1, n=2, dim=0),
        lambda: pruning.custom_from_mask(layer, "weight", torch.ones(4, 6, device="meta")),
    ):
        prune()
        assert layer.weight_mask.shape == (4, 6)
        assert layer.weight_mask.is_meta
    layer.load_state_dict(loaded.state_dict(), assign=True)
    assert torch.equal(layer(torch.ones(1, 6)), loaded(torch.ones(1, 6)))


@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_an_embedding_with_sparse_gradients_trains(kind: Any) -> None:
    torch.manual_seed(0)
    table = kind(50, 4, sparse=True)
    pruning.l1_unstructured(table, "weight", 0.5)
    before = table.weight.detach().clone()
    rows = torch.tensor([[1, 2, 1], [7, 2, 3]])
    table(rows).sum().backward()
    pruning.mask_gradients(table)
    assert table.weight_orig.grad.is_sparse
    seen = torch.zeros(50, 1).index_add_(0, rows.view(-1), torch.ones(6, 1))
    assert torch.equal(table.weight_orig.grad.to_dense(), seen * table.weight_mask)
    torch.optim.SparseAdam([table.weight_orig], lr=0.1).step()
    table(rows)
    assert torch.equal(table.weight != before, (seen * table.weight_mask).bool())


def test_gradients_that_somebody_else_has_written_can_be_masked() -> None:
    layer = pruned()
    layer.weight_orig.grad = torch.full((4, 6), torch.nan)
    pruning.mask_gradients(nn.Sequential(layer))
    assert not layer.weight_orig.grad[layer.weight_mask == 0].any()
    assert layer.weight_orig.grad[layer.weight_mask == 1].isnan().all()


def test_a_mask_that_was_loaded_in_another_dtype_masks_gradients() -> None:
    layer = pruned()
    layer.load_state_dict({**layer.state_dict(), "weight_mask": layer.weight_mask.bool()}, assign=True)
    layer.weight_orig.grad = torch.ones(4, 6)
    pruning.mask_gradients(layer)
    assert torch.equal(layer.weight_orig.grad, layer.weight_mask.float())


def test_inference_mode() -> None:
    layer = pruned()
    moved(layer, "in place")
    with torch.inference_mode():
        inside = layer(torch.ones(1, 6))
    assert torch.equal(inside, layer(torch.ones(1, 6)))
    layer(torch.ones(1, 6)).sum().backward()
    with torch.inference_mode():
        born = nn.Linear(2, 2)
        pruning.l1_unstructured(born, "weight", 2)
        born(torch.ones(1, 2))
        assert int((born.weight == 0).sum()) == 2


class ReadByParent(nn.Module):
    """Network that reads the weight of a layer without calling the layer, as Qwen3-Next reads that of `conv1d`."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(x), self.read.weight)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_weight_that_only_a_parent_reads_trains_by_a_keeper(*, evaluated: bool) -> None:
    torch.manual_seed(0)
    model, x = ReadByParent(), torch.randn(3, 6)

    def step() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    pruning.prune(model, "magnitude", sparsity=0.5)
    if evaluated:
        pruning.report(model, x)
    step()
    with pytest.raises(RuntimeError, match=r"`weight` of Linear has .* an earlier step, .* hold masks by a keeper"):
        step()
    masks = pruning.MaskSet.collect(model)
    pruning.remove_all(model)
    pruning.MaskKeeper(model, masks)
    before = model.read.weight.detach().clone()
    step()
    step()
    assert not torch.equal(model.read.weight, before)
    assert not bool(model.read.weight[masks["read.weight"] == 0].any())
