"""Rows of catalogues: the name of a built-in, the place of its code, its options with rules for values, and its paper.

The catalogue of a family maps names to rows. The engine, the schema of a configuration, the reference pages, error
messages and the contract tests all read the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeGuard, TypeVar

from pruning.refused import RefusedValue, UnknownOption

LARGEST = 2**63 - 1
"""Largest integer of 64 bits, which records and tensors hold."""


@dataclass(frozen=True)
class Rule:
    """A condition on a value.

    Args:
        holds: whether a value keeps the rule.
        text: the rest of a sentence that begins with "`key` (=value) must ".
        largest: largest integer that keeps the rule, if `text` does not say so.
    """

    holds: Callable[[Any], bool]
    text: str
    largest: int | None = None

    def demand(self, value: Any) -> str:
        """Return the rest of the sentence for a value that breaks the rule."""
        is_beyond = self.largest is not None and is_int(value) and value > self.largest
        return f"be at most {self.largest}" if is_beyond else self.text

    def or_null(self, remedy: str = ", or null") -> Rule:
        """Return a rule that also accepts null."""
        return Rule(lambda value: value is None or self.holds(value), f"{self.text}{remedy}", self.largest)


def one_of(*choices: str) -> Rule:
    """Return the rule that a value is one of several words."""
    return Rule(lambda value: value in choices, f"be one of {', '.join(choices)}")


def at_least(least: float, remedy: str = "") -> Rule:
    """Return the rule that a value is a finite number of at least `least`; an integer has 64 bits."""
    return Rule(
        lambda value: is_number(value) and least <= value < float("inf"), f"be at least {least}{remedy}", LARGEST
    )


def above(least: float, remedy: str = "") -> Rule:
    """Return the rule that a value is a finite number above `least`; an integer has 64 bits."""
    return Rule(lambda value: is_number(value) and least < value < float("inf"), f"be above {least}{remedy}", LARGEST)


def whole(least: int, remedy: str = "") -> Rule:
    """Return the rule that a value is an integer of at least `least`, in 64 bits."""
    text = f"be an integer of at least {least}{remedy}"
    return Rule(lambda value: is_int(value) and least <= value <= LARGEST, text, LARGEST)


def within(remedy: str) -> Rule:
    """Return the rule that a value is a fraction strictly between 0 and 1."""
    return Rule(lambda value: is_number(value) and 0 < value < 1, f"lie in (0, 1){remedy}")


def is_number(value: Any) -> bool:
    """Return whether a value is an int of 64 bits or a float, but not a bool."""
    return isinstance(value, float) or (is_int(value) and abs(value) <= LARGEST)


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


REQUIRED: Any = Parameter.empty
"""The default of an option that must be given."""
BaselineRole: TypeAlias = Literal["", "random", "magnitude"]
"""Role of a built-in in comparisons: the random control, the baseline of the smallest weights, or none."""
Check = Callable[[str, Mapping[str, Any]], Iterator[str]]
"""(place in a configuration, values) -> an error sentence for each broken rule over several options."""


def load(code: str) -> Any:
    """Import a module and return one of its attributes, from "module:name"."""
    module, _, name = code.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Option:
    """An argument of a built-in.

    Args:
        name: the argument's name in the code, which users type.
        type: type of its values, an annotation that OmegaConf accepts, such as `list[int]` or `int | None`.
        default: the default in the code; `in_sweeps` of the row may replace it in sweeps.
        meaning: one sentence.
        rules: conditions on a value; an error names the first broken one.
        later: whether stages' keys leave the option out at its default, because there are keys from before it existed.
        stored: rule for a value that a saved sweep names, if it is stricter than `rules`: anybody may have written it.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    rules: tuple[Rule, ...] = ()
    later: bool = False
    stored: Rule | None = None

    def broken(self, value: Any) -> Rule | None:
        """Return the first rule that a value breaks, or None."""
        return next((rule for rule in self.rules if not rule.holds(value)), None)


@dataclass(frozen=True)
class Row:
    """A built-in.

    Args:
        name: the name that users type; unique in its family.
        code: "module:function"; imported on first use, so that a catalogue needs no torch.
        meaning: one sentence.
        options: arguments of the code in addition to those of its whole family.
        paper: the source, such as "Lee et al. 2019, arXiv 1810.02340".
        packages: import names of packages that the code needs in addition to the project's requirements.
        extra: the extra of the project that installs `packages`.
        in_sweeps: option -> its default in a sweep, if that differs from the default in the code.
        check: rules over several options.
        unlisted: arguments of the code that only the engine sets; sweeps do not have them.
        elsewhere: option -> the key that sets it in a sweep, outside of the row's group.
        when_stored: option -> its value when the network of a saved sweep is rebuilt, whatever the sweep says.
        version: raised when equal arguments give different bits than before; part of the keys of stages.
    """

    FAMILY: ClassVar[str] = "built-in"
    """Name of the family in messages."""

    name: str
    code: str
    meaning: str
    options: tuple[Option, ...] = ()
    paper: str = ""
    packages: tuple[str, ...] = ()
    extra: str = ""
    in_sweeps: Mapping[str, Any] = field(default_factory=dict)
    check: Check | None = None
    unlisted: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    when_stored: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1

    def load(self) -> Any:
        """Import and return the function or class that `code` names."""
        return load(self.code)

    @property
    def takes_fisher_matrix(self) -> bool:
        """Whether the code accepts a Fisher matrix computed before."""
        return "matrix" in self.unlisted

    def refuse_broken(self, options: Mapping[str, Any], choice: str = "") -> None:
        """Raise ValueError for an option whose value breaks a rule.

        Args:
            options: name -> value.
            choice: the choice that the options belong to, as in `score`; empty for arguments.
        """
        known = {option.name: option for option in self.options}
        for name, value in options.items():
            if name in known and (rule := known[name].broken(value)):
                raise RefusedValue(_key(choice, name), value).because(f"must {rule.demand(value)}.")

    def refuse(self, options: Mapping[str, Any], choice: str = "") -> None:
        """Raise ValueError for an option that the code does not take, or whose value breaks a rule."""
        taken = [*(option.name for option in self.options), *self.unlisted]
        refuse_unknown(options, taken, f"{self.FAMILY} {self.name}", choice)
        self.refuse_broken(options, choice)

    def missing_packages(self) -> list[str]:
        """Return the packages of `packages` that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


def refuse_unknown(options: Mapping[str, Any], taken: Collection[str], code: str, choice: str = "") -> None:
    """Raise ValueError for an option that the code, such as "score obs", does not take."""
    if unknown := [name for name in options if name not in taken]:
        raise UnknownOption(_key(choice, unknown[0]), options[unknown[0]]).because(
            f"is not taken by the {code}, which takes {', '.join(taken) or 'no options'}."
        )


def _key(choice: str, name: str) -> str:
    return f"{choice}.{name}" if choice else name


class Named(Protocol):
    """An object with a name."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def named(rows: Iterable[R]) -> Mapping[str, R]:
    """Return name -> row; raise ValueError if two rows have the same name."""
    found: dict[str, R] = {}
    for row in rows:
        if row.name in found:
            raise ValueError(f"`name` (={row.name!r}) must be unique, but two rows have it; rename one row.")
        found[row.name] = row
    return MappingProxyType(found)
