"""The seven independent choices (score, unit, scope, schedule, dynamics, repair, control), and pruning amounts.

A float amount in [0, 1] is a fraction of the currently unpruned units; an int amount is a number of units. `1` is one
unit, `1.0` is all units. A unit is an entry (unstructured) or a channel (structured).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, SupportsFloat, TypeAlias, cast, get_args

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.dynamics import DYNAMICS, DynamicsRow, own_row
from pruning.catalogue.repairs import REPAIRS
from pruning.refused import RefusedType, RefusedValue
from pruning.schedule import targets

UnitKind: TypeAlias = Literal[
    "entry", "block", "channel", "group", "layer", "heads", "mlp", "residual", "expert", "layer_and_mlp", "sizes"
]
FamilyUnit: TypeAlias = Literal["layer", "heads", "mlp", "residual", "expert"]
FAMILY_UNITS: tuple[FamilyUnit, ...] = get_args(FamilyUnit)
"""Units of stock transformers, which a family defines; see docs/reference/transformers.md."""
_IN_ORDER: tuple[FamilyUnit, ...] = ("layer", "expert", "heads", "mlp", "residual")
SIZES = {unit: f"{unit}s" if unit in ("layer", "expert") else str(unit) for unit in _IN_ORDER}
"""Unit of stock transformers -> the field of `Unit` that says how many of them an architecture has."""
IN_TURNS: Mapping[str, tuple[FamilyUnit, ...]] = {"layer_and_mlp": ("layer", "mlp"), "sizes": tuple(SIZES)}
"""Units of stock transformers that are pruned one after the other in one pruning."""
TRANSFORMER_UNITS = (*FAMILY_UNITS, *IN_TURNS)
"""Units that only stock transformers have."""
SPANNING = ("group", *TRANSFORMER_UNITS)
"""Units that span several tensors: dependency groups."""
EQUAL_WIDTHS: tuple[FamilyUnit, ...] = ("heads", "mlp", "expert")
"""Units of which a stock transformer has equal numbers in all layers."""
TAKE_UNIFORM = (*EQUAL_WIDTHS, "layer_and_mlp")
"""Units that `scope.uniform` is for."""
Reduction: TypeAlias = Literal["sum", "l1", "l2", "square_of_sum"]
ScopeKind: TypeAlias = Literal["layer", "global", "row", "window"]
Normalisation: TypeAlias = Literal["size", "group"]
Order: TypeAlias = Literal["at_once", "sequential"]
Budget: TypeAlias = Literal["channels", "parameters", "active_parameters", "macs", "bytes"]
ControlKind: TypeAlias = Literal["none", "shuffle", "invert"]


@dataclass(frozen=True)
class Score:
    """Importance of entries; the lowest score is pruned first, and signed scores keep their sign.

    Args:
        kind: a name in `pruning.scores`, or a function of your own with the same signature,
            `(model, batches, loss, *, size, generator, masks, **options) -> {name: tensor}`.
        options: further arguments of the score, such as `temperature` of `grasp`.
    """

    kind: str | Callable[..., Any] = "magnitude"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """Units that are pruned as a whole.

    Args:
        kind: "entry"; "block": `size` consecutive inputs of `outputs` consecutive outputs, in a convolution at one
            kernel position, within a group of channels (the last one is shorter where they do not divide); "channel": a
            slice along `dim`;
            "group": a channel with everything that must be removed with it (`pruning.dependency_groups`); of a stock
            transformer, "layer": a whole block, "heads": a key and value head with its query heads, "mlp": a hidden
            unit of an MLP, "residual": a channel of the residual stream; "layer_and_mlp": whole blocks, then hidden
            units of the others; "expert": an expert of any mixture, with what its router has for it, in all layers
            equally many; "sizes": as many of each as the sizes below leave out.
        size: number of inputs of a block.
        outputs: number of outputs of a block.
        dim: dimension that counts channels: 0 for the outputs of a layer, 1 for its inputs.
        reduce: how scores of entries become a unit's score: "sum", "l1" (sum of magnitudes), "l2" or "square_of_sum".
        spare_last: keep the last tensor dense and out of all counts, because its channels are the network's outputs.
        by_layers: for "layer_and_mlp", the fraction of what is removed that whole blocks make up; hidden units are the
            rest.
        layers: for "sizes", the number of blocks that are kept, of those that can go; None: all.
        experts: for "sizes", the number of experts that each layer keeps, or each group of them that its router chooses
            first; None: all.
        heads: for "sizes", the number of key and value heads that each layer keeps, each with the query heads that
            share it; None: all.
        mlp: for "sizes", the number of hidden units that each MLP, or each expert, keeps; None: all.
        residual: for "sizes", the number of channels that the residual stream keeps; None: all.
    """

    kind: UnitKind = "entry"
    size: int = 4
    outputs: int = field(default=1, metadata={"units": ("block",), "later": True})
    dim: int = field(default=0, metadata={"ranked": ("channel",)})  # in keys of all units
    reduce: Reduction = "sum"
    spare_last: bool = False
    by_layers: float = field(default=0.5, metadata={"units": ("layer_and_mlp",)})
    layers: int | None = field(default=None, metadata={"units": ("sizes",)})
    experts: int | None = field(default=None, metadata={"units": ("sizes",)})
    heads: int | None = field(default=None, metadata={"units": ("sizes",)})
    mlp: int | None = field(default=None, metadata={"units": ("sizes",)})
    residual: int | None = field(default=None, metadata={"units": ("sizes",)})

    @property
    def spans(self) -> bool:
        """Whether units span several tensors."""
        return self.kind in SPANNING

    @property
    def of_transformer(self) -> bool:
        """Whether units are whole parts of a stock transformer."""
        return self.kind in TRANSFORMER_UNITS

    @property
    def inputs(self) -> int:
        """Number of consecutive inputs that go together: the size of a block, else 1."""
        return self.size if self.kind == "block" else 1

    @property
    def parts(self) -> tuple[FamilyUnit, ...]:
        """Units that are pruned in turns, first those of the first; empty for a unit of one kind."""
        return IN_TURNS.get(self.kind, ())

    @property
    def sizes(self) -> dict[FamilyUnit, int]:
        """Unit -> how many of them are kept, for those with a size."""
        return {unit: size for unit, name in SIZES.items() if (size := getattr(self, name)) is not None}

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        _one_of("unit.kind", self.kind, get_args(UnitKind))
        _one_of("unit.reduce", self.reduce, get_args(Reduction))
        _at_least("unit.size", self.size, 1)
        _at_least("unit.outputs", self.outputs, 1)
        for unit, size in self.sizes.items():
            _at_least(f"unit.{SIZES[unit]}", size, 1)
        if not 0 <= _number("unit.by_layers", self.by_layers) <= 1:
            raise RefusedValue("unit.by_layers", self.by_layers).because(
                "must lie in [0, 1]: the part of whole blocks."
            )
        if not isinstance(cast(object, self.dim), Integral):
            raise RefusedType("unit.dim", self.dim).because(
                "must be an int: 0 for output channels, 1 for input channels."
            )


def blocks_of(size: int, outputs: int) -> Unit:
    """Return the unit of blocks of `outputs` outputs and `size` inputs; single entries for 1 and 1."""
    return Unit("block", size=size, outputs=outputs) if size * outputs > 1 else Unit()


@dataclass(frozen=True)
class Scope:
    """Pools in which units are ranked, and how many units each tensor keeps.

    Args:
        kind: "layer" ranks each tensor separately; "global" ranks all tensors together; "row" ranks the weights of each
            output separately and prunes floor(s n) of n (Wanda), in some of the rows one more if they are short;
            "window" keeps `n` of each `m` consecutive entries along the input dimension.
        allocation: density of each tensor under "layer" and "row". "each" prunes round(s n) of the tensor's n units;
            "given" sets each tensor's density by `densities`. The others divide an exact total: "uniform" evenly;
            "uniform_plus" with a dense first convolution and at least 0.2 of the last tensor; "er" and "erk" by shapes;
            "lamp" as LAMP's scores of the weights would.
        power: exponent of the shape ratio in ER and ERK, from -30 to 30; 0 is uniform.
        densities: name of a parameter, or a pattern of fnmatch -> its final density; for "given".
        normalise: "size" takes means instead of sums over a unit's entries, so that channels of wide and narrow layers
            compare; "group" divides a channel's score by the absolute mean of its dependency group.
        min_kept: lowest number of units that every tensor keeps (all units of a smaller tensor).
        n: number of entries that a window keeps.
        m: number of entries of a window; must divide the input dimension.
        budget: quantity of which the sparsity is a fraction, for dependency groups: their "channels", or "parameters",
            "active_parameters" (that one token uses, in a mixture of experts), "bytes" or "macs" (multiply-accumulates)
            of the whole network.
        round_to: dependency groups that lose channels keep a multiple of this width.
        uniform: all layers keep equal numbers of "heads" or "mlp" units, as the configuration of a transformer demands;
            kind="layer" does so too, but "global" ranks over all layers.
    """

    kind: ScopeKind = "layer"
    allocation: str = "each"
    power: float = 1.0
    densities: Mapping[str, float] = field(default_factory=dict)
    normalise: Normalisation | None = None
    min_kept: int = 0
    n: int = 2
    m: int = 4
    budget: Budget = field(default="channels", metadata={"units": SPANNING})
    round_to: int = field(default=1, metadata={"units": tuple(each for each in SPANNING if each != "sizes")})
    uniform: bool = field(default=False, metadata={"units": TAKE_UNIFORM})

    def __post_init__(self) -> None:
        """Refuse invalid values and combinations."""
        _one_of("scope.kind", self.kind, get_args(ScopeKind))
        _one_of("scope.allocation", self.allocation, ALLOCATIONS)
        _at_least("scope.min_kept", self.min_kept, 0)
        _at_least("scope.m", self.m, 1)
        _at_least("scope.round_to", self.round_to, 1)
        _one_of("scope.budget", self.budget, get_args(Budget))
        if self.normalise not in (None, *get_args(Normalisation)):
            raise RefusedValue("scope.normalise", self.normalise).because(
                "must be 'size' or 'group', or None for unchanged scores."
            )
        _at_least("scope.n", self.n, 1)
        if not -30 <= _number("scope.power", self.power) <= 30:
            raise RefusedValue("scope.power", self.power).because(
                "must lie in [-30, 30], so that densities are floats."
            )
        if self.n > self.m:
            raise RefusedValue("scope.n", self.n).because(f"must lie in [1, m] = [1, {self.m}]: n of each m are KEPT.")
        if self.kind == "row" and not ALLOCATIONS[self.allocation].by_row:
            by_row = " or ".join(repr(name) for name, row in ALLOCATIONS.items() if row.by_row)
            raise RefusedValue("scope.allocation", self.allocation).because(
                f"ranks whole tensors, not rows; use {by_row}."
            )
        if self.allocation != "each" and self.kind in ("global", "window"):
            raise RefusedValue("scope.allocation", self.allocation).because(
                f"sets what each tensor keeps, which `scope.kind` (={self.kind!r}) decides already; use kind='layer'."
            )
        if self.min_kept and self.kind in ("row", "window"):
            raise RefusedValue("scope.min_kept", self.min_kept).because(
                f"counts units of a whole tensor, but `scope.kind` (={self.kind!r}) counts within each {self.kind}; "
                "leave `scope.min_kept` at 0."
            )
        if self.kind != "window" and (self.n, self.m) != (2, 4):
            raise RefusedValue("scope.n", self.n).because(
                f"and `scope.m` (={self.m}) set what a window keeps, but `scope.kind` (={self.kind!r}) has no windows; "
                "use kind='window'."
            )
        if self.allocation == "given" and not self.densities:
            raise RefusedValue("scope.densities", dict(self.densities)).because(
                "must give each tensor a density with `scope.allocation` given, as in {fc*: 0.1}; pass some, or a file."
            )
        if bool(self.densities) != (self.allocation == "given"):
            raise RefusedValue("scope.densities", dict(self.densities)).because(
                f"goes with allocation='given' only, but `scope.allocation` is {self.allocation!r}; pass both or none."
            )
        for name, density in self.densities.items():
            if not 0 <= _number(f"scope.densities[{name!r}]", density) <= 1:
                raise RefusedValue(f"scope.densities[{name!r}]", density).because(
                    "must lie in [0, 1]: the fraction kept."
                )


def counts_experts(unit: Unit, scope: Scope) -> bool:
    """Return whether a sparsity counts experts: round(s n) of the n experts of each layer, or of each group, go."""
    return unit.kind == "expert" and scope.budget == "channels"


@dataclass(frozen=True)
class Schedule:
    """Final sparsity of one pruning, its number of steps, and the order of the layers.

    Args:
        sparsity: the fraction of all units that is pruned in the end, in [0, 1); None if the scope alone decides it.
        inner: number of steps, each with its own scoring and without training in between; density falls geometrically.
        order: "at_once" scores all tensors before any is pruned; "sequential" prunes block by block, each with the
            inputs that the pruned blocks before it give (`pruning.layerwise`).
    """

    sparsity: float | None = None
    inner: int = 1
    order: Order = "at_once"

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        _at_least("schedule.inner", self.inner, 1)
        _one_of("schedule.order", self.order, get_args(Order))
        targets("geometric", 0.0 if self.sparsity is None else self.sparsity, self.inner)


@dataclass(frozen=True)
class Dynamics:
    """Whether pruned entries may return, or how masks change within a training.

    Args:
        kind: "nested" ranks only survivors; "free" ranks all entries at every re-scoring, pruned entries with the
            weights that they had; any other name in `pruning.catalogue.dynamics` changes masks within a training, as
            does a class of your own derived from `pruning.dynamics.Dynamics`, or its name, package.Class.
        options: arguments of the dynamics, such as `every` of "rigl".
    """

    kind: str | type[Any] = "nested"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse unknown dynamics, options that the dynamics does not take, and values that break an option's rule."""
        if isinstance(self.kind, str) and "." not in self.kind:
            _one_of("dynamics.kind", self.kind, DYNAMICS)
            self.row.refuse(self.options, "dynamics")

    @property
    def row(self) -> DynamicsRow:
        """The row of the catalogue, or one with what a class of your own says of itself."""
        if isinstance(self.kind, str):
            return DYNAMICS.get(self.kind) or own_row(self.kind)
        return own_row(self.kind.__name__, keeps_counts=self.kind.keeps_counts, nested=self.kind.nested)

    def load(self) -> Callable[..., Any]:
        """Return what makes the `pruning.dynamics.Dynamics`, called with the options."""
        made: Callable[..., Any] = self.row.load() if isinstance(self.kind, str) else self.kind
        return made


@dataclass(frozen=True)
class Repair:
    """Change of survivors' values, biases or statistics after a pruning.

    Args:
        kind: a name in `pruning.catalogue.repairs`, or "none".
        options: arguments of the repair, such as `damping` of "obs".
    """

    kind: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse unknown repairs, options that the repair does not take, and values that break an option's rule."""
        _one_of("repair.kind", self.kind, REPAIRS)
        REPAIRS[self.kind].refuse(self.options, "repair")


@dataclass(frozen=True)
class Control:
    """Control experiment that a method must beat.

    Args:
        kind: "shuffle" shuffles the mask within each tensor, "invert" inverts the scores, "none" is no control.
    """

    kind: ControlKind = "none"

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        _one_of("control.kind", self.kind, get_args(ControlKind))


def _one_of(name: str, value: object, kinds: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `kinds`."""
    if value not in kinds:
        raise RefusedValue(name, value).because(f"must be one of {', '.join(kinds)}.")


def _at_least(name: str, value: int, least: int) -> None:
    """Raise TypeError unless `value` is an int, and ValueError if it is below `least`."""
    if not isinstance(cast(object, value), Integral):
        raise RefusedType(name, value).because(f"must be an int, not {type(value).__name__}.")
    if value < least:
        raise RefusedValue(name, value).because(f"must be an int of at least {least}.")


def _number(name: str, value: float) -> float:
    """Return `value`; raise TypeError unless it is a number."""
    if not isinstance(cast(object, value), Real):
        raise RefusedType(name, value).because(f"must be a number, not {type(value).__name__}.")
    return value


Amount: TypeAlias = SupportsFloat
"""Any real number: int, float, numpy scalar, Fraction. Tensors, Decimals and strings are refused."""


def validate_amount(amount: object) -> None:
    """Check an amount as far as possible without the tensor.

    Raises:
        TypeError: `amount` is not a `numbers.Real`.
        ValueError: a float outside [0, 1] (NaN included), or a negative int.
    """
    if not isinstance(amount, Real):
        raise TypeError(
            f"`amount` (={amount!r}) must be an int or a float, not {type(amount).__name__}; "
            "pass a float in [0, 1] to prune a fraction, an int to prune a count."
        )
    if isinstance(amount, Integral):
        if int(amount) < 0:
            raise ValueError(
                f"`amount` (={amount!r}) must not be negative when it is an int; it counts units to prune."
            )
    elif not 0.0 <= float(amount) <= 1.0:
        raise ValueError(f"`amount` (={amount!r}) must lie in [0, 1] when it is a float; pass an int to prune a count.")


def check_amount_fits(amount: Amount, tensor_size: int) -> None:
    """Raise `ValueError` when an int `amount` exceeds `tensor_size`, the number of units that can still be pruned."""
    if isinstance(amount, Integral) and int(amount) > tensor_size:
        raise ValueError(
            f"`amount` (={amount!r}) must not exceed the {tensor_size} units that can still be pruned; "
            "pass a smaller int, or a float in [0, 1] to prune a fraction."
        )


def count_to_prune(amount: Amount, tensor_size: int) -> int:
    """Return the number of units to prune.

        count = amount                          for an int amount
        count = round(amount * tensor_size)     for a float amount, half to even

    Args:
        amount: fraction of the currently unpruned units, or number of units.
        tensor_size: the number of currently unpruned units.
    """
    if isinstance(amount, Integral):
        return int(amount)
    return round(cast(float, amount) * tensor_size)


def resolve_amount(amount: Amount, tensor_size: int) -> int:
    """Return `count_to_prune(amount, tensor_size)`; raise `ValueError` if the count exceeds `tensor_size`."""
    check_amount_fits(amount, tensor_size)
    return count_to_prune(amount, tensor_size)
