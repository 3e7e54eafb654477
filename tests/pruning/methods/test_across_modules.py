"""Global pruning of entries and of channels: values by hand, tied and masked parameters, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

import pruning
from pruning.methods.functions import normalised_norms


def linear(weight: list[list[float]]) -> nn.Linear:
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0])
    layer.weight = nn.Parameter(values)
    return layer


def pair() -> list[tuple[nn.Module, str]]:
    return [
        (linear([[1.0, 2.0, 3.0, 4.0], [-4.0, -3.0, -2.0, -1.0]]), "weight"),
        (linear([[0.0, 0.1, -2.0]]), "weight"),
    ]


class TestUnstructured:
    def test_the_smallest_of_all(self) -> None:
        (first, _), (second, _) = pairs = pair()
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=4)
        assert first.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]]
        assert second.weight.tolist() == [[0, 0, -2]]

    def test_ties_go_by_the_order_of_the_parameters(self) -> None:
        (first, _), (second, _) = pairs = pair()
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=6)
        assert first.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]
        assert second.weight.tolist() == [[0, 0, -2]]

    def test_by_importance_scores_of_some(self) -> None:
        (first, _), (second, _) = pairs = pair()
        scores: dict[tuple[nn.Module, str], Tensor] = {
            (first, "weight"): torch.tensor([[4.0, 2.0, 1.0, 3.0], [-3.0, -1.0, -2.0, -4.0]])
        }
        pruning.global_unstructured(pairs, pruning.L1Unstructured, scores, amount=4)
        assert first.weight.tolist() == [[1, 2, 0, 4], [-4, 0, -2, -1]]
        assert second.weight.tolist() == [[0, 0, -2]]

    def test_rounds_count_what_survives_of_all(self) -> None:
        model = nn.Sequential(nn.Linear(10, 6), nn.Linear(10, 4))
        pairs = [(layer, "weight") for layer in model]
        for method in (pruning.L1Unstructured, pruning.RandomUnstructured):
            for left in (80, 64) if method is pruning.L1Unstructured else (51, 41):
                pruning.global_unstructured(iter(pairs), method, amount=0.2)
                assert sum(int(layer.weight_mask.sum()) for layer in model) == left
        hooks = [next(iter(layer._forward_pre_hooks.values())) for layer in model]
        assert [len(hook) for hook in hooks] == [4, 4]
        assert all(isinstance(method, pruning.CustomFromMask) for hook in hooks for method in hook)

    def test_a_custom_method_ranks_all_survivors_as_one_vector(self) -> None:
        seen = []

        class Largest(pruning.BasePruningMethod):
            PRUNING_TYPE = "unstructured"

            def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
                seen.append(tuple(t.shape))
                mask = default_mask.clone()
                mask[t.abs().argmax()] = 0
                return mask

        (first, _), (second, _) = pairs = pair()
        for _ in range(2):
            pruning.global_unstructured(pairs, Largest)
        assert seen == [(11,), (10,)]
        assert first.weight_mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
        assert second.weight_mask.all()

    def test_a_generator_reproduces_the_draw(self) -> None:
        masks = []
        for _ in range(2):
            pairs = pair()
            generator = torch.Generator().manual_seed(5)
            pruning.global_unstructured(pairs, pruning.RandomUnstructured, amount=5, generator=generator)
            masks.append([module.weight_mask.tolist() for module, _ in pairs])
        assert masks[0] == masks[1]

    def test_identity_and_what_is_left_of_a_nan(self) -> None:
        (first, _), (second, _) = pairs = pair()
        pruning.global_unstructured(pairs, pruning.Identity)
        assert first.weight_mask.all()
        pruning.custom_from_mask(second, "weight", torch.tensor([[0, 1, 1]]))
        with torch.no_grad():
            second.weight_orig[0, 0] = float("nan")
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=1)
        assert second.weight_mask.tolist() == [[0, 0, 1]]

    def test_tied_parameters_with_masks_of_their_own_are_united(self) -> None:
        first, second = linear([[1.0, 2.0, 3.0, 4.0]]), linear([[0.0] * 4])
        second.weight = first.weight
        pruning.custom_from_mask(first, "weight", torch.tensor([[1, 1, 1, 0]]))
        pruning.custom_from_mask(second, "weight", torch.tensor([[1, 1, 0, 1]]))
        pruning.global_unstructured([(first, "weight"), (second, "weight")], pruning.L1Unstructured, amount=1)
        assert first.weight_mask.tolist() == [[0, 1, 0, 0]]
        assert second.weight_mask is first.weight_mask


@pytest.mark.parametrize("rounds", [1, 3])
def test_masks_are_those_of_torch(rounds: int) -> None:
    masks = []
    for library in (pruning, torch_prune):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 2), nn.Linear(4, 5))
        for _ in range(rounds):
            library.global_unstructured([(m, "weight") for m in model], library.L1Unstructured, amount=0.3)
        masks.append([layer.weight_mask for layer in model])
    assert all(torch.equal(*both) for both in zip(*masks, strict=True))


def test_errors() -> None:
    pairs = pair()
    with pytest.raises(TypeError, match="must be an iterable of pairs"):
        pruning.global_unstructured(3, pruning.L1Unstructured, amount=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must map"):
        pruning.global_unstructured(pairs, pruning.L1Unstructured, [torch.ones(2)], amount=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use `global_structured`"):
        pruning.global_unstructured(pairs, pruning.LnStructured, amount=1, n=2)
    with pytest.raises(TypeError, match="LnStructured or RandomStructured"):
        pruning.global_structured(pairs, pruning.L1Unstructured, amount=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not exceed the 11 units"):
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=12)
    for wrong, match in (({"n": "nuc"}, "'nuc'"), ({"n": "max"}, "'max'"), ({"amount": 9}, "the 3 units")):
        with pytest.raises(ValueError, match=match):
            pruning.global_structured(pairs, **{"amount": 1, **wrong})
    with pytest.raises(IndexError, match="`dim`"):
        pruning.global_structured(pairs, amount=1, dim=2)
    with pytest.raises(ValueError, match="2 dimensions"):
        pruning.global_structured([*pairs, (pairs[0][0], "bias")], amount=1)
    with pytest.raises(ValueError, match=r"Linear\.weight.*NaN"):
        pruning.global_structured(pairs, importance_scores={pairs[1]: torch.full((1, 3), float("nan"))}, amount=1)
    assert not any(pruning.is_pruned(module) for module, _ in pairs)


class TestStructured:
    def test_norms_are_normalised_by_the_size_of_a_channel(self) -> None:
        wide, narrow = linear([[2.0] * 9, [1.0] * 9]), linear([[1.5], [3.0]])
        # L2 norms 6, 3, 1.5, 3 would take the narrow layer's 1.5 first; root mean squares are 2, 1, 1.5, 3.
        for expected in ([1, 0, 1, 1], [1, 0, 0, 1], [0, 0, 0, 1]):
            pruning.global_structured([(wide, "weight"), (narrow, "weight")], amount=1)
            kept = [*wide.weight_mask.any(1).tolist(), *narrow.weight_mask.any(1).tolist()]
            assert kept == [bool(value) for value in expected]

    def test_fractions_count_the_channels_still_alive(self) -> None:
        model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 1))
        for left in (8, 6, 5):
            pruning.global_structured(((m, "weight") for m in model), amount=0.2)
            assert sum(int(m.weight_mask.any(3).any(2).any(1).sum()) for m in model) == left

    def test_what_is_pruned_does_not_count_in_a_norm(self) -> None:
        layer = linear([[9.0, 1.0], [2.0, 2.0]])
        pruning.custom_from_mask(layer, "weight", torch.tensor([[0, 1], [1, 1]]))
        pruning.global_structured([(layer, "weight")], amount=1, n=1)
        assert layer.weight_mask.tolist() == [[0, 0], [1, 1]]

    def test_along_another_dimension_by_scores(self) -> None:
        layer = linear([[9.0, 1.0], [2.0, 2.0]])
        scores = {(layer, "weight"): torch.tensor([[0.0, 5.0], [0.0, 5.0]])}
        pruning.global_structured([(layer, "weight")], importance_scores=scores, amount=1, dim=-1)
        assert layer.weight_mask.tolist() == [[0, 1], [0, 1]]

    def test_random_channels_are_drawn_from_all(self) -> None:
        counts = torch.zeros(5)
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
            pairs = [(m, "weight") for m in model]
            pruning.global_structured(pairs, pruning.RandomStructured, amount=2, generator=generator)
            dead = torch.cat([~m.weight_mask.any(1) for m in model])
            assert int(dead.sum()) == 2
            counts += dead
        assert counts.min() > 50  # 80 expected, standard deviation 7
        assert counts.max() < 110


@pytest.mark.parametrize(("n", "expected"), [(1, 3.5), (2, 12.5**0.5), (0, 1), (float("inf"), 4), ("fro", 12.5**0.5)])
def test_normalised_norms_are_power_means(n: Any, expected: float) -> None:
    t = torch.tensor([[3.0, -4.0, 3.0, -4.0]])
    assert normalised_norms(t, n, 0).tolist() == pytest.approx([expected])
