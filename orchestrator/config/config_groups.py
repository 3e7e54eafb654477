"""Config groups whose options are rows of a catalogue: their schemas for Hydra, and their rules; no torch.

A row becomes a dataclass with the common keys of its group, then the keys of the row. A custom component has only the
common keys: it is a YAML file, or settings, with a `_target_` and its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache, cached_property
from typing import Any

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.models import COUNT, MODELS, SIZES
from orchestrator.catalogue.searches import BUDGET, SEARCHES
from orchestrator.catalogue.tasks import TASKS
from orchestrator.config.key_rules import violations
from orchestrator.config.well_formed import mistyped
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.reconstructions import SOLVERS, Reconstruction
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.rows import Check, Option, Row, Rule, is_int, named, whole, within
from pruning.catalogue.scores import SCORES, ScoreRow

_KIND = Option("kind", str | None, None, "Name of a built-in component; pass exactly one of `kind` and `_target_`.")
_REPAIR = Option("kind", str | None, None, "Name of a repair.")
_DYNAMICS = Option("kind", str | None, None, "Name of a dynamics.")
_SEARCH = Option("kind", str | None, None, "Name of a search.")
COMPONENT = (
    Option("name", str | None, None, "Name in reports; null: the kind. Not part of a result's key."),
    _KIND,
    Option(
        "_target_", str | None, None, "A component of your own, package.module.Thing; it is called with the other keys."
    ),
    Option(
        "depends",
        list[str],
        [],
        "Files and directories that the component reads; their contents are part of a result's key.",
    ),
)
"""Keys that all components have."""
NETWORK = (
    *COMPONENT,
    Option(
        "weights",
        str | None,
        None,
        "A .safetensors, .gguf or .pt file, its URI, a folder, or a name on the hub; null: initial weights.",
    ),
    Option("revision", str | None, None, "Branch, tag or commit of a name on the hub."),
    Option(
        "reinitialise",
        list[str],
        [],
        "Patterns for parameters and buffers that keep their initial values, as in `fc.*`.",
    ),
)
BUILT_IN_NETWORK = (
    *NETWORK,
    Option(
        "input_shape",
        list[int] | None,
        None,
        "Shape of an example without the batch dimension; null: the shape in the data set.",
        (SIZES.or_null(),),
    ),
    Option(
        "classes",
        int | None,
        None,
        "Number of outputs; null: the number of classes in the data set.",
        (COUNT.or_null(),),
    ),
)
DATA_SET = (
    *COMPONENT,
    Option(
        "val_fraction",
        float | None,
        None,
        "Fraction of the training split held out for validation; pass exactly one of this and `val_size`.",
        (within(": models are selected on the validation split").or_null(""),),
    ),
    Option(
        "val_size",
        int | None,
        None,
        "Number of examples held out for validation.",
        (whole(1, ": models are selected on these examples").or_null(""),),
    ),
    Option(
        "split_seed",
        int,
        0,
        "Seed of the split into training and validation; independent of a trial's `seed`.",
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
        "Maximum number of training examples for each scoring; null: none, or `per_class`.",
        (_MANY,),
    ),
    Option("per_class", int | None, None, "Number of examples of each class, in place of `examples`.", (_MANY,)),
    Option("batch_size", int | None, None, "Examples in a batch for scoring; null: one batch.", (_MANY,)),
    Option(
        "calibrate_all_experts",
        bool,
        False,
        "Layer by layer, every token counts for every stacked expert of a mixture, also for those that get few tokens.",
        later=True,
    ),
)


def _weights_given(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    for name in ("revision", "reinitialise"):
        of_path = name == "revision" and "path" in values  # may belong to `path`
        if values.get(name) and values.get("weights") is None and not of_path:
            yield (
                f"`{where}.{name}` (={values[name]}) is for the initial weights of the network; pass "
                f"`{where}.weights`, "
                f"or leave `{where}.{name}` out."
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
    row = _RANKING.get(str(values.get("kind")))
    examples = values.get("examples", row.in_sweeps.get("examples") if row else None)
    if row and row.reads_data and examples is None and per_class is None:
        yield (
            f"`{where}.examples` (=null) must be given, or `{where}.per_class`: {row.name} reads data; "
            f"pass {where}.examples=128."
        )


def _scope_elsewhere(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    if "scope" in values:
        yield f"`{where}.scope` (={values['scope']}) is a group; pass scope={values['scope']}."


def _nothing(_where: str, _values: Mapping[str, Any]) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Group:
    """Config group.

    Args:
        name: the name as it is typed.
        rows: the built-in options.
        own: the keys of a custom component.
        built_in: the keys that every built-in option has, before the keys of its row.
        check: rules over several of these keys.
    """

    name: str
    rows: Mapping[str, Row]
    own: tuple[Option, ...]
    built_in: tuple[Option, ...]
    check: Check = _nothing

    def options(self, row: Row | None) -> tuple[Option, ...]:
        """Return the keys of a row, or of a custom component for None, with their defaults in a sweep."""
        return self.own if row is None else self._options_of_rows[row.name]

    @cached_property
    def _options_of_rows(self) -> Mapping[str, tuple[Option, ...]]:
        """Name of a row -> its keys: made once, as a plan asks for them many times a trial."""
        return {name: tuple(self._options_of(row)) for name, row in self.rows.items()}

    def _options_of(self, row: Row) -> Iterator[Option]:
        for option in (*self.built_in, *row.options):
            if option.name in row.elsewhere:
                continue
            default = row.name if option.name == "kind" else row.in_sweeps.get(option.name, option.default)
            yield replace(option, default=default)


_RANKING: Mapping[str, ScoreRow | Reconstruction] = {**SCORES, **SOLVERS}
GROUPS: Mapping[str, Group] = named(
    (
        Group("model", MODELS, NETWORK, BUILT_IN_NETWORK, _weights_given),
        Group("data", DATA, DATA_SET, DATA_SET, _one_cut),
        Group("task", TASKS, COMPONENT, COMPONENT),
        Group("score", _RANKING, SCORING, SCORING, _scoring_data),
        Group("dynamics", DYNAMICS, COMPONENT, (_DYNAMICS,)),
        Group("repair", REPAIRS, (_REPAIR,), (_REPAIR,)),
        Group("method", {n: row for n, row in METHODS.items() if row.in_sweep}, COMPONENT, COMPONENT, _scope_elsewhere),
        Group("search", SEARCHES, (*COMPONENT, *BUDGET), (_SEARCH,)),
    )
)
"""Name -> group."""
OF_STAGES: Mapping[str, Group] = {name: group for name, group in GROUPS.items() if name != "search"}
"""Groups whose components decide the results of stages."""


OWN = "own"
"""Option of a group that sets only the keys that all components have."""
OPEN = [name for name, group in GROUPS.items() if any(option.name == "_target_" for option in group.own)]
"""Groups that take a custom component."""


def with_own_options(settings: Sequence[str]) -> list[str]:
    """Choose the option `own` for each group with a typed `GROUP._target_` and no typed option or kind.

    The keys of the default option then do not reach the target, and the target's keys need no `+`:
    `model._target_=mine.net model.width=16` becomes `model=own ++model._target_=mine.net ++model.width=16`. A typed
    option or kind stays, and is refused later. A target of null chooses nothing.
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
    """Return the dataclass of a built-in kind; None, or an unknown kind, gives the one of a custom component."""
    parent = GROUPS[group]
    row = parent.rows.get(kind) if kind else None
    checks = [parent.check, *((row.check,) if row and row.check else ())]

    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        for check in checks:
            yield from check(where, values)

    name = f"{group}_{row.name if row else OWN}"
    return dataclass_of(name, parent.options(row), across=staticmethod(across))


def dataclass_of(name: str, options: Iterable[Option], **namespace: Any) -> type:
    """Return a dataclass with a field for each option; rules and meanings are metadata of the fields."""

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
    """Yield a sentence for each rule that a component breaks; a custom component has few rules."""
    schema = schema_of(group, node.get("kind"))
    yield from [*mistyped(schema, node, f"{group}.")] or violations(group, schema, node, closed=False)
