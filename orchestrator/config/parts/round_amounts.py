"""How much rounds prune, of what, and when: plain dataclasses, and what is said of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.key_rules import key
from pruning import schedule as schedules
from pruning.catalogue.value_rules import Rule, is_number, one_of

MOST_ROUNDS = 10_000
"""A longer schedule is a slip of the keyboard, and its plan would fill the memory."""

_SPARSITY = Rule(
    lambda sparsity: sparsity is None or 0.0 <= sparsity < 1.0,
    "lie in [0, 1): it is the fraction of prunable weights that are zero in the end; pass 0.9 to keep a tenth of them",
)
_PATTERNS = Rule(bool, "hold a pattern, or nothing is pruned; pass ['*'] to take every one")


@dataclass
class Schedule:
    """What each round prunes: a path to the overall `sparsity` over `rounds`, or the raw `amount` of every round."""

    kind: str = key("geometric", one_of(*schedules.KINDS))
    """How sparsity grows over the rounds, s in the end and k of n done: `geometric` 1 - (1 - s)^(k/n), `linear` s k/n,
    `cubic` s - s (1 - k/n)^3, `one_shot` s in every round."""
    sparsity: float | None = key(None, _SPARSITY)
    """The fraction of what is prunable that is zero in the end; exactly one of `sparsity` and `amount` is given."""
    at: str = key("trained", one_of("start", "trained"))
    """What is pruned first: the network as it is initialised, which is trained then, or the trained one."""
    inner: int = key(1, Rule(lambda inner: 1 <= inner <= MOST_ROUNDS, f"lie in [1, {MOST_ROUNDS}]"))
    """How often a round scores anew without training, masking an equal fraction of what is left each time."""
    rounds: int = key(
        1,
        Rule(lambda rounds: rounds >= 1, "be at least 1; pass 1 to prune in one step"),
        Rule(lambda rounds: rounds <= MOST_ROUNDS, f"be at most {MOST_ROUNDS}; pass 1 to prune in one step"),
    )
    """Rounds of pruning and fine-tuning."""
    amount: Any = key(
        None,
        Rule(is_number, "be a number; pass a float for a fraction, an int for a count").or_null(""),
        Rule(
            lambda amount: not isinstance(amount, float) or 0 <= amount <= 1,
            "lie in [0, 1] when it is a float; pass an int to prune a count",
        ),
        Rule(lambda amount: amount is None or amount >= 0, "not be negative; pass 0 to prune nothing"),
    )
    """What every round takes as `torch.nn.utils.prune` means it: a float is a fraction of what is left, an int a
    count."""


@dataclass
class Prune:
    """Which parameters are pruned, by module type and name, less what the patterns leave out, and how they are held."""

    types: list[str] = key(
        ["Linear", *(f"Conv{part}{n}d" for part in ("", "Transpose") for n in (1, 2, 3))],
        _PATTERNS,
    )
    """Class names of the modules whose parameters are pruned."""
    parameters: list[str] = key(["weight"], _PATTERNS)
    """Names of their parameters, as in `weight`."""
    include: list[str] = key(["*"], _PATTERNS)
    """Patterns of which one must fit a parameter's full name, as in `conv*`."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of which none may fit it, as in `classifier.*`."""
    holding: str = key("keeper", one_of("keeper", "hooks"))
    """What holds the masks while fine-tuning: a `keeper`, or `hooks`, which are as those of `torch.nn.utils.prune`."""


def is_identity(method: Mapping[str, Any]) -> bool:
    """Whether a method prunes nothing and so takes no amount."""
    return method.get("kind") == "identity"


def given_once(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong where not exactly one of a sparsity and an amount is given, or none that is needed."""
    sparsity, amount, scope = config["schedule"]["sparsity"], config["schedule"]["amount"], config["scope"]
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
