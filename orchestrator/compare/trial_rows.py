"""Rows of each trial's finished rounds, its status, and why it failed. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from orchestrator.compare.comparison import TrialRow, TrialStatus
from orchestrator.compare.panels import Position
from orchestrator.compare.round_columns import chosen, scoring_steps
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import RATES, REWIND, Plan, StageSpec, TrialSpec
from orchestrator.core.stage_kinds import KINDS

Records = Mapping[str, StageRecord]


class _Stage(NamedTuple):
    """A finished stage, with values that every trial on it needs."""

    spec: StageSpec
    record: StageRecord
    seconds: float
    cost: float
    """Steps of the stage plus the cost of its score, see `scoring_steps`."""
    training_macs: int | None
    shared: bool
    """Whether several trials use the stage."""


def rows_of_each(plan: Plan, records: Records, known: Sequence[Position]) -> list[list[TrialRow]]:
    """Return for each trial the rows of its dense network and of each finished round.

    Args:
        plan: the trials and their stages
        records: stage key -> record
        known: position of each trial
    """
    stage = _stages(plan, records)
    return [list(_rows(stage, records, *each)) for each in zip(plan.trials, known, strict=True)]


def last_rows(plan: Plan, records: Records, known: Sequence[Position]) -> list[TrialRow | None]:
    """Return for each trial the row of its last round; None if the trial has not ended."""
    stage = _stages(plan, records)
    found: list[TrialRow | None] = []
    for trial, position in zip(plan.trials, known, strict=True):
        ended = all(key in records for key in trial.stages)
        found.append(_row(records, trial, position, [*map(stage, trial.stages)]) if ended else None)
    return found


def training_macs_until(plan: Plan, records: Records, trial: TrialSpec, key: str) -> int | None:
    """Return the multiply-accumulates of a trial's training up to a stage of it; None if one is not recorded."""
    before = trial.stages[:-1] if key in trial.parts else trial.stages[: trial.stages.index(key)]
    return _total_training_macs(records, trial, [*map(_stages(plan, records), (*before, key))])


def _rows(stage: Callable[[str], _Stage], records: Records, trial: TrialSpec, position: Position) -> Iterator[TrialRow]:
    if trial.dense not in trial.stages and trial.dense in records:
        yield _row(records, trial, position, [stage(trial.dense)])
    chain: list[_Stage] = []
    for key in trial.stages:
        if key not in records:
            return
        chain.append(stage(key))
        if KINDS[chain[-1].record.kind].reads_test:
            yield _row(records, trial, position, chain)


def _row(records: Records, trial: TrialSpec, position: Position, chain: Sequence[_Stage]) -> TrialRow:
    """Return the row of the last stage of `chain`; its totals are over the whole chain."""
    spec, record, own = chain[-1].spec, chain[-1].record, [each for each in chain if not each.shared]
    after, before, remaining, early = record.after, record.before, record.remaining_parameters, record.least_loss
    val, test = _names(record.primary.name)
    return TrialRow(
        trial=trial.name,
        model=position.panel[0],
        data=position.panel[1],
        line=position.line,
        method=position.method,
        schedule=position.schedule,
        seed=position.seed,
        round=record.round,
        final=record.key == trial.stages[-1],
        requested_sparsity=record.requested_sparsity,
        sparsity=record.sparsity,
        metric=record.primary.name,
        test=after.get(test, math.nan),
        test_loss=after.get("test/loss", math.nan),
        val=after.get(val, math.nan),
        val_loss=after.get("val/loss", math.nan),
        val_before=before.get(val) if spec.training == "finetune" else None,
        val_loss_before=before.get("val/loss") if spec.training == "finetune" else None,
        early_step=None if early is None else early.step,
        early_val=None if early is None else early.metrics.get(val),
        parameters=record.parameters,
        remaining_parameters=remaining,
        active_parameters=record.typed.active_parameters,
        compression=record.parameters / max(1, remaining),
        macs=record.macs,
        macs_remaining=record.macs_remaining,
        speedup=record.macs_speedup,
        steps=record.steps,
        seconds=chain[-1].seconds,
        total_steps=sum([each.record.steps for each in chain]),
        total_cost=sum([each.cost for each in chain]),
        total_seconds=sum([each.seconds for each in chain]),
        own_steps=sum([each.record.steps for each in own]),
        own_seconds=sum([each.seconds for each in own]),
        training_macs=chain[-1].training_macs,
        total_training_macs=_total_training_macs(records, trial, chain),
        stage=record.key,
        chosen=chosen(spec.typed, record),
        others={name: value for name, value in after.items() if name not in (test, val, "test/loss", "val/loss")},
    )


def _total_training_macs(records: Records, trial: TrialSpec, chain: Sequence[_Stage]) -> int | None:
    """Return the multiply-accumulates of all training from the initialisation; None if a part is not recorded.

    Rounds that rewind to a step of the dense training need the training up to this step. A chain without the dense
    training counts it once: the furthest start that a round names.
    """
    counts = [each.training_macs for each in chain]
    keys = {each.record.key for each in chain}
    if trial.dense not in keys:
        inputs = (each.spec.inputs for each in chain)
        starts = {named[role] for named in inputs for role in (REWIND, RATES) if role in named} - keys
        parts = [records[key].training_macs if key in records else None for key in starts]
        counts.append(None if None in parts else max((part for part in parts if part is not None), default=0))
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _stages(plan: Plan, records: Records) -> Callable[[str], _Stage]:
    """Return a cached function: stage key -> finished stage."""

    @cache
    def stage(key: str) -> _Stage:
        record, spec = records[key], plan.stages[key]
        cost = record.steps + scoring_steps(spec, record)
        shared = len(plan.trials_of[key]) > 1
        return _Stage(spec, record, record.seconds, cost, record.training_macs, shared)

    return stage


@cache
def _names(metric: str) -> tuple[str, str]:
    """Return a metric's names on validation and on test."""
    return f"val/{metric}", f"test/{metric}"


def statuses(
    plan: Plan, records: Records, failures: Mapping[str, str], stopped: Container[str] = ()
) -> dict[str, TrialStatus]:
    """Return trial name -> status; `stopped` are the trials that a search does not run."""
    return {
        trial.name: status(trial, keys, plan, records, failures, stopped=trial.name in stopped)
        for trial, keys in zip(plan.trials, plan.work, strict=True)
    }


def status(
    trial: TrialSpec,
    keys: Sequence[str],
    plan: Plan,
    records: Records,
    failures: Mapping[str, str],
    *,
    stopped: bool = False,
) -> TrialStatus:
    """Return the status of a trial with the stages `keys`; `stopped` says whether a search does not run it."""
    missing = [key for key in keys if key not in records]
    if not missing:
        return "finished"
    if any(key in failures for key in (*keys, *trial.parts)):
        return "failed"
    if stopped:
        return "stopped"
    return "unfinished" if any(KINDS[plan.stages[key].kind].trains for key in missing) else "unmeasured"


def reasons(plan: Plan, records: Records, failures: Mapping[str, str]) -> dict[str, str]:
    """Return trial name -> why it failed, for failed trials."""
    each = zip(plan.trials, plan.work, strict=True)
    found = {trial.name: reason(trial, keys, records, failures) for trial, keys in each}
    return {name: text for name, text in found.items() if text is not None}


def warnings(plan: Plan, records: Records) -> dict[str, tuple[str, ...]]:
    """Return warning in records -> the stages with it, as a trial's name and the kind of stage."""
    found: dict[str, list[str]] = {}
    for key, spec in plan.stages.items():
        for text in records[key].warnings if key in records else ():
            first = next((plan.trials[index].name for index in plan.trials_of[key]), key[:12])
            found.setdefault(text, []).append(f"{first}, {spec.title}")
    return {text: tuple(stages) for text, stages in found.items()}


def reason(trial: TrialSpec, keys: Sequence[str], records: Records, failures: Mapping[str, str]) -> str | None:
    """Return why a trial with the stages `keys` failed, None if it did not."""
    left = (key for key in (*keys, *trial.parts) if key not in records)
    return next((failures[key] for key in left if key in failures), None)
