"""Run the stages of a segment one after another; the network stays on its device between stages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from orchestrator.core.errors import Cancelled, OrchestratorError, StageMissing, StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Key, StageSpec, start_of
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import PastFailure, Result, Run, StageOrder, StageStore, WorkOrder
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
    network, store = None, order.worker.store
    repeats = bool(store.finished([spec.key for spec in order.specs]))
    failed = set(store.failures.known())
    for index, stage in enumerate(order.stages):
        if repeats and (record := _standing(store, order.specs[index:])) is not None:
            network = None
        else:
            if stage.spec.key in failed:
                _refuse(stage)
            result = _result(stage, network)
            record = store.commit(result.record, result.files)
            store.checkpoints.drop(record.key)
            network = result.network if record.weights_digest == result.record.weights_digest else None
        yield record


def _result(stage: StageOrder, network: object = None, repeated: frozenset[Key] = frozenset()) -> Result:
    """Run a stage; if a stage that it starts from is damaged or missing, repeat that stage first.

    After a repetition the stage loads its inputs from the store, since the networks in memory may have been changed.

    Args:
        stage: the stage.
        network: network that the previous stage left in memory.
        repeated: keys of the stages that were repeated for this one so far.
    """
    run: Run = resolve(KINDS[stage.spec.kind].run)
    try:
        with _remembered(stage), _in_time(stage) as limited:
            return run(limited, network)
    except StageMissing as missing:
        if not stage.lineage or missing.key in repeated:
            raise
        result = _result(_lost(missing.key, stage))
        stage.store.commit(result.record, result.files)
        return _result(stage, None, repeated | {missing.key})


def _lost(key: Key, stage: StageOrder) -> StageOrder:
    """Return the order for the missing stage that `stage` needs: a restart point, or a stage of its lineage."""
    above = stage.lineage
    for place in stage.spec.typed.restart.places:
        if (start := start_of(above[0], place)).key == key:
            return StageOrder(start, stage.worker)
    position = next((index for index, each in enumerate(above) if each.key == key), len(above) - 1)
    return StageOrder(above[position], stage.worker, above[:position])


def _refuse(stage: StageOrder) -> None:
    """Raise FailedBefore if a stage failed before under the same circumstances."""
    past = stage.store.failures.of(stage.spec.key)
    if past is not None and past.circumstances == _circumstances(stage):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(past.time))
        again = FailedBefore(
            f"the stage failed before, on {when}: {past.message.rstrip('.')}; pass retry_failed=true to try it again."
        )
        again.log, again.host = past.log, past.host
        raise again


@contextmanager
def _remembered(stage: StageOrder) -> Iterator[None]:
    """Save a failure in the store if the stage would fail the same way again."""
    try:
        yield
    except OrchestratorError as error:
        failure = failure_of(error, stage.worker.log, [each.fields for each in (*stage.lineage, stage.spec)])
        if failure.repeats:
            with suppress(StoreError):  # the original failure matters more
                where = (_circumstances(stage), failure.log, failure.host)
                past = PastFailure(type(error).__name__, failure.message, time.time(), *where)
                stage.store.failures.save(stage.spec.key, past)
        raise


def _circumstances(stage: StageOrder) -> dict[str, str]:
    """Return what decides, besides a stage's key, how it ends: its environment and the weights it starts from."""
    inputs = stage.store.finished(stage.spec.inputs.values())
    return deciding(stage.worker.device) | {key: record.weights_digest for key, record in inputs.items()}


@contextmanager
def _in_time(stage: StageOrder) -> Iterator[StageOrder]:
    """Yield the stage with a deadline; raise a TimeoutError if it ends at a batch because it is late."""
    limit = stage.worker.stage_timeout or math.inf
    try:
        yield replace(stage, deadline=time.monotonic() + limit)
    except Cancelled as error:
        if stage.worker.cancelled():
            raise
        raise TimeoutError(f"the stage took longer than `cluster.stage_timeout` (={limit:g} s)") from error


def _standing(store: StageStore, specs: Sequence[StageSpec]) -> StageRecord | None:
    """Return the first record if its stage need not run; None if unfinished stages need its dropped weights."""
    standing = store.finished([spec.key for spec in specs])
    record = standing.get(specs[0].key)
    if record is None or WEIGHTS in record.files or all(spec.key in standing for spec in specs):
        return record
    return None
