"""The choices that a pruning method is made of, as groups of a configuration: plain dataclasses, no torch.

What their values may be, and how they go together, `pruning.choices.axes` says: a choice here is typed for Hydra, and
`violations` quotes what the engine refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pruning.choices import axes
from pruning.choices.published import PUBLISHED

RANKING = "l1_unstructured"
"""The method that ranks by `score`, as one without a kind does; those of any other kind decide by themselves."""
OF_SCORE = ("name", "kind", "_target_", "depends", "examples", "per_class", "batch_size")
"""Keys of a score that are no arguments of its function."""
CHOICES = ("score", "unit", "scope", "dynamics", "repair")
"""The groups that say how a round ranks."""
OF_GROUPS = ("budget", "round_to")
"""Keys of a scope that dependency groups alone take: those of other units are refused any value but the default."""


@dataclass
class Unit:
    """What goes at once; see `pruning.choices.axes.Unit`."""

    kind: str = "entry"
    size: int = 4
    dim: int = 0
    reduce: str = "sum"
    spare_last: bool = False


@dataclass
class Scope:
    """Among which units is ranked, and how many each tensor keeps; see `pruning.choices.axes.Scope`."""

    kind: str = "layer"
    allocation: str = "each"
    power: float = 1.0
    densities: dict[str, float] = field(default_factory=dict)
    normalise: str | None = None
    min_kept: int = 0
    n: int = 2
    m: int = 4
    budget: str = "channels"
    round_to: int = 1


@dataclass
class Dynamics:
    """Whether entries return; see `pruning.choices.axes.Dynamics`."""

    kind: str = "nested"


@dataclass
class Repair:
    """What happens to the survivors; see `pruning.choices.axes.Repair`."""

    kind: str = "none"
    damping: float | None = None


def scored_as(score: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """Return a score with the mode of BatchNorm that null stands for, by when the network is pruned."""
    if score.get("batch_norm", "") is not None:
        return score
    return {**score, "batch_norm": "train" if at == "start" else "eval"}


def called(method: Mapping[str, Any], score: Mapping[str, Any]) -> str | None:
    """Return what reports call a method: one that is a score alone goes by that which is chosen instead."""
    name, kind = method.get("name"), score.get("kind")
    published = PUBLISHED.get(str(name))
    if decides_itself(method) or (published is None and method.get("kind") != RANKING):
        return name
    usual = published.score.kind if published else "magnitude"
    if kind == usual:
        return name
    instead = score.get("name") or str(score.get("_target_")).rpartition(".")[2]
    if method.get("kind") == RANKING or published == axes.Choices(axes.Score(usual)):
        return instead
    return f"{name}, score={instead}"


def decides_itself(method: Mapping[str, Any]) -> bool:
    """Whether a method is a class that chooses entries by itself, and not by the choices."""
    return method.get("_target_") is not None or method.get("kind") not in (None, RANKING)


def published_at_start(config: Mapping[str, Any]) -> bool:
    """Whether the paper of a trial's method prunes the network as it is initialised."""
    published = PUBLISHED.get(str(config["method"].get("name")))
    return published is not None and published.schedule.at == "start"


def choices_of(
    parts: Mapping[str, Any],
    *,
    score: Callable[..., Any] | None = None,
    sparsity: float | None = None,
    at: str = "trained",
    inner: int = 1,
    control: str = "none",
) -> axes.Choices:
    """Return what the groups of a configuration, or fields of a round, choose; what is absent is as in the engine.

    Args:
        parts: `CHOICES` by name.
        score: the function that `score._target_` names.
        sparsity: what this round prunes to, in units.
        at, inner: of the schedule.
        control: "invert" turns the scores round; any other is not the ranking's.

    Raises:
        ValueError: they cannot be meant, or not together.
    """
    node: Mapping[str, Any] = parts.get("score", {"kind": "magnitude"})
    options = {name: value for name, value in node.items() if name not in OF_SCORE}
    return axes.Choices(
        score=axes.Score(score or str(node.get("kind") or node.get("_target_")), options),
        unit=axes.Unit(**parts.get("unit", {})),
        scope=axes.Scope(**parts.get("scope", {})),
        schedule=axes.Schedule(sparsity=sparsity, inner=inner, at=at),  # type: ignore[arg-type]
        dynamics=axes.Dynamics(**parts.get("dynamics", {})),
        repair=axes.Repair(**parts.get("repair", {})),
        restart=axes.Restart(control="invert" if control == "invert" else "none"),
    )


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for what the choices of a configuration cannot be, by themselves or together."""
    schedule = config["schedule"]
    try:
        choices = choices_of(config, at=schedule["at"], inner=schedule["inner"])
    except (ValueError, TypeError) as error:
        yield str(error)
        return
    if decides_itself(config["method"]):
        yield from _of_a_class(config, choices)
        return
    of_magnitudes = config["method"].get("kind") == RANKING and choices.score.kind == "magnitude"
    if schedule["amount"] is not None and not of_magnitudes:
        yield (
            f"`schedule.amount` (={schedule['amount']}) is what a class such as method={RANKING} takes, and "
            f"`score` (={_named(config['score'])}) ranks to a sparsity; pass schedule.sparsity, and "
            "schedule.amount=null."
        )
    elif schedule["amount"] is not None:
        yield from _of_a_class(config, choices)
    scope, rounds, sparsity = choices.scope, schedule["rounds"], schedule["sparsity"]
    if scope.kind == "window":
        exact = 1 - scope.n / scope.m
        if rounds > 1 or (sparsity is not None and abs(sparsity - exact) > 1e-9):
            yield (
                f"`schedule.sparsity` (={sparsity}) over `schedule.rounds` (={rounds}) must be {exact:g} in one, where "
                f"scope=window keeps {scope.n} of each {scope.m}; pass schedule=one_shot schedule.sparsity={exact:g}."
            )
    if scope.allocation == "given" and sparsity is not None:
        yield (
            f"`schedule.sparsity` (={sparsity}) must be null with scope.allocation=given, where `scope.densities` say "
            "what is kept; pass schedule.sparsity=null."
        )


def _of_a_class(config: Mapping[str, Any], choices: axes.Choices) -> Iterator[str]:
    """Yield what is chosen beside a class that needs none of it."""
    plain, method = axes.Choices(), config["method"]
    named = method.get("name") or method.get("kind") or method.get("_target_")
    if config["schedule"]["amount"] is not None and not decides_itself(method):
        named = f"{named} with schedule.amount"
    chosen = {
        "score": (choices.score.kind, plain.score.kind),
        "unit": (choices.unit.kind, plain.unit.kind),
        "scope.allocation": (choices.scope.allocation, plain.scope.allocation),
        "dynamics": (choices.dynamics.kind, plain.dynamics.kind),
        "repair": (choices.repair.kind, plain.repair.kind),
        "schedule.inner": (choices.schedule.inner, plain.schedule.inner),
    }
    for name, (value, default) in chosen.items():
        if value != default:
            yield (
                f"`{name}` (={value}) says how a score ranks, and `method` (={named}) is a class that decides by "
                f"itself; pass method=magnitude, or leave out `{name}`."
            )
    if choices.scope.kind not in ("layer", "global"):
        yield (
            f"`scope` (={choices.scope.kind}) says how a score ranks, and `method` (={named}) is a class that takes "
            "layer or global alone; pass method=magnitude, or another scope."
        )
    if choices.scope.kind == "global" and str(method.get("kind")).endswith("_structured"):
        yield (
            f"`scope` (=global) ranks single entries of all tensors, and {method['kind']} takes whole channels of one; "
            "pass scope=layer, or method=magnitude unit=channel."
        )


def _named(score: Mapping[str, Any]) -> Any:
    return score.get("kind") or score.get("_target_")
