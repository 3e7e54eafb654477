"""What a key's value must be, declared beside the key: a dataclass is Hydra's schema and holds the rules of its fields.

A rule over several keys is a static method `across(where, values)` of the dataclass, which yields sentences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from orchestrator.config.well_formed import keys


@dataclass(frozen=True)
class Rule:
    """What must hold of a value, and the rest of a sentence that begins with "`key` (=value) must "."""

    holds: Callable[[Any], bool]
    text: str

    def or_null(self, remedy: str = ", or null") -> Rule:
        """Return the rule that lets null pass, too."""
        return Rule(lambda value: value is None or self.holds(value), f"{self.text}{remedy}")


def key(default: Any, *rules: Rule) -> Any:
    """Return a dataclass field whose values must keep `rules`, of which the first that is broken is said."""
    return field(default_factory=lambda: copy.copy(default), metadata={"rules": rules})


def one_of(*choices: str) -> Rule:
    """Return the rule of a choice."""
    return Rule(lambda value: value in choices, f"be one of {', '.join(choices)}")


def at_least(least: float, remedy: str = "") -> Rule:
    """Return the rule of a number that is not below `least`, nor infinite."""
    return Rule(lambda value: is_number(value) and least <= value < float("inf"), f"be at least {least}{remedy}")


def whole(least: int, remedy: str = "") -> Rule:
    """Return the rule of an integer that is not below `least`."""
    return Rule(lambda value: is_int(value) and value >= least, f"be an integer of at least {least}{remedy}")


def within(remedy: str) -> Rule:
    """Return the rule of a proper fraction."""
    return Rule(lambda value: is_number(value) and 0 < value < 1, f"lie in (0, 1){remedy}")


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: Any) -> bool:
    """Whether it is an int; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


@cache
def _rules(schema: type) -> Mapping[str, tuple[Rule, ...]]:
    return {each.name: each.metadata.get("rules", ()) for each in fields(schema)}


def violations(where: str, schema: type, values: Mapping[str, Any], *, closed: bool = True) -> Iterator[str]:
    """Yield a sentence for each rule of the dataclass `schema` that the plain node named `where` breaks.

    Each quotes key, value, rule and remedy. Keys that are absent are not looked at; nested dataclasses are.

    Args:
        where: dotted path of the node, empty for the root.
        schema: the dataclass.
        values: the node.
        closed: refuse keys that `schema` lacks; not at the root, whose variables may have any name.
    """
    rules, nodes, prefix = _rules(schema), keys(schema), f"{where}." if where else ""
    for name, value in values.items():
        if name not in rules:
            if where and closed:
                yield f"`{prefix}{name}` (={value!r}) is not known; the keys are {', '.join(sorted(rules))}."
            continue
        for rule in rules[name]:
            if not rule.holds(value):
                yield f"`{prefix}{name}` (={value}) must {rule.text}."
                break
        if (nested := nodes[name]) is not None:
            yield from violations(f"{prefix}{name}", nested, value)
    yield from getattr(schema, "across", _nothing)(where, values)


def _nothing(_where: str, _values: Mapping[str, Any]) -> Iterator[str]:
    yield from ()
