"""Control from scratch: the small dense network that masks leave is trained like one built small, then embedded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_trials import planned, small, train
from torch import Tensor, nn
from training_cases import job

import pruning
from orchestrator.catalogue.models import MODELS
from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_job import FitResult
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.state.from_scratch import ControlError, small_of
from orchestrator.workloads import data_loading
from orchestrator.workloads.tasks.classification import Classification
from pruning import MaskSet


def settings(*overrides: str) -> dict[str, Any]:
    """Return a trial that prunes half of the hidden units and trains with momentum."""
    return small("method=magnitude", "unit=group", "train.optimizer.momentum=0.9", *overrides)


def by_hand(spec: StageSpec) -> tuple[nn.Module, FitResult]:
    """Return a network with half as many hidden units, built and trained like a dense one."""
    with seeded(derive(0, "1/small")):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 2))
    known = data_loading.load({"_target_": "small_workloads.classification_data"}, None)
    task = Classification()
    return model, training_loop.fit(job(model, task, spec.fields["train"], data=known, seed=derive(0, "0/fit")))


@pytest.mark.slow
def test_it_is_trained_as_a_network_of_that_size_is(store: Store) -> None:
    plan = planned(settings("+control=small"), settings())
    records = train(plan, store)
    (dense, key), (_, pruned) = (trial.stages for trial in plan.trials)
    weights: dict[str, Tensor] = load(store.read(key, "weights.safetensors"))
    masks = MaskSet.from_bytes(store.read(key, "masks.npz"))
    model, fit = by_hand(plan.stages[key])
    left = masks["0.weight"].any(1)

    assert plan.stages[key].fields["restart"] == {
        "weights": "reinit",
        "rates": 0,
        "optimizer": "restored",
        "control": "small",
    }
    assert int(left.sum()) == 4
    for name, expected in model.state_dict().items():
        found = weights[name]
        if name != "1.num_batches_tracked":
            found = found[:, left] if name == "4.weight" else found[left] if name[0] in "01" else found
        assert torch.equal(found, expected), name
    assert not weights["4.weight"][:, ~left].any()
    assert [point.metrics for point in records[key].curve] == [point.metrics for point in fit.curve]
    assert (records[key].steps, records[key].before) == (records[dense].steps, {})
    assert masks == MaskSet.from_bytes(store.read(pruned, "masks.npz"))
    assert records[key].sparsity == records[pruned].sparsity


@pytest.mark.slow
def test_it_stands_at_the_sparsity_of_what_it_is_the_control_of_on_a_line_of_its_own(store: Store) -> None:
    plan = planned(*(settings(f"restart.control={each}", f"seed={n}") for each in ("none", "small") for n in (0, 1)))
    records = train(plan, store)
    found = compare_trials(plan, records)
    verdicts = {finding.rule: finding for finding in audit(plan, records, found)}

    assert {point.line: point.seeds for point in found.operating_points} == {
        "magnitude, control=none": (0, 1),
        "magnitude, control=small": (0, 1),
    }
    assert len({point.level for point in found.operating_points}) == 1
    control = verdicts["a control of masks that are found before training, or trained from an earlier step"]
    assert (control.verdict, control.reason) == ("pass", "small")


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_record(store: Store, tmp_path: Path) -> None:
    plan, other = planned(settings("+control=small")), Store(str(tmp_path / "other"))
    expected = train(plan, other)[plan.trials[0].stages[-1]]
    *before, spec = plan.stages.values()
    for each in before:
        list(run_segment(WorkOrder((each,), Worker(store), lineage=plan.lineage(each.key))))
    asked = iter(range(99))
    lineage = plan.lineage(spec.key)
    with suppress(training_loop.Cancelled):
        list(
            run_segment(WorkOrder((spec,), Worker(store, grace=9, cancelled=lambda: next(asked) > 6), lineage=lineage))
        )
    assert store.checkpoints.reached(spec.key).number == 7
    (found,) = run_segment(WorkOrder((spec,), Worker(store, grace=9), lineage=lineage))

    assert found.result() == expected.result()
    assert store.read(found.key, "weights.safetensors") == other.read(found.key, "weights.safetensors")


@pytest.mark.filterwarnings("ignore:channels of 4.weight are outputs")
def test_a_network_that_cannot_be_made_small_is_told_before_any_is_trained(store: Store) -> None:
    named = "prune.include=['*', 4.weight]"  # output units cannot be removed
    plan = planned(settings("+control=small", "unit=channel", "unit.spare_last=false", named))
    spec = plan.stages[plan.trials[0].stages[-1]]

    with pytest.raises(ControlError, match=r"entries of 4\.weight that are left are masked \(.*unit=group"):
        list(run_preflight(WorkOrder((spec,), Worker(store), lineage=plan.lineage(spec.key))))


@pytest.mark.slow
def test_a_network_draws_in_its_own_way_in_the_sizes_that_it_has() -> None:
    """Glorot's variance is 2 / (fan_in + fan_out): 784 + 300 inputs and outputs become 784 + 30."""
    model = MODELS["lenet_300_100"].load()([1, 28, 28], 10)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.9, example=torch.zeros(2, 1, 28, 28))
    masks = MaskSet.collect(model)
    pruning.remove_all(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one, same, other = (small_of(model, masks, (torch.zeros(2, 1, 28, 28),), seed).model for seed in (1, 1, 2))
    first = one.get_parameter("fc1.weight").detach()

    assert first.shape == (30, 784)
    assert float(first.std()) == pytest.approx((2 / 814) ** 0.5, rel=0.02)
    assert not any(value.any() for name, value in one.state_dict().items() if name.endswith("bias"))
    assert torch.equal(first, same.get_parameter("fc1.weight"))
    assert not torch.equal(first, other.get_parameter("fc1.weight"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Scaled(nn.Module):
    """Network with a parameter that no `reset_parameters` draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.relu(self.first(x) * self.scale))
        return outputs


@pytest.mark.parametrize(
    ("model", "rows", "words"),
    [
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (), "the network does not become smaller"),
        (nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2, bias=False)), (0,), r"biases .* \(2\.bias\)"),
        (Scaled(), (0,), "no module around scale has a `reset_parameters`"),
    ],
    ids=["nothing", "constants", "drawn"],
)
def test_what_is_no_small_dense_network_is_refused(model: nn.Module, rows: tuple[int, ...], words: str) -> None:
    first = next(name for name, each in model.named_parameters() if each.ndim == 2)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[list(rows)] = False

    with pytest.raises(ControlError, match=f"`restart.control` \\(=small\\) trains .*{words}"):
        small_of(model, MaskSet({first: mask}), (torch.zeros(2, 4),), seed=0)
