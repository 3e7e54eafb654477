"""How a module holds a pruned parameter: laws of both engines, and those of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pruning

ENGINES = ("reparam", "inplace")


def pruned(engine: Any, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias)
    return pruning.l1_unstructured(layer, "weight", 0.5, engine=engine)


def dead_entries(layer: nn.Module) -> torch.Tensor:
    return layer.weight[layer.weight_mask == 0]  # type: ignore[index]


@pytest.mark.parametrize("engine", ENGINES)
class TestState:
    def test_names_places_and_identities(self, engine: Any) -> None:
        layer = nn.Linear(6, 4)
        parameter, grad = layer.weight, torch.ones(4, 6)
        parameter.grad = grad
        pruning.l1_unstructured(layer, "weight", 0.5, engine=engine)
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

    def test_remove_makes_zeros_permanent(self, engine: Any) -> None:
        layer = pruned(engine)
        expected, outputs = layer.weight.detach().clone(), layer(torch.ones(1, 6))
        pruning.remove(layer, "weight")
        assert torch.equal(layer.weight, expected)
        assert int((layer.weight == 0).sum()) == 12
        assert torch.equal(layer(torch.ones(1, 6)), outputs)

    def test_pruned_and_removed_by_turns_with_one_optimizer(self, engine: Any) -> None:
        layer = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            pruning.l1_unstructured(layer, "weight", 0.25, engine=engine)
            before = layer.weight.detach().clone()
            layer(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            layer(torch.ones(2, 6))
            assert not torch.equal(layer.weight, before)
            assert not dead_entries(layer).any()
            pruning.remove(layer, "weight")

    def test_two_parameters_of_one_module(self, engine: Any) -> None:
        layer = pruned(engine)
        pruning.random_unstructured(layer, "bias", 2, engine=engine)
        assert list(dict(layer.named_parameters())) == ["weight_orig", "bias_orig"]
        pruning.remove(layer, "weight")
        layer(torch.ones(1, 6)).sum().backward()
        assert list(dict(layer.named_parameters())) == ["weight", "bias_orig"]
        assert pruning.is_pruned(layer)
        pruning.remove(layer, "bias")
        assert not pruning.is_pruned(layer)

    def test_is_pruned_looks_inside(self, engine: Any) -> None:
        model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
        assert not pruning.is_pruned(model)
        pruning.identity(model[1][0], "bias", engine=engine)
        assert pruning.is_pruned(model)

    def test_taken_names_are_refused(self, engine: Any) -> None:
        layer = nn.Linear(2, 2)
        layer.weight_mask = "mine"  # type: ignore[assignment]
        with pytest.raises(AttributeError, match="'weight_mask'; rename it"):
            pruning.identity(layer, "weight", engine=engine)
        assert layer.weight_mask == "mine"
        assert not pruning.is_pruned(layer)

    def test_the_engine_stays_unless_another_is_asked_for(self, engine: Any) -> None:
        layer = pruned(engine)
        pruning.l1_unstructured(layer, "weight", 0.5)
        assert (layer.weight is layer.weight_orig) == (engine == "inplace")
        other: Any = "reparam" if engine == "inplace" else "inplace"
        pruning.l1_unstructured(layer, "weight", 0.5, engine=other)
        assert (layer.weight is layer.weight_orig) == (other == "inplace")
        layer(torch.ones(1, 6)).sum().backward()
        assert int((layer.weight == 0).sum()) == 21  # of 24: 12, 18, 21

    def test_frozen_parameters_stay_frozen(self, engine: Any) -> None:
        layer = nn.Linear(6, 4)
        layer.weight.requires_grad_(False)
        pruning.l1_unstructured(layer, "weight", 0.5, engine=engine)
        assert not layer.weight.requires_grad
        layer(torch.ones(1, 6)).sum().backward()
        assert layer.weight_orig.grad is None


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "rmsprop, one by one": lambda p: torch.optim.RMSprop(p, lr=0.05, foreach=False),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_engines_train_the_kept_weights_alike(name: str) -> None:
    trained = {}
    for engine in ENGINES:
        layer = pruned(engine)
        optimizer = OPTIMIZERS[name](layer.parameters())
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            optimizer.zero_grad()
            layer(torch.randn(8, 6, generator=generator)).square().sum().backward()
            optimizer.step()
        layer(torch.ones(1, 6))
        trained[engine] = (layer.weight.detach().clone(), layer.bias.detach().clone())
        assert not dead_entries(layer).any()
    assert torch.equal(trained["reparam"][0], trained["inplace"][0])
    assert torch.equal(trained["reparam"][1], trained["inplace"][1])


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


def test_inplace_stores_zeros_and_costs_no_second_tensor() -> None:
    layer = pruned("inplace")
    assert layer.weight is layer.weight_orig
    assert int((layer.weight_orig == 0).sum()) == 12
    assert layer.state_dict()["weight_orig"].data_ptr() == layer.weight.data_ptr()


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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", WAYS)
def test_pruned_entries_are_zero_whenever_they_are_used(engine: Any, how: str) -> None:
    layer = pruned(engine)
    moved(layer, how)
    inputs = torch.eye(6, dtype=layer.weight_orig.dtype)
    outputs = layer(inputs) - layer.bias
    assert torch.allclose(outputs.t(), layer.weight_orig * layer.weight_mask, atol=1e-6)
    assert not dead_entries(layer).any()


@pytest.mark.parametrize("how", [*WAYS, "data"])
def test_enforce_masks_zeroes_the_stored_parameter(how: str) -> None:
    layer = pruned("inplace")
    if how == "data":  # the one way that leaves no trace for the next forward to find
        layer.weight_orig.data.add_(1.0)
    else:
        moved(layer, how)
    pruning.enforce_masks(nn.Sequential(layer))
    assert not layer.weight_orig[layer.weight_mask == 0].any()
    assert how == "load a mask" or layer.weight_orig[layer.weight_mask == 1].all()
    assert layer.weight is layer.weight_orig


def test_enforce_masks_leaves_the_reparam_engine_alone() -> None:
    layer = pruned("reparam")
    before = layer.weight_orig._version
    pruning.enforce_masks(layer)
    assert layer.weight_orig._version == before


def test_inplace_masks_only_what_has_changed() -> None:
    layer = pruned("inplace")
    version = layer.weight_orig._version
    for _ in range(3):
        layer(torch.ones(1, 6))
    assert layer.weight_orig._version == version
    moved(layer, "in place")
    layer(torch.ones(1, 6))
    assert layer.weight_orig._version == version + 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_written_by_hand_holds_from_the_next_forward(engine: Any) -> None:
    layer = pruned(engine)
    layer(torch.ones(1, 6))
    layer.weight_mask[0] = 0
    assert layer(torch.ones(1, 6))[0, 0] == layer.bias[0]
    assert not layer.weight[0].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_assigned_over_the_pruned_one_is_refused(engine: Any) -> None:
    layer = pruned(engine)
    layer.weight = nn.Parameter(torch.ones(4, 6))
    for _ in range(2):
        with pytest.raises(TypeError, match="assign that one, or call `remove` before"):
            layer(torch.ones(1, 6))
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    pruning.l1_unstructured(conv[0], "weight", 0.5, engine=engine)
    with pytest.raises(TypeError):  # as torch's; before, the fused layer would have used the old weight
        nn.utils.fusion.fuse_conv_bn_eval(*conv)(torch.ones(1, 3, 5, 5))


@pytest.mark.parametrize("engine", ENGINES)
def test_pruning_in_an_older_hook_of_the_forward(engine: Any) -> None:
    layer = nn.Linear(6, 4)

    def prune(module: nn.Module, _inputs: object) -> None:
        pruning.l1_unstructured(module, "weight", 5, engine=engine)

    layer.register_forward_pre_hook(prune)
    for round_ in (1, 2, 3):
        outputs = layer(torch.ones(1, 6))
        assert int((layer.weight_mask == 0).sum()) == 5 * round_
        assert torch.allclose(outputs, (layer.weight_orig * layer.weight_mask).sum(1) + layer.bias)
        outputs.sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
def test_pruning_within_autocast_holds_at_once(engine: Any) -> None:
    layer = pruning.identity(nn.Linear(6, 4, bias=False), "weight", engine=engine)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 6)).any()
        pruning.l1_unstructured(layer, "weight", 1.0)
        assert not layer(torch.ones(1, 6)).any()


def test_an_expanded_parameter_is_not_held_in_place() -> None:
    layer = nn.Linear(5, 4)
    layer.weight = nn.Parameter(torch.arange(1.0, 6.0).expand(4, 5))
    mask = torch.ones(4, 5)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="Clone the parameter, or pass engine='reparam'"):
        pruning.custom_from_mask(layer, "weight", mask, engine="inplace")
    assert not pruning.is_pruned(layer)
    pruning.custom_from_mask(layer, "weight", mask, engine="reparam")
    assert layer.weight.tolist() == [[0, 2, 3, 4, 5], *[[1, 2, 3, 4, 5]] * 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_structure_made_on_meta_takes_a_pruned_state(engine: Any) -> None:
    layer, loaded = nn.Linear(6, 4, device="meta"), pruned(engine)
    for prune in (
        lambda: pruning.l1_unstructured(layer, "weight", 0.5, engine=engine),
        lambda: pruning.ln_structured(layer, "weight", 1, n=2, dim=0),
        lambda: pruning.custom_from_mask(layer, "weight", torch.ones(4, 6, device="meta")),
    ):
        prune()
        assert layer.weight_mask.shape == (4, 6)
        assert layer.weight_mask.is_meta
    layer.load_state_dict(loaded.state_dict(), assign=True)
    pruning.enforce_masks(layer)
    assert torch.equal(layer(torch.ones(1, 6)), loaded(torch.ones(1, 6)))


def test_gradients_can_be_accumulated_over_forwards() -> None:
    layer = pruned("inplace")
    first = layer(torch.ones(1, 6))
    layer.weight_mask.copy_(layer.weight_mask.clone())  # as DDP does before each forward
    (first + layer(torch.ones(1, 6))).square().sum().backward()


def test_a_step_of_another_optimizer_leaves_an_unfinished_backward_alone() -> None:
    layer, other = pruned("inplace"), nn.Linear(2, 2)
    first = layer(torch.ones(1, 6))
    torch.optim.SGD(other.parameters()).step()
    (first + layer(torch.ones(1, 6))).square().sum().backward()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")])
def test_an_embedding_with_sparse_gradients_trains(engine: Any, kind: Any) -> None:
    torch.manual_seed(0)
    table = kind(50, 4, sparse=True)
    pruning.l1_unstructured(table, "weight", 0.5, engine=engine)
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


def test_gradients_are_dense_until_masked() -> None:
    layer, reference = pruned("inplace"), pruned("reparam")
    for module in (layer, reference):
        module(torch.ones(1, 6)).sum().backward()
    assert layer.weight_orig.grad.all()
    pruning.mask_gradients(layer)
    assert torch.equal(layer.weight_orig.grad, reference.weight_orig.grad)
    norms = [nn.utils.clip_grad_norm_(module.parameters(), 1.0) for module in (layer, reference)]
    assert norms[0] == norms[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_inference_mode(engine: Any) -> None:
    layer = pruned(engine)
    moved(layer, "in place")
    with torch.inference_mode():
        inside = layer(torch.ones(1, 6))
    assert torch.equal(inside, layer(torch.ones(1, 6)))
    layer(torch.ones(1, 6)).sum().backward()
    with torch.inference_mode():
        born = nn.Linear(2, 2)
        pruning.l1_unstructured(born, "weight", 2, engine=engine)
        born(torch.ones(1, 2))
        assert int((born.weight == 0).sum()) == 2
