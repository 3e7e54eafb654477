"""What is to be done: stages, trials, and the plan of a sweep. Plain data.

All of it survives a round trip through JSON unchanged, so a worker, the store, the tracker and the comparison all
speak of the same thing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from orchestrator.core.plain_data import Sha256, canonical_json, digest, quoted, read_as
from orchestrator.core.stage_fields import StageFields
from orchestrator.core.stage_kinds import KINDS

SPEC_VERSION = 2
"""Raised whenever the same fields come to mean other work: every older stage is then another stage."""

Key = Sha256
"""The content address of a stage."""

NETWORK = "network"
"""The role of the input whose live weights a stage goes on from."""
DENSE = "dense"
"""The role of the deployed dense network beside which a deployed one is measured."""
TEACHER = "teacher"
"""The role of the input whose outputs a stage learns to give."""
REWIND = "rewind"
"""The role of the start of a training whose weights and buffers a round goes back to."""
RATES = "rates"
"""The role of the start of a training from which a round trains on: its schedule, data order and optimizer."""


@dataclass(frozen=True)
class StageSpec:
    """One unit of work that trials can share, such as training the dense network, or one round.

    key = sha256(canonical JSON of {version, kind, fields, inputs})

    `fields` holds exactly what the result depends on, defaults included. A dense stage has the fields `model`, `data`,
    `train`, `seed`, `device`, `threads`, `sources` and `versions` (of the user's code and ours); a round has `method`,
    `prune`, `finetune`, `seed`, `round` (counted from 1), `sources`, `versions` and either
    `target` (overall sparsity to reach) or `amount` (of what is left). One that trains on from a step of the dense
    training has `train` for `finetune`, and `restart`. A start has the fields of a dense stage and
    `until`, the place at which it ends: its result is the state of that training then. A deployment has `format`, and a
    measurement also what it is to measure.
    """

    kind: str
    """A row of `orchestrator.core.stage_kinds`."""
    fields: Mapping[str, Any]
    inputs: Mapping[str, Key] = field(default_factory=dict)
    """Role -> the stage whose result is meant: `network` is what the stage goes on from."""
    starts_from: tuple[Key, ...] = field(default=(), compare=False)
    """Stages that would save work and give the same bits. Not part of the key."""
    location: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Part of `fields` -> where what is pinned by content lies, and what else changes no result. Not in the key."""

    @cached_property
    def key(self) -> Key:
        """The content address."""
        named = {"version": SPEC_VERSION, "kind": self.kind, "fields": self.fields, "inputs": self.inputs}
        return digest(canonical_json(named))

    @cached_property
    def typed(self) -> StageFields:
        """The fields as typed values; raises ValueError for those of another type."""
        return read_as(StageFields, self.fields)

    @property
    def training_config(self) -> Mapping[str, Any]:
        """The plain data of how the stage trains, as the loop takes it; empty for one that does not."""
        found: Mapping[str, Any] = self.fields.get(self.training) or {}
        return found

    @property
    def parent(self) -> Key | None:
        """The stage whose network this one goes on from."""
        return self.inputs.get(NETWORK)

    @property
    def training(self) -> str:
        """The field that says how the stage trains."""
        return "finetune" if "finetune" in self.fields else "train"

    @property
    def round(self) -> int:
        """k for the k-th pruning round, 0 for what comes before the first."""
        return self.typed.round

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {
            "kind": self.kind,
            "fields": dict(self.fields),
            "inputs": dict(self.inputs),
            "starts_from": list(self.starts_from),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the spec that `to_json` wrote; raise ValueError for one that cannot be."""
        spec = read_as(cls, {**data, "location": {}})
        _ = spec.typed  # raises for a field of another type
        if spec.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, found {quoted(spec.kind)}")
        return spec


def start_of(dense: StageSpec, until: int | str) -> StageSpec:
    """Return the stage that is a dense training up to a step, 0 for the network as it is initialised.

    The dense stage may go on from it, `replace(dense, starts_from=(start.key,))`, under the same key, to the same bits.

    Args:
        dense: that training, or another start of it.
        until: the step, or epochs as in 2.5ep.
    """
    return StageSpec("start", {**dense.fields, "until": until}, location=dense.location)


def identity_of(spec: StageSpec, identities: Mapping[Key, str]) -> str:
    """Return what is equal for chains of stages that differ in nothing but the seed.

    identity = sha256(canonical JSON of [kind, fields less `seed`, {role: identity of that input}])

    Args:
        spec: the last stage of the chain
        identities: those of its inputs, by key
    """
    fields = {name: value for name, value in spec.fields.items() if name != "seed"}
    return digest(canonical_json([spec.kind, fields, {role: identities[key] for role, key in spec.inputs.items()}]))


@dataclass(frozen=True)
class TrialSpec:
    """One point of a sweep: a name, what was overridden for it, its resolved config, and its chain of stage keys."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    stages: tuple[Key, ...]
    dense: Key
    """What the trial is compared with."""
    identity: str
    """Equal for trials that differ in nothing but the seed: `identity_of` of the last stage."""
    measured: tuple[Key, ...] = ()
    """The stages that measure what its last stage left, deployed, one for each format."""


@dataclass(frozen=True)
class Plan:
    """The stages of a sweep, each key once and after its inputs, and the trials that are chains of them."""

    stages: Mapping[Key, StageSpec]
    trials: tuple[TrialSpec, ...]
    finished: Mapping[Key, StageSpec] = field(default_factory=dict)
    """Stages of the sweep that are durable already: `without` puts them here."""

    @cached_property
    def children(self) -> Mapping[Key, tuple[Key, ...]]:
        """Stage key -> keys of the stages that need it, for those that are needed."""
        found: dict[Key, list[Key]] = {}
        for key in self.stages:
            for needed in self.needs(key):
                found.setdefault(needed, []).append(key)
        return {needed: tuple(keys) for needed, keys in found.items()}

    def needs(self, key: Key) -> tuple[Key, ...]:
        """Return the stages of this plan that are inputs of `key`, or save it work."""
        spec = self.stages[key]
        others = (*spec.inputs.values(), *spec.starts_from)
        return tuple(dict.fromkeys(other for other in others if other in self.stages))

    def lineage(self, key: Key) -> tuple[StageSpec, ...]:
        """Return the specs of the stages whose network `key` goes on from, the first one first."""
        found: list[StageSpec] = []
        parent = self.stages[key].parent
        while parent is not None:
            found.append(self.stages.get(parent) or self.finished[parent])
            parent = found[-1].parent
        return tuple(reversed(found))

    @cached_property
    def work(self) -> tuple[tuple[Key, ...], ...]:
        """Stages that each trial takes, as `work_of`."""
        return tuple(map(self.work_of, self.trials))

    def work_of(self, trial: TrialSpec) -> tuple[Key, ...]:
        """Return all that a trial takes: what it is compared with, its chain, its measurements, their inputs."""
        return tuple(self._with_inputs(dict.fromkeys((trial.dense, *trial.stages, *trial.measured))))

    def _with_inputs(self, keys: Iterable[Key]) -> dict[Key, None]:
        """Return the keys with those of all inputs, inputs first."""
        found: dict[Key, None] = {}
        for key in keys:
            spec = self.stages.get(key) or self.finished[key]
            missing = [needed for needed in spec.inputs.values() if needed not in found]
            found |= {**self._with_inputs(missing), key: None}
        return found

    @cached_property
    def trials_of(self) -> Mapping[str, tuple[int, ...]]:
        """Stage key -> indices of the trials that take it."""
        found: dict[str, list[int]] = {key: [] for key in self.stages}
        for index, keys in enumerate(self.work):
            for key in keys:
                if key in found:
                    found[key].append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    def without(self, finished: Collection[Key]) -> Plan:
        """Return the plan of what is left to do: finished stages go aside, the trials stay."""
        left = {key: spec for key, spec in self.stages.items() if key not in finished}
        aside = {key: spec for key, spec in self.stages.items() if key in finished}
        return Plan(left, self.trials, {**self.finished, **aside})

    def segments(self) -> Iterator[tuple[Key, ...]]:
        """Yield runs of stages without a branch, inputs first: what one task executes on one device."""
        joined = {
            key: following[0]
            for key, following in self.children.items()
            if len(following) == 1 and self._goes_on(following[0], key)
        }
        inner = set(joined.values())
        for key in self.stages:
            if key not in inner:
                run = [key]
                while run[-1] in joined:
                    run.append(joined[run[-1]])
                yield tuple(run)

    def _goes_on(self, key: Key, parent: Key) -> bool:
        """Whether a stage can follow another in one task: what else of this plan it needs stands before that one."""
        spec, needs = self.stages[key], set(self.needs(key)) - {parent}
        if spec.parent != parent or KINDS[spec.kind].own_task:
            return False
        return not needs or needs <= self._above(parent)

    def _above(self, key: Key) -> set[Key]:
        """Return all stages of this plan that `key` needs, and those that they need."""
        found, pending = set[Key](), [key]
        while pending:
            needed = [other for other in self.needs(pending.pop()) if other not in found]
            found.update(needed)
            pending += needed
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`: what many have in common, such as a model's configuration, stands once."""
        known: dict[str, dict[str, int]] = {}
        parts: dict[str, list[Any]] = {}

        def shared(values: Mapping[str, Any]) -> dict[str, Any]:
            found = dict(values)
            for name, value in values.items():
                if isinstance(value, Mapping):
                    places, text = known.setdefault(name, {}), repr(value)
                    if text not in places:
                        places[text] = len(places)
                        parts.setdefault(name, []).append(value)
                    found[name] = {"part": places[text]}
            return found

        return {
            "stages": [[key, {**spec.to_json(), "fields": shared(spec.fields)}] for key, spec in self.stages.items()],
            "trials": [{**vars(trial), "config": shared(trial.config)} for trial in self.trials],
            "parts": parts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the plan that `to_json` wrote, under the keys that it had then.

        Raises:
            ValueError: it names stages that it lacks, or that come later, or is no plan at all; the fault is named
        """

        def whole(values: Mapping[str, Any]) -> dict[str, Any]:
            parts = data["parts"]
            return {k: parts[k][v["part"]] if isinstance(v, dict) else v for k, v in values.items()}

        stages: dict[Key, StageSpec] = {}
        try:
            for key, spec in data["stages"]:
                read = StageSpec.from_json({**spec, "fields": whole(spec["fields"])})
                stages[read_as(Key, key)] = read
                if late := [needed for needed in read.inputs.values() if needed not in stages or needed == key]:
                    raise ValueError(f"stage {key} needs {late[0]}, which does not stand before it")
            trials = tuple(read_as(TrialSpec, {**trial, "config": whole(trial["config"])}) for trial in data["trials"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no plan ({error})") from None
        for trial in trials:
            if not trial.stages or not all(key in stages for key in (trial.dense, *trial.stages, *trial.measured)):
                raise ValueError(f"trial {quoted(trial.name)} has stages that the plan lacks")
            for each in (stages[key] for key in trial.measured):
                if each.parent is None or stages[each.parent].parent is None:
                    raise ValueError(f"trial {quoted(trial.name)} measures what is no deployment of a network")
        return cls(stages, trials)


@dataclass(frozen=True)
class Job:
    """One trial as it was asked for: its overrides, and its resolved configuration or why there is none."""

    overrides: tuple[str, ...]
    config: Mapping[str, Any] | None = None
    error: str | None = None
