"""Typed fields of stages, parsed once from the plain data of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from orchestrator.core.plain_data import Count, Margin
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS, RestartControl, RestartWeights, any_of
from pruning.choices import axes
from pruning.choices.combining import Choices

Place: TypeAlias = int | str
"""Step of a training, or epochs as in 2.5ep if the number of steps is unknown."""

RANKING = "l1_unstructured"
"""Kind of the method that ranks by a score. A method without a kind does so, too; all other kinds decide themselves."""
NOT_OPTIONS = ("name", "kind", "_target_", "depends")
"""Keys of a component that are not options of its code."""
OF_SCORING_DATA = ("examples", "per_class", "batch_size")
"""Keys of a score that choose the examples it reads."""
INFINITIES = ("inf", "-inf")
"""Notation of infinities in a configuration: JSON has no infinity."""


@dataclass(frozen=True)
class Component:
    """Score, repair or method: built-in by `kind`, or custom by `_target_`."""

    kind: str | None = None
    _target_: str | None = None

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
class ParallelFields:
    """Processes that train a network together."""

    processes: Count = 1
    sync_batch_norm: bool = False
    version: Count = 1


@dataclass(frozen=True)
class _Unit:
    kind: str = ""


@dataclass(frozen=True)
class _Scope:
    kind: str = ""
    allocation: str = "each"
    budget: Literal["channels", "parameters", "macs", "bytes"] = "channels"


@dataclass(frozen=True)
class StageFields:
    """Fields of a stage of any kind; a field that the kind lacks has its default.

    A round has a `target`, the overall sparsity, or an `amount` of the survivors. With given densities, both are None.
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
    unit: _Unit = _Unit()
    scope: _Scope = _Scope()
    dynamics: Component = Component()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    sources: Sources = Sources()
    format: str = ""
    measure: MeasuringFields = MeasuringFields()

    @property
    def changes_masks(self) -> bool:
        """Whether masks change within the training of the round."""
        return axes.Dynamics(self.dynamics._target_ or self.dynamics.kind or "nested").row.in_training

    @property
    def decides_itself(self) -> bool:
        """Whether a class decides which entries to prune, without a score."""
        return self.amount is not None or decides_itself(self.method)


def decides_itself(method: Component) -> bool:
    """Whether a method is a class that decides which entries to prune, without a score."""
    return method._target_ is not None or method.kind not in (None, RANKING)


def choices_of(fields: Mapping[str, Any], typed: StageFields) -> Choices:
    """Return the choices of a round, or of a configuration; a custom score or class goes by its target.

    Args:
        fields: the plain data.
        typed: the typed fields of the same data.

    Raises:
        ValueError: a choice has no meaning, or conflicts with another one.
        TypeError: a value has another type.
    """
    by_class, repair = typed.decides_itself, fields.get("repair", {})
    method = {} if not by_class else _options(fields.get("method", {}))
    score = _options({n: value for n, value in fields.get("score", {}).items() if n not in OF_SCORING_DATA})
    unit = {} if by_class else fields.get("unit", {})
    scope = axes.Scope(**fields.get("scope", {}))
    sparsity = None if scope.kind == "window" or typed.amount is not None else typed.target
    return Choices(
        score=axes.Score() if by_class else axes.Score(typed.score.named, score),
        unit=axes.Unit(**unit),
        scope=scope,
        schedule=axes.Schedule(sparsity, typed.inner, typed.order),
        dynamics=axes.Dynamics(
            typed.dynamics._target_ or typed.dynamics.kind or "nested", _options(fields.get("dynamics", {}))
        ),
        repair=axes.Repair(repair.get("kind") or "none", _options(repair)),
        control=axes.Control("invert" if typed.restart.control_row.inverts else "none"),
        select=typed.method.named if by_class else None,
        arguments=method | ({} if typed.amount is None else {"amount": typed.amount}),
    )


def _options(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a component's code, with infinities as numbers."""
    found = {name: value for name, value in node.items() if name not in NOT_OPTIONS}
    return {name: float(value) if value in INFINITIES else value for name, value in found.items()}
