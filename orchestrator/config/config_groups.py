"""Groups of a configuration whose options are rows of a catalogue: Hydra's schema of them, and their rules; no torch.

A row becomes a dataclass: the keys that every option of its group has, then the row's own. A component of the user's
own has the first alone: a YAML file, or settings, with a `_target_` and its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.models import COUNT, MODELS, SIZES
from orchestrator.catalogue.tasks import TASKS
from orchestrator.config.key_rules import violations
from orchestrator.config.well_formed import mistyped
from pruning.catalogue.methods import METHODS
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.rows import Check, Option, Row, named
from pruning.catalogue.scores import SCORES
from pruning.catalogue.value_rules import Rule, is_int, whole, within

_KIND = Option("kind", str | None, None, "A built-in one; exactly one of `kind` and `_target_` is given.")
_REPAIR = Option("kind", str | None, None, "Which repair.")
COMPONENT = (
    Option("name", str | None, None, "What reports call it; null: its kind. Not part of the key of a result."),
    _KIND,
    Option("_target_", str | None, None, "Your own: package.module.Thing, which is called with the other keys."),
    Option(
        "depends", list[str], [], "Files and directories that it reads: their contents are part of the key of a result."
    ),
)
"""Keys of every component."""
NETWORK = (
    *COMPONENT,
    Option(
        "weights",
        str | None,
        None,
        "A .safetensors or .pt file, its URI, a folder or a name on the hub of Hugging Face; null: as initialised.",
    ),
    Option("revision", str | None, None, "Branch, tag or commit of a name on the hub."),
    Option(
        "reinitialise",
        list[str],
        [],
        "Patterns on the names of parameters and buffers that keep their initialisation, as in `fc.*`.",
    ),
)
BUILT_IN_NETWORK = (
    *NETWORK,
    Option(
        "input_shape",
        list[int] | None,
        None,
        "Shape of an example without its batch; null: that of the data set.",
        (SIZES.or_null(),),
    ),
    Option("classes", int | None, None, "Number of outputs; null: that of the data set.", (COUNT.or_null(),)),
)
DATA_SET = (
    *COMPONENT,
    Option(
        "val_fraction",
        float | None,
        None,
        "Fraction of the training split that is held out for validation; exactly one of this and `val_size` is given.",
        (within(": models are selected on the validation split").or_null(""),),
    ),
    Option(
        "val_size",
        int | None,
        None,
        "Examples that are held out for validation.",
        (whole(1, ": models are selected on these examples").or_null(""),),
    ),
    Option(
        "split_seed",
        int,
        0,
        "Seed of the cut into training and validation; it does not follow a trial's `seed`.",
        (Rule(lambda value: is_int(value) and 0 <= value < 2**63, "be an integer in [0, 2^63)"),),
    ),
)
_MANY = whole(1).or_null(", or null")
SCORING = (
    *COMPONENT,
    Option(
        "examples",
        int | None,
        None,
        "How many examples of the training split at most, at each re-scoring; null: none, unless `per_class`.",
        (_MANY,),
    ),
    Option("per_class", int | None, None, "How many examples of each class, instead.", (_MANY,)),
    Option("batch_size", int | None, None, "Examples of their batches; null: all in one.", (_MANY,)),
)


def _weights_given(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name in ("revision", "reinitialise"):
        of_path = name == "revision" and values.get("kind") == "huggingface"  # it may be that of `path`
        if values.get(name) and values.get("weights") is None and not of_path:
            yield (
                f"`{where}.{name}` (={values[name]}) is about the weights that the network begins with; pass "
                f"`{where}.weights`, or leave it out."
            )


def _one_cut(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    fraction, size = values.get("val_fraction"), values.get("val_size")
    if fraction is not None and size is not None:
        yield (
            f"`{where}.val_fraction` (={fraction}) and `{where}.val_size` (={size}) are both given; "
            f"pass exactly one: add `{where}.val_fraction=null` or `{where}.val_size=null`."
        )


def _scoring_data(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    examples, per_class = values.get("examples"), values.get("per_class")
    if examples is not None and per_class is not None:
        yield (
            f"`{where}.examples` (={examples}) and `{where}.per_class` (={per_class}) are both given; pass exactly "
            f"one: add `{where}.examples=null` or `{where}.per_class=null`."
        )
    row = SCORES.get(str(values.get("kind")))
    examples = values.get("examples", row.in_sweeps.get("examples") if row else None)
    if row and row.reads_data and examples is None and per_class is None:
        yield (
            f"`{where}.examples` (=null) must be given, or `{where}.per_class`: {row.name} reads data; "
            f"pass {where}.examples=128."
        )


def _scope_elsewhere(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    if "scope" in values:
        yield f"`{where}.scope` (={values['scope']}) is a group of its own; pass scope={values['scope']}."


def _nothing(_where: str, _values: Mapping[str, Any]) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Group:
    """A group of a configuration.

    Args:
        name: as it is typed.
        rows: its built-in options.
        own: keys of a component of the user's own.
        built_in: keys that every built-in option has, before those of its row.
        check: rules over several of these keys.
    """

    name: str
    rows: Mapping[str, Row]
    own: tuple[Option, ...]
    built_in: tuple[Option, ...]
    check: Check = _nothing

    def options(self, row: Row | None) -> Iterator[Option]:
        """Yield the keys of a row's option, of one of the user's own for None, with their defaults in a sweep."""
        if row is None:
            yield from self.own
            return
        for option in (*self.built_in, *row.options):
            default = row.name if option in (_KIND, _REPAIR) else row.in_sweeps.get(option.name, option.default)
            yield Option(option.name, option.type, default, option.meaning, option.rules)


GROUPS: Mapping[str, Group] = named(
    (
        Group("model", MODELS, NETWORK, BUILT_IN_NETWORK, _weights_given),
        Group("data", DATA, DATA_SET, DATA_SET, _one_cut),
        Group("task", TASKS, COMPONENT, COMPONENT),
        Group("score", SCORES, SCORING, SCORING, _scoring_data),
        Group("repair", REPAIRS, (_REPAIR,), (_REPAIR,)),
        Group("method", {n: row for n, row in METHODS.items() if row.in_sweep}, COMPONENT, COMPONENT, _scope_elsewhere),
    )
)
"""Name -> group; what a kind stands for is its row's code."""


OWN = "own"
"""The option of a group that sets nothing but the keys that every component has."""
OPEN = [name for name, group in GROUPS.items() if any(option.name == "_target_" for option in group.own)]
"""Groups that take a component of the user's own."""


def with_own_options(settings: Sequence[str]) -> list[str]:
    """Return settings in which a typed `GROUP._target_` chooses the option `own` of its group, where no other is typed.

    So the keys of the default option do not reach the target, and its own keys need no `+`: `model._target_=mine.net
    model.width=16` becomes `model=own ++model._target_=mine.net ++model.width=16`. A typed option or kind stays, to be
    refused beside the target. A target of null chooses nothing.
    """
    keys = {setting.lstrip("+~").partition("=")[0]: setting.partition("=")[2] for setting in settings}
    found = [*settings]
    for group in OPEN:
        kind, target = (keys.get(f"{group}.{key}", "null") not in ("null", "") for key in ("kind", "_target_"))
        if target and not (kind or group in keys):
            inside = f"{group}."
            found = [f"++{each.lstrip('+')}" if each.lstrip("+").startswith(inside) else each for each in found]
            found.insert(0, f"{group}={OWN}")
    return found


@cache
def schema_of(group: str, kind: str | None) -> type:
    """Return the dataclass of an option of a group; None, or a kind that is not built in, is one of the user's own."""
    parent = GROUPS[group]
    row = parent.rows.get(kind) if kind else None
    checks = [parent.check, *((row.check,) if row and row.check else ())]

    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        for check in checks:
            yield from check(where, values)

    name = f"{group}_{row.name if row else OWN}"
    return dataclass_of(name, parent.options(row), across=staticmethod(across))


def dataclass_of(name: str, options: Iterable[Option], **namespace: Any) -> type:
    """Return options as a dataclass, with their rules and meanings as metadata of its fields."""

    def field_of(option: Option) -> Any:
        metadata = {"rules": option.rules, "meaning": option.meaning}
        return field(default_factory=lambda: copy.copy(option.default), metadata=metadata)

    fields = [(option.name, option.type, field_of(option)) for option in options]
    made = make_dataclass(name, fields, namespace=namespace)
    made.__module__ = __name__  # where pickle finds it, see `__getattr__`
    return made


def __getattr__(name: str) -> type:
    group, _, kind = name.partition("_")
    if group in GROUPS and (kind == OWN or kind in GROUPS[group].rows):
        return schema_of(group, None if kind == OWN else kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def violations_of(group: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that a component breaks; one of the user's own has few."""
    schema = schema_of(group, node.get("kind"))
    yield from [*mistyped(schema, node, f"{group}.")] or violations(group, schema, node, closed=False)
