"""Multiply-accumulates of trainings, by hand: a network 64-16-10 on digits, with 32 examples in a step."""

from __future__ import annotations

import math

import pytest
import torch
from small_trials import composed, planned, train
from test_sparse_training import SHORT, asked, masks_of
from torch import Tensor, nn

from orchestrator.store.store import Store
from orchestrator.training.loop.sparse_training import TrainingCost
from orchestrator.workloads.data_loading import load
from pruning import MaskSet
from pruning.measure.macs import WeightMacs, macs, weight_macs

DENSE = 64 * 16 + 16 * 10
"""Multiply-accumulates of an example."""


def cost(store: Store, *overrides: str, method: str = "static") -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return the cost of the pruned network's training, and the kept entries of its masks."""
    plan = asked(method, *overrides)
    record = train(plan, store)[plan.trials[0].stages[-1]]
    return record.details["training_macs"], masks_of(record, store).kept()


def test_a_dense_training_costs_one_forward_and_two_backward_passes(store: Store) -> None:
    plan = planned(composed(*SHORT, "method=identity", "schedule.sparsity=null", "schedule.amount=0"))
    record = train(plan, store)[plan.trials[0].dense]

    passes = 20 * 32 * DENSE
    assert record.details["training_macs"] == {
        "dense": {"steps": 20, "examples": 20 * 32, "forward": passes, "backward": 2 * passes}
    }


def test_a_fixed_mask_costs_what_it_keeps(store: Store) -> None:
    found, kept = cost(store)

    passes = 20 * 32 * sum(kept.values())
    assert found == {"sparse": {"steps": 20, "examples": 640, "forward": passes, "backward": 2 * passes}}


def test_rigl_reads_all_gradients_in_the_steps_of_its_updates(store: Store) -> None:
    """Updates are before steps 0, 4, 8 and 12 of 20, as until is 15."""
    found, kept = cost(store, method="rigl")

    left = 32 * sum(kept.values())
    assert found["sparse"] == {"steps": 16, "examples": 512, "forward": 16 * left, "backward": 32 * left}
    assert found["sparse_forward"] == {
        "steps": 4,
        "examples": 128,
        "forward": 4 * left,
        "backward": 4 * left + 4 * 32 * DENSE,
    }


def test_sr_ste_computes_with_half_and_updates_all(store: Store) -> None:
    found, kept = cost(store, method="sr_ste")

    assert sum(kept.values()) == DENSE // 2
    assert found == {
        "sparse_forward": {
            "steps": 20,
            "examples": 640,
            "forward": 640 * DENSE // 2,
            "backward": 640 * DENSE // 2 + 640 * DENSE,
        }
    }


def test_gradual_pruning_is_dense_until_it_begins(store: Store) -> None:
    """Updates after 4, 8, 12 and 15 steps; the first one prunes nothing."""
    found, _ = cost(store, method="gradual")
    lengths, places = (64 * 16, 16 * 10), ((8, 4 / 11), (12, 8 / 11), (15, 1.0))
    sparsities = [0.9 - 0.9 * (1 - progress) ** 3 for _, progress in places]
    left = [sum(size - round(sparsity * size) for size in lengths) for sparsity in sparsities]

    steps = [12 - 8, 15 - 12, 20 - 15]
    forward = 32 * sum(count * kept for count, kept in zip(steps, left, strict=True))
    assert found["dense"]["steps"] == 8
    assert found["sparse"] == {"steps": 12, "examples": 384, "forward": forward, "backward": 2 * forward}


def test_a_smaller_last_batch_and_accumulated_batches_count_their_examples(store: Store) -> None:
    found, kept = cost(store, "train.accumulate=2", "train.steps=null", "train.epochs=1")

    (sums,) = found.values()
    examples = len(load({"kind": "digits", "val_fraction": 0.15}).train)
    assert examples % 32 != 0
    assert sums["examples"] == examples
    assert sums["steps"] == math.ceil(math.ceil(examples / 32) / 2)
    assert sums["forward"] == examples * sum(kept.values())


def test_a_rewound_round_counts_its_own_steps(store: Store) -> None:
    plan = planned(composed(*SHORT, "method=lottery_ticket", "restart.step=5", "schedule.sparsity=0.5"))
    records = train(plan, store)
    last = records[plan.trials[0].stages[-1]]

    assert last.steps == 15
    assert last.details["training_macs"]["sparse"]["steps"] == 15
    starts = [record for record in records.values() if record.kind == "start"]
    assert [record.details["training_macs"]["dense"]["steps"] for record in starts] == [5]


class Applied(nn.Module):
    """A convolution, a layer that is applied twice, and a weight without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice = nn.Conv2d(2, 4, 3, groups=2), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(4, 3))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).mT
        x = self.attention(x, x, x)[0]
        out: Tensor = self.twice(self.twice(x)) @ self.own
        return out


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5])
def test_counts_by_weight_are_the_counts_of_a_pass_under_the_masks(sparsity: float) -> None:
    torch.manual_seed(0)
    model, x = Applied(), torch.randn(1, 2, 6, 6)
    masks = {name: torch.rand(each.shape) >= sparsity for name, each in model.named_parameters() if each.ndim > 1}
    held = MaskSet(masks)
    found = weight_macs(model, x)
    for name, mask in masks.items():
        with torch.no_grad():
            model.get_parameter(name).mul_(mask)

    assert found.total == macs(model, x, MaskSet({})).total
    assert int(found.remaining(masks)) == macs(model, x, held).remaining


class Shared(nn.Module):
    """Two layers of one weight, and a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_a_shared_weight_is_masked_in_all_its_uses(name: str) -> None:
    model, x, mask = Shared(), torch.randn(1, 6), torch.rand(6, 6) > 0.5
    with torch.no_grad():
        model.first.weight.mul_(mask)
    kept = int(mask.sum())

    assert int(weight_macs(model, x).remaining({name: mask})) == 2 * kept + 36
    assert macs(model, x, MaskSet({name: mask})).remaining == 2 * kept + 36


def test_a_cost_that_an_earlier_release_did_not_count_stays_unknown() -> None:
    made = TrainingCost(WeightMacs(6, {}), dict)
    made.step(2)
    assert made.state() == {"dense": {"steps": 1, "examples": 2, "forward": 12, "backward": 24}}

    made.go_on(None)
    made.step(2)

    assert made.state() is None
