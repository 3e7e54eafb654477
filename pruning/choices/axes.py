"""The seven independent choices: score, unit, scope, schedule, dynamics, repair and control.

Each is plain data that refuses values without a meaning; nothing here needs torch. A published method is a combination
(`pruning.choices.published`); `pruning.choices.combining` says which choices go together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, cast, get_args

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.repairs import REPAIRS
from pruning.schedule import targets

UnitKind: TypeAlias = Literal["entry", "block", "channel", "group"]
Reduction: TypeAlias = Literal["sum", "l1", "l2", "square_of_sum"]
ScopeKind: TypeAlias = Literal["layer", "global", "row", "window"]
Normalisation: TypeAlias = Literal["size", "group"]
Budget: TypeAlias = Literal["channels", "parameters", "macs", "bytes"]
DynamicsKind: TypeAlias = Literal["nested", "free"]
ControlKind: TypeAlias = Literal["none", "shuffle", "invert"]


@dataclass(frozen=True)
class Score:
    """How important each entry is; the lowest goes first, and signed scores stay signed.

    Args:
        kind: a name of `pruning.scores`, or a function of your own with the same signature,
            `(model, batches, loss, *, size, generator, masks, **options) -> {name: tensor}`.
        options: what the score takes besides, as `temperature` of `grasp`.
    """

    kind: str | Callable[..., Any] = "magnitude"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """What goes at once.

    Args:
        kind: "entry"; "block": `size` consecutive entries of an output's weights; "channel": a slice along `dim`;
            "group": a channel with all that must go with it (`pruning.dependency_groups`).
        size: entries of a block; must divide the weights of one output.
        dim: of a channel; 0 are the outputs of a layer, 1 its inputs.
        reduce: a unit's score from its entries': "sum", "l1" (of magnitudes), "l2", or "square_of_sum".
        spare_last: leave the last tensor dense and out of every count: its channels are the network's outputs.
    """

    kind: UnitKind = "entry"
    size: int = 4
    dim: int = 0
    reduce: Reduction = "sum"
    spare_last: bool = False

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        _one_of("unit.kind", self.kind, get_args(UnitKind))
        _one_of("unit.reduce", self.reduce, get_args(Reduction))
        _at_least("unit.size", self.size, 1)
        if not isinstance(cast(object, self.dim), Integral):
            raise TypeError(f"`unit.dim` (={self.dim!r}) must be an int: 0 for output channels, 1 for input channels.")


@dataclass(frozen=True)
class Scope:
    """Among which units is ranked, and how many each tensor keeps.

    Args:
        kind: "layer": each tensor by itself; "global": all as one; "row": each output's weights by themselves, losing
            floor(s n) of n (Wanda); "window": `n` are kept of each `m` consecutive entries along the input dimension.
        allocation: each tensor's share under "layer" and "row". "each" loses round(s n) of its n; the others divide an
            exact total: "uniform" evenly; "uniform_plus" with a dense first convolution and at least 0.2 of the last
            tensor; "er" and "erk" by shapes; "lamp" as LAMP's scores of the weights would; "given" by `densities`.
        power: of ER and ERK; 0 is uniform.
        densities: name of a parameter, or a pattern of fnmatch -> the density it ends at; for "given".
        normalise: "size" divides a unit's score by its entries: channels of wide and narrow layers rank as one;
            "group", of dependency groups, by the mean of its group.
        min_kept: so many units are kept of every tensor at least (all, where there are fewer).
        n: how many a window keeps.
        m: how many entries a window has; must divide the input dimension.
        budget: what the sparsity is a fraction of, for dependency groups: their "channels", or of the whole network the
            "parameters", "bytes", or "macs" (multiply-accumulates).
        round_to: dependency groups that lose channels keep a multiple of this width.
    """

    kind: ScopeKind = "layer"
    allocation: str = "each"
    power: float = 1.0
    densities: Mapping[str, float] = field(default_factory=dict)
    normalise: Normalisation | None = None
    min_kept: int = 0
    n: int = 2
    m: int = 4
    budget: Budget = "channels"
    round_to: int = 1

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        _one_of("scope.kind", self.kind, get_args(ScopeKind))
        _one_of("scope.allocation", self.allocation, ALLOCATIONS)
        _at_least("scope.min_kept", self.min_kept, 0)
        _at_least("scope.m", self.m, 1)
        _at_least("scope.round_to", self.round_to, 1)
        _one_of("scope.budget", self.budget, get_args(Budget))
        if self.normalise not in (None, *get_args(Normalisation)):
            raise ValueError(
                f"`scope.normalise` (={self.normalise!r}) must be 'size' or 'group', or None for scores as they are."
            )
        _at_least("scope.n", self.n, 0)
        if self.n > self.m:
            raise ValueError(f"`scope.n` (={self.n!r}) must lie in [0, m] = [0, {self.m}]: so many are KEPT of each m.")
        if self.kind == "row" and not ALLOCATIONS[self.allocation].by_row:
            raise ValueError(
                f"`scope.allocation` (={self.allocation!r}) ranks whole tensors, not rows; use 'erk' or 'given'."
            )
        if self.allocation != "each" and self.kind in ("global", "window"):
            raise ValueError(
                f"`scope.allocation` (={self.allocation!r}) says what each tensor keeps, which `scope.kind` "
                f"(={self.kind!r}) decides by itself; use kind='layer'."
            )
        if self.min_kept and self.kind in ("row", "window"):
            raise ValueError(
                f"`scope.min_kept` (={self.min_kept}) holds for whole tensors, but `scope.kind` (={self.kind!r}) "
                "counts within each; leave it at 0."
            )
        if self.kind != "window" and (self.n, self.m) != (2, 4):
            raise ValueError(
                f"`scope.n` (={self.n}) and `scope.m` (={self.m}) say what a window keeps, and `scope.kind` "
                f"(={self.kind!r}) has none; use kind='window'."
            )
        if bool(self.densities) != (self.allocation == "given"):
            raise ValueError(
                f"`scope.densities` (of {len(self.densities)} tensors) goes with allocation='given' and nothing else, "
                f"not with {self.allocation!r}; give both or neither."
            )
        for name, density in self.densities.items():
            if not 0 <= _number(f"scope.densities[{name!r}]", density) <= 1:
                raise ValueError(f"`scope.densities[{name!r}]` (={density!r}) must lie in [0, 1]: the fraction kept.")


@dataclass(frozen=True)
class Schedule:
    """How far one pruning goes, and in how many steps.

    Args:
        sparsity: the fraction of all units that is pruned in the end, in [0, 1); None where the scope decides it alone.
        inner: re-scorings without training on the way; density falls geometrically over them.
    """

    sparsity: float | None = None
    inner: int = 1

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        _at_least("schedule.inner", self.inner, 1)
        targets("geometric", 0.0 if self.sparsity is None else self.sparsity, self.inner)


@dataclass(frozen=True)
class Dynamics:
    """Whether entries return.

    Args:
        kind: "nested": only survivors are ranked; "free": at every re-scoring all entries compete, dead ones with the
            weights that they had.
    """

    kind: DynamicsKind = "nested"

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        _one_of("dynamics.kind", self.kind, get_args(DynamicsKind))


@dataclass(frozen=True)
class Repair:
    """What changes the survivors' values, or biases and statistics.

    Args:
        kind: a name of `pruning.catalogue.repairs`, or "none".
        options: arguments of the repair, as `damping` of "obs".
    """

    kind: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse unknown repairs, options that the repair does not take, and values that break an option's rule."""
        _one_of("repair.kind", self.kind, REPAIRS)
        REPAIRS[self.kind].refuse(self.options, "`repair.{}`")


@dataclass(frozen=True)
class Control:
    """What a method must beat.

    Args:
        kind: "shuffle" the mask inside each tensor, "invert" the scores, or "none".
    """

    kind: ControlKind = "none"

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        _one_of("control.kind", self.kind, get_args(ControlKind))


def _one_of(name: str, value: object, kinds: Collection[str]) -> None:
    """Raise ValueError unless a value is one of `kinds`."""
    if value not in kinds:
        raise ValueError(f"`{name}` (={value!r}) must be one of {', '.join(kinds)}.")


def _at_least(name: str, value: int, least: int) -> None:
    """Raise TypeError unless a value is an int, ValueError if it is a smaller one."""
    if not isinstance(cast(object, value), Integral):
        raise TypeError(f"`{name}` (={value!r}) must be an int, not {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` (={value!r}) must be an int of at least {least}.")


def _number(name: str, value: float) -> float:
    """Return a number; raise TypeError for what is none."""
    if not isinstance(cast(object, value), Real):
        raise TypeError(f"`{name}` (={value!r}) must be a number, not {type(value).__name__}.")
    return value
