"""Restarted rounds: rewound to the bytes and the schedule of a step, or pruned before any training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sampling import sampled
from small_trials import planned, small, train
from small_workloads import normed
from torch import Tensor

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.errors import OrchestratorError, StageMissing
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job, Plan
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.sweep.conductor import run
from orchestrator.training import stage_networks
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.state import resuming
from pruning import MaskSet

EPOCH, STEPS = 8, 24
"""Numbers of steps in an epoch and in the dense training."""


def run_chain(plan: Plan, store: Store) -> list[StageRecord]:
    """Run all stages of a plan; return the records of its first trial's chain."""
    records = train(plan, store)
    return [records[key] for key in plan.trials[0].stages]


def weights(store: Store, record: StageRecord) -> dict[str, Tensor]:
    return load(store.read(record.key, "weights.safetensors"))


def masks(store: Store, record: StageRecord) -> MaskSet:
    return MaskSet.from_bytes(store.read(record.key, "masks.npz"))


def start_at(plan: Plan, store: Store, until: int | str) -> StageRecord:
    (key,) = (key for key, spec in plan.stages.items() if spec.fields.get("until") == until)
    return store.finished([key])[key]


@sampled(quick=lambda step: step in (5, "1.5ep"))
@pytest.mark.parametrize("step", [0, 5, "1.5ep", 1.0, STEPS])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("prune.holding=hooks",),
        ("train.ema=0.9", "train.select=last"),
        ("optimizer@train.optimizer=adam", "scheduler@train.scheduler=step", "train.patience=1", "train.eval_every=3"),
    ],
    ids=["plain", "hooks", "averages", "adam"],
)
def test_where_nothing_is_pruned_a_rewound_round_is_the_dense_training(
    store: Store, step: int | str | float, options: Sequence[str]
) -> None:
    rewound = ("method=identity", "restart=rewind", f"restart.step={step}", *options)
    if "train.patience=1" in options and step not in (0, 5):
        pytest.skip("the training ends earlier")
    dense, found = run_chain(planned(small(*rewound)), store)

    assert found.weights_digest == dense.weights_digest
    assert found.after == dense.after
    taken = {0: 0, 5: 5, "1.5ep": 12, 1.0: STEPS, STEPS: STEPS}[step]
    assert found.steps == dense.steps - taken
    assert [point.metrics for point in found.curve] == [p.metrics for p in dense.curve if p.step > taken]


@sampled(8)
@pytest.mark.parametrize("damage", ["gone", "altered"])
@pytest.mark.parametrize(
    "options", [("restart.step=5",), ("restart.step=0", "restart.rates=5"), ("schedule.at=start",)]
)
def test_a_start_that_is_lost_while_the_sweep_runs_is_made_again(
    store: Store, tmp_path: Path, options: Sequence[str], damage: str
) -> None:
    method = ("score=snip", "scope=global") if "schedule.at=start" in options else ("restart=rewind", "score=random")
    plan = planned(small(*method, *options))
    quiet = run_chain(plan, store)
    starts = [key for key, spec in plan.stages.items() if spec.kind == "start"]
    records, disturbed = [], Store(str(tmp_path / "disturbed"))
    for keys in plan.segments():
        for key in disturbed.finished(starts):
            if damage == "gone":
                disturbed.discard(key)
            else:
                for name in ("weights.safetensors", "state.safetensors"):
                    file = Path(disturbed.uri, "stages", key, name)
                    file.chmod(0o644)
                    file.write_bytes(bytes(file.stat().st_size))
        order = WorkOrder(
            tuple(plan.stages[key] for key in keys), Worker(disturbed, grace=9), lineage=plan.lineage(keys[0])
        )
        records += run_segment(order)

    assert starts
    assert {r.key: r.result() for r in records}.items() >= {r.key: r.result() for r in quiet}.items()


@pytest.mark.parametrize("holding", ["keeper", "hooks"])
def test_a_rewound_round_begins_with_the_bytes_of_the_step_under_its_mask(store: Store, holding: str) -> None:
    rewound = ("restart=rewind", "restart.step=5", "restart.rates=1.0", f"prune.holding={holding}")
    plan = planned(small(*rewound, "schedule.rounds=2", "schedule=geometric"))
    _, _, last = run_chain(plan, store)
    saved, found, mask = weights(store, start_at(plan, store, 5)), weights(store, last), masks(store, last)

    assert last.steps == 0
    assert mask.sparsity() == 0.5
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        expected = torch.where(mask[name], saved[name], 0) if name in mask else saved[name]
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("options", [(), ("prune.holding=hooks",), ("train.ema=0.9",), ("train.clip_norm=1",)])
def test_what_is_pruned_stays_zero_though_its_momentum_is_restored(store: Store, options: Sequence[str]) -> None:
    _, found = run_chain(planned(small("restart=rewind", "restart.step=5", *options)), store)
    tensors, mask = weights(store, found), masks(store, found)

    assert found.steps == STEPS - 5
    assert all(not tensors[name][~mask[name]].any() for name in mask)
    assert [point.step for point in found.curve] == [3, 11, 19]
    assert [point.epoch for point in found.curve] == [1, 2, 3]


def test_what_goes_on_from_a_step_has_nothing_of_what_is_pruned_nor_of_what_was_measured(store: Store) -> None:
    """Momentum and averages of pruned entries are 0: optimizers that couple entries, and evaluations, read them."""
    plan = planned(small("restart=rewind", "restart.step=12", "train.ema=0.9"))
    found = run_chain(plan, store)[-1]
    model, mask, spec = normed(), masks(store, found), plan.stages[found.key]
    in_order = stage_networks.masks_of(model, mask)
    saved = resuming.state_of(store, start_at(plan, store, 12).key)
    state = resuming.onward(model, in_order, spec, store)

    assert state is not None
    momentum = state.part("optimizer")["state"]["state"]
    for index, kept in enumerate(in_order):
        for after, before in (
            (momentum[index]["momentum_buffer"], saved.part("optimizer")["state"]["state"][index]["momentum_buffer"]),
            (state.part("averages")[index], saved.part("averages")[index]),
        ):
            assert torch.equal(after, before if kept is None else torch.where(kept, before, 0))
            assert before.count_nonzero() > after.count_nonzero() or kept is None
    assert saved.part("curve")
    assert (state.part("curve"), state.part("best_state"), state.part("selected_step")) == ([], None, 12)
    assert state.part("scheduler") == saved.part("scheduler")


def test_learning_rates_are_rewound_and_weights_are_kept(store: Store) -> None:
    plan = planned(small("restart=lr_rewind", "restart.rates=1ep"))
    dense, found = run_chain(plan, store)
    rates = {point.epoch: point.metrics["lr"] for point in dense.curve}

    assert found.steps == 2 * EPOCH
    assert {point.epoch: point.metrics["lr"] for point in found.curve} == {e: rates[e] for e in (2, 3)}


def test_from_the_last_step_on_nothing_is_trained(store: Store) -> None:
    dense, found = run_chain(planned(small("restart=lr_rewind", "restart.rates=1.0")), store)
    before, after, mask = weights(store, dense), weights(store, found), masks(store, found)

    assert found.steps == 0
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] * mask[name] if name in mask else before[name])


def test_an_interrupted_round_goes_on_to_the_same_record(store: Store, tmp_path: Path) -> None:
    plan, other = planned(small("restart=rewind", "restart.step=5")), Store(str(tmp_path / "other"))
    expected = run_chain(plan, other)[-1]
    *before, spec = plan.stages.values()
    for each in before:
        list(run_segment(WorkOrder((each,), Worker(store), lineage=plan.lineage(each.key))))
    asked = iter(range(99))
    order = WorkOrder((spec,), Worker(store, grace=9), lineage=plan.lineage(spec.key))
    with suppress(Cancelled):
        list(
            run_segment(
                WorkOrder(order.specs, Worker(store, grace=9, cancelled=lambda: next(asked) > 6), lineage=order.lineage)
            )
        )
    assert store.checkpoints.reached(spec.key).number == 5 + 7
    (found,) = run_segment(order)

    assert found.result() == expected.result()
    assert store.read(found.key, "weights.safetensors") == other.read(found.key, "weights.safetensors")


def test_weights_of_another_step_fail_the_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(small("restart=rewind"))
    exact = resuming.masked

    def off_by_a_bit(model: torch.nn.Module, given: MaskSet) -> None:
        exact(model, given)
        with torch.no_grad():
            next(model.parameters()).add_(1e-7)

    monkeypatch.setattr(resuming, "masked", off_by_a_bit)
    with pytest.raises(LawBroken, match=r"rewound weights differ from the weights of the step to rewind to: 0\.weight"):
        run_chain(plan, store)


def test_a_step_beyond_the_end_is_told(store: Store) -> None:
    with pytest.raises(
        OrchestratorError, match=r"`restart.step` or `restart.rates` \(=25\) must be at most 24, the steps"
    ):
        run_chain(planned(small("restart=rewind", "restart.step=25")), store)
    early = small("restart=rewind", "restart.step=20", "train.patience=1", "train.optimizer.lr=0")
    with pytest.raises(OrchestratorError, match="must be at most 16, where the dense training stopped early"):
        run_chain(planned(early), store)


def test_a_network_is_pruned_before_it_is_trained(store: Store) -> None:
    """The masks are those of the initialisation; at sparsity 0 the training equals the dense one."""
    plan = planned(small("schedule.at=start"), small("schedule.at=start", "method=identity"))
    begun, found = run_chain(plan, store)
    (_, whole), dense = (
        (store.finished(plan.trials[1].stages)[key] for key in plan.trials[1].stages),
        plan.trials[0].dense,
    )
    initial, mask = weights(store, begun), masks(store, found)

    assert not [name for name in begun.after if name.startswith("test")]
    assert whole.weights_digest == store.finished([dense])[dense].weights_digest
    assert found.steps == STEPS
    for name, kept in mask.items():
        magnitude = initial[name].abs()
        assert magnitude[kept].min() >= magnitude[~kept].max()


def test_a_shuffled_mask_keeps_its_counts_and_the_weights_that_it_uncovers(store: Store) -> None:
    options = ("schedule.at=start", "finetune.epochs=1")
    plan = planned(*(small(*options, f"restart.control={each}") for each in ("shuffle", "none")))
    found = run_chain(plan, store)[-1]
    (plain_round,) = store.finished(plan.trials[1].stages[1:]).values()
    one, other = masks(store, found), masks(store, plain_round)

    assert one != other
    assert one.kept() == other.kept()


@sampled(2)
@pytest.mark.parametrize(("method", "dim"), [("random_structured", 0), ("ln_structured", 1), ("l1_unstructured", None)])
def test_whole_channels_are_shuffled_where_a_class_prunes_these(store: Store, method: str, dim: int | None) -> None:
    options = (
        f"method={method}",
        *(() if dim is None else (f"method.dim={dim}",)),
        "restart=rewind",
        "schedule.rounds=1",
    )
    plan = planned(*(small(*options, f"restart.control={each}") for each in ("shuffle", "none")))
    found = run_chain(plan, store)[-1]
    (plain_round,) = store.finished(plan.trials[1].stages[1:]).values()
    one, other = masks(store, found), masks(store, plain_round)

    assert one != other
    assert one.kept() == other.kept()
    for mask in one.values() if dim is not None else ():
        channels = mask.movedim(dim, 0).flatten(1)
        assert torch.equal(channels.any(1), channels.all(1))


def test_a_shuffled_mask_lets_pruned_weights_back_as_they_were(store: Store) -> None:
    options = ("restart.control=shuffle", "restart.rates=1.0", "schedule.at=start")
    begun, found = run_chain(planned(small(*options)), store)
    initial, after, mask = weights(store, begun), weights(store, found), masks(store, found)

    for name, kept in mask.items():
        assert torch.equal(after[name], torch.where(kept, initial[name], 0))


def test_weights_are_drawn_anew_under_the_mask_of_the_others(store: Store) -> None:
    """The control applies to the last of two rounds, on top of the same first round."""
    rewound = ("restart=rewind", "schedule=geometric", "schedule.rounds=2", "train.epochs=1")
    plan = planned(*(small(*rewound, f"restart.control={each}") for each in ("reinit", "none")))
    *_, found = run_chain(plan, store)
    ticket = store.finished(plan.trials[1].stages)[plan.trials[1].stages[-1]]
    fields = plan.stages[found.key].fields["restart"]

    assert plan.trials[0].stages[:2] == plan.trials[1].stages[:2]
    assert fields == {"weights": "reinit", "rates": 0, "optimizer": "restored"}
    assert masks(store, found) == masks(store, ticket)
    assert (found.steps, ticket.steps) == (EPOCH, EPOCH)
    assert found.weights_digest != ticket.weights_digest


def test_weights_that_are_drawn_anew_are_those_of_no_other_seed_or_round(store: Store) -> None:
    untrained = ("restart=reinit", "restart.rates=1.0", "schedule=geometric", "schedule.rounds=2")
    plan = planned(small(*untrained), small(*untrained, "seed=1"))
    run_chain(plan, store)
    records = [store.finished([key])[key] for trial in plan.trials for key in trial.stages]
    drawn = [weights(store, record)["0.weight"] for record in records]
    kept = masks(store, records[2])["0.weight"] & masks(store, records[5])["0.weight"]

    assert kept.any()
    for index, first in enumerate(drawn):
        assert not any((first == other)[kept].any() for other in drawn[:index])


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_inverted_scores_prune_what_is_largest(store: Store, scope: str) -> None:
    options = ("schedule.at=start", "restart.control=invert", f"scope={scope}", "restart.rates=1.0")
    begun, found = run_chain(planned(small(*options)), store)
    initial, mask = weights(store, begun), masks(store, found)
    pairs = [(initial[name].abs(), mask[name]) for name in mask]
    if scope == "global":
        pairs = [(torch.cat([w.flatten() for w, _ in pairs]), torch.cat([kept.flatten() for _, kept in pairs]))]

    assert mask.sparsity() == 0.5
    assert all(magnitude[kept].max() <= magnitude[~kept].min() for magnitude, kept in pairs)


@pytest.mark.slow
def test_a_sweep_compares_what_was_never_dense_with_the_dense_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("cluster=inline", "tracking=none", "objective=matching_sparsity")
    choices = (("schedule.at=start",), ("restart=rewind", "restart.step=1ep"), ("restart=lr_rewind",), ())
    configs = [small(*options, *each, f"seed={seed}") for each in choices for seed in (0, 1)]
    outcome = run([Job((f"trial={index}",), each) for index, each in enumerate(configs)])
    found = compare_trials(outcome.plan, outcome.records)
    begun = next(index for index, trial in enumerate(outcome.plan.trials) if trial.dense not in trial.stages)
    (dense,), points = found.dense, {point.line: point for point in found.points}

    assert outcome.status == "finished"
    assert outcome.objective(begun) in (0.0, 0.5)
    assert dense.seeds == (0, 1)
    assert len(points) == 4
    assert all(point.difference is not None and point.seeds == (0, 1) for point in points.values())
    steps = [point.total_steps for point in points.values()]
    assert sorted(steps) == [STEPS, STEPS + 1, STEPS + 2 * EPOCH, 2 * STEPS]
    assert found.cost.steps == 2 * (sum(steps) - 2 * STEPS)
    assert [finding.verdict for finding in audit(outcome.plan, outcome.records, found)].count("fail") <= 6
    assert run([Job(("again",), configs[0])]).ran


def test_a_training_goes_on_from_the_next_start_where_the_furthest_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged: set[str] = set()

    def state_of(_store: object, key: str) -> str:
        if key in damaged:
            raise StageMissing("damaged", key)
        return f"state of {key}"

    monkeypatch.setattr(resuming, "state_of", state_of)
    steps = {"near": 10, "far": 30, "between": 20}
    records = {key: SimpleNamespace(steps=each, started_from="", kind="start") for key, each in steps.items()}
    records["of other weights"] = SimpleNamespace(steps=90, started_from="others", kind="start")
    store: Any = SimpleNamespace(finished=lambda keys: {key: records[key] for key in keys})
    found = []
    for key in (None, "far", "between", "near"):
        damaged |= {key} if key else set()
        found.append(resuming.furthest(store, [*records], "")[0])

    assert found == ["state of far", "state of between", "state of near", None]
