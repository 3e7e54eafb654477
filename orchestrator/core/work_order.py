"""Work orders from executors to workers, attempts, and the parts of a store that workers use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import Seconds
from orchestrator.core.records import NOWHERE, CurvePoint, Reached, StageRecord
from orchestrator.core.specs import StageSpec

FileWriter = Callable[[BinaryIO], object]
"""Writes the content of a file from start to end; every call writes the same content."""


@dataclass(frozen=True)
class Checkpoint:
    """Last saved state of an unfinished stage: its step, plain values, and a file with tensors on this node."""

    step: int
    values: Mapping[str, Any]
    tensors: Path


@dataclass(frozen=True)
class PastFailure:
    """Failure that would happen again: the class name of the error, its message, and its time (Unix seconds)."""

    kind: str
    message: str
    time: Seconds
    circumstances: Mapping[str, str]
    """Conditions beside the key that decide the outcome: the environment, and the weights that it started from."""
    log: str = ""
    """File with the traceback, on `host`."""
    host: str = ""


class Failures(Protocol):
    """Remembered failures, at most one for each stage."""

    def save(self, key: str, failure: PastFailure) -> None:
        """Save the failure of a stage."""
        ...

    def of(self, key: str) -> PastFailure | None:
        """Return the failure of a stage; None if there is none."""
        ...

    def known(self) -> list[str]:
        """Return the keys of the stages with a remembered failure."""
        ...


class States(Protocol):
    """Checkpoints of unfinished stages, at most one for each stage."""

    def save(self, key: str, step: int, values: Mapping[str, Any], tensors: FileWriter) -> None:
        """Save a checkpoint durably, in place of the previous one."""
        ...

    def latest(self, key: str) -> Checkpoint | None:
        """Return the verified checkpoint of a stage; None if there is none. Raises `CheckpointDamaged`."""
        ...

    def reached(self, key: str) -> Reached:
        """Return the place of a stage's checkpoint; `NOWHERE` if there is none."""
        ...

    def put_aside(self, key: str, reason: str) -> None:
        """Move an unusable checkpoint aside."""
        ...

    def drop(self, key: str) -> None:
        """Remove a stage's checkpoint, if there is one."""
        ...


class Contents(Protocol):
    """Files of finished stages. Every method raises `StageMissing` for a damaged or missing file."""

    def tensors(self, key: str, name: str) -> Mapping[str, Any]:
        """Return the tensors in one file of a finished stage by name, memory-mapped from the file."""
        ...

    def values(self, key: str, name: str) -> Mapping[str, Any]:
        """Return the JSON object in one file of a finished stage."""
        ...

    def masks(self, key: str) -> Mapping[str, Any]:
        """Return the masks of a finished round: parameter name -> boolean array."""
        ...

    def fetch(self, key: str, name: str) -> Path:
        """Return the path of one file of a finished stage on this node; open the file at once."""
        ...


class StageStore(Protocol):
    """Part of a store that executors and workers use; it must pickle."""

    @property
    def stages(self) -> Contents:
        """Files of finished stages."""
        ...

    @property
    def checkpoints(self) -> States:
        """Checkpoints of unfinished stages."""
        ...

    @property
    def failures(self) -> Failures:
        """Failures that would happen again."""
        ...

    def finished(self, keys: Iterable[str]) -> Mapping[str, StageRecord]:
        """Return the records of those `keys` that the store holds."""
        ...

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        """Save a stage durably, and return the record that the store then holds."""
        ...


Report = Callable[[str, CurvePoint, Metric], object]
"""Callback for a point of a running stage: the stage's key, the point, and the primary metric of its task."""


def unheard(key: str, point: CurvePoint, metric: Metric) -> None:
    """Ignore the point."""


def never() -> bool:
    """Return False: the work is never cancelled."""
    return False


@dataclass(frozen=True)
class Seat:
    """Place of a process among the ranks of a trial of several processes."""

    rank: int
    size: int
    meeting: str = ""
    """Name under which rank 0 says where the ranks meet."""
    local_rank: int = 0
    """Number of this process among those of the trial on its node."""
    host: str = "127.0.0.1"
    """Address of rank 0, where the ranks meet."""
    port: int = 0
    sync_batch_norm: bool = False
    timeout: float | None = None
    """Seconds that a rank waits for rank 0 outside of a training; None: for ever."""
    step_timeout: float = 1800.0
    """Seconds that a rank waits for the others within a step of a training."""


@dataclass(frozen=True)
class Worker:
    """Worker of a segment: its store and resources. Plain data, except for what the worker itself sets."""

    store: StageStore
    device: str = "cpu"
    threads: int = 1
    cancelled: Callable[[], bool] = never
    """Called at every batch: return True, or raise, to end the work."""
    grace: float = 0.0
    """Seconds between cancellation and the end of the worker by force."""
    stage_timeout: float | None = None
    """Seconds after which a stage ends at a batch, to be retried."""
    report: Report = unheard
    """Callback for each point of a stage's curve; the executor sets it in the worker."""
    log: str = ""
    """File on the worker for the output of the work."""
    check: Callable[[], object] | None = None
    """Check that must pass on a node before the work, called once in each process."""
    seat: Seat | None = None
    """Place of this process among those of the trial; None if it is the only one."""
    ranks: Any = None
    """Ranks of the trial, `orchestrator.training.team.ranks.Ranks`, in a worker of several; None for one process."""


@dataclass(frozen=True)
class StageOrder:
    """One stage for a worker."""

    spec: StageSpec
    worker: Worker
    lineage: tuple[StageSpec, ...] = ()
    """Stages before this one in its chain, the dense one first."""
    attempt: int = 1
    deadline: float = math.inf
    """Monotonic time at which the stage ends at a batch."""

    @property
    def dense(self) -> StageSpec:
        """First stage of the chain, which names the model and the data."""
        return self.lineage[0] if self.lineage else self.spec

    @property
    def store(self) -> StageStore:
        """Store of the worker."""
        return self.worker.store

    def cancelled(self) -> bool:
        """Return whether the stage must end, because the worker is cancelled or the stage is late."""
        return self.worker.cancelled() or time.monotonic() > self.deadline


@dataclass(frozen=True)
class WorkOrder:
    """Chain of stages for one worker."""

    specs: tuple[StageSpec, ...]
    """Stages, each of which starts from the previous one; the inputs of the first one are in the store."""
    worker: Worker
    lineage: tuple[StageSpec, ...] = ()
    """Stages before the first one in its chain, the dense one first."""
    attempt: int = 1
    """Number of the attempt at the first stage."""

    @property
    def stages(self) -> tuple[StageOrder, ...]:
        """An order for each stage; attempts are counted for each stage."""
        chain, above = (*self.lineage, *self.specs), len(self.lineage)
        return tuple(
            StageOrder(spec, self.worker, chain[:place], 1 if place > above else self.attempt)
            for place, spec in enumerate(chain[above:], above)
        )

    def done_by(self, **changed: Any) -> WorkOrder:
        """Return the order with changed fields of its worker."""
        return replace(self, worker=replace(self.worker, **changed))


@dataclass(frozen=True)
class AttemptStart:
    """First message of a worker: where the attempt runs, and since when."""

    host: str
    node: str
    log: str
    time: float


@dataclass(eq=False)
class Attempt:
    """Attempt at the rest of a segment; `done` of its stages are finished."""

    segment: int
    number: int
    """Number of this attempt at the first unfinished stage."""
    specs: tuple[StageSpec, ...]
    lineage: tuple[StageSpec, ...] = ()
    """Stages before the first one in its chain."""
    done: int = 0
    start: AttemptStart | None = None
    """Where the attempt runs, once it has started in another process."""
    reached: Reached = NOWHERE
    """Place of the first stage's checkpoint when the previous attempt was lost."""
    spared: int = 0
    """Number of previous attempts that left a newer checkpoint, and so do not count as retries."""

    @property
    def left(self) -> tuple[str, ...]:
        """Keys of the unfinished stages."""
        return tuple(spec.key for spec in self.specs[self.done :])


@dataclass(frozen=True)
class Passed:
    """Successful preflight; `unmatched` holds the (key, pattern) pairs of `prune` that match nothing in the network."""

    unmatched: tuple[tuple[str, str], ...] = ()
    figures: tuple[str, ...] = ()
    """Names of the figures that the task measures on the validation split."""
    primary: Metric | None = None
    """Primary metric of the task; None if the stage was not built."""
    told: tuple[str, ...] = ()
    """Sentences about matrix weights that the rounds leave dense, and about experts that they leave."""


Item = TypeVar("Item", StageRecord, Passed)
Work = Callable[[WorkOrder], Iterator[StageRecord]]
"""Runs the stages of an order in turn, and yields each record once the stage is durable."""
Preflight = Callable[[WorkOrder], Iterator[Passed]]
"""Tries a stage on a few examples; raises if the stage cannot run."""


@dataclass(frozen=True)
class Result:
    """Result of a stage: its record and files to commit, and its network on the device.

    The files are written from the network: commit them before anything changes the network.
    """

    record: StageRecord
    files: Mapping[str, FileWriter]
    network: object


Run = Callable[[StageOrder, object], Result]
"""Runs one stage; gets the network that the previous stage left in memory, or None, and loads inputs from the store."""
