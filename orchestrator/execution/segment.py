"""Run the stages of a segment one after another; the network stays on its device between stages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from orchestrator.core.errors import Cancelled, OrchestratorError, StageMissing, StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, Key, StageSpec, start_of
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import PastFailure, Result, Run, WorkOrder
from orchestrator.execution.perform import failure_of, resolve
from orchestrator.training.state.checkpointing import deciding


class FailedBefore(OrchestratorError):
    """A stage is not tried because it failed before and would fail the same way again."""

    repeats = True


def run_segment(order: WorkOrder) -> Iterator[StageRecord]:
    """Run the stages of `order` and yield each stage's record once it is durable.

    A stage is not run again if it is durable already, as below a repeated parent that gave the same bits. A stage that
    failed before is not tried if it would fail the same way again. If another worker has committed a stage with other
    weights, the next stage starts from those weights.
    """
    network: object = None
    repeats = bool(order.store.finished([spec.key for spec in order.specs]))
    failed = set(order.store.failures.known())
    for index, spec in enumerate(order.specs):
        if repeats and (record := _standing(order, index)) is not None:
            network = None
        else:
            if spec.key in failed:
                _refuse(spec, order)
            result = _result(order, index, {} if network is None else {NETWORK: network})
            record = order.store.commit(result.record, result.files)
            order.store.checkpoints.drop(record.key)
            network = result.network if record.weights_digest == result.record.weights_digest else None
        yield record
        order = replace(order, attempt=1)  # attempts are counted for each stage


def _result(
    order: WorkOrder, index: int, inputs: Mapping[str, object], repeated: frozenset[Key] = frozenset()
) -> Result:
    """Run a stage; if a stage that it starts from is damaged or missing, repeat that stage first.

    After a repetition the stage loads its inputs from the store, since the networks in memory may have been changed.

    Args:
        repeated: keys of the stages that were repeated for this one so far.
    """
    spec, above = order.specs[index], (*order.lineage, *order.specs[:index])
    run: Run = _remembered(_in_time(resolve(KINDS[spec.kind].run)))
    try:
        return run(spec, inputs, order)
    except StageMissing as missing:
        if not above or missing.key in repeated:
            raise
        lost, lineage = _lost(missing.key, spec, above)
        result = _result(replace(order, specs=(lost,), lineage=lineage), 0, {})
        order.store.commit(result.record, result.files)
        return _result(order, index, {}, repeated | {missing.key})


def _lost(key: Key, spec: StageSpec, above: tuple[StageSpec, ...]) -> tuple[StageSpec, tuple[StageSpec, ...]]:
    """Return the missing stage that `spec` needs, and the stages above it: a restart point, or a stage of `above`."""
    for place in spec.typed.restart.places:
        if (start := start_of(above[0], place)).key == key:
            return start, ()
    position = next((index for index, each in enumerate(above) if each.key == key), len(above) - 1)
    return above[position], above[:position]


def _refuse(spec: StageSpec, order: WorkOrder) -> None:
    """Raise FailedBefore if a stage failed before under the same circumstances."""
    past = order.store.failures.of(spec.key)
    if past is not None and past.circumstances == _circumstances(spec, order):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(past.time))
        again = FailedBefore(
            f"the stage failed before, on {when}: {past.message.rstrip('.')}; pass retry_failed=true to try it again."
        )
        again.log, again.host = past.log, past.host
        raise again


def _remembered(run: Run) -> Run:
    """Wrap `run` to save a failure in the store if the stage would fail the same way again."""

    def remembered(spec: StageSpec, inputs: Mapping[str, object], order: WorkOrder) -> Result:
        try:
            return run(spec, inputs, order)
        except OrchestratorError as error:
            failure = failure_of(error, order.log, [each.fields for each in (*order.lineage, *order.specs)])
            if failure.repeats:
                with suppress(StoreError):  # the original failure matters more
                    where = (_circumstances(spec, order), failure.log, failure.host)
                    past = PastFailure(type(error).__name__, failure.message, time.time(), *where)
                    order.store.failures.save(spec.key, past)
            raise

    return remembered


def _circumstances(spec: StageSpec, order: WorkOrder) -> dict[str, str]:
    """Return what decides, besides a stage's key, how it ends: its environment and the weights it starts from."""
    inputs = order.store.finished(spec.inputs.values())
    return deciding(order.device) | {key: record.weights_digest for key, record in inputs.items()}


def _in_time(run: Run) -> Run:
    """Wrap `run` to end a stage at a batch after `stage_timeout` seconds, with a TimeoutError."""

    def timed(spec: StageSpec, inputs: Mapping[str, object], order: WorkOrder) -> Result:
        limit, begun = order.stage_timeout or math.inf, time.monotonic()
        try:
            late = replace(order, cancelled=lambda: order.cancelled() or time.monotonic() - begun > limit)
            return run(spec, inputs, late)
        except Cancelled as error:
            if order.cancelled():
                raise
            raise TimeoutError(f"the stage took longer than `cluster.stage_timeout` (={limit:g} s)") from error

    return timed


def _standing(order: WorkOrder, index: int) -> StageRecord | None:
    """Return the record of a durable stage that need not run; None if unfinished stages need its dropped weights."""
    left: list[Key] = [spec.key for spec in order.specs[index:]]
    standing = order.store.finished(left)
    record = standing.get(left[0])
    if record is None or WEIGHTS in record.files or all(key in standing for key in left):
        return record
    return None
