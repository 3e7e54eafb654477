"""What came of a stage: its record and what that is made of. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta
from msgspec.json import encode

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import Count, Fraction, Number, Seconds, Sha256, quoted, read_as
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS

RECORD_VERSION = 3
"""Raised when records of before cannot be read any more: a store refuses the versions it does not know."""


BUSY = 0.5
"""Other processes that ran on average while latency was measured, from which on that is told."""


@dataclass(frozen=True)
class CurvePoint:
    """One point of a training curve: metrics after `step` optimizer steps of this stage, at `time` (Unix seconds)."""

    step: Count
    epoch: Number
    time: Seconds
    metrics: Mapping[str, Number]


@dataclass(frozen=True)
class FileInfo:
    """The digest and the size in bytes of one file of a finished stage."""

    sha256: Sha256
    bytes: Count


@dataclass(frozen=True)
class _Counts:
    """Of a split: for each class what is right, and of how many."""

    hits: tuple[Count, ...] = ()
    of: tuple[Count, ...] = ()


@dataclass(frozen=True)
class _Scoring:
    """Of a round that a score has ranked: what it read."""

    score: str = ""
    examples: Count = 0
    passes: Count = 0
    rescorings: Count = 0
    split: str = ""
    removed: Fraction | None = None


@dataclass(frozen=True)
class _Details:
    """What code reads of any record's details."""

    rounding: Fraction = 0.0
    measured: Mapping[str, _Counts] = field(default_factory=dict)
    dead_tensors: tuple[str, ...] = ()
    scoring: _Scoring = _Scoring()
    dense: Mapping[str, Number] = field(default_factory=dict)


MEASURED = ("latency_ms", "dense_ms", "speedup", "speedup_low", "speedup_high")
"""What a measurement says at each batch size."""


@dataclass(frozen=True)
class StageRecord:
    """What a finished stage says of itself.

    Figures are named by split and metric, as in `val/loss` or `test/rmse`; fractions are plain. `before` holds those
    of the pruned network on the validation split before fine-tuning (empty for a dense stage); `after` those of the
    selected model, and on the test split, read once; what is not finite is missing, and told in `warnings`. Of a
    deployment and its measurement `after` has what the network achieves in a format that changes outputs, else nothing.
    """

    key: str
    kind: str
    round: Count
    before: Mapping[str, Number]
    after: Mapping[str, Number]
    metrics: Annotated[tuple[Metric, ...], Meta(min_length=1, max_length=64)]
    """What the figures mean, but for the loss; the first is the primary one, by which networks are compared."""
    curve: tuple[CurvePoint, ...]
    requested_sparsity: Fraction | None
    sparsity: Fraction
    tensor_sparsity: Mapping[str, Fraction]
    """Qualified parameter name -> fraction of its entries that are masked; every prunable parameter is named."""
    tensor_sizes: Mapping[str, Count]
    parameters: Count
    """All parameters of the network, prunable or not."""
    macs: Count
    """Multiply-accumulates of one forward pass of one example, dense."""
    macs_remaining: Number
    """The same, counting only unmasked weights."""
    weights_digest: str
    mask_digest: str
    steps: Count
    best_step: Count
    started: Seconds
    """Unix seconds."""
    started_from: str = ""
    """`weights_digest` of the stage whose network this one went on from, empty where there is none."""
    data_digest: str = ""
    """Digest of the examples of a data set of the user's own; empty for a built-in one, and in older records."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What is no figure: `measured`, by split what the task counts, such as the `hits` of each class; of a round
    `dead_tensors`, the names of those without an entry left, `rounding`, by how much whole entries or channels may
    keep what is gone from what was requested, and `scoring`, what was ranked by, what that read, and the fraction
    `removed` of its units or its budget; of a deployment `form`, and what was `kept` of what is empty, and why; of a
    measurement in a format that changes outputs `dense`, what the dense network achieves in it.
    """
    measurements: Mapping[str, Seconds] = field(default_factory=dict)
    """What another run would measure anew: `seconds` it took, of which `scoring` and `selection`; of a deployment its
    `bytes`, `parameters` left, and `difference` of outputs; of a measurement at each batch size N `latency_ms/N`,
    `dense_ms/N`, `speedup/N` with `speedup_low/N` and `speedup_high/N`, `memory/N` and `dense_memory/N` where the
    system says them, and how many `others` ran meanwhile. Never part of the result.
    """
    warnings: tuple[str, ...] = ()
    device: str = "cpu"
    host: str = ""
    attempt: Count = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """`StageSpec.to_json()` of what was run, so that a store can be read without the config that made it."""
    version: int = RECORD_VERSION

    CIRCUMSTANCES: ClassVar = (
        *("measurements", "warnings", "started", "device", "host", "attempt", "environment", "files", "data_digest"),
    )

    @property
    def inputs(self) -> Mapping[str, str]:
        """Role -> key of the stage whose result was meant, as in the spec."""
        found: Mapping[str, str] = self.spec.get("inputs", {})
        return found

    @property
    def primary(self) -> Metric:
        """The metric by which networks are compared."""
        return self.metrics[0]

    def figure(self, split: str) -> float:
        """Return the primary metric on a split of the selected model; NaN where it is not known."""
        return self.after.get(f"{split}/{self.primary.name}", math.nan)

    @property
    def least_loss(self) -> CurvePoint | None:
        """The first point of the curve with the least loss on validation; None where no point has one."""
        measured = [point for point in self.curve if "val/loss" in point.metrics]
        return min(measured, key=lambda point: point.metrics["val/loss"], default=None)

    @property
    def seconds(self) -> float:
        """How long the stage took."""
        return self.measurements.get("seconds", 0.0)

    @property
    def text_bytes(self) -> int:
        """About the bytes that the record itself takes in a store."""
        return len(encode(self))

    @property
    def ended(self) -> float:
        """Unix seconds."""
        return self.started + self.seconds

    @property
    def prunable_parameters(self) -> int:
        """Entries of all prunable parameters."""
        return sum(self.tensor_sizes.values())

    @property
    def remaining_parameters(self) -> int:
        """All parameters less the masked entries."""
        return self.parameters - round(self.sparsity * self.prunable_parameters)

    @property
    def macs_speedup(self) -> float | None:
        """Theoretical speed-up: multiply-accumulates of the dense network / those left; None if none are left."""
        return self.macs / self.macs_remaining if self.macs_remaining > 0 else None

    @property
    def figures(self) -> dict[str, float]:
        """Everything of the stage that is one number, by the names that views show."""
        found: dict[str, float | None] = {
            **self.after,
            **{f"{name}_before": value for name, value in self.before.items()},
            "sparsity/overall": self.sparsity,
            "sparsity/requested": self.requested_sparsity,
            **{f"sparsity/{name}": value for name, value in self.tensor_sparsity.items()},
            "parameters/remaining": self.remaining_parameters,
            "parameters/compression": self.parameters / max(1, self.remaining_parameters),
            "macs/remaining": self.macs_remaining,
            "macs/speedup": self.macs_speedup,
            "seconds": self.seconds,
            "steps": self.steps,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def result(self) -> dict[str, Any]:
        """Return what must be bit-equal wherever and however often the stage ran: all but its circumstances."""
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
            OrchestratorError: this code cannot read the record's version, or does not know its kind of stage
            ValueError: what it says cannot be; the field is named
        """
        if data.get("version") != RECORD_VERSION or data.get("kind") not in tuple(KINDS):
            raise OrchestratorError(
                f"`version` (={quoted(data.get('version'))}) of a stage record must be {RECORD_VERSION}, and its "
                f"`kind` (={quoted(data.get('kind'))}) one of {', '.join(KINDS)}; use the release that wrote it, or "
                "another `store.uri`"
            )
        record = read_as(cls, data)
        read_as(_Details, record.details)
        record._refuse_impossible(StageSpec.from_json(record.spec) if record.spec else None)
        most = sum(record.tensor_sizes.values()) // 4 + 4096 * (1 + len(record.tensor_sizes))
        if MASKS in record.files and record.files[MASKS].bytes > most:
            raise ValueError(f"`files` {MASKS} must be at most {most} bytes, packed as it is")
        return record

    def _refuse_impossible(self, spec: StageSpec | None) -> None:
        """Raise ValueError where numbers contradict each other, or what a round was told to do."""
        if self.macs_remaining > self.macs:
            raise ValueError(f"`macs_remaining` (={self.macs_remaining:g}) must be at most `macs` (={self.macs})")
        if self.parameters < self.prunable_parameters:
            raise ValueError(
                f"`parameters` (={self.parameters}) must be at least the {self.prunable_parameters} of `tensor_sizes`"
            )
        if self.tensor_sparsity.keys() != self.tensor_sizes.keys():
            raise ValueError("`tensor_sparsity` must name the parameters that `tensor_sizes` names")
        if self.kind == "deploy":
            self._refuse_undeployed(spec)
        if self.kind == "measure":
            self._refuse_unmeasured(spec)
        if spec is None or not KINDS[self.kind].prunes:
            return
        if self.round != spec.round:
            raise ValueError(f"`round` (={self.round}) must be that of `spec` ({spec.round})")
        target = spec.typed.target
        if "target" in spec.fields and self.requested_sparsity != target:
            raise ValueError(f"`requested_sparsity` (={self.requested_sparsity}) must be that of `spec` ({target})")

    def _refuse_undeployed(self, spec: StageSpec | None) -> None:
        """Raise ValueError where a deployment lacks a figure that its measurement reads, or its network."""
        if spec is None or spec.parent is None:
            raise ValueError("`spec` of a deployment must say its network in `inputs`")
        if lacking := [name for name in ("bytes", "parameters") if name not in self.measurements]:
            raise ValueError(f"`measurements` of a deployment must have {lacking[0]!r}")

    def _refuse_unmeasured(self, spec: StageSpec | None) -> None:
        """Raise ValueError where a measurement lacks what it was to measure, or does not say what that was."""
        sizes = spec.typed.measure.batch_sizes if spec else ()
        if not sizes or not (spec and spec.typed.format):
            raise ValueError("`spec` of a measurement must say its `format` and at what `measure.batch_sizes`")
        by_size = (f"{name}/{size}" for size in sizes for name in MEASURED)
        lacking = [name for name in ("bytes", "dense_bytes", *by_size) if not self.measurements.get(name, 0) > 0]
        if lacking:
            raise ValueError(f"`measurements` must have {lacking[0]!r}, above 0")
