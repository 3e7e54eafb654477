"""Record of a finished stage, and the parts of a record. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from msgspec import Meta
from msgspec.json import encode

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import Count, Fraction, Margin, Number, Seconds, Sha256, quoted, read_as
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS

RECORD_VERSION = 3
"""Increased when this code can no longer read older records: a store refuses unknown versions."""


BUSY = 0.5
"""Warn if at least this many other processes ran on average during a latency measurement."""


BLOCKS = "blocks"
"""Part of a checkpoint with the blocks pruned so far, and figure of a live point with the number of all blocks."""


class Reached(NamedTuple):
    """Place of a checkpoint in its stage: a pruned block, or a step of the training after all blocks."""

    trains: bool
    number: int

    def __str__(self) -> str:
        return f"{'step' if self.trains else 'block'} {self.number}"


NOWHERE = Reached(False, -1)
"""Place of a stage without a checkpoint; less than every other place."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Point of a training curve: metrics after `step` optimizer steps of this stage, at `time` (Unix seconds)."""

    step: Count
    epoch: Number
    time: Seconds
    metrics: Mapping[str, Number]


@dataclass(frozen=True)
class FileInfo:
    """Digest and size in bytes of one file of a finished stage."""

    sha256: Sha256
    bytes: Count


@dataclass(frozen=True)
class WindowLosses:
    """Cross-entropy in nats and number of tokens of each window of a text."""

    loss: tuple[Number, ...] = ()
    tokens: tuple[Count, ...] = ()


@dataclass(frozen=True)
class SplitCounts:
    """Counts of a split for each class, correct examples and all examples, or a fraction; and windows of a text."""

    hits: tuple[Count, ...] = ()
    constant: Number | None = None
    of: tuple[Count, ...] = ()
    rates: tuple[Fraction | None, ...] = ()
    windows: WindowLosses = WindowLosses()


@dataclass(frozen=True)
class LayerDetails:
    """Layer that was pruned with calibration data, see `pruning.reconstruction.block_by_block.LayerReport`."""

    block: str
    sparsity: Fraction
    error: Margin | None
    rows: Count


@dataclass(frozen=True)
class Generation:
    """Continuation of a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Answers:
    """Score of each document of a task, in order, and the digest of the documents."""

    documents: Sha256
    scores: tuple[Number, ...]


@dataclass(frozen=True)
class ScoringDetails:
    """Scoring of a round: the score, the data that it read, and the fraction removed."""

    score: str = ""
    examples: Count | None = None
    passes: Count | None = None
    rescorings: Count | None = None
    split: str = ""
    units: Mapping[str, Count] = field(default_factory=dict)
    removed: Fraction | None = None
    layers: Mapping[str, LayerDetails] = field(default_factory=dict)


WholeMacs = Annotated[int, Meta(ge=0)]
"""Exact number of multiply-accumulates, which may be larger than 64 bits hold."""


@dataclass(frozen=True)
class PhaseCost:
    """Multiply-accumulates of a phase of a training: sums over its steps and their examples."""

    steps: Count
    examples: Count
    forward: WholeMacs | Margin
    backward: WholeMacs | Margin


@dataclass(frozen=True)
class MaskUpdate:
    """Change of the masks within a round's training, as `pruning.dynamics` records it."""

    step: Count
    kept: Count
    dropped: Count
    grown: Count
    first_overlap: Fraction
    last_overlap: Fraction
    explored: Fraction


@dataclass(frozen=True)
class MatrixWeights:
    """Entries of all matrix weights of a network, and the largest weights that a round leaves dense by their names."""

    entries: Count = 0
    considered: Count = 0
    dense: Mapping[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Details:
    """Entries of a record's `details` that code reads; `details` of a row of `KINDS` names those of its stages."""

    rounding: Fraction = 0.0
    measured: Mapping[str, SplitCounts] = field(default_factory=dict)
    dead_tensors: tuple[str, ...] = ()
    scoring: ScoringDetails = ScoringDetails()
    dense: Mapping[str, Number] = field(default_factory=dict)
    training_macs: Mapping[str, PhaseCost] = field(default_factory=dict)
    mask_updates: tuple[MaskUpdate, ...] = ()
    generations: tuple[Generation, ...] = ()
    shared_examples: Count | None = None
    form: str = ""
    kept: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    matrix_weights: MatrixWeights = MatrixWeights()
    active_parameters: Count | None = None
    answers: Mapping[str, Answers] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRecord:
    """Record of a finished stage.

    Figures are named by split and metric, as in `val/loss` or `test/rmse`; fractions are not in percent. `before`
    holds the figures of the pruned network on the validation split before fine-tuning (empty for a dense stage).
    `after` holds the figures of the selected model on the validation split, and on the test split, which is read once.
    A figure that is not finite is left out, and `warnings` names it. For a deployment and its measurement, `after`
    holds the figures in the deployed format if the format changes outputs, else nothing.
    """

    key: str
    kind: str
    round: Count
    before: Mapping[str, Number]
    after: Mapping[str, Number]
    metrics: Annotated[tuple[Metric, ...], Meta(min_length=1, max_length=64)]
    """Metrics of the figures, except the loss; the first one is primary: networks are compared by it."""
    curve: tuple[CurvePoint, ...]
    requested_sparsity: Fraction | None
    sparsity: Fraction
    tensor_sparsity: Mapping[str, Fraction]
    """Qualified parameter name -> fraction of masked entries, for every prunable parameter."""
    tensor_sizes: Mapping[str, Count]
    parameters: Count
    """Number of all parameters of the network, prunable or not."""
    macs: Count
    """Multiply-accumulates of a forward pass of the dense network on one example."""
    macs_remaining: Number
    """Multiply-accumulates of unmasked weights only."""
    weights_digest: str
    mask_digest: str
    steps: Count
    best_step: Count
    started: Seconds
    """Start of the stage in Unix seconds."""
    started_from: str = ""
    """`weights_digest` of the stage whose network this stage started from; empty if there is none."""
    data_digest: str = ""
    """Digest of the examples of a custom data set; empty for a built-in data set, and in older records."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Results that are not figures.

    All stages: `measured`, the counts of the task for each split, such as the `hits` of each class, and the
    primary metric of a `constant` answer; for a text the
    cross-entropy and tokens of the `windows` of its test splits; `generations`, the continuations of prompts;
    `active_parameters` of a mixture of experts, the remaining parameters that one token uses;
    `training_macs`, phase -> `steps`, `examples`, and multiply-accumulates `forward` and `backward` under the masks of
    each step (absent in older records). A round: `dead_tensors`, the names of the tensors without survivors;
    `rounding`, the largest difference between requested and achieved sparsity that whole entries or channels may cause;
    `scoring`, the score, the data that it read, the fraction `removed` of its units or its budget, and `layers`, the
    error of each layer that was pruned with calibration data; `mask_updates`, the changes of masks within its training.
    A deployment: `form`, and `kept`, the empty parts that were not removed, with reasons. A measurement in a format
    that changes outputs: `dense`, the figures of the dense network in that format. An evaluation: `answers`, figure ->
    the score of each document, for figures that are means over documents.
    """
    measurements: Mapping[str, Seconds] = field(default_factory=dict)
    """Measurements that differ from run to run; never part of the result.

    All stages: `seconds`, with `scoring` and `selection` as parts of them. A deployment: `bytes`, the `parameters`
    that remain, and the `difference` of outputs. A measurement, for each batch size N: `latency_ms/N`, `dense_ms/N`,
    `speedup/N` with `speedup_low/N` and `speedup_high/N`, and `memory/N` and `dense_memory/N` if the system reports
    memory; `others`, the number of other processes that ran meanwhile. If the network generates tokens, also
    `token_ms/N`, `dense_token_ms/N` and `token_speedup/N` with its ends, for one token after those of a prompt. If the
    dense network ran in the fastest runtime, which `environment` names as `dense_runtime/N`, also `pytorch_ms/N`, and
    `speedup_pytorch/N` with its ends. An evaluation: the number of `documents`.
    """
    warnings: tuple[str, ...] = ()
    device: str = "cpu"
    host: str = ""
    attempt: Count = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """`StageSpec.to_json()` of the stage, so that a store can be read without the configuration of the sweep."""
    version: int = RECORD_VERSION

    CIRCUMSTANCES: ClassVar = (
        *("measurements", "warnings", "started", "device", "host", "attempt", "environment", "files", "data_digest"),
    )

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: another thread may read `typed` while this one pickles."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def inputs(self) -> Mapping[str, str]:
        """Role -> key of the input stage, as in the spec."""
        found: Mapping[str, str] = self.spec.get("inputs", {})
        return found

    @property
    def primary(self) -> Metric:
        """Metric by which networks are compared."""
        return self.metrics[0]

    def figure(self, split: str) -> float:
        """Return the primary metric of the selected model on a split; NaN if unknown."""
        return self.after.get(f"{split}/{self.primary.name}", math.nan)

    @property
    def constant(self) -> float | None:
        """Primary metric on test of the best answer that is the same for every example; None if not recorded."""
        return self.typed.measured.get("test", SplitCounts()).constant

    @property
    def considered(self) -> float | None:
        """Share of the network's matrix weights that the round considers; None if not recorded."""
        weights = self.typed.matrix_weights
        return weights.considered / weights.entries if weights.entries else None

    @property
    def least_loss(self) -> CurvePoint | None:
        """First point of the curve with the smallest validation loss; None if no point has a validation loss."""
        measured = [point for point in self.curve if "val/loss" in point.metrics]
        return min(measured, key=lambda point: point.metrics["val/loss"], default=None)

    @property
    def training_macs(self) -> int | None:
        """Multiply-accumulates of the stage's training, forward and backward; None if its steps were not counted."""
        phases = self.typed.training_macs
        if self.steps and not phases:
            return None
        return sum(round(phase.forward) + round(phase.backward) for phase in phases.values())

    @cached_property
    def typed(self) -> Details:
        """`details`, checked and with types."""
        return read_as(Details, self.details)

    def windows(self, split: str) -> tuple[Sequence[float], Sequence[int]]:
        """Return cross-entropy and tokens of each window of a split; empty if they are not recorded."""
        found = self.typed.measured.get(split, SplitCounts()).windows
        return (found.loss, found.tokens) if len(found.loss) == len(found.tokens) else ((), ())

    @property
    def seconds(self) -> float:
        """Duration of the stage in seconds."""
        return self.measurements.get("seconds", 0.0)

    @property
    def text_bytes(self) -> int:
        """Approximate size of the record itself in a store, in bytes."""
        return len(encode(self))

    @property
    def ended(self) -> float:
        """End of the stage in Unix seconds."""
        return self.started + self.seconds

    @property
    def prunable_parameters(self) -> int:
        """Number of entries of all prunable parameters."""
        return sum(self.tensor_sizes.values())

    @property
    def remaining_parameters(self) -> int:
        """Number of all parameters minus the masked entries."""
        return self.parameters - round(self.sparsity * self.prunable_parameters)

    @property
    def macs_speedup(self) -> float | None:
        """Theoretical speed-up: multiply-accumulates of the dense network / remaining ones; None if none remain."""
        return self.macs / self.macs_remaining if self.macs_remaining > 0 else None

    @property
    def figures(self) -> dict[str, float]:
        """All scalar figures of the stage, by the names that views show."""
        found: dict[str, float | None] = {
            **self.after,
            **{f"{name}_before": value for name, value in self.before.items()},
            "sparsity/overall": self.sparsity,
            "sparsity/requested": self.requested_sparsity,
            "sparsity/considered": self.considered,
            **{f"sparsity/{name}": value for name, value in self.tensor_sparsity.items()},
            "parameters/remaining": self.remaining_parameters,
            "parameters/compression": self.parameters / max(1, self.remaining_parameters),
            "macs/remaining": self.macs_remaining,
            "macs/speedup": self.macs_speedup,
            "seconds": self.seconds,
            "steps": self.steps,
            "training_macs": self.training_macs,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def sharing(self, spec: StageSpec) -> Self:
        """Return the record with the fields of its planned spec in place of equal copies: half of its memory."""
        planned = spec.to_json()
        return replace(self, spec=planned) if self.spec == planned else self

    def result(self) -> dict[str, Any]:
        """Return the fields that must be bit-equal in every run of the stage: all except `CIRCUMSTANCES`.

        Times of the curve and `starts_from` of the spec are left out as well.
        """
        data = self.to_json()
        for name in self.CIRCUMSTANCES:
            data.pop(name)
        data["curve"] = [{k: v for k, v in point.items() if k != "time"} for point in data["curve"]]
        data["spec"] = {k: v for k, v in data["spec"].items() if k != "starts_from"}
        return data

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the record that `to_json` wrote.

        Raises:
            OrchestratorError: this code does not know the record's version, or its kind of stage
            ValueError: a field is invalid; the text names it
        """
        if data.get("version") != RECORD_VERSION or data.get("kind") not in tuple(KINDS):
            raise OrchestratorError(
                f"`version` (={quoted(data.get('version'))}) of a stage record must be {RECORD_VERSION}, and its "
                f"`kind` (={quoted(data.get('kind'))}) must be one of {', '.join(KINDS)}; use the release that wrote "
                "the record, or another `store.uri`"
            )
        record = read_as(cls, data)
        if odd := sorted(vars(record.typed).keys() & record.details.keys() - {*KINDS[record.kind].details}):
            raise ValueError(f"`details` of a {KINDS[record.kind].noun} must not have {odd[0]!r}")
        record._refuse_impossible(StageSpec.from_json(record.spec) if record.spec else None)
        most = sum(record.tensor_sizes.values()) // 4 + 4096 * (1 + len(record.tensor_sizes))
        if MASKS in record.files and record.files[MASKS].bytes > most:
            raise ValueError(f"`files` {MASKS} must be at most {most} bytes, as masks are packed")
        return record

    def _refuse_impossible(self, spec: StageSpec | None) -> None:
        """Raise ValueError if numbers contradict each other or the spec of the round."""
        if self.macs_remaining > self.macs:
            raise ValueError(f"`macs_remaining` (={self.macs_remaining:g}) must be at most `macs` (={self.macs})")
        if self.parameters < self.prunable_parameters:
            raise ValueError(
                f"`parameters` (={self.parameters}) must be at least the sum of "
                f"`tensor_sizes` (={self.prunable_parameters})"
            )
        if any(update.kept > self.prunable_parameters for update in self.typed.mask_updates):
            raise ValueError(
                f"`mask_updates` must have at most {self.prunable_parameters} `kept` entries, the sum of `tensor_sizes`"
            )
        if self.tensor_sparsity.keys() != self.tensor_sizes.keys():
            raise ValueError("`tensor_sparsity` must have the same parameter names as `tensor_sizes`")
        if not KINDS[self.kind].trains:
            self._refuse_unmeasured(spec)
        if spec is None or not KINDS[self.kind].prunes:
            return
        if self.round != spec.round:
            raise ValueError(f"`round` (={self.round}) must be the round of `spec` (={spec.round})")
        target = spec.typed.target
        if "target" in spec.fields and self.requested_sparsity != target:
            raise ValueError(
                f"`requested_sparsity` (={self.requested_sparsity}) must be the target of `spec` (={target})"
            )

    def _refuse_unmeasured(self, spec: StageSpec | None) -> None:
        """Raise ValueError if a stage that trains nothing lacks its network, or a figure of its row."""
        row = KINDS[self.kind]
        if spec is None or spec.parent is None:
            raise ValueError(f"`spec` of a {row.noun} must name its network in `inputs`")
        sizes = spec.typed.measure.batch_sizes
        if row.times and not (sizes and spec.typed.format):
            raise ValueError(f"`spec` of a {row.noun} must have `format` and `measure.batch_sizes`")
        by_size = (f"{name}/{size}" for size in sizes for name in row.figures_by_size)
        if lacking := [name for name in (*row.figures, *by_size) if not self.measurements.get(name, 0) > 0]:
            raise ValueError(f"`measurements` must have {lacking[0]!r}, above 0")
