"""What is remembered of masks changes the cost of later rounds, never their result."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning import chunks, memory, survivors
from pruning.survivors import recall

ENGINES = ("reparam", "inplace")
NEVER = 1 << 62


@pytest.fixture(autouse=True)
def _all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", 0)
    monkeypatch.setattr(survivors, "AT_ONCE", 16)


def layer_at_98(engine: Any, method: str = "l1_unstructured", **arguments: Any) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(100, 50)
    getattr(pruning, method)(layer, "weight", 0.98, engine=engine, **arguments)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_are_the_same_with_and_without_notes(
    engine: Any, trained: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[list[Tensor]] = []
    for large in (0, NEVER):
        monkeypatch.setattr(memory, "LARGE", large)
        torch.manual_seed(1)
        layer = nn.Linear(200, 50).to(dtype)
        draw = torch.Generator().manual_seed(2)
        found = []
        for method, amount in (("l1", 0.98), ("random", 0.2), ("l1", 0.2), ("l1", 7), ("random", 0.5), ("random", 1.0)):
            if trained:
                with torch.no_grad():
                    layer.weight_orig.add_(0.1) if found else layer.weight.add_(0.1)
            getattr(pruning, f"{method}_unstructured")(layer, "weight", amount, generator=draw, engine=engine)
            assert (recall(layer.weight_mask) is not None) == (large == 0)
            found += [layer.weight_mask.clone(), layer.weight.detach().clone(), layer.weight_orig.detach().clone()]
        ends.append(found)
    for ours, reference in zip(*ends, strict=True):
        assert torch.equal(ours, reference)


def edit_in_place(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask[0].fill_(1)
    return layer


def edit_data(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask.data[0].fill_(1)
    pruning.enforce_masks(layer)  # what the in-place engine asks for
    return layer


def edit_data_evenly(layer: nn.Linear) -> nn.Linear:
    """Keep the number of survivors, and move them."""
    layer.weight_mask.data.copy_(layer.weight_mask.flip(0, 1))
    pruning.enforce_masks(layer)
    return layer


def edit_through_numpy(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask.numpy()[:, 3] = 0
    layer.weight_mask.numpy()[4] = 1
    pruning.enforce_masks(layer)
    return layer


def replace_data(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask.data = torch.eye(50).repeat(1, 2)
    return layer


def load_state(layer: nn.Linear) -> nn.Linear:
    other = layer_at_98("reparam", "random_unstructured")
    layer.load_state_dict(other.state_dict())
    return layer


def assign_state(layer: nn.Linear) -> nn.Linear:
    other = layer_at_98("reparam", "random_unstructured")
    layer.load_state_dict(other.state_dict(), assign=True)
    return layer


def by_a_mask(layer: nn.Linear) -> nn.Linear:
    keep = torch.ones(50, 100)
    keep[:, :50] = 0
    return pruning.custom_from_mask(layer, "weight", keep)


CHANGES: list[Callable[[nn.Linear], nn.Linear]] = [
    *(
        edit_in_place,
        edit_data,
        edit_data_evenly,
        edit_through_numpy,
        replace_data,
        load_state,
        assign_state,
        by_a_mask,
    ),
    *(nn.Module.double, nn.Module.bfloat16, nn.Module.share_memory, copy.deepcopy),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_note_never_outlives_the_mask_that_it_was_taken_of(
    engine: Any, change: Callable[[nn.Linear], nn.Linear]
) -> None:
    layer = layer_at_98(engine)
    assert recall(layer.weight_mask) is not None
    layer = change(layer)
    kept, values = layer.weight_mask.clone() != 0, layer.weight_orig.detach().clone()
    count = int(kept.sum()) // 5
    pruning.l1_unstructured(layer, "weight", 0.2)
    order = values.abs().masked_fill(~kept, torch.inf).flatten().argsort(stable=True)
    expected = kept.flatten().clone()
    expected[order[:count]] = False
    assert torch.equal(layer.weight_mask.flatten() != 0, expected)
    assert torch.equal(layer.weight.detach(), values * layer.weight_mask)
    if engine == "inplace":
        assert not layer.weight_orig[layer.weight_mask == 0].any()


def test_what_an_optimizer_has_moved_is_masked_in_the_next_round() -> None:
    layer = layer_at_98("inplace")
    with torch.no_grad():
        layer.weight_orig.fill_(1)
    pruning.random_unstructured(layer, "weight", 0.2)
    assert torch.equal(layer.weight_orig, layer.weight_mask)


def test_a_parameter_held_by_two_modules_is_masked_in_both() -> None:
    first, second = nn.Linear(100, 50), nn.Linear(100, 50)
    second.weight = first.weight
    pairs = [(first, "weight"), (second, "weight")]
    for _ in range(3):
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.9, engine="inplace")
        assert first.weight_mask is second.weight_mask
        assert torch.equal(first.weight_orig != 0, first.weight_mask != 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_that_knows_the_survivors_does_not_look_for_them(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer_at_98(engine), layer_at_98(engine)]

    def look(_: chunks.Chunk) -> None:
        raise AssertionError("the mask was read")

    monkeypatch.setattr(chunks.Chunk, "look", look)
    pruning.random_unstructured(layers[0], "weight", 0.2)
    pairs = [(layer, "weight") for layer in layers]
    pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.5)
    assert sum(int(layer.weight_mask.sum()) for layer in layers) == 90


@pytest.mark.parametrize("engine", ENGINES)
def test_only_sparse_masks_are_noted_and_notes_end_with_them(engine: Any) -> None:
    gc.collect()
    before = len(survivors._notes)
    layer = layer_at_98(engine)
    for _ in range(5):
        pruning.l1_unstructured(layer, "weight", 0.1)
    assert len(survivors._notes) == before + (2 if engine == "reparam" else 1)  # the mask, and what it leaves
    dense = pruning.l1_unstructured(nn.Linear(100, 50), "weight", 0.9, engine=engine)
    assert recall(dense.weight_mask) is None
    del layer, dense
    gc.collect()
    assert len(survivors._notes) == before


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_pruned_whole_are_known_until_entries_go(dim: int) -> None:
    layer = layer_at_98("reparam", "ln_structured", n=2, dim=dim)
    assert (recall(layer.weight_mask) is not None) == (dim == 0)
    assert int(layer.weight_mask.sum()) == 100
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)
    pruning.random_unstructured(layer, "weight", 60)
    pruning.random_structured(layer, "weight", 0, dim=0)
    assert int(layer.weight_mask.sum()) == 40
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)


def test_nothing_is_noted_in_inference_mode() -> None:
    with torch.inference_mode():
        layer = layer_at_98("inplace")
        pruning.l1_unstructured(layer, "weight", 0.2)
        assert int(layer.weight_mask.sum()) == 80
