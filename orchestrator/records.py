"""The frozen nouns of a sweep and their keys: plain data, standard library only.

A `StageSpec` says what a unit of work depends on, a `StageRecord` what came of it. Both survive a round trip through
JSON unchanged, so a worker, the store, the tracker and the comparison all speak of the same thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Protocol, Self

SPEC_VERSION = 1
"""Raised whenever the same fields come to mean other work: every older stage is then another stage."""

RECORD_VERSION = 1
"""Raised whenever a record's fields change: a store refuses the versions it does not know."""

StageKind = Literal["dense", "round"]
EventKind = Literal["started", "finished", "failed", "killed", "retried"]


class OrchestratorError(Exception):
    """Base of everything a user can mend; its text is the whole message, no traceback needed."""

    exit_status = 1
    """What the command line ends with; 2 where nothing was started."""


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of `text` in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


@dataclass(frozen=True)
class StageSpec:
    """One unit of work that trials can share: train the dense network, or prune and fine-tune one round.

    key = sha256(canonical JSON of {version, kind, fields, parent key})

    `fields` holds exactly what the result depends on, defaults included. A dense stage has the fields `model`, `data`,
    `train`, `seed`, `device`, `threads` and `sources`; a round has `method`, `prune`, `finetune`, `seed`, `round`
    (counted from 1), `sources` and either `target` (overall sparsity to reach) or `amount` (of what is left).
    """

    kind: StageKind
    fields: Mapping[str, Any]
    parent: str | None = None
    location: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Where the worker finds what `fields` pins by content, such as a data set's directory. Not part of the key."""

    @cached_property
    def key(self) -> str:
        """The content address: 64 hex digits."""
        return digest(
            canonical_json({"version": SPEC_VERSION, "kind": self.kind, "fields": self.fields, "parent": self.parent})
        )

    @property
    def round(self) -> int:
        """0 for the dense stage, k for the k-th pruning round."""
        return 0 if self.kind == "dense" else int(self.fields["round"])

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {"kind": self.kind, "fields": dict(self.fields), "parent": self.parent}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the spec that `to_json` wrote."""
        return cls(kind=data["kind"], fields=data["fields"], parent=data["parent"])


@dataclass(frozen=True)
class TrialSpec:
    """One point of a sweep: a name, what was overridden for it, its resolved config, and its chain of stage keys."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The stages of a sweep, each key once and parents before children, and the trials that are chains of them."""

    stages: Mapping[str, StageSpec]
    trials: tuple[TrialSpec, ...]

    @cached_property
    def children(self) -> Mapping[str | None, tuple[str, ...]]:
        """Stage key -> keys of the stages that start from it; None -> the roots of the forest."""
        found: dict[str | None, list[str]] = {}
        for key, spec in self.stages.items():
            found.setdefault(spec.parent if spec.parent in self.stages else None, []).append(key)
        return {parent: tuple(keys) for parent, keys in found.items()}

    @cached_property
    def trials_of(self) -> Mapping[str, tuple[int, ...]]:
        """Stage key -> indices of the trials whose chain contains it."""
        found: dict[str, list[int]] = {key: [] for key in self.stages}
        for index, trial in enumerate(self.trials):
            for key in trial.stages:
                if key in found:
                    found[key].append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    def without(self, finished: set[str]) -> Plan:
        """Return the plan of what is left to do: finished stages go, the trials stay."""
        return Plan({key: spec for key, spec in self.stages.items() if key not in finished}, self.trials)

    def segments(self) -> Iterator[tuple[str, ...]]:
        """Yield runs of stages without a branch, parents first: what one task executes on one device."""
        pending = list(reversed(self.children.get(None, ())))
        while pending:
            run = [pending.pop()]
            while len(following := self.children.get(run[-1], ())) == 1:
                run.append(following[0])
            pending.extend(reversed(following))
            yield tuple(run)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {
            "stages": [[key, spec.to_json()] for key, spec in self.stages.items()],
            "trials": [asdict(trial) for trial in self.trials],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the plan that `to_json` wrote, under the keys that it had then."""
        return cls(
            stages={key: StageSpec.from_json(spec) for key, spec in data["stages"]},
            trials=tuple(
                TrialSpec(**{**trial, "overrides": tuple(trial["overrides"]), "stages": tuple(trial["stages"])})
                for trial in data["trials"]
            ),
        )


@dataclass(frozen=True)
class CurvePoint:
    """One point of a training curve: metrics after `step` optimizer steps of this stage, at `time` (Unix seconds)."""

    step: int
    epoch: float
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FileInfo:
    """The digest and the size in bytes of one file of a finished stage."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class StageRecord:
    """What a finished stage says of itself.

    Metric keys are `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy` (accuracies are fractions). `before` holds
    validation metrics of the pruned network before fine-tuning (empty for a dense stage); `after` those of the selected
    model, and its test metrics, read once.
    """

    key: str
    kind: StageKind
    round: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    curve: tuple[CurvePoint, ...]
    requested_sparsity: float | None
    sparsity: float
    tensor_sparsity: Mapping[str, float]
    """Qualified parameter name -> fraction of its entries that are masked; every prunable parameter is named."""
    tensor_sizes: Mapping[str, int]
    parameters: int
    """All parameters of the network, prunable or not."""
    macs: int
    """Multiply-accumulates of one forward pass of one example, dense."""
    macs_remaining: float
    """The same, counting only unmasked weights."""
    weights_digest: str
    mask_digest: str
    steps: int
    best_step: int
    seconds: float
    started: float
    """Unix seconds."""
    warnings: tuple[str, ...] = ()
    device: str = "cpu"
    host: str = ""
    attempt: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """`StageSpec.to_json()` of what was run, so that a store can be read without the config that made it."""
    version: int = RECORD_VERSION

    CIRCUMSTANCES = ("seconds", "started", "device", "host", "attempt", "environment", "files")

    @property
    def prunable_parameters(self) -> int:
        """Entries of all prunable parameters."""
        return sum(self.tensor_sizes.values())

    @property
    def remaining_parameters(self) -> int:
        """All parameters less the masked entries."""
        return self.parameters - round(self.sparsity * self.prunable_parameters)

    def result(self) -> dict[str, Any]:
        """Return what must be bit-equal wherever and however often the stage ran: all but its circumstances."""
        data = self.to_json()
        for name in self.CIRCUMSTANCES:
            data.pop(name)
        data["curve"] = [{k: v for k, v in point.items() if k != "time"} for point in data["curve"]]
        return data

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the record that `to_json` wrote; raise `OrchestratorError` for a version this code cannot read."""
        if data.get("version") != RECORD_VERSION:
            raise OrchestratorError(
                f"`version` (={data.get('version')!r}) of a stage record must be {RECORD_VERSION}; "
                "use the release that wrote it, or another `store.uri`"
            )
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        values["curve"] = tuple(CurvePoint(**point) for point in data["curve"])
        values["warnings"] = tuple(data["warnings"])
        values["files"] = {name: FileInfo(**info) for name, info in data["files"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Failure:
    """Why a stage did not finish: a sentence, the remote traceback, where the log is, and whether a retry may help."""

    message: str
    traceback: str = ""
    log: str = ""
    host: str = ""
    transient: bool = False
    fatal: bool = False
    """Whether no other trial can do better, as where the store is full: the sweep stops."""


@dataclass(frozen=True)
class StageEvent:
    """Something that happened to a stage, at `time` (Unix seconds): what executors yield and trackers record.

    `finished` carries the record, `failed` and `killed` the failure. A stage that fails fails the stages below it:
    the executor yields a `failed` event for each of those too, with the cause.
    """

    kind: EventKind
    key: str
    time: float
    record: StageRecord | None = None
    failure: Failure | None = None
    attempt: int = 1


class Executor(Protocol):
    """Runs the stages of a plan. `InlineExecutor` and `RayExecutor` pass one contract suite."""

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside it are in the store) and yield what happens, as it happens."""
        ...

    def cancel(self) -> None:
        """Hand out nothing more and end running stages at their next batch; `run` then yields `killed` and returns."""
        ...


class Tracker(Protocol):
    """Keeps a view of the sweep for people. `MemoryTracker` and `MlflowTracker` pass one contract suite."""

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view: one parent for the sweep, one child for each trial, stages in `finished` already filled in."""
        ...

    def record(self, event: StageEvent) -> None:
        """Take one event; return at once, never raise for a view that is away."""
        ...

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view: statuses, the report's files (relative path -> content), everything flushed."""
        ...


@dataclass(frozen=True)
class SweepInfo:
    """What a tracker is told of the sweep as a whole."""

    name: str
    config: Mapping[str, Any]
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
