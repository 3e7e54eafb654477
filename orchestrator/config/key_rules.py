"""Rules of keys, declared beside the key: a dataclass is Hydra's schema and holds the rules of its fields.

A rule over several keys is a static method `across(where, values)` of the dataclass, which yields sentences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any

from orchestrator.config.well_formed import keys
from pruning.catalogue.value_rules import Rule


def key(default: Any, *rules: Rule) -> Any:
    """Return a dataclass field whose values must keep `rules`, of which the first that is broken is said."""
    return field(default_factory=lambda: copy.copy(default), metadata={"rules": rules})


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
