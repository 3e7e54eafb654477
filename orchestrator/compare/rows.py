"""What came of each trial: a tidy row for each finished round, its status, and why it failed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.compare.chosen import chosen, scoring_steps
from orchestrator.compare.comparison import Row, TrialStatus
from orchestrator.compare.grouping import Position
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS


def rows_of(plan: Plan, records: Mapping[str, StageRecord], trial: TrialSpec, position: Position) -> Iterator[Row]:
    """Yield the rows of a trial's finished stages: the network that it is compared with, and each round."""
    if trial.dense not in trial.stages and trial.dense in records:
        yield _row(plan, trial, position, [records[trial.dense]])
    chain: list[StageRecord] = []
    for key in trial.stages:
        if key not in records:
            return
        chain.append(records[key])
        if KINDS[chain[-1].kind].reads_test:
            yield _row(plan, trial, position, chain)


def last_row(plan: Plan, records: Mapping[str, StageRecord], trial: TrialSpec, position: Position) -> Row | None:
    """Return the row of a trial's last round, None where it has not ended."""
    chain = [records[key] for key in trial.stages if key in records]
    return _row(plan, trial, position, chain) if len(chain) == len(trial.stages) else None


def _row(plan: Plan, trial: TrialSpec, position: Position, chain: Sequence[StageRecord]) -> Row:
    """Return the row of the last record of `chain`, which says what it took to come there."""
    record, own = chain[-1], [each for each in chain if len(plan.trials_of[each.key]) == 1]
    told = [f"{split}/{name}" for split in ("test", "val") for name in (record.primary.name, "loss")]
    early = record.least_loss
    return Row(
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
        test=record.figure("test"),
        test_loss=record.after.get("test/loss", math.nan),
        val=record.figure("val"),
        val_loss=record.after.get("val/loss", math.nan),
        val_before=record.before.get(f"val/{record.primary.name}"),
        val_loss_before=record.before.get("val/loss"),
        early_step=None if early is None else early.step,
        early_val=None if early is None else early.metrics.get(f"val/{record.primary.name}"),
        parameters=record.parameters,
        remaining_parameters=record.remaining_parameters,
        compression=record.parameters / max(1, record.remaining_parameters),
        macs=record.macs,
        macs_remaining=record.macs_remaining,
        speedup=record.macs / record.macs_remaining if record.macs_remaining > 0 else math.inf,
        steps=record.steps,
        seconds=record.seconds,
        total_steps=sum(each.steps for each in chain),
        total_cost=sum(each.steps + scoring_steps(plan.stages[each.key], each) for each in chain),
        total_seconds=sum(each.seconds for each in chain),
        own_steps=sum(each.steps for each in own),
        own_seconds=sum(each.seconds for each in own),
        stage=record.key,
        chosen=chosen(plan.stages[record.key].fields, record),
        others={name: value for name, value in record.after.items() if name not in told},
    )


def statuses(plan: Plan, records: Mapping[str, StageRecord], failures: Mapping[str, str]) -> dict[str, TrialStatus]:
    """Return trial -> what became of it."""
    return {
        trial.name: _status(keys, plan, records, failures) for trial, keys in zip(plan.trials, plan.work, strict=True)
    }


def _status(
    keys: Sequence[str], plan: Plan, records: Mapping[str, StageRecord], failures: Mapping[str, str]
) -> TrialStatus:
    missing = [key for key in keys if key not in records]
    if not missing:
        return "finished"
    if any(key in failures for key in keys):
        return "failed"
    return "unfinished" if any(KINDS[plan.stages[key].kind].trains for key in missing) else "unmeasured"


def reasons(plan: Plan, records: Mapping[str, StageRecord], failures: Mapping[str, str]) -> dict[str, str]:
    """Return trial -> why it failed, of those that did."""
    found = {}
    for trial, keys in zip(plan.trials, plan.work, strict=True):
        key = next((key for key in keys if key not in records and key in failures), None)
        if key is not None:
            found[trial.name] = failures[key]
    return found
