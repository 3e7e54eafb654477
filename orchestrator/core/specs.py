"""Specs of stages and trials, the typed fields of stages, and the plan of a sweep. Plain data.

A round trip through JSON changes nothing, so the worker, the store, the tracker and the comparison use the same specs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from orchestrator.core.plain_data import Count, Margin, Sha256, canonical_json, digest, quoted, read_as
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS, RestartControl, RestartWeights, any_of
from orchestrator.core.stage_kinds import KINDS, START, Place, place_in_words
from pruning.choices import axes

OF_SCORING_DATA = ("examples", "per_class", "batch_size")
"""Keys of a score that choose the examples it reads."""
CHOICES = ("score", "unit", "scope", "dynamics", "repair")
"""Choices that define how a round ranks."""
INFINITIES = ("inf", "-inf")
"""Notation of infinities in a configuration: JSON has no infinity."""


@dataclass(frozen=True)
class Component:
    """Choice of a round: built-in by `kind`, or custom by `_target_`."""

    kind: str | None = None
    _target_: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    """All that is given for the choice."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of its code, with infinities as numbers."""
        common = {each.name for each in fields(self) if each.name != "given"} | {"name", "depends"}
        options = {name: value for name, value in self.given.items() if name not in common}
        return {name: float(value) if value in INFINITIES else value for name, value in options.items()}

    @property
    def named(self) -> str:
        """Target of a custom component, else the kind."""
        return str(self._target_ or self.kind)

    def said(self, where: str) -> str:
        """Return how a message names the component at a key, as in "`method.kind` (=identity)"."""
        return f"`{where}.{'_target_' if self._target_ else 'kind'}` (={self.named})"


@dataclass(frozen=True)
class ScoreFields(Component):
    """Score, and the examples of the training split that it reads."""

    kind: str | None = "magnitude"
    examples: Count | None = None
    per_class: Count | None = None
    batch_size: Count | None = None
    calibrate_all_experts: bool = False


@dataclass(frozen=True)
class TrainingFields:
    """Training settings that other code reads."""

    _target_: str | None = None
    batch_size: Count | None = None
    eval_batch_size: Count = 512
    accumulate: Count | None = None
    epochs: Margin | None = None
    steps: Count | None = None


@dataclass(frozen=True)
class RestartFields:
    """Start of the training in a round.

    Args:
        weights: name of a row of `RESTARTS`.
        step: the place whose weights a row with `at_step` uses.
        rates: the place of the dense training from which the round continues by `train`; None if it fine-tunes.
        optimizer: "restored" from the place `rates`, or "fresh".
        control: name of a row of `CONTROLS`.
    """

    weights: Annotated[str, Meta(pattern=any_of(RESTARTS))] = "keep"
    rates: Place | None = None
    optimizer: str = "restored"
    step: Place | None = None
    control: Annotated[str, Meta(pattern=any_of(CONTROLS))] = "none"

    @property
    def weights_row(self) -> RestartWeights:
        """Row of the weights."""
        return RESTARTS[self.weights]

    @property
    def control_row(self) -> RestartControl:
        """Row of the control."""
        return CONTROLS[self.control]

    @property
    def places(self) -> tuple[Place, ...]:
        """Places of the dense training that the round needs."""
        return tuple(place for place in (self.step, self.rates) if place is not None)


@dataclass(frozen=True)
class PruneFields:
    """Parameters that are pruned, and the way in which masks are held during training.

    Args:
        types: names of module classes, or of their base classes.
        parameters: patterns for the last part of a parameter's name.
        include, exclude: patterns for the qualified name.
        holding: "keeper" or "hooks".
    """

    types: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ("weight",)
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    holding: str = "keeper"


@dataclass(frozen=True)
class Sources:
    """Digests of the custom code and files that a stage depends on."""

    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.modules or self.packages or self.files)


@dataclass(frozen=True)
class MeasuringFields:
    """Settings of a latency measurement."""

    batch_sizes: tuple[Count, ...] = ()
    threads: Count = 1
    seconds: Margin = 0.0
    blocks: Count = 2


@dataclass(frozen=True)
class HarnessFields:
    """Task of lm-evaluation-harness, and the settings of its evaluation.

    Args:
        task: name of a task, group or tag.
        shots: examples in each prompt; None: the number in the task's definition.
        limit: maximum number of documents; None: all.
        batch_size: number of requests that the network answers at once.
        release: release of the library.
        content: digest of the task's own definition, code and data files; empty for a task of the library.
        beside: file name -> digest, for the settings of the tokenizer and of generation.
    """

    task: str = ""
    shots: Count | None = None
    limit: Count | None = None
    batch_size: Count = 1
    release: str = ""
    content: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParallelFields:
    """Processes that train a network together."""

    processes: Count = 1
    sync_batch_norm: bool = False
    version: Count = 1


@dataclass(frozen=True)
class UnitFields(Component):
    """Unit that is pruned as a whole; a stage that prunes nothing has none."""

    kind: str = ""

    @property
    def of_transformer(self) -> bool:
        """Whether units are whole parts of a stock transformer."""
        return self.kind in axes.TRANSFORMER_UNITS


@dataclass(frozen=True)
class ScopeFields(Component):
    """Pools in which units are ranked; a stage that prunes nothing has none."""

    kind: str = ""
    allocation: str = "each"
    budget: Literal["channels", "parameters", "active_parameters", "macs", "bytes"] = "channels"


@dataclass(frozen=True)
class StageFields:
    """Fields of a stage of any kind; a field that the kind lacks has its default.

    A round has a `target`, the overall sparsity, or an `amount` of the survivors. Both are None with given densities or
    sizes.
    """

    seed: int = 0
    device: str = "cpu"
    threads: Count = 1
    parallel: ParallelFields = ParallelFields()
    round: Count = 0
    inner: Count = 1
    order: Literal["at_once", "sequential"] = "at_once"
    target: float | None = None
    amount: float | int | None = None
    until: Place | None = None
    train: TrainingFields = TrainingFields()
    finetune: TrainingFields = TrainingFields()
    restart: RestartFields = RestartFields()
    prune: PruneFields = PruneFields()
    method: Component = Component()
    score: ScoreFields = ScoreFields()
    repair: Component = Component()
    unit: UnitFields = UnitFields()
    scope: ScopeFields = ScopeFields()
    dynamics: Component = Component()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    sources: Sources = Sources()
    format: str = ""
    measure: MeasuringFields = MeasuringFields()
    harness: HarnessFields = HarnessFields()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Parse the plain fields of a stage; raise ValueError for a field of another type."""
        whole = dict(plain)
        for name in ("method", *CHOICES):
            if isinstance(node := plain.get(name), dict | Mapping):  # dict first: a shortcut
                whole[name] = {**node, "given": node}
        return read_as(cls, whole)

    @property
    def changes_masks(self) -> bool:
        """Whether masks change within the training of the round."""
        return axes.Dynamics(self.dynamics._target_ or self.dynamics.kind or "nested").row.in_training


SPEC_VERSION = 2
"""Increased when the same fields mean different work: every older stage then has another key."""

Key = Sha256
"""Content address of a stage."""

NETWORK = "network"
"""Role of the input whose network a stage starts from."""
DENSE = "dense"
"""Role of the dense network that a round or the measurement of a deployment compares with."""
TEACHER = "teacher"
"""Role of the input whose outputs a stage learns to reproduce."""
REWIND = "rewind"
"""Role of the start of a training whose weights and buffers a round rewinds to."""
RATES = "rates"
"""Role of the start of a training from which a round continues: its schedule, data order and optimizer."""


@dataclass(frozen=True)
class StageSpec:
    """Unit of work that trials can share, such as the dense training, or one round.

    key = sha256(canonical JSON of {version, kind, fields, inputs})

    `fields` holds exactly the values that the result depends on, defaults included. A dense stage has the fields
    `model`, `data`, `train`, `seed`, `device`, `threads`, `sources` and `versions` (of the user's code and ours). A
    round has `method`, `prune`, `finetune`, `seed`, `round` (counted from 1), `sources`, `versions`, and either
    `target` (the overall sparsity) or `amount` (of the survivors). A round that continues from a step of the dense
    training has `train` in place of `finetune`, and `restart`. A start has the fields of a dense stage and `until`, the
    place at which it ends: its result is the training state at that place. A part has the fields of a round and
    `until`. A deployment has `format`; a measurement has `measure` as well. An evaluation has `harness`.
    """

    kind: str
    """Name of a row of `orchestrator.core.stage_kinds`."""
    fields: Mapping[str, Any]
    inputs: Mapping[str, Key] = field(default_factory=dict)
    """Role -> key of the input stage; `network` is the stage whose network this stage starts from."""
    starts_from: tuple[Key, ...] = field(default=(), compare=False)
    """Stages that save work without changing the result. Not part of the key."""
    location: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Part of `fields` -> paths of files whose content is in the key, and settings that change no result. Not in the
    key."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields and the key: another thread may parse the fields while this one pickles."""
        state = self.__dict__.copy()
        state.pop("typed", None)
        return state

    @cached_property
    def key(self) -> Key:
        """Content address of the stage."""
        named = {"version": SPEC_VERSION, "kind": self.kind, "fields": self.fields, "inputs": self.inputs}
        return digest(canonical_json(named))

    @cached_property
    def typed(self) -> StageFields:
        """Fields as typed values; raises ValueError for a field of another type."""
        return StageFields.of(self.fields)

    @property
    def title(self) -> str:
        """Name of the stage for people."""
        typed = self.typed
        known = {"round": typed.round, "format": typed.format, "task": typed.harness.task}
        return KINDS[self.kind].title.format(until=place_in_words(typed.until), **known)

    @property
    def training_config(self) -> Mapping[str, Any]:
        """Plain training configuration for the loop; empty if the stage does not train."""
        found: Mapping[str, Any] = self.fields.get(self.training) or {}
        return found

    @property
    def parent(self) -> Key | None:
        """Key of the stage whose network this stage starts from; None if there is none."""
        return self.inputs.get(NETWORK)

    @property
    def training(self) -> str:
        """Name of the field with the training configuration."""
        return "finetune" if "finetune" in self.fields else "train"

    @property
    def round(self) -> int:
        """k for the k-th pruning round, 0 before the first round."""
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
        """Rebuild the spec that `to_json` wrote; raise ValueError for an invalid spec."""
        spec = read_as(cls, {**data, "location": {}})
        _ = spec.typed  # raises for a field of another type
        if spec.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, found {quoted(spec.kind)}")
        return spec


def start_of(dense: StageSpec, until: int | str) -> StageSpec:
    """Return the stage that runs a dense training up to a step; step 0 is the initialised network.

    The dense stage may continue from this stage, `replace(dense, starts_from=(start.key,))`: key and bits stay equal.

    Args:
        dense: the dense training, or another start of it.
        until: the step, or epochs as in 2.5ep.
    """
    return StageSpec(START, {**dense.fields, "until": until}, location=dense.location)


def identity_of(spec: StageSpec, identities: Mapping[Key, str]) -> str:
    """Return a digest that is equal for chains of stages that differ only in the seed.

    identity = sha256(canonical JSON of [kind, fields less `seed`, {role: identity of that input}])

    Args:
        spec: the last stage of the chain
        identities: the identities of its inputs, by key
    """
    fields = {name: value for name, value in spec.fields.items() if name != "seed"}
    return digest(canonical_json([spec.kind, fields, {role: identities[key] for role, key in spec.inputs.items()}]))


@dataclass(frozen=True)
class TrialSpec:
    """Trial of a sweep: its name, its overrides, its resolved configuration, and its chain of stage keys."""

    name: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    stages: tuple[Key, ...]
    dense: Key
    """Key of the dense training that the trial is compared with."""
    identity: str
    """`identity_of` the last stage: equal for trials that differ only in the seed."""
    measured: tuple[Key, ...] = ()
    """Keys of the stages that read the last network once it is finished, such as measurements of its deployments."""
    parts: tuple[Key, ...] = ()
    """Keys of the stages that end at places of the last round's training, the first place first: only a search runs
    them, and the trial needs none."""


@dataclass(frozen=True)
class Plan:
    """Plan of a sweep: its stages, each key once and after its inputs, and the trials, which are chains of stages."""

    stages: Mapping[Key, StageSpec]
    trials: tuple[TrialSpec, ...]
    finished: Mapping[Key, StageSpec] = field(default_factory=dict)
    """Stages of the sweep that are not to be run, because the store holds them or a search has not asked for them."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: another thread may compute the other properties while this one pickles."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def children(self) -> Mapping[Key, tuple[Key, ...]]:
        """Stage key -> keys of the stages that need this stage, if there are any."""
        found: dict[Key, list[Key]] = {}
        for key in self.stages:
            for needed in self.needs(key):
                found.setdefault(needed, []).append(key)
        return {needed: tuple(keys) for needed, keys in found.items()}

    @property
    def belonging(self) -> dict[Key, None]:
        """Stages of this plan, and stages that they may continue from, such as the parts of an earlier search."""
        return dict.fromkeys((*self.stages, *chain.from_iterable(spec.starts_from for spec in self.stages.values())))

    def needs(self, key: Key) -> tuple[Key, ...]:
        """Return the stages of this plan that are inputs of `key`, or that it starts from."""
        spec = self.stages[key]
        others = (*spec.inputs.values(), *spec.starts_from)
        return tuple(dict.fromkeys(other for other in others if other in self.stages))

    def lineage(self, key: Key) -> tuple[StageSpec, ...]:
        """Return the specs of the stages before `key` in its chain, the first one first."""
        found: list[StageSpec] = []
        parent = self.stages[key].parent
        while parent is not None:
            found.append(self.stages.get(parent) or self.finished[parent])
            parent = found[-1].parent
        return tuple(reversed(found))

    @cached_property
    def work(self) -> tuple[tuple[Key, ...], ...]:
        """Stages of each trial, as `work_of` returns them."""
        return tuple(map(self.work_of, self.trials))

    def work_of(self, trial: TrialSpec) -> tuple[Key, ...]:
        """Return all stages of a trial: its dense training, its chain, its measurements, and their inputs."""
        return self.with_inputs(dict.fromkeys((trial.dense, *trial.stages, *trial.measured)))

    def with_inputs(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Return the keys and the keys of all their inputs, inputs first."""
        return tuple(self._with_inputs(keys))

    def _with_inputs(self, keys: Iterable[Key]) -> dict[Key, None]:
        found: dict[Key, None] = {}
        for key in keys:
            spec = self.stages.get(key) or self.finished[key]
            missing = [needed for needed in spec.inputs.values() if needed not in found]
            found |= {**self._with_inputs(missing), key: None}
        return found

    @cached_property
    def trials_of(self) -> Mapping[str, tuple[int, ...]]:
        """Stage key -> indices of the trials that use this stage, or of which it is a part."""
        found: dict[str, list[int]] = {key: [] for key in self.stages}
        for index, (keys, trial) in enumerate(zip(self.work, self.trials, strict=True)):
            for key in (*keys, *trial.parts):
                if key in found:
                    found[key].append(index)
        return {key: tuple(indices) for key, indices in found.items()}

    def added(self, amounts: Mapping[Key, float]) -> dict[Key, float]:
        """Return what each stage adds to its parts, if an amount of a stage includes those of its parts.

        Args:
            amounts: stage key -> steps or seconds, for some stages of this plan
        """
        found = dict(amounts)
        for key in amounts:
            spec = self.stages.get(key) or self.finished[key]
            if spec.starts_from:
                parts = [amounts[part] for part in spec.starts_from if part in amounts and self._is_part(part)]
                found[key] = max(0.0, amounts[key] - max(parts, default=0.0))
        return found

    def _is_part(self, key: Key) -> bool:
        spec = self.stages.get(key) or self.finished.get(key)
        return spec is not None and KINDS[spec.kind].part

    def without(self, finished: Collection[Key]) -> Plan:
        """Return the plan without the stages that need not run; the trials stay."""
        left = {key: spec for key, spec in self.stages.items() if key not in finished}
        aside = {key: spec for key, spec in self.stages.items() if key in finished}
        return Plan(left, self.trials, {**self.finished, **aside})

    def segments(self) -> Iterator[tuple[Key, ...]]:
        """Yield chains of stages without a branch, inputs first: one task executes each chain on one device."""
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
        """Whether a stage can follow `parent` in one task: its other inputs must come before `parent`."""
        spec, needs = self.stages[key], set(self.needs(key)) - {parent}
        if spec.parent != parent or KINDS[spec.kind].own_task:
            return False
        return not needs or needs <= self._above(parent)

    def _above(self, key: Key) -> set[Key]:
        """Return all stages of this plan that `key` needs, directly or indirectly."""
        found, pending = set[Key](), [key]
        while pending:
            needed = [other for other in self.needs(pending.pop()) if other not in found]
            found.update(needed)
            pending += needed
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`; shared parts, such as a model's configuration, appear once."""
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
        """Rebuild the plan that `to_json` wrote, with the keys of that time.

        Raises:
            ValueError: the data names stages that are missing or come later, or is not a plan; the text names the fault
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
                    raise ValueError(f"stage {key} needs {late[0]}, which must come before it in the plan")
            trials = tuple(read_as(TrialSpec, {**trial, "config": whole(trial["config"])}) for trial in data["trials"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not a plan ({error})") from None
        for trial in trials:
            if not trial.stages or not all(
                key in stages for key in (trial.dense, *trial.stages, *trial.measured, *trial.parts)
            ):
                raise ValueError(f"trial {quoted(trial.name)} names a stage that is not in the plan")
            for each in (stages[key] for key in trial.measured):
                above = stages.get(each.parent or "")
                if KINDS[each.kind].trains or above is None or (KINDS[each.kind].times and above.parent is None):
                    raise ValueError(
                        f"trial {quoted(trial.name)} measures a stage that is not a deployment of a network"
                    )
        return cls(stages, trials)


@dataclass(frozen=True)
class Job:
    """Requested trial: its overrides, and its resolved configuration or the error of composing it."""

    overrides: tuple[str, ...]
    config: Mapping[str, Any] | None = None
    error: str | None = None
