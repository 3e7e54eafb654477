"""Laws of PyTorch's own tests of `torch.nn.utils.prune`, rewritten: both libraries must keep them.

The numbers are those of PyTorch's 34 tests; if two of them test one law in two cases, one test here has both cases.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

import pruning

pytestmark = pytest.mark.parametrize("prune", [pruning, torch_prune])

MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "conv": lambda: nn.Conv3d(2, 3, 2),
    "embedding": lambda: nn.Embedding(6, 4),
}
NAMES = {"linear": ("weight", "bias"), "conv": ("weight", "bias"), "embedding": ("weight",)}
EVERYWHERE = [pytest.param(MODULES[kind], name, id=f"{kind}-{name}") for kind in MODULES for name in NAMES[kind]]


def zeros(tensor: Tensor) -> int:
    return int((tensor == 0).sum())


def of(values: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(values[0]), len(values), bias=False)
    layer.weight.data.copy_(torch.tensor(values))
    return layer


def test_1_amounts_are_real_numbers_in_range(prune: Any) -> None:
    for odd in ("I'm a string", [0.5]):
        with pytest.raises(TypeError):
            prune._validate_pruning_amount_init(amount=odd)
    for wrong in (1.1, 20.0, -0.1, -10):
        with pytest.raises(ValueError, match="amount"):
            prune._validate_pruning_amount_init(amount=wrong)
    for right in (0.34, 1500, 0, 0.0, 1, 1.0):
        prune._validate_pruning_amount_init(amount=right)


def test_2_a_count_must_fit_the_tensor(prune: Any) -> None:
    with pytest.raises(ValueError, match="amount"):
        prune._validate_pruning_amount(amount=20, tensor_size=19)
    for amount in (0.3, 19, 0, 1.0):
        prune._validate_pruning_amount(amount=amount, tensor_size=19)


def test_3_a_fraction_is_rounded_to_a_count(prune: Any) -> None:
    counts = [prune._compute_nparams_toprune(amount, 15) for amount in (0, 10, 15, 0.0, 0.1, 0.5, 1.0)]
    assert counts == [0, 10, 15, 0, 2, 8, 15]


@pytest.mark.parametrize(("make", "name"), EVERYWHERE)
def test_4_to_6_the_mask_and_the_original_have_the_shape_and_make_the_new_value(
    prune: Any, make: Callable[[], nn.Module], name: str
) -> None:
    module = make()
    before = getattr(module, name).detach().clone()
    prune.random_unstructured(module, name=name, amount=0.1)
    original, mask = getattr(module, f"{name}_orig"), getattr(module, f"{name}_mask")

    assert original.shape == mask.shape == before.shape
    assert torch.equal(original, before)
    assert torch.equal(getattr(module, name), original * mask)


@pytest.mark.parametrize("method", ["identity", "random_unstructured"])
def test_7_and_8_pruning_nothing_leaves_outputs_and_a_mask_of_ones(prune: Any, method: str) -> None:
    module, inputs = nn.Linear(5, 7), torch.ones(1, 5)
    before = module(inputs)
    getattr(prune, method)(module, "weight", **({} if method == "identity" else {"amount": 0.0}))

    assert torch.equal(module.weight_mask, torch.ones(7, 5))
    assert torch.equal(module(inputs), before)


def test_9_the_entries_that_the_computed_mask_prunes_are_zero(prune: Any) -> None:
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    module = of([[1, 2, 3], [4, 5, 6]])
    with mock.patch.object(prune.RandomUnstructured, "compute_mask", return_value=mask):
        prune.random_unstructured(module, name="weight", amount=0.9)

    assert module.weight.tolist() == [[1, 0, 0], [4, 5, 0]]


def test_10_and_11_a_forward_uses_the_pruned_value_before_remove_and_after_it(prune: Any) -> None:
    module, inputs = of([[1, 2], [3, 4]]), torch.ones(1, 2)
    mask = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    with mock.patch.object(prune.RandomUnstructured, "compute_mask", return_value=mask):
        prune.random_unstructured(module, name="weight", amount=0.9)
    pruned = module(inputs)
    prune.remove(module, "weight")

    assert pruned.tolist() == [[2, 3]]
    assert torch.equal(module(inputs), pruned)


def test_12_the_parameter_is_one_object_throughout(prune: Any) -> None:
    module = nn.Linear(5, 7, bias=False)
    parameter = module.weight
    prune.random_unstructured(module, name="weight", amount=0.1)
    assert module.weight_orig is parameter
    prune.remove(module, "weight")
    assert module.weight is parameter


@pytest.mark.parametrize(("make", "name"), EVERYWHERE)
def test_13_a_pruned_module_can_be_pickled(prune: Any, make: Callable[[], nn.Module], name: str) -> None:
    module = make()
    prune.random_unstructured(module, name=name, amount=0.1)
    loaded = pickle.loads(pickle.dumps(module))

    assert torch.equal(getattr(loaded, name), getattr(module, name))


def test_14_later_prunings_join_a_container_and_masks_only_shrink(prune: Any) -> None:
    module = nn.Conv3d(2, 2, 2)
    prune.l1_unstructured(module, name="weight", amount=0.1)
    first = module.weight_mask.clone()
    prune.ln_structured(module, name="weight", amount=0.3, n=2, dim=0)
    (hook,) = module._forward_pre_hooks.values()

    assert isinstance(hook, torch_prune.PruningContainer)
    assert hook._tensor_name == "weight"
    assert [type(each).__name__ for each in hook] == ["L1Unstructured", "LnStructured"]
    assert torch.all(module.weight_mask <= first)


def test_15_a_container_takes_methods_of_its_own_parameter_only(prune: Any) -> None:
    container, own, other = prune.PruningContainer(), prune.L1Unstructured(2), prune.L1Unstructured(2)
    container._tensor_name = own._tensor_name = "test"
    other._tensor_name = "another"
    with pytest.raises(ValueError, match="another"):
        container.add_pruning_method(other)
    container.add_pruning_method(own)

    assert list(container) == [own]
    with pytest.raises(TypeError):
        container.add_pruning_method(10)
    with pytest.raises(ValueError, match="another"):
        container.add_pruning_method(other)


def test_16_a_container_prunes_by_the_newest_method_what_is_left(prune: Any) -> None:
    scores, kept = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1.0, 1, 0, 1], [1, 0, 0, 1]])
    cases = [
        (prune.L1Unstructured(amount=2), [[0, 0, 0, 1], [1, 0, 0, 1]]),
        (prune.LnStructured(amount=1, n=2, dim=0), [[0, 0, 0, 0], [1, 0, 0, 1]]),
        (prune.LnStructured(amount=1, n=2, dim=1), [[0, 1, 0, 1], [0, 0, 0, 1]]),
    ]
    for method, expected in cases:
        container = prune.PruningContainer()
        container._tensor_name = method._tensor_name = "test"
        container.add_pruning_method(method)

        assert container.compute_mask(scores, kept.clone()).tolist() == expected


def test_17_and_18_l1_prunes_the_smallest_magnitudes_or_scores(prune: Any) -> None:
    module = of([[1, -2, 3], [-4, 5, -6]])
    prune.l1_unstructured(module, "weight", amount=2)
    assert module.weight.tolist() == [[0, 0, 3], [-4, 5, -6]]
    prune.l1_unstructured(module, "weight", amount=0.5)
    assert module.weight.tolist() == [[0, 0, 0], [0, 5, -6]]

    scored = of([[1, -2, 3], [-4, 5, -6]])
    prune.l1_unstructured(scored, "weight", amount=2, importance_scores=torch.tensor([[9.0, 9, 9], [9, 1, 2]]))
    assert scored.weight.tolist() == [[1, -2, 3], [-4, 0, 0]]


def test_19_of_equal_magnitudes_the_count_is_exact(prune: Any) -> None:
    module = of([[1.0] * 8] * 5)
    prune.l1_unstructured(module, "weight", amount=0.4)
    assert zeros(module.weight_mask) == 16


def test_20_random_channels_are_whole_and_as_many_as_asked_for(prune: Any) -> None:
    for dim, channels in ((0, 5), (1, 8)):
        module = nn.Linear(8, 5)
        prune.random_structured(module, "weight", amount=2, dim=dim)
        kept = module.weight_mask.sum(1 - dim)
        assert sorted(kept.tolist()) == [0, 0] + [40 / channels] * (channels - 2)


def test_21_and_22_the_channels_of_smallest_norm_go_by_values_or_scores(prune: Any) -> None:
    values = torch.arange(1.0, 13.0).reshape(3, 2, 2)
    module, scored = nn.Conv1d(2, 3, 2), nn.Conv1d(2, 3, 2)
    for each, scores in ((module, None), (scored, values.flip(0))):
        each.weight.data.copy_(values)
        prune.ln_structured(each, "weight", amount=1, n=2, dim=0, importance_scores=scores)
    prune.ln_structured(module, "weight", amount=0.5, n=1, dim=-1)

    assert module.weight_mask.tolist() == [[[0, 0]] * 2, [[0, 1]] * 2, [[0, 1]] * 2]
    assert scored.weight_mask[:, 0, 0].tolist() == [1, 1, 0]


def test_23_remove_leaves_a_plain_parameter_with_its_zeros(prune: Any) -> None:
    module = nn.Linear(5, 7)
    prune.random_unstructured(module, name="weight", amount=0.5)
    pruned = module.weight.detach().clone()
    prune.remove(module, "weight")

    assert sorted(dict(module.named_parameters())) == ["bias", "weight"]
    assert not dict(module.named_buffers())
    assert not module._forward_pre_hooks
    assert torch.equal(module.weight, pruned)


def test_24_what_is_not_pruned_cannot_be_removed(prune: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        prune.remove(nn.Linear(5, 7), "weight")


def test_25_and_26_a_global_pruning_ranks_all_tensors_as_one(prune: Any) -> None:
    for scored, expected in ((False, [[0, 0, 1], [1, 1, 1]]), (True, [[1, 1, 1], [1, 0, 0]])):
        first, second = of([[1, 2, 3]]), of([[4, 5, 6]])
        scores = {(second, "weight"): torch.tensor([[9.0, 0.1, 0.2]])} if scored else None
        prune.global_unstructured(
            [(first, "weight"), (second, "weight")], prune.L1Unstructured, importance_scores=scores, amount=2
        )
        assert [first.weight_mask.tolist()[0], second.weight_mask.tolist()[0]] == expected


@pytest.mark.parametrize(("make", "name"), EVERYWHERE)
def test_27_a_mask_of_ones_own_is_taken_as_it_is(prune: Any, make: Callable[[], nn.Module], name: str) -> None:
    module = make()
    mask = torch.randint(0, 2, getattr(module, name).shape)
    prune.custom_from_mask(module, name, mask)
    assert torch.equal(getattr(module, f"{name}_mask"), mask.to(torch.float32))


@pytest.mark.parametrize("error", [Exception("HA!"), TypeError("no")])
def test_28_a_mask_that_cannot_be_computed_leaves_the_module_unpruned(prune: Any, error: Exception) -> None:
    module = nn.Linear(5, 7)
    failing = mock.patch.object(prune.L1Unstructured, "compute_mask", side_effect=error)
    with failing, pytest.raises(type(error), match=str(error)):
        prune.l1_unstructured(module, name="weight", amount=0.9)

    assert sorted(dict(module.named_parameters())) == ["bias", "weight"]
    assert not dict(module.named_buffers())
    assert not module._forward_pre_hooks


def test_29_and_30_a_pruned_model_is_saved_by_its_state(prune: Any) -> None:
    model, other = (nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1)) for _ in range(2))
    prune.l1_unstructured(model[0], name="weight", amount=0.9)
    prune.l1_unstructured(other[0], name="weight", amount=0.1)
    other.load_state_dict(model.state_dict())
    pruned = model[0].weight.detach().clone()
    prune.remove(model[0], name="weight")
    plain = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
    plain.load_state_dict(model.state_dict())
    other(torch.ones(1, 10))  # a forward brings `weight` up to date

    assert torch.equal(plain[0].weight, pruned)
    assert torch.equal(other[0].weight, pruned)


def test_31_to_33_a_method_prunes_a_plain_tensor_by_its_values_or_scores(prune: Any) -> None:
    t, kept = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 1]])
    method = prune.L1Unstructured(amount=2)

    assert method.prune(t, kept).tolist() == [[0, 0, 3, 0], [5, 6, 0, 8]]
    assert torch.equal(method.prune(t, kept, importance_scores=t), method.prune(t, kept))
    by_score = method.prune(t, kept, importance_scores=torch.ones_like(t).index_fill(1, torch.tensor([2]), 9))
    assert zeros(by_score) == 4
    assert by_score[0, 2] == 3


def test_34_an_rnn_prunes_and_trains_what_its_kernels_read(prune: Any) -> None:
    module = nn.LSTM(32, 32)
    prune.l1_unstructured(module, name="weight_ih_l0", amount=0.5)
    names = list(dict(module.named_parameters()))
    assert sum(isinstance(each, nn.Parameter) for each in module._flat_weights) == 3
    assert "weight_ih_l0_orig" in names
    module(torch.ones(1, 1, 32))[0].sum().backward()
    assert zeros(module.weight_ih_l0_orig.grad) >= 32 * 4 * 32 // 2
    prune.remove(module, "weight_ih_l0")

    assert sum(isinstance(each, nn.Parameter) for each in module._flat_weights) == 4
    assert zeros(module.weight_ih_l0) == 32 * 4 * 32 // 2
    assert all(a is not b for a, b in pairwise(module._flat_weights))
