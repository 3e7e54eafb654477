"""A row of a catalogue: the name of a built-in, where its code is, its options, its needs and its paper.

A family's catalogue is a mapping of names to rows. Whatever must know a built-in reads its row: the engine, the schema
of a configuration, the reference, refusals and the contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

from pruning.catalogue.value_rules import Rule

REQUIRED: Any = Parameter.empty
"""The default of an option that the code has none for."""
Check = Callable[[str, Mapping[str, Any]], Iterator[str]]
"""(place in a configuration, values) -> a sentence for each rule over several options that the values break."""


def load(code: str) -> Any:
    """Import and return what "module:name" says."""
    module, _, name = code.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Option:
    """An argument of a built-in.

    Args:
        name: as the code calls it, and as it is typed.
        type: of its values; an annotation that OmegaConf takes, such as `list[int]` or `int | None`.
        default: that of the code, unless the row says `in_sweeps`.
        meaning: one sentence.
        rules: what a value must keep; the first that is broken is told.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    rules: tuple[Rule, ...] = ()

    def broken(self, value: Any) -> Rule | None:
        """Return the first rule that a value breaks; None if it keeps them all."""
        return next((rule for rule in self.rules if not rule.holds(value)), None)


@dataclass(frozen=True)
class Row:
    """A built-in.

    Args:
        name: as it is typed; unique in its family.
        code: "module:function"; imported when it is used, so that a catalogue needs no torch.
        meaning: one sentence.
        options: what the code takes besides what its whole family takes.
        paper: the source, as in "Lee et al. 2019, arXiv 1810.02340".
        packages: what must be installed besides the project's requirements, by the names that are imported.
        extra: the extra of the project that installs `packages`.
        in_sweeps: option -> its default in a sweep, where that differs from the code's.
        check: rules over several options.
        unlisted: arguments of the code that the engine sets; no sweep has them.
        version: raised when equal arguments come to give other bits; part of the keys of stages.
    """

    FAMILY: ClassVar[str] = "built-in"
    """What messages call a row."""

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
    version: int = 1

    def load(self) -> Any:
        """Import and return the function or class that `code` names."""
        return load(self.code)

    @property
    def takes_fisher_matrix(self) -> bool:
        """Whether the code takes a Fisher matrix that was made before."""
        return "matrix" in self.unlisted

    def refuse_broken(self, options: Mapping[str, Any], place: str = "`{}`") -> None:
        """Raise ValueError for an option whose value breaks a rule.

        Args:
            options: name -> value.
            place: how a message names an option, with {} for its name.
        """
        known = {option.name: option for option in self.options}
        for name, value in options.items():
            if name in known and (rule := known[name].broken(value)):
                raise ValueError(f"{place.format(name)} (={value!r}) must {rule.text}.")

    def refuse(self, options: Mapping[str, Any], place: str = "`{}`") -> None:
        """Raise ValueError for an option that the code does not take, or whose value breaks a rule."""
        taken = [*(option.name for option in self.options), *self.unlisted]
        if unknown := [name for name in options if name not in taken]:
            raise ValueError(
                f"{place.format(unknown[0])} (={options[unknown[0]]!r}) is not taken by the {self.FAMILY} "
                f"{self.name}, which takes {', '.join(taken) or 'no options'}."
            )
        self.refuse_broken(options, place)

    def missing_packages(self) -> list[str]:
        """Return those of `packages` that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


class Named(Protocol):
    """Whatever has a name of its own."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def named(rows: Iterable[R]) -> Mapping[str, R]:
    """Return name -> row; raise ValueError for two rows of one name."""
    found: dict[str, R] = {}
    for row in rows:
        if row.name in found:
            raise ValueError(f"two rows are called {row.name!r}; give each a name of its own.")
        found[row.name] = row
    return MappingProxyType(found)
