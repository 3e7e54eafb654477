"""Schemas and rules of `schedule` and `prune`: how much each round prunes, when, and which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.key_rules import key
from pruning import schedule as schedules
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.value_rules import Rule, is_number, one_of

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
    the pruned blocks before it give; null: `sequential` for sparsegpt and alps, else `at_once`."""
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
    """Class names of the modules whose parameters are pruned."""
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


def given_once(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error unless exactly one of sparsity and amount is given, if the scope needs one of them."""
    sparsity, amount, scope = config["schedule"]["sparsity"], config["schedule"]["amount"], config["scope"]
    dynamics = DYNAMICS.get(str(config["dynamics"].get("kind")))
    if dynamics is not None and not dynamics.has_target and amount is None:
        if sparsity is not None:
            yield (
                f"`schedule.sparsity` (={sparsity}) must be null with dynamics={dynamics.name}, whose threshold and "
                "penalty decide the sparsity; pass schedule.sparsity=null."
            )
        return
    if amount is None and (scope["kind"] == "window" or scope["allocation"] == "given"):
        return
    if (sparsity is None) == (amount is None):
        given, remedy = "neither", "the overall sparsity to end at, or the amount that each round takes."
        if amount is not None:
            given, remedy = "both", "add `schedule.sparsity=null` (a preset may set it) or `schedule.amount=null`."
        yield (
            f"`schedule.sparsity` (={sparsity}) and `schedule.amount` (={amount}) are {given} given; pass exactly one: "
            f"{remedy}"
        )
