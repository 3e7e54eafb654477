"""Rules of keys: a dataclass is Hydra's schema, and also holds the rules of its fields.

Rules over several keys are in a static method `across(where, values)` of the dataclass, which yields sentences.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from orchestrator.config.well_formed import keys
from pruning.catalogue.rows import Rule


@dataclass(frozen=True)
class Unread:
    """When no result depends on a setting.

    Args:
        unless: the key of the same node without which the setting is not read; None: no result ever depends on it.
        at_default: whether the key of a stage then holds the default; otherwise the setting is absent.
    """

    unless: str | None = None
    at_default: bool = False


def key(default: Any, *rules: Rule, unread: Unread | None = None, meaning: str = "") -> Any:
    """Return a dataclass field with a default and rules; `violations` reports the first broken rule.

    Args:
        default: the default.
        rules: rules of the value.
        unread: when the setting is left out of the keys of stages; None: never.
        meaning: what the reference says of it, in place of a docstring.
    """
    metadata = {"rules": rules, "unread": unread, "meaning": meaning}
    return field(default_factory=lambda: copy.copy(default), metadata=metadata)


@cache
def _rules(schema: type) -> Mapping[str, tuple[Rule, ...]]:
    return {each.name: each.metadata.get("rules", ()) for each in fields(schema)}


def violations(where: str, schema: type, values: Mapping[str, Any], *, closed: bool = True) -> Iterator[str]:
    """Yield a sentence for each rule of `schema` that a plain node breaks: key, value, rule and remedy.

    Absent keys are ignored. Nested dataclasses are checked as well.

    Args:
        where: the dotted path of the node, empty for the root.
        schema: the dataclass.
        values: the node.
        closed: refuse unknown keys; never at the root, where variables may have any name.
    """
    rules, nodes, prefix = _rules(schema), keys(schema), f"{where}." if where else ""
    for name, value in values.items():
        if name not in rules:
            if where and closed:
                yield f"`{prefix}{name}` (={value!r}) is not a key; the keys are {', '.join(sorted(rules))}."
            continue
        for rule in rules[name]:
            if not rule.holds(value):
                yield f"`{prefix}{name}` (={value}) must {rule.demand(value)}."
                break
        if (nested := nodes[name]) is not None:
            yield from violations(f"{prefix}{name}", nested, value)
    if across := getattr(schema, "across", None):
        yield from across(where, values)
