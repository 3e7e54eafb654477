"""What came of a stage: its record and what that is made of. Plain data, standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from orchestrator.core.errors import OrchestratorError

RECORD_VERSION = 2
"""Raised whenever a record's fields change: a store refuses the versions it does not know."""


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
    model, and its test metrics, read once; what is not finite is missing, and told in `warnings`.
    """

    key: str
    kind: str
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
    started: float
    """Unix seconds."""
    started_from: str = ""
    """`weights_digest` of the stage whose network this one went on from, empty where there is none."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only its kind has to say: of a round `dead_tensors`, the names of those without an entry left."""
    measurements: Mapping[str, float] = field(default_factory=dict)
    """What another run would measure anew: `seconds` it took. Never part of the result."""
    warnings: tuple[str, ...] = ()
    device: str = "cpu"
    host: str = ""
    attempt: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """`StageSpec.to_json()` of what was run, so that a store can be read without the config that made it."""
    version: int = RECORD_VERSION

    CIRCUMSTANCES = ("measurements", "started", "device", "host", "attempt", "environment", "files")

    @property
    def inputs(self) -> Mapping[str, str]:
        """Role -> key of the stage whose result was meant, as in the spec."""
        found: Mapping[str, str] = self.spec.get("inputs", {})
        return found

    @property
    def seconds(self) -> float:
        """How long the stage took."""
        return self.measurements.get("seconds", 0.0)

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
