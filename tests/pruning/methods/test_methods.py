"""Pruning methods: values by hand, exact counts, and equal results of class and function."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.nn.utils.prune as torch_prune
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pruning


def linear(weight: list[list[float]]) -> nn.Linear:
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0])
    layer.weight = nn.Parameter(values)
    return layer


def conv() -> nn.Conv2d:
    """One filter of three 2 x 2 channels; L2 norms 3.5, 1.1 and 6; L1 norms of the two columns 5.7 and 11.6."""
    layer = nn.Conv2d(3, 1, 2)
    values = [[[1.0, 2.0], [1.0, 2.5]], [[0.5, 1.0], [0.1, 0.1]], [[-3.0, -5.0], [0.1, -1.0]]]
    layer.weight = nn.Parameter(torch.tensor([values]))
    return layer


class TestByHand:
    def test_identity_changes_nothing(self) -> None:
        layer = nn.Linear(5, 2)
        inputs = torch.randn(3, 5)
        expected = layer(inputs)
        assert pruning.identity(layer, "weight") is layer
        assert torch.equal(layer.weight_mask, torch.ones(2, 5))
        assert torch.equal(layer(inputs), expected)
        layer(inputs).sum().backward()
        assert torch.allclose(layer.weight_orig.grad, inputs.sum(0).expand(2, 5))
        assert torch.equal(layer(inputs), layer(inputs))

    def test_l1_prunes_the_smallest_and_then_the_next_smallest(self) -> None:
        layer = linear([[1.0, 2.0, 3.0, 4.0], [-4.0, -3.0, -2.0, -1.0]])
        pruning.l1_unstructured(layer, "weight", 2)
        assert layer.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]]
        pruning.l1_unstructured(layer, "weight", 2)
        assert layer.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]

    def test_l1_by_importance_scores(self) -> None:
        layer = linear([[1.0, 2.0, 3.0, 4.0], [-4.0, -3.0, -2.0, -1.0]])
        scores = torch.tensor([[4.0, 2.0, 1.0, 3.0], [-3.0, -1.0, -2.0, -4.0]])
        pruning.l1_unstructured(layer, "weight", 2, scores)
        assert layer.weight.tolist() == [[1, 2, 0, 4], [-4, 0, -2, -1]]
        pruning.l1_unstructured(layer, "weight", 2, importance_scores=scores)
        assert layer.weight.tolist() == [[1, 0, 0, 4], [-4, 0, 0, -1]]

    def test_equal_scores_go_by_lowest_index(self) -> None:
        layer = linear([[2.0, -2.0, 2.0], [2.0, 1.0, -2.0]])
        pruning.l1_unstructured(layer, "weight", 3)
        assert layer.weight_mask.tolist() == [[0, 0, 1], [1, 0, 1]]

    def test_ln_by_channel_and_then_by_column(self) -> None:
        layer = conv()
        pruning.ln_structured(layer, "weight", 1, n=2, dim=1)
        expected = torch.ones(1, 3, 2, 2)
        expected[:, 1] = 0
        assert torch.equal(layer.weight_mask, expected)
        pruning.ln_structured(layer, "weight", 1, n=1, dim=-1)
        expected[..., 0] = 0
        assert torch.equal(layer.weight_mask, expected)

    def test_ln_by_importance_scores(self) -> None:
        layer = conv()
        scores = torch.tensor([[[[10.0, 1], [10, 1]], [[30, 3], [30, 3]], [[-20, -2], [-20, -2]]]])
        pruning.ln_structured(layer, "weight", 1, 2, 1, scores)
        assert layer.weight_mask[0, :, 0, 0].tolist() == [0, 1, 1]
        pruning.ln_structured(layer, "weight", 1, 2, -1, importance_scores=scores)
        assert layer.weight_mask[0, 1].tolist() == [[1, 0], [1, 0]]

    def test_ln_ranks_what_is_left_of_a_channel(self) -> None:
        layer = linear([[9.0, 1.0], [2.0, 2.0]])
        pruning.custom_from_mask(layer, "weight", torch.tensor([[0, 1], [1, 1]]))
        pruning.ln_structured(layer, "weight", 1, n=2, dim=0)
        assert layer.weight_mask.tolist() == [[0, 0], [1, 1]]

    def test_random_structured_takes_whole_channels(self) -> None:
        layer = nn.Conv2d(4, 5, 2)
        pruning.random_structured(layer, "weight", 0.6, dim=1)  # round(2.4)
        kept = layer.weight_mask.sum((0, 2, 3))
        assert sorted(kept.tolist()) == [0, 0, 20, 20]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
    def test_custom_mask_of_any_dtype_combines_with_the_old_one(self, dtype: torch.dtype) -> None:
        layer = linear([[1.0, 2.0, 3.0, 4.0]])
        pruning.custom_from_mask(layer, "weight", mask=torch.tensor([[1, 1, 0, 0]], dtype=dtype))
        pruning.custom_from_mask(layer, "weight", mask=torch.tensor([[0, 1, 1, 0]], dtype=dtype))
        assert layer.weight.tolist() == [[0, 2, 0, 0]]
        assert layer.weight_mask.dtype == torch.float32

    def test_biases_and_vectors_can_be_pruned(self) -> None:
        layer = nn.Conv3d(2, 4, 2)
        pruning.random_unstructured(layer, "bias", 0.5)
        assert int((layer.bias == 0).sum()) == 2
        assert layer.bias_mask.shape == layer.bias_orig.shape == layer.bias.shape


@pytest.mark.parametrize("method", ["random_unstructured", "l1_unstructured"])
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), amount=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_counts_are_exact(method: str, rows: int, columns: int, amount: float, seed: int) -> None:
    layer = nn.Linear(columns, rows)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        left = int(layer.weight_mask.sum()) if hasattr(layer, "weight_mask") else rows * columns
        getattr(pruning, method)(layer, "weight", amount, generator=generator)
        assert int(layer.weight_mask.sum()) == left - round(amount * left)


@given(values=st.lists(st.integers(-3, 3), min_size=6, max_size=6), amount=st.integers(0, 6))
@settings(max_examples=40)
def test_l1_under_ties_is_a_stable_sort(values: list[int], amount: int) -> None:
    layer = linear([[float(v) for v in values]])
    pruning.l1_unstructured(layer, "weight", amount)
    dead = sorted(range(6), key=lambda i: (abs(values[i]), i))[:amount]
    assert layer.weight_mask.tolist() == [[float(i not in dead) for i in range(6)]]


@given(seed=st.integers(0, 1000), amount=st.floats(0, 1), n=st.sampled_from([1, 2, 0.5, float("inf")]))
@settings(max_examples=30)
def test_masks_are_those_of_torch_where_no_scores_are_equal(seed: int, amount: float, n: float) -> None:
    torch.manual_seed(seed)
    ours, theirs = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    theirs.load_state_dict(ours.state_dict())
    for library, layer in ((pruning, ours), (torch_prune, theirs)):
        library.l1_unstructured(layer, "weight", amount / 2)
        library.ln_structured(layer, "weight", amount, n=n, dim=seed % 4)
        library.l1_unstructured(layer, "weight", amount)
    assert torch.equal(ours.weight_mask, theirs.weight_mask)


@pytest.mark.parametrize("amount", [0, 0.0, 0.01])
@pytest.mark.parametrize("method", ["random_unstructured", "random_structured"])
def test_nothing_to_prune_draws_no_random_number(method: str, amount: float) -> None:
    extra: dict[str, Any] = {"dim": 0} if method == "random_structured" else {}
    layer, state = nn.Linear(5, 5), torch.get_rng_state()
    getattr(pruning, method)(layer, "weight", amount, **extra)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.weight_mask.all()


@pytest.mark.parametrize("name", ["RandomUnstructured", "L1Unstructured"])
def test_apply_dispatches_through_the_class_attribute(name: str) -> None:
    layer = nn.Linear(5, 2)
    mask = torch.ones(2, 5)
    mask[1, 0] = mask[0, 3] = 0
    with mock.patch(f"pruning.{name}.compute_mask") as compute_mask:
        compute_mask.return_value = mask
        getattr(pruning, name).apply(layer, "weight", amount=0.9)
    assert torch.equal(layer.weight_mask, mask)
    outputs = layer(torch.ones(1, 5))
    assert torch.allclose(outputs, (layer.weight_orig * mask).sum(1) + layer.bias)
    pruning.remove(layer, "weight")
    assert torch.equal(layer(torch.ones(1, 5)), outputs)


def test_compute_mask_ranks_all_of_its_argument_and_keeps_the_default_mask_as_it_is() -> None:
    t = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    default = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    mask = pruning.L1Unstructured(2).compute_mask(t, default)
    assert mask.tolist() == [[0, 0, 1, 0], [1, 1, 0, 1]]
    assert default.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]
    assert pruning.CustomFromMask(torch.eye(2)).compute_mask(t[:, :2], default[:, :2]).tolist() == [[1, 0], [0, 1]]


def test_integer_scores_and_masks() -> None:
    t = 2 * torch.randint(-1, 2, (10, 7))
    assert int((pruning.L1Unstructured(0.2).compute_mask(t, torch.ones_like(t)) == 0).sum()) == 14


def test_prune_works_on_plain_tensors() -> None:
    t = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    default = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.5, 1.6, 1.7, 1.8]])
    method = pruning.L1Unstructured(2)
    assert method.prune(t, default).tolist() == [[0, 0, 3, 0], [5, 6, 0, 8]]
    assert method.prune(t, default, importance_scores=t).tolist() == [[0, 0, 3, 0], [5, 6, 0, 8]]
    assert method.prune(t, default, importance_scores=scores).tolist() == [[0, 2, 3, 0], [0, 6, 0, 8]]
    assert method.prune(t).tolist() == [[0, 0, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(ValueError, match=r"\(4,\)"):
        method.prune(t, importance_scores=torch.ones(4))
    draws = [pruning.RandomUnstructured(4).prune(t, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("name", pruning.METHODS)
def test_every_method_takes_the_common_keywords(name: str) -> None:
    extra: dict[str, Any] = {
        "identity": {},
        "custom_from_mask": {"mask": torch.eye(4)},
        "random_structured": {"amount": 1, "dim": 0},
        "ln_structured": {"amount": 1, "n": 2, "dim": 0},
    }.get(name, {"amount": 2})
    common: dict[str, Any] = {
        "importance_scores": torch.rand(4, 4),
        "generator": torch.Generator().manual_seed(0),
    }
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    hook = pruning.METHODS[name].load().apply(first, "weight", **extra, **common)
    common["generator"].manual_seed(0)
    assert getattr(pruning, name)(second, "weight", **extra, **common) is second
    assert torch.equal(first.weight_mask, second.weight_mask)
    assert isinstance(hook, getattr(torch_prune, type(hook).__name__))


@pytest.mark.parametrize("library", [pruning, torch_prune])
def test_a_subclass_may_apply_its_mask_in_its_own_way(library: Any) -> None:
    """Straight-through estimator: pruned in the forward, trained as if it were dense."""

    class StraightThrough(library.L1Unstructured):  # type: ignore[misc]
        def apply_mask(self, module: nn.Module) -> Tensor:
            orig = getattr(module, f"{self._tensor_name}_orig")
            return 2 * (orig + (super().apply_mask(module) - orig).detach())

    layer = linear([[1.0, -2.0, 3.0, -4.0]])
    parameter = layer.weight
    StraightThrough.apply(layer, "weight", 2)
    assert layer.weight.tolist() == [[0, 0, 6, -8]]
    for _ in range(2):
        outputs = layer(torch.ones(1, 4))
        assert outputs.item() == pytest.approx(layer.bias.item() - 2)
    if library is pruning:
        copied = copy.deepcopy(layer)
        assert copied.weight.tolist() == [[0, 0, 6, -8]]
        copied.weight.sum().backward()
        assert copied.weight_orig.grad.tolist() == [[2, 2, 2, 2]]
        assert parameter.grad is None
        assert cloudpickle.loads(cloudpickle.dumps(copied)).weight.tolist() == [[0, 0, 6, -8]]
    outputs.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [[2, 2, 2, 2]]
    library.remove(layer, "weight")
    assert layer.weight is parameter
    assert layer.weight.tolist() == [[0, 0, 6, -8]]
