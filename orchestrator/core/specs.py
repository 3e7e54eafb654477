"""What is to be done: stages, trials, and the plan of a sweep. Plain data, standard library only.

All of it survives a round trip through JSON unchanged, so a worker, the store, the tracker and the comparison all
speak of the same thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from orchestrator.core.canonical import canonical_json, digest

SPEC_VERSION = 1
"""Raised whenever the same fields come to mean other work: every older stage is then another stage."""


StageKind = Literal["dense", "round"]


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
class Job:
    """One trial as it was asked for: its overrides, and its resolved configuration or why there is none."""

    overrides: tuple[str, ...]
    config: Mapping[str, Any] | None = None
    error: str | None = None
