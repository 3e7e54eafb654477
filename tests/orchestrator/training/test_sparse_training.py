"""Trainings in which masks change: equal bits after interruptions, laws, selected weights, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sampling import sampled
from small_trials import bits, composed, planned, train

from orchestrator.config.config_groups import with_own_options
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.planning.plan import ConfigError
from orchestrator.store.store import Store
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.pruning_rounds import LawBroken
from pruning import MaskSet
from pruning.dynamics.changing_masks import Dynamics
from pruning.dynamics.gradual_pruning import Gradual
from pruning.dynamics.regrowth import RigL

SHORT = (
    *("model=mlp", "model.hidden=[16]", "train.epochs=null", "train.steps=20", "train.batch_size=32"),
    *("finetune.epochs=null", "finetune.steps=12", "finetune.batch_size=32", "train.checkpoint_minutes=1"),
    *("train.eval_every=5", "prune.exclude=[]"),
)
METHODS = {
    "static": (),
    "set": ("dynamics.every=4",),
    "rigl": ("dynamics.every=4",),
    "gradual": ("dynamics.every=4", "dynamics.begin=0.2"),
    "sr_ste": (),
    "ste": (),
    "movement": ("dynamics.every=4",),
    "soft_movement": ("dynamics.penalty=0.01", "dynamics.rate=100"),
}
"""Method -> overrides for a short training."""


def asked(method: str, *overrides: str) -> Plan:
    return planned(composed(*SHORT, f"method={method}", *METHODS.get(method, ()), *overrides))


def pruned(plan: Plan, store: Store) -> StageRecord:
    """Run a plan; return the record of the last stage."""
    return train(plan, store)[plan.trials[0].stages[-1]]


def masks_of(record: StageRecord, store: Store) -> MaskSet:
    return MaskSet.from_bytes(store.read(record.key, "masks.npz"))


def chain(plan: Plan) -> tuple[StageSpec, ...]:
    often = {part: {"checkpoint_minutes": 1.0} for part in ("train", "finetune")}
    return tuple(replace(plan.stages[key], location=often) for key in plan.trials[0].stages)


def interrupted(specs: tuple[StageSpec, ...], store: Store, every: int) -> StageRecord:
    """Run stages with an interruption after each `every` batches; each attempt continues from the last checkpoint."""
    for _ in range(100):
        left = tuple(spec for spec in specs if not store.finished([spec.key]))
        if not left:
            break
        calls = iter(range(10**9))
        order = WorkOrder(
            left,
            Worker(store, cancelled=lambda calls=calls: next(calls) >= every, grace=9),
            lineage=specs[: len(specs) - len(left)],
        )
        with suppress(Cancelled):
            list(run_segment(order))
    return store.finished([specs[-1].key])[specs[-1].key]


SAMPLE = (("rigl", "0.9"), ("gradual", "null"), ("soft_movement", "0.9"), ("sr_ste", "null"))
"""Interrupted in each run of the tests; the others are slow."""


@pytest.mark.parametrize(
    ("method", "ema"),
    [
        pytest.param(*case, id=f"{case[0]}-{'averages' if case[1] != 'null' else 'plain'}", marks=marks)
        for case in product(METHODS, ("null", "0.9"))
        for marks in [() if case in SAMPLE else (pytest.mark.slow,)]
    ],
)
def test_an_interrupted_training_gives_the_same_bits(method: str, ema: str, store: Store, tmp_path: Path) -> None:
    """Interruptions fall before, at and after updates, and checkpoints before and after the selected step."""
    specs = chain(asked(method, f"train.ema={ema}"))
    quiet = list(run_segment(WorkOrder(specs, Worker(store))))[-1]

    for number, every in enumerate((1, 3)):
        fresh = Store(str(tmp_path / f"other{number}"))
        assert bits(interrupted(specs, fresh, every), fresh) == bits(quiet, store)
        assert fresh.checkpoints.known() == []


@sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_trial_ends_with_the_masks_that_its_weights_have(method: str, store: Store) -> None:
    record = pruned(asked(method, "train.ema=0.5"), store)
    weights, masks = load(store.read(record.key, "weights.safetensors")), masks_of(record, store)

    assert record.details["mask_updates"] or method == "static"
    assert masks.digest() == record.mask_digest
    for name, mask in masks.items():
        assert not weights[name][~mask].any()
    if method == "soft_movement":
        assert record.requested_sparsity is None
        assert 0.05 < record.sparsity < 1
    else:
        assert record.sparsity == pytest.approx(0.5 if "ste" in method else 0.9, abs=1e-3)


def test_every_method_begins_with_one_erk_mask_where_counts_stay(store: Store) -> None:
    found = {method: pruned(asked(method), store) for method in ("static", "set", "rigl")}
    counts = [masks_of(record, store).kept() for record in found.values()]

    assert counts[0] == counts[1] == counts[2]
    assert len({record.mask_digest for record in found.values()}) == 3


def test_selected_weights_go_with_the_masks_that_they_had(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the evaluations after 5, 10, 15, 20 steps is made the one after 10."""
    seen: list[tuple[int, dict[str, torch.Tensor]]] = []
    monkeypatch.setattr(
        "orchestrator.training.loop.evaluation.evaluate",
        scripted := Scripted([0.1, 0.9, 0.2, 0.3]),
    )
    after = RigL.after_step

    def noted(self: RigL) -> None:
        after(self)
        seen.append((self.step, dict(self.kept)))

    monkeypatch.setattr(RigL, "after_step", noted)
    record = pruned(asked("rigl", "dynamics.until=1.0"), store)
    at_ten = MaskSet(dict(seen[9][1]))

    assert scripted.calls >= 4
    assert seen[9][0] == record.best_step == 10
    assert masks_of(record, store) == at_ten != MaskSet(dict(seen[-1][1]))


class Scripted:
    """Evaluation of which the accuracy is written down."""

    def __init__(self, values: list[float]) -> None:
        from orchestrator.training.loop.evaluation import evaluate

        self.evaluate, self.values, self.calls = evaluate, values, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.evaluate(*args, **kwargs)
        value = self.values[self.calls % len(self.values)]
        self.calls += 1
        return replace(found, figures={**found.figures, "accuracy": value})


@pytest.mark.parametrize("method", ["gradual", "movement", "soft_movement"])
def test_weights_are_not_selected_before_the_masks_prune_as_much_as_in_the_end(
    method: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.training.loop.evaluation.evaluate", Scripted([0.9, 0.8, 0.2, 0.1]))

    record = pruned(asked(method, "train.patience=1"), store)

    assert record.best_step == 15, "masks are final after 15 of 20 steps"
    assert record.steps == 20, "patience counts from there"


@sampled(4)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("dynamics=nested", "schedule.at=during"), "`schedule.at` .=during. needs a dynamics that changes masks"),
        (("method=rigl", "schedule.at=start"), "`schedule.at` .=start. prunes before the training.*schedule.at=during"),
        (("method=rigl", "schedule.rounds=3"), "`schedule.rounds` .=3. must be 1 with schedule.at=during"),
        (("method=rigl", "prune.holding=hooks"), "`prune.holding` .=hooks..*prune.holding=keeper"),
        (("method=rigl", "restart.control=shuffle"), "`restart.control` .=shuffle..*dynamics=static"),
        (("method=gradual", "repair=bn_stats"), "`repair.kind` .='bn_stats'. cannot be combined"),
        (("method=gradual", "schedule.inner=5"), "`schedule.inner` .=5. cannot be combined"),
        (("method=rigl", "unit=channel"), "`unit.kind` .='channel'. cannot be combined"),
        (("method=sr_ste", "scope=global"), "`scope.kind` .='global'. cannot be combined.*must be 'window'"),
        (("method=movement", "score=snip"), "`score.kind` .='snip'. cannot be combined"),
        (
            ("method=soft_movement", "schedule.sparsity=0.5"),
            "`schedule.sparsity` .=0.5. must be null with dynamics=soft",
        ),
        (("method=sr_ste", "schedule.sparsity=0.9"), "`schedule.sparsity` .=0.9.*must be 0.5 in one round"),
        (("method=gradual", "dynamics.every=0"), "`dynamics.every` .=0. must be an integer of at least 1"),
        (
            ("method=rigl", "train.epochs=null", "train.steps=100", "dynamics.until=200"),
            "must give steps begin < until",
        ),
        (("method=gradual", "schedule.at=trained", "finetune=none"), "`finetune` trains nothing"),
        (("method=random_unstructured", "dynamics=rigl", "schedule.at=during"), "`dynamics` .=rigl. is for ranking"),
        (
            ("method=gradual", "schedule.amount=0.1", "schedule.sparsity=null"),
            "`schedule.amount` .=0.1. is for a class",
        ),
        (("method=movement", "scope.min_kept=5"), "`scope.min_kept` .=5. cannot be combined"),
        (("method=sr_ste", "scope.normalise=size"), "`scope.normalise` .='size'. cannot be combined"),
        (("method=rigl", "scope=row"), "`scope.kind` .='row'. cannot be combined"),
        (
            ("method=gradual", "dynamics.until=1.5"),
            "`dynamics.until` .=1.5. must be a fraction of the training up to 1, or",
        ),
        (("method=rigl", "train.epochs=0"), "rounds train by `train`, which trains nothing"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(composed(*overrides))


def test_masks_change_in_the_fine_tuning_of_a_trained_network_and_of_a_pruned_one(store: Store) -> None:
    plan = asked("gradual", "schedule=geometric", "schedule.sparsity=0.75", "schedule.rounds=2")
    records = train(plan, store)
    dense, first, second = (records[key] for key in plan.trials[0].stages)

    assert [first.sparsity, second.sparsity] == pytest.approx([0.5, 0.75], abs=1e-3)
    assert first.started_from == dense.weights_digest
    assert [first.steps, second.steps] == [12, 12]
    assert masks_of(second, store).nested_in(masks_of(first, store))
    assert [update["kept"] for update in first.details["mask_updates"]][-1] == sum(
        masks_of(first, store).kept().values()
    )


@sampled(12)
@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("score=taylor", "score.examples=32", "scope=global"), "entry"),
        (("scope=erk",), "entry"),
        (("unit=channel", "schedule.sparsity=0.5"), "channel"),
        (("unit=group", "schedule.sparsity=0.5", "scope=global"), "group"),
        (("scope=window", "scope.n=1", "scope.m=4", "schedule.sparsity=null"), "entry"),
        (("unit=block", "unit.size=4"), "block"),
    ],
)
def test_gradual_pruning_takes_what_the_engine_has(overrides: tuple[str, ...], where: str, store: Store) -> None:
    record = pruned(asked("gradual", *overrides), store)

    assert record.details["scoring"]["unit"] == where
    assert record.details["mask_updates"]


@pytest.mark.parametrize(
    ("method", "options", "outputs"),
    [("rigl", ("scope=layer",), 1), ("movement", (), 1), ("rigl", ("scope=layer", "unit.outputs=2"), 2)],
)
def test_blocks_of_inputs_go_and_return_together(
    method: str, options: tuple[str, ...], outputs: int, store: Store
) -> None:
    plan = asked(method, "unit=block", "schedule.sparsity=0.7", *options)
    record = pruned(plan, store)

    assert record.details["scoring"]["unit"] == "block"
    for name, mask in masks_of(record, store).items():
        blocks = mask.unflatten(1, (-1, 4)).unflatten(0, (-1, outputs)).movedim(1, 2)  # of 64 and 16 inputs
        assert torch.equal(blocks.flatten(2).any(2), blocks.flatten(2).all(2)), name
        count = mask.numel() // (4 * outputs)
        assert int(blocks.flatten(2).any(2).sum()) == count - round(0.7 * count)
    assert record.details["mask_updates"]


def broken(monkeypatch: pytest.MonkeyPatch, method: type[Dynamics], name: str, act: Any) -> None:
    """Act after a method of a dynamics was called."""
    right = getattr(method, name)

    def wrong(self: Any, *args: Any) -> Any:
        found = right(self, *args)
        act(self)
        return found

    monkeypatch.setattr(method, name, wrong)


def test_a_regrown_entry_that_begins_elsewhere_fails_the_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(made: RigL) -> None:
        with torch.no_grad():
            for name, kept in made.kept.items():
                made.parameter(name)[kept & (made.parameter(name) == 0)] = 0.5

    broken(monkeypatch, RigL, "after_step", act)
    with pytest.raises(LawBroken, match=r"regrew entries of .*weight with values outside of \[0, 0\]"):
        pruned(asked("rigl"), store)


def test_a_count_that_moves_fails_the_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(made: RigL) -> None:
        if made.step == 9:
            name = next(iter(made.kept))
            mask = made.kept[name].clone()
            mask.view(-1)[mask.view(-1).nonzero()[0]] = False
            made.change({name: mask})

    broken(monkeypatch, RigL, "after_step", act)
    with pytest.raises(LawBroken, match=r"changed the number of kept units of .*weight"):
        pruned(asked("rigl"), store)


def test_a_sparsity_that_is_not_reached_fails_the_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Gradual._choices_at

    def less(self: Gradual, progress: float) -> Any:
        return choices(self, 0.5 * progress)

    monkeypatch.setattr(Gradual, "_choices_at", less)
    with pytest.raises(LawBroken, match=r"achieved sparsity 0\.78.* is not the requested 0\.9"):
        pruned(asked("gradual"), store)


def test_a_pruned_weight_that_is_not_zero_fails_the_trial(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(made: RigL) -> None:
        if made.step == made.length:
            with torch.no_grad():
                for name, kept in made.kept.items():
                    made.parameter(name)[~kept] = 0.1

    broken(monkeypatch, RigL, "after_step", act)
    with pytest.raises(LawBroken, match="pruned weights are not zero"):
        pruned(asked("rigl", "train.select=last"), store)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def own(name: str, *overrides: str) -> Plan:
    chosen = ("score=random", "scope=erk", "schedule=during", f"dynamics._target_=own_dynamics.{name}")
    return planned(composed(*with_own_options([*SHORT, *chosen, *overrides])))


@pytest.mark.slow
def test_a_dynamics_of_ones_own_changes_masks_as_it_is_shown(store: Store, tmp_path: Path) -> None:
    plan = own("Rotating", "dynamics.every=4")
    found = pruned(plan, store)
    static = pruned(asked("static"), store)

    assert [update["step"] for update in found.details["mask_updates"]] == [4, 8, 12, 16]
    assert masks_of(found, store).kept() == masks_of(static, store).kept()
    other = Store(str(tmp_path / "other"))
    assert bits(interrupted(chain(plan), other, 3), other) == bits(found, store)


def test_a_dynamics_of_ones_own_prunes_to_the_sparsity_that_it_is_given(store: Store) -> None:
    record = pruned(own("Pruning", "scope=layer"), store)

    assert record.sparsity == pytest.approx(0.9, abs=1e-3)
    assert record.best_step == 20, "until is the end of the training"


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("Failing", (), "`dynamics._target_` .=own_dynamics.Failing. failed with KeyError: 'no such layer'; fix"),
        ("Returning", (), "brought pruned entries of .* back"),
        ("Asking", (), "`dynamics._target_` .=own_dynamics.Asking. failed with ZeroDivisionError"),
        ("Unsure", (), "`dynamics._target_` .=own_dynamics.Unsure. failed with ZeroDivisionError"),
        ("Losing", (), "changed the number of kept units of"),
        ("Rotating", ("dynamics.evry=4",), "is called with .evry., but .*missing a required argument"),
        ("function", ("dynamics.every=4",), "must be a class derived from pruning.dynamics.Dynamics, not a function"),
        ("Nowhere", (), "own_dynamics.Nowhere"),
    ],
)
def test_a_mistake_in_ones_own_dynamics_is_told_in_a_sentence(
    name: str, overrides: tuple[str, ...], said: str, store: Store
) -> None:
    with pytest.raises(OrchestratorError, match=said):
        pruned(own(name, *overrides), store)


REWOUND = ("schedule=one_shot", "restart=rewind", "restart.step=10", "train.optimizer.lr=0.3")


@sampled(2)
@pytest.mark.parametrize("method", ["gradual", "movement", "sr_ste", "rigl"])
def test_a_rewound_round_forgets_what_the_dense_training_measured(method: str, store: Store) -> None:
    """The dense network at step 10 is better than the pruned one, and its patience is almost used up."""
    sparsity = "schedule.sparsity=null" if method == "sr_ste" else "schedule.sparsity=0.98"
    plan = asked(method, *REWOUND, sparsity, "train.eval_every=2", "train.patience=2")
    record = pruned(plan, store)

    assert [point.step for point in record.curve][:2] == [2, 4]
    assert record.best_step in [point.step for point in record.curve]


@pytest.mark.parametrize("method", ["lottery_ticket", "rigl"])
def test_the_best_step_of_a_rewound_round_counts_from_its_beginning(method: str, store: Store) -> None:
    plan = asked(method, *REWOUND[:3], "schedule.sparsity=0.5", "train.eval_every=5")
    record = pruned(plan, store)
    values = {point.step: point.metrics["val/accuracy"] for point in record.curve}

    assert record.best_step == max(values, key=lambda step: (values[step], -step))
    assert record.after["val/accuracy"] == values[record.best_step]


@sampled(3)
@pytest.mark.parametrize("method", [name for name in METHODS if "ste" not in name])
def test_averages_of_tied_weights_are_masked(method: str, store: Store) -> None:
    model = ("model._target_=own_dynamics.Tied", "data._target_=own_dynamics.numbers", "prune.include=[head.weight]")
    typed = [*SHORT[2:], f"method={method}", *METHODS[method], *model, "train.ema=0.9", "scope=layer"]
    record = pruned(planned(composed(*with_own_options(typed))), store)
    weights = load(store.read(record.key, "weights.safetensors"))

    assert record.steps == 20
    for mask in masks_of(record, store).values():
        assert not weights["head.weight"][~mask].any()


def test_frozen_weights_keep_their_values(store: Store) -> None:
    model = ("model._target_=own_dynamics.frozen", "data._target_=own_dynamics.numbers")
    typed = [*SHORT[2:], "method=set", "dynamics.every=4", *model]
    plan = planned(composed(*with_own_options(typed)))
    record = pruned(plan, store)
    start = load(store.read(plan.trials[0].stages[0], "weights.safetensors"))
    weights, masks = load(store.read(record.key, "weights.safetensors")), masks_of(record, store)

    assert torch.equal(weights["0.weight"], start["0.weight"] * masks["0.weight"])


@pytest.mark.slow
def test_a_line_is_named_after_its_dynamics() -> None:
    def name(*overrides: str) -> str:
        return str(planned(composed(*with_own_options(overrides))).trials[0].config["method"]["name"])

    assert name("dynamics=rigl", "schedule=during") == "rigl"
    assert name("method=magnitude", "dynamics=gradual", "schedule=during") == "gradual"
    assert name("method=rigl") == "rigl"
    assert name("method=rigl", "dynamics=static") == "rigl, dynamics=static"
    assert name("method=snip", "dynamics=set", "schedule=during") == "snip, dynamics=set"
    own = ("dynamics._target_=own_dynamics.Rotating", "dynamics.every=4", "schedule=during")
    assert name(*own) == "Rotating"
    assert name("method=snip") == "snip"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("unattached", "must call `context.attach.optimizer.` before the first step, so that masks change"),
        ("twice", "`context.attach` was called twice for pruned parameters"),
        ("early", "ended after 5 steps, before the last change of the masks"),
        ("without_steps", "`steps` .=0. of `context.attach` must be an int of at least 1"),
        ("forgetting_masks", "for weights of an earlier step, call `context.restore_masks` with the masks of that"),
    ],
)
def test_what_a_function_does_wrong_with_changing_masks_is_told(function: str, said: str, store: Store) -> None:
    with pytest.raises(OrchestratorError, match=said):
        pruned(looped(function), store)


def looped(function: str, method: str = "gradual", *overrides: str) -> Plan:
    return asked(method, f"train._target_=own_dynamics.{function}", "train.select=last", *overrides)


def test_a_function_gives_back_earlier_weights_with_their_masks(store: Store) -> None:
    record = pruned(looped("best_of_two", "rigl", "dynamics.until=1.0"), store)

    assert {update["step"] for update in record.details["mask_updates"]} == {0, 4, 8, 12, 16}
    weights = load(store.read(record.key, "weights.safetensors"))
    assert all(not weights[name][~mask].any() for name, mask in masks_of(record, store).items())


@pytest.mark.parametrize("method", ["rigl", "static"])
def test_optimizers_of_different_parameters_count_one_batch_together(method: str, store: Store) -> None:
    one, two = (pruned(looped(name, method), store) for name in ("plainly", "by_two_optimizers"))

    assert two.details["training_macs"] == one.details["training_macs"]


@pytest.mark.parametrize(
    ("method", "overrides", "said"),
    [
        ("rigl", ("dynamics.every=9",), "masks changed in 2 of 20 steps (dynamics.every=9): too few for rigl"),
        ("gradual", ("dynamics.every=100",), "too few for gradual; pass a smaller dynamics.every, such as 1"),
        ("rigl", ("dynamics.every=1",), "15 of 20 steps changed masks in place of weights (dynamics.every=1)"),
        ("soft_movement", ("dynamics.rate=0.01",), "soft_movement pruned 0.00%: pass a larger dynamics.penalty"),
    ],
)
def test_a_training_whose_masks_hardly_change_is_warned_of(
    method: str, overrides: tuple[str, ...], said: str, store: Store
) -> None:
    record = pruned(asked(method, *overrides), store)

    assert any(said in each for each in record.warnings)


def test_usual_trainings_are_not_warned_of(store: Store) -> None:
    assert not pruned(asked("rigl", "dynamics.every=12", "train.steps=80"), store).warnings
    assert not pruned(asked("static"), store).warnings
