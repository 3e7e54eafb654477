"""Schemas of what a round prunes: unit, scope, schedule and parameters; and the files with densities of tensors.

The schemas of unit and scope are derived from the engine's dataclasses. A file with densities by total sparsity, for
`scope.densities_file`, is read before planning and is part of the key:

densities:
  0.9:                  # a value of schedule.sparsity
    conv1.weight: 0.55  # fraction of the tensor that is kept
    fc1.weight: 0.04
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from orchestrator.config.key_rules import key
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.redact import redact
from pruning import schedule as schedules
from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.rows import Rule, is_number, one_of
from pruning.choices import axes

MOST_ROUNDS = 10_000
"""Maximum number of rounds: a longer schedule is a typing error, and its plan would fill the memory."""

_SPARSITY = Rule(
    lambda sparsity: sparsity is None or 0.0 <= sparsity < 1.0,
    "lie in [0, 1): the fraction of prunable weights that are zero at the end; pass 0.9 to keep a tenth of them",
)
_PATTERNS = Rule(bool, "hold at least one pattern, or nothing is pruned; pass ['*'] for all")


@dataclass
class Schedule:
    """Pruning schedule: a path to the overall `sparsity` over `rounds`, or the raw `amount` of every round."""

    kind: str = key("geometric", one_of(*schedules.KINDS))
    """Sparsity after round k of n, with s at the end: `geometric` 1 - (1 - s)^(k/n), `linear` s k/n, `cubic`
    s - s (1 - k/n)^3, `one_shot` s in every round."""
    sparsity: float | None = key(None, _SPARSITY)
    """Fraction of prunable weights that are zero at the end; pass exactly one of `sparsity` and `amount`."""
    at: str = key("trained", one_of("start", "trained", "during"))
    """First network to prune: the initialised network, before its training (`start`) or within it (`during`, for a
    `dynamics` that changes masks), or the trained network (`trained`)."""
    inner: int = key(1, Rule(lambda inner: 1 <= inner <= MOST_ROUNDS, f"lie in [1, {MOST_ROUNDS}]"))
    """Scoring steps of a round, without training in between; each masks an equal fraction of the survivors."""
    order: str | None = key(None, one_of("at_once", "sequential").or_null())
    """`at_once` scores all layers before any is pruned; `sequential` prunes block by block, each with the inputs that
    the pruned blocks before it give; null: `sequential` for sparsegpt and alps, and for wanda by rows and windows, else
    `at_once`."""
    rounds: int = key(
        1,
        Rule(lambda rounds: rounds >= 1, "be at least 1; pass 1 to prune in one step"),
        Rule(lambda rounds: rounds <= MOST_ROUNDS, f"be at most {MOST_ROUNDS}; pass 1 to prune in one step"),
    )
    """Number of rounds of pruning and fine-tuning."""
    amount: Any = key(
        None,
        Rule(is_number, "be a number; pass a float for a fraction, an int for a count").or_null(""),
        Rule(
            lambda amount: not isinstance(amount, float) or 0 <= amount <= 1,
            "lie in [0, 1] when it is a float; pass an int to prune a count",
        ),
        Rule(lambda amount: amount is None or amount >= 0, "not be negative; pass 0 to prune nothing"),
    )
    """Amount of every round, as in `torch.nn.utils.prune`: a float is a fraction of the survivors, an int a count."""


@dataclass
class Prune:
    """Parameters that are pruned, by module type and name, and the way in which masks are held."""

    types: list[str] = key(
        ["Linear", *(f"Conv{part}{n}d" for part in ("", "Transpose") for n in (1, 2, 3))],
        _PATTERNS,
    )
    """Class names of the modules whose parameters are pruned. The default takes all weights of layers, recurrent ones,
    packed projections and stacked experts, too; embeddings, heads tied to them and routers stay dense."""
    parameters: list[str] = key(["weight"], _PATTERNS)
    """Names of the parameters in these modules, as in `weight`."""
    include: list[str] = key(["*"], _PATTERNS)
    """Patterns; a parameter's full name must match one of them, as in `conv*`."""
    exclude: list[str] = field(default_factory=list)
    """Patterns; a parameter's full name must match none of them, as in `classifier.*`."""
    holding: str = key("keeper", one_of("keeper", "hooks"))
    """How masks are held during fine-tuning: by a `keeper`, or by `hooks` like those of `torch.nn.utils.prune`."""


def is_identity(method: Mapping[str, Any]) -> bool:
    """Whether a method prunes nothing, and so takes no amount."""
    return method.get("kind") == "identity"


KEY = "densities_file"
NAME: Any = field(
    default=None,
    metadata={
        "meaning": 'YAML or JSON file with densities by total sparsity, for "given"; `schedule.sparsity` selects them. '
        "`pruning-orchestrator allocate` writes such files."
    },
)
"""Field of the key in the schema."""
CLOSE = 1e-9
"""Largest difference of equal sparsities."""


def without_file(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scope without the name of its file, which is no part of a key: the densities are."""
    return {name: value for name, value in scope.items() if name != KEY}


def with_densities(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a trial's configuration with the densities of its file for its sparsity.

    Args:
        config: configuration of a trial, perhaps malformed.

    Raises:
        OrchestratorError: the file cannot be read, has no densities for the sparsity, or nothing can use it.
    """
    scope, schedule = config.get("scope"), config.get("schedule")
    if not isinstance(scope, Mapping) or not isinstance(schedule, Mapping) or scope.get(KEY) is None:
        return config
    name, sparsity = scope[KEY], schedule.get("sparsity")
    said = f"`scope.{KEY}` (={redact(str(name))})"
    if scope.get("allocation") != "given" or scope.get("densities"):
        raise OrchestratorError(f"{said} goes with scope=given, without `scope.densities`; pass scope=given alone.")
    if not isinstance(sparsity, float):
        raise OrchestratorError(
            f"{said} has densities for values of `schedule.sparsity` (={sparsity}); pass one of them, as in "
            "schedule.sparsity=0.9."
        )
    found = _read(said, str(name))
    fits = [densities for level, densities in found.items() if abs(level - sparsity) <= CLOSE]
    if not fits:
        raise OrchestratorError(
            f"{said} has no densities for `schedule.sparsity` (={sparsity}), only for "
            f"{', '.join(f'{level:g}' for level in found)}; pass one of these, or write the file for more."
        )
    return {**config, "scope": {**scope, "densities": fits[0]}}


def _read(said: str, name: str) -> dict[float, dict[str, float]]:
    """Return the densities of a file by sparsity."""
    from omegaconf import OmegaConf  # a tenth of a second, which MLflow's writer spares

    try:
        found = OmegaConf.to_container(OmegaConf.load(os.path.expanduser(name)))
    except Exception as error:  # a parser may raise anything
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OrchestratorError(f"{said} cannot be read: {' '.join(told.split())}; check the path.") from None
    levels = found.get("densities") if isinstance(found, dict) else None
    if not isinstance(levels, dict) or not levels:
        raise OrchestratorError(
            f"{said} must have the key `densities`, with densities by sparsity, as in densities: {{0.9: {{conv*: "
            "0.5, fc*: 0.05}}; pruning-orchestrator allocate writes such files."
        )
    return {_fraction(said, level, "sparsity"): _densities(said, level, each) for level, each in levels.items()}


def _densities(said: str, level: Any, each: Any) -> dict[str, float]:
    if not isinstance(each, dict) or not each:
        raise OrchestratorError(f"{said} must name tensors at sparsity {level}, as in {{conv*: 0.5, fc*: 0.05}}.")
    return {str(name): _fraction(said, value, f"density of {name} at sparsity {level}") for name, value in each.items()}


def _fraction(said: str, value: Any, what: str) -> float:
    try:
        number = math.nan if value is True or value is False else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise OrchestratorError(f"{said} has the {what} {value!r}, which must be a number in [0, 1]; correct it.")
    return number


def schema_of_axis(
    axis: type, *, words: Mapping[str, Collection[str]] | None = None, more: Sequence[tuple[str, Any, Any]] = ()
) -> type:
    """Convert a choice of the engine to a dataclass for OmegaConf: text for literals, dicts for mappings.

    Args:
        axis: a class of `pruning.choices.axes`.
        words: field -> its allowed values, if the engine has a catalogue of them.
        more: name, type and field of keys that only a sweep has.
    """
    hints = get_type_hints(axis)
    made = []
    for each in fields(axis):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        rules = [one_of(*words[each.name])] if words and each.name in words else []
        made.append((each.name, _plain_type(hints[each.name]), key(default, *rules)))
    schema = make_dataclass(axis.__name__, [*made, *more], namespace={"AXIS": axis})
    schema.__module__ = __name__  # where pickle finds it
    return schema


def _plain_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is Mapping:
        return dict[get_args(hint)]  # type: ignore[misc]  # at run time
    if type(None) in get_args(hint):
        (kind,) = (each for each in get_args(hint) if each is not type(None))
        return _plain_type(kind) | None
    return hint


if TYPE_CHECKING:
    Unit: TypeAlias = Any
    Scope: TypeAlias = Any
else:
    Unit = schema_of_axis(axes.Unit)
    Scope = schema_of_axis(axes.Scope, words={"allocation": ALLOCATIONS}, more=[(KEY, str | None, NAME)])
