"""Cells, groups and rows of the tables on docs/does-it-pay.md. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from orchestrator.planning.number_formats import ratio_interval

Record = Mapping[str, Any]
Recorded = Mapping[str, Any]
"""A measurement of the record."""
PAYS = 1.05
"""A speed-up counts if its interval lies above this: some of hundreds of intervals lie above 1 by chance."""


def pays(cell: Recorded) -> bool:
    """Whether the interval of a speed-up lies above `PAYS`."""
    return bool(cell["low"] is not None and cell["low"] > PAYS)


def geometric_mean(cells: Sequence[Recorded]) -> float:
    """Return the geometric mean of the speed-ups."""
    return math.exp(fmean(math.log(cell["speedup"]) for cell in cells))


def speedup(cell: Recorded) -> str:
    """Return a speed-up with its interval, bold if it pays."""
    text = ratio_interval(cell["speedup"], cell["low"], cell["high"])
    return f"**{text}**" if pays(cell) else text


def pattern(cell: Recorded) -> str:
    """Return the pattern with its sparsity, such as `unstructured 90%`."""
    return f"{cell['pattern']} {percent(cell['sparsity'])}"


def percent(fraction: float) -> str:
    """Return a fraction in percent."""
    return f"{100 * fraction:g}%"


def chosen(cells: Sequence[Recorded], **fields: Any) -> list[Recorded]:
    """Return the cells with these values."""
    return [cell for cell in cells if all(cell[name] == value for name, value in fields.items())]


def names(cells: Sequence[Recorded], key: str) -> list[str]:
    """Return the values of a field, in order."""
    return list(dict.fromkeys(str(cell[key]) for cell in cells))


def groups(cells: Sequence[Recorded], key: str) -> Iterator[tuple[str, list[Recorded]]]:
    """Yield each value of a field with its cells."""
    for name in names(cells, key):
        yield name, [cell for cell in cells if cell[key] == name]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, and an empty one."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
