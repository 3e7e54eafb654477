"""The fields of stages as typed values, read once from the plain data that keys are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from orchestrator.core.plain_data import Count, Margin
from pruning.choices import axes
from pruning.choices.combining import Choices

Place: TypeAlias = int | str
"""A step of a training; where only its epochs are known, epochs as in 2.5ep."""

RANKING = "l1_unstructured"
"""The method that ranks by its score, as one without a kind does; those of any other kind decide by themselves."""
NOT_OPTIONS = ("name", "kind", "_target_", "depends")
"""Keys of a component that are no options of its code."""
OF_SCORING_DATA = ("examples", "per_class", "batch_size")
"""Keys of a score that say which examples it reads."""
INFINITIES = ("inf", "-inf")
"""How an infinity is written where one makes sense: JSON has none."""


@dataclass(frozen=True)
class Component:
    """A score, a repair or a method: a built-in one by `kind`, or the user's own by `_target_`."""

    kind: str | None = None
    _target_: str | None = None

    @property
    def named(self) -> str:
        """The target of one of the user's own, else the kind."""
        return str(self._target_ or self.kind)

    def said(self, where: str) -> str:
        """Return how a message names the component at a key, as in "`method.kind` (=identity)"."""
        return f"`{where}.{'_target_' if self._target_ else 'kind'}` (={self.named})"


@dataclass(frozen=True)
class ScoreFields(Component):
    """A score, and the examples of the training split that it reads."""

    kind: str | None = "magnitude"
    examples: Count | None = None
    per_class: Count | None = None
    batch_size: Count | None = None


@dataclass(frozen=True)
class Training:
    """What other code reads of how a stage trains."""

    _target_: str | None = None
    batch_size: Count | None = None
    eval_batch_size: Count = 512
    accumulate: Count | None = None
    epochs: Margin | None = None
    steps: Count | None = None


@dataclass(frozen=True)
class Restart:
    """What a round trains on from.

    Args:
        weights: "keep" what was pruned, those of a "step" of the dense training, or drawn anew ("reinit").
        step: whose weights "step" means.
        rates: the place of the dense training from which the round trains on by `train`; None where it fine-tunes.
        optimizer: "restored" from that place, or "fresh".
        control: "shuffle", "invert" or "small", else "none".
    """

    weights: str = "keep"
    rates: Place | None = None
    optimizer: str = "restored"
    step: Place | None = None
    control: str = "none"

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the dense training that the round needs."""
        return tuple(place for place in (self.step, self.rates) if place is not None)


@dataclass(frozen=True)
class Prune:
    """Which parameters are pruned, and how masks are held while training.

    Args:
        types: names of module classes, or of their bases.
        parameters: patterns on a parameter's own name.
        include, exclude: patterns on its qualified name.
        holding: "keeper" or "hooks".
    """

    types: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ("weight",)
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    holding: str = "keeper"


@dataclass(frozen=True)
class Sources:
    """Contents of the user's own code and files that a stage depends on."""

    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.modules or self.packages or self.files)


@dataclass(frozen=True)
class MeasuringFields:
    """What is measured of a deployment."""

    batch_sizes: tuple[Count, ...] = ()
    threads: Count = 1
    seconds: Margin = 0.0
    blocks: Count = 2


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
    """The fields of a stage of any kind; those that its kind lacks have their defaults.

    A round reaches a `target`, an overall sparsity, or takes an `amount` of what is left; where densities are given,
    both are None.
    """

    seed: int = 0
    device: str = "cpu"
    threads: Count = 1
    round: Count = 0
    inner: Count = 1
    target: float | None = None
    amount: float | int | None = None
    until: Place | None = None
    train: Training = Training()
    finetune: Training = Training()
    restart: Restart = Restart()
    prune: Prune = Prune()
    method: Component = Component()
    score: ScoreFields = ScoreFields()
    repair: Component = Component()
    unit: _Unit = _Unit()
    scope: _Scope = _Scope()
    dynamics: _Unit = _Unit()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    sources: Sources = Sources()
    format: str = ""
    measure: MeasuringFields = MeasuringFields()

    @property
    def decides_itself(self) -> bool:
        """Whether a class chooses entries by itself, and not by the choices."""
        return self.amount is not None or decides_itself(self.method)


def decides_itself(method: Component) -> bool:
    """Whether a method is a class that chooses entries by itself, and not by the choices."""
    return method._target_ is not None or method.kind not in (None, RANKING)


def choices_of(fields: Mapping[str, Any], typed: StageFields) -> Choices:
    """Return what a round, or the groups of a configuration, choose; a score or class of one's own goes by its name.

    Args:
        fields: the plain data.
        typed: what was read of it.

    Raises:
        ValueError: they cannot be meant, or not together.
        TypeError: one has a value of another type.
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
        schedule=axes.Schedule(sparsity, typed.inner),
        dynamics=axes.Dynamics(**fields.get("dynamics", {})),
        repair=axes.Repair(repair.get("kind") or "none", _options(repair)),
        control=axes.Control("invert" if typed.restart.control == "invert" else "none"),
        select=typed.method.named if by_class else None,
        arguments=method | ({} if typed.amount is None else {"amount": typed.amount}),
    )


def _options(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a component's code, with infinities as numbers."""
    found = {name: value for name, value in node.items() if name not in NOT_OPTIONS}
    return {name: float(value) if value in INFINITIES else value for name, value in found.items()}
