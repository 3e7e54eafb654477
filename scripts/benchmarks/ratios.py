"""Ratios of a benchmark: two implementations timed in turns, rows with bars, and their table."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Action = Callable[[], Any]
Case = Callable[[], Action]
"""Prepares a case, and returns the function to time."""


@dataclass(frozen=True)
class Row:
    """Row of the table; `theirs` and `ours` are in `unit`, `bar` is None without a bar."""

    what: str
    theirs: float
    ours: float
    unit: str
    ratio: float
    bar: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the bar is met, if there is one."""
        return self.bar is None or (self.ratio >= self.bar if self.at_least else self.ratio <= self.bar)

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"{'>=' if self.at_least else '<='} {self.bar:g}"
        figures = f"{self.theirs:12.3f} {self.ours:12.3f} {self.unit:<5} {self.ratio:8.2f}"
        return f"{self.what:<64} {figures}  {bar:<8}{'' if self.met else 'SHORT'}".rstrip()


def interleaved(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Return the median seconds of each case, one run of each in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            action = case()
            gc.collect()
            start = time.process_time()
            kept = action()
            taken = time.process_time() - start
            del kept, action
            if turn:  # the first turn warms up
                seconds[name].append(taken)
    return {name: statistics.median(values) for name, values in seconds.items()}


def faster(what: str, theirs: Case, ours: Case, bar: float | None, repeats: int) -> Row:
    """Return how many times faster ours is."""
    found = interleaved({"theirs": theirs, "ours": ours}, repeats)
    return Row(what, 1e3 * found["theirs"], 1e3 * found["ours"], "ms", found["theirs"] / found["ours"], bar, True)


def shown(rows: Iterable[Row]) -> list[Row]:
    """Print each row when it is measured, then the rows that miss their bar; return all rows."""
    print(f"{'what':<64} {'theirs':>12} {'ours':>12} {'':<5} {'ratio':>8}  bar")
    found = []
    for row in rows:
        found.append(row)
        print(row, flush=True)
    if short := [row for row in found if not row.met]:
        print(f"\n{len(short)} of {len(found)} fall short of their bar:", *short, sep="\n")
    return found


def as_json(about: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Return the rows as JSON, with the environment of the measurement."""
    return json.dumps({**about, "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=1) + "\n"
