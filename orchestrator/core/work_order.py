"""What an executor hands to a worker, and what the worker first says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import Seconds
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import StageSpec

FileWriter = Callable[[BinaryIO], object]
"""Writes the content of a file, front to back; called again, it writes the same."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a stage was when it was last kept: at `step`, with plain `values`, its tensors in a file on this node."""

    step: int
    values: Mapping[str, Any]
    tensors: Path


@dataclass(frozen=True)
class PastFailure:
    """How a stage failed that would fail so again: the name of its error, what was said, when (Unix seconds)."""

    kind: str
    message: str
    time: Seconds
    circumstances: Mapping[str, str]
    """What decides beside its key how it ends: where it ran, and the weights that it started from."""
    log: str = ""
    """The file that has its traceback, on `host`."""
    host: str = ""


class Failures(Protocol):
    """Where it is remembered how stages failed, one failure a stage."""

    def save(self, key: str, failure: PastFailure) -> None:
        """Remember how a stage failed."""
        ...

    def of(self, key: str) -> PastFailure | None:
        """Return how a stage failed, None where that is not known."""
        ...

    def known(self) -> list[str]:
        """Return the keys of the stages of which a failure is remembered."""
        ...


class States(Protocol):
    """Where the states of stages that have not ended are kept, one a stage."""

    def save(self, key: str, step: int, values: Mapping[str, Any], tensors: FileWriter) -> None:
        """Make a state durable in place of the one before."""
        ...

    def latest(self, key: str) -> Checkpoint | None:
        """Return a stage's state, verified; None where there is none. Raises `CheckpointDamaged`."""
        ...

    def reached(self, key: str) -> int:
        """Return the step of a stage's state, -1 where there is none."""
        ...

    def put_aside(self, key: str, reason: str) -> None:
        """Set a state aside that cannot be gone on from."""
        ...

    def drop(self, key: str) -> None:
        """Remove a stage's state, if there is one."""
        ...


class Contents(Protocol):
    """What is in the files of finished stages; each call raises `StageMissing` for a file that is damaged or gone."""

    def tensors(self, key: str, name: str) -> Mapping[str, Any]:
        """Return the tensors in one file of a finished stage, by name and mapped from the file."""
        ...

    def values(self, key: str, name: str) -> Mapping[str, Any]:
        """Return the JSON object in one file of a finished stage."""
        ...

    def masks(self, key: str) -> Mapping[str, Any]:
        """Return the masks of a finished round, boolean arrays by parameter."""
        ...

    def fetch(self, key: str, name: str) -> Path:
        """Return where one file of a finished stage lies on this node, to be opened at once."""
        ...


class StageStore(Protocol):
    """What executors and their work need of a store; it must pickle."""

    @property
    def stages(self) -> Contents:
        """What is in the files of finished stages."""
        ...

    @property
    def checkpoints(self) -> States:
        """The states of stages that have not ended."""
        ...

    @property
    def failures(self) -> Failures:
        """How stages failed that would fail so again."""
        ...

    def finished(self, keys: Iterable[str]) -> Mapping[str, StageRecord]:
        """Return the records of those `keys` that are durable."""
        ...

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        """Make a stage durable and return the record that stands."""
        ...


Report = Callable[[str, CurvePoint, Metric], object]
"""Told the points of stages that run: the stage's key, the point, and the primary metric of its task."""


def unheard(key: str, point: CurvePoint, metric: Metric) -> None:
    """Nobody listens."""


def never() -> bool:
    """Nobody cancels."""
    return False


@dataclass(frozen=True)
class WorkOrder:
    """A run of stages for one worker: plain data, but for what the executor supplies in the worker."""

    specs: tuple[StageSpec, ...]
    """The stages, each going on from the one before; what the first one needs is in the store."""
    store: StageStore
    device: str = "cpu"
    threads: int = 1
    lineage: tuple[StageSpec, ...] = ()
    """The stages from whose networks the first one goes on, the dense one first."""
    attempt: int = 1
    cancelled: Callable[[], bool] = never
    """To be asked at every batch: whether to end, by returning or raising."""
    grace: float = 0.0
    """Seconds that remain, once `cancelled` says so, before the worker is ended by force."""
    stage_timeout: float | None = None
    """Seconds after which a stage is to end at a batch, to be tried again."""
    report: Report = unheard
    """To be told each point of a stage's curve as it comes; the executor supplies it in the worker."""
    log: str = ""
    """The file on the worker that takes what the work prints."""
    check: Callable[[], object] | None = None
    """What must not raise on a node before it works, asked once a process."""


@dataclass(frozen=True)
class AttemptStart:
    """Where an attempt runs and since when: the first thing that a worker says of it."""

    host: str
    node: str
    log: str
    time: float


@dataclass(eq=False)
class Attempt:
    """One try at what is left of a segment; `done` of its stages are finished."""

    segment: int
    number: int
    """Which try it is at the first stage that is left."""
    specs: tuple[StageSpec, ...]
    lineage: tuple[StageSpec, ...] = ()
    """The stages from whose networks the first one goes on."""
    done: int = 0
    start: AttemptStart | None = None
    """Where it runs, once it does and if that is elsewhere."""
    reached: int = -1
    """The step of the checkpoint that the first stage had when the attempt before was lost."""
    spared: int = 0
    """How many of the attempts before it left a further checkpoint, and so count as no retry."""

    @property
    def left(self) -> tuple[str, ...]:
        """Keys of the stages that are not finished yet."""
        return tuple(spec.key for spec in self.specs[self.done :])


@dataclass(frozen=True)
class Passed:
    """A preflight that found nothing wrong; `unmatched` are (key, pattern) of `prune` that its network has not."""

    unmatched: tuple[tuple[str, str], ...] = ()
    figures: tuple[str, ...] = ()
    """What the task measures on the validation split."""


Item = TypeVar("Item", StageRecord, Passed)
Work = Callable[[WorkOrder], Iterator[StageRecord]]
"""Runs the stages of an order in turn and yields each one's record once it is durable."""
Preflight = Callable[[WorkOrder], Iterator[Passed]]
"""Tries a stage on a few examples; raises where it cannot run."""


@dataclass(frozen=True)
class Result:
    """What came of a stage: its record and files, to be committed, and its network as it stands on the device.

    The files are written from that network: commit them before anything moves it.
    """

    record: StageRecord
    files: Mapping[str, FileWriter]
    network: object


Run = Callable[[StageSpec, Mapping[str, object], WorkOrder], Result]
"""Runs one stage, given the networks of its inputs that are at hand, by role; the others are in the store."""
