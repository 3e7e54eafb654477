"""Rows of the engine's catalogues: the code of each row exists and takes the row's options."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import pruning
from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.reconstructions import RECONSTRUCTIONS
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.rows import REQUIRED, Option, Row, above, named
from pruning.catalogue.scores import SCORES
from pruning.choices.published import PUBLISHED

FIRST: Mapping[str, list[str]] = {
    "score": ["given"],
    "repair": ["given", "kept"],
    "method": [],
    "dynamics": [],
    "reconstruction": ["problem"],
    "allocation": ["shapes", "sizes", "density"],
}
"""Family -> arguments of its code before the options of a row."""
BY_ENGINE = {"method": {"amount", "mask"}}
"""Family -> arguments that the engine sets for every row."""
ROWS = [
    row
    for family in (SCORES, REPAIRS, METHODS, ALLOCATIONS, DYNAMICS, RECONSTRUCTIONS)
    for row in family.values()
    if row.code
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.FAMILY}-{row.name}")
def test_a_row_says_what_its_code_takes(row: Row) -> None:
    signature = inspect.signature(row.load()).parameters
    taken = {name: each for name, each in signature.items() if each.kind is not each.VAR_KEYWORD}
    for name in FIRST[row.FAMILY]:
        del taken[name]
    for name in {*row.unlisted, *BY_ENGINE.get(row.FAMILY, ())}:
        taken.pop(name, None)

    assert set(taken) == {option.name for option in row.options}
    for option in row.options:
        default = taken[option.name].default
        if row.FAMILY == "repair":  # null stands for the code's default
            assert option.default is None
        else:
            assert option.default == default or (option.default is REQUIRED and default is inspect.Parameter.empty)
        given = row.in_sweeps.get(option.name, option.default)
        assert given is REQUIRED or option.broken(given) is None, f"the default of {option.name} breaks its own rule"
        assert option.meaning.endswith((".", ";"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.FAMILY}-{row.name}")
def test_a_module_is_not_called_as_a_row(row: Row) -> None:
    """Importing a module named like a score or a dynamics would replace its function in the package."""
    module, _, _ = row.code.partition(":")

    called: Mapping[str, Mapping[str, Row]] = {"score": SCORES, "dynamics": DYNAMICS}
    assert module.rpartition(".")[2] not in called.get(row.FAMILY, {})


@pytest.mark.parametrize("name", list(pruning.dynamics.DYNAMICS))
def test_a_row_of_dynamics_says_what_its_code_says(name: str) -> None:
    row = DYNAMICS[name]
    made = row.load()(
        **{option.name: 0.5 for option in row.options if option.default is REQUIRED or option.name == "sparsity"}
    )

    assert (made.keeps_counts, made.nested) == (row.keeps_counts, row.nested)
    assert {option.name for option in row.options} >= set(row.elsewhere)


def test_papers_are_written_in_one_way() -> None:
    for row in (*ROWS, *PUBLISHED.values()):
        for source in filter(None, row.paper.split("; ")):
            assert re.fullmatch(r"[\w,& .-]+ \d{4}(, arXiv \d{4}\.\d{4,5})?", source), row.name


def test_a_broken_rule_and_an_unknown_option_are_told() -> None:
    row = Row("cut", "pruning:prune", "cuts", (Option("depth", float, 1.0, "How deep.", (above(0, " mm"),)),))

    row.refuse({"depth": 2.0})
    with pytest.raises(ValueError, match=r"`depth` \(=-1\) must be above 0 mm\."):
        row.refuse({"depth": -1})
    with pytest.raises(ValueError, match=r"`a\.width` \(=3\) is not taken by the built-in cut, which takes depth\."):
        row.refuse({"width": 3}, "a")
    with pytest.raises(ValueError, match=r"`name` \(='cut'\) must be unique"):
        named((row, row))


def test_the_catalogues_need_no_torch() -> None:
    modules = [f"pruning.catalogue.{path.stem}" for path in Path(inspect.getfile(Row)).parent.glob("*.py")]
    modules = [*(module for module in modules if "__" not in module), "pruning.choices.published"]
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"

    assert len(modules) >= 8
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
