"""What a column of the comparison is, and those of what was measured of deployed networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.compare.comparison import Point
from orchestrator.compare.deployed import Deployed
from orchestrator.core.metrics import Metric


@dataclass(frozen=True)
class Column:
    """A column of the comparison: on the page always, elsewhere if it has a `width` there, in characters."""

    name: str
    """`{metric}` in it stands for the primary metric with its unit."""
    cell: Callable[[Point], str]
    """The text of a point; fractions and their differences are in percent."""
    width: int = 0
    hint: str = ""

    def heading(self, metric: Metric) -> str:
        """Return the name above points with this primary metric."""
        return self.name.format(metric=metric.heading)


def measured_columns(points: Sequence[Point]) -> Iterator[Column]:
    """Yield the columns of what was measured of deployed networks, one format after another."""
    found = dict.fromkeys((each.format, each.batch_size, each.hardware) for p in points for each in p.deployed)
    for name in dict.fromkeys(name for name, _, _ in found):
        yield Column(f"{name} kB", _kilobytes(name), 8, "bytes of the deployed network")
        machines = list(dict.fromkeys(hardware for each, _, hardware in found if each == name))
        for key in (key for key in found if key[0] == name):
            number = f" #{1 + machines.index(key[2])}" if len(machines) > 1 else ""
            hint = f"measured: times as fast as dense in the same format, 95% interval; {key[2]}"
            yield Column(f"at batch {key[1]}{number}", _times(key), 21, hint)


def _kilobytes(name: str) -> Callable[[Point], str]:
    return lambda point: next((f"{each.bytes / 1e3:,.1f}" for each in point.deployed if each.format == name), "")


def _times(key: tuple[str, int, str]) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        found = (each for each in point.deployed if (each.format, each.batch_size, each.hardware) == key)
        return next((times(each) for each in found), "")

    return cell


def times(measured: Deployed) -> str:
    """1.82x [1.75, 1.90]."""
    speedup = measured.speedup
    ends = "" if speedup.low is None or speedup.high is None else f" [{speedup.low:.2f}, {speedup.high:.2f}]"
    return f"{speedup.mean:.2f}x{ends}"
