"""Columns of a comparison table, and the text of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.compare.audit.rounds import TOLERANCE
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import Deployed
from orchestrator.compare.round_columns import WEIGHTS, in_words
from orchestrator.compare.secondary_figures import FurtherTestSet
from orchestrator.compare.statistics import Estimate, has_spread
from orchestrator.core.metrics import Metric
from orchestrator.planning.number_formats import (
    duration,
    in_points,
    kilobytes,
    percent,
    ratio,
    ratio_interval,
    whole_number,
)


@dataclass(frozen=True)
class Column:
    """Column of the comparison table. The HTML page has every column; text tables have those with a `width`, and
    the cost if it differs."""

    name: str
    """Heading; `{metric}` in it stands for the primary metric with its unit."""
    cell: Callable[[Point], str]
    """Text of a point's cell; fractions and their differences are in percent."""
    width: int = 0
    """Minimum width in a text table, in characters."""
    hint: str = ""

    def heading(self, metric: Metric) -> str:
        """Return the heading for points with this primary metric."""
        return self.name.format(metric=metric.heading)


NO_MACS = "0 left: none remain, at one seed or all; –: none are counted"
"""Legend of MACs cells without a ratio."""
COST = Column(
    "cost",
    lambda p: whole_number(p.total_cost),
    hint="optimizer steps from initialisation, and the cost of scoring in steps",
)
MATCH = Column(
    "match",
    lambda p: verdict(p) if p.round else "",
    8,
    "whether a loss of the margin or more is ruled out; –: not tested, after a line's first no",
)
ASKED = Column("asked", lambda p: asked(p), 15, "requested sparsity, and the quantity it is a fraction of")
COLUMNS = (
    Column(
        "sparsity %", lambda p: in_points(p.sparsity) if p.round else "dense", 10, "achieved, of the prunable weights"
    ),
    Column(
        "test {metric}",
        lambda p: spread(p.test, p.metric) + ("*" if p.best else " "),
        15,
        "mean ± standard deviation",
    ),
    Column("95% interval", lambda p: interval(p.test, p.metric)),
    Column(
        "vs dense [95% interval]",
        lambda p: difference(p.difference, p.metric) if p.round else "",
        23,
        "paired by seed; for fractions in percentage points",
    ),
    MATCH,
    Column(
        "before fine-tuning",
        lambda p: spread(p.val_before, p.metric) if p.val_before and p.val_before != p.val else "",
        hint="mean ± standard deviation on the validation split",
    ),
    Column("size", lambda p: ratio(p.compression), 6, "parameters, dense / remaining"),
    Column("MACs", lambda p: macs(p), 6, f"multiply-accumulates, dense / remaining: a theoretical speed-up; {NO_MACS}"),
    Column("seeds", lambda p: seeds(p), 5),
    Column("steps", lambda p: whole_number(p.total_steps), hint="optimizer steps from initialisation"),
    COST,
    Column(
        "training MACs",
        lambda p: "" if p.training_ratio is None else ratio(p.training_ratio),
        hint="multiply-accumulates of all training from initialisation / those of the dense training: forward and "
        "backward, under the masks of each step, without scoring and evaluation. Masks save no time in PyTorch. Empty: "
        "not recorded, or no dense training",
    ),
    Column("own", lambda p: whole_number(p.own_steps), hint="steps that no other trial shares"),
    Column("work", lambda p: duration(p.total_seconds), hint="time of work from initialisation"),
)
HARM = Column(
    "harmed most",
    lambda p: ", ".join(f"{each.label} -{in_points(each.loss)}" for each in p.harmed),
    hint="classes that lose most against dense, in percentage points, mean over seeds",
)
NARROW = tuple(column for column in COLUMNS if column.width)
ALWAYS = COLUMNS[:2]
"""Columns that are never folded into the line above the table."""


def narrow(comparison: Comparison, points: Sequence[Point]) -> tuple[Column, ...]:
    """Return the columns of a text table, with the cost if points at one level differ in it."""
    unequal = {id(point) for point, _ in comparison.costlier}
    shown = (*NARROW, COST) if any(id(point) in unequal for point in points) else NARROW
    return _with_asked(shown, points)


def columns(points: Sequence[Point]) -> tuple[Column, ...]:
    """Return the columns that the HTML page can show for these points: all test sets side by side, then the rest."""
    shown = [column for name in names_of_further(points) for column in on_further(name)]
    shown += [
        column
        for split in splits_of_asked(points)
        for column in on_asked(points, split, "" if split == "test" else f"{split} ")
    ]
    tests, rest = COLUMNS[: 1 + COLUMNS.index(MATCH)], COLUMNS[1 + COLUMNS.index(MATCH) :]
    harm = [HARM] if any(point.harmed for point in points) else []
    return _with_asked((*tests, *shown, *rest, *measured_columns(points), *harm), points)


def folded(points: Sequence[Point]) -> tuple[tuple[Column, ...], tuple[tuple[Column, str], ...]]:
    """Return the columns in which these points differ, and the others with the text that all points have.

    Columns without a text, and the cost if it is the steps, are in neither.
    """
    differing, constant = [], []
    for column in columns(points):
        cells = [column.cell(point).strip() for point in points]
        texts = {cell for cell in cells if cell}
        whole = all(cell for cell, point in zip(cells, points, strict=True) if point.round)
        if column is COST and all(point.total_cost == point.total_steps for point in points):
            continue
        if len(texts) > 1 or (texts and (not whole or column in ALWAYS or len(points) < 3)):
            differing.append(column)
        elif texts:
            constant.append((column, texts.pop()))
    return tuple(differing), tuple(constant)


def _with_asked(shown: tuple[Column, ...], points: Sequence[Point]) -> tuple[Column, ...]:
    """Insert the requested sparsity after the achieved one if they differ at a point."""
    return (shown[0], ASKED, *shown[1:]) if any(map(reached_another, points)) else shown


def reached_another(point: Point) -> bool:
    """Whether the requested sparsity is not a fraction of weights, or differs from the achieved one."""
    gap = 0.0 if point.requested_sparsity is None else abs(point.sparsity - point.requested_sparsity)
    return point.budget != WEIGHTS or gap > TOLERANCE


def names_of_further(points: Sequence[Point]) -> list[str]:
    """Return the names of the points' further test sets."""
    return list(dict.fromkeys(each.name for point in points for each in point.further))


def on_further(name: str) -> Iterator[Column]:
    """Yield the columns of a further test set."""

    def on(point: Point) -> FurtherTestSet | None:
        return next((each for each in point.further if each.name == name), None)

    def cell(point: Point) -> str:
        each = on(point)
        return "" if each is None else spread(each.test, point.metric) + ("*" if each.best else " ")

    yield Column(f"{name} {{metric}}", cell, 15)
    yield Column(
        "vs dense [95% interval]",
        lambda p: difference(each.difference, p.metric) if p.round and (each := on(p)) else "",
        23,
    )


def splits_of_asked(points: Sequence[Point]) -> list[str]:
    """Return the test splits on which the points have metrics that options of the task ask for."""
    return list(dict.fromkeys(each.split for point in points for each in point.asked))


def on_asked(points: Sequence[Point], split: str, prefix: str = "") -> Iterator[Column]:
    """Yield a column for each metric on a test split that options of the task ask for; headings begin with `prefix`."""
    for metric in dict.fromkeys(each.metric for point in points for each in point.asked if each.split == split):
        yield Column(f"{prefix}{metric.heading}", _asked(split, metric), 15, "on test: mean ± standard deviation")


def _asked(split: str, metric: Metric) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        found = (each for each in point.asked if (each.split, each.metric) == (split, metric))
        return next((spread(each.test, metric) for each in found), "")

    return cell


def measured_columns(points: Sequence[Point]) -> Iterator[Column]:
    """Yield the columns of deployment measurements, format by format."""
    found = dict.fromkeys((each.format, each.batch_size, each.hardware) for p in points for each in p.deployed)
    for name in dict.fromkeys(name for name, _, _ in found):
        yield Column(f"{name} kB", _kilobytes(name), 8, "size of the deployed network")
        if any(each.test for point in points for each in point.deployed if each.format == name):
            hint = f"of the networks in {name}, measured in its runtime: mean ± standard deviation"
            yield Column(f"{name} {{metric}}", _achieved(name), 15, hint)
        machines = list(dict.fromkeys(hardware for each, _, hardware in found if each == name))
        for key in (key for key in found if key[0] == name):
            number = f" #{1 + machines.index(key[2])}" if len(machines) > 1 else ""
            each = [d for p in points for d in p.deployed if (d.format, d.batch_size, d.hardware) == key]
            rivals = list(dict.fromkeys(name for d in each for name in d.dense_runtimes))
            against = f"the fastest runtime here ({', '.join(rivals)})" if rivals else "the same format"
            hint = f"measured speed-up over dense in {against}, 95% interval; {key[2]}"
            yield Column(f"at batch {key[1]}{number}", _times(key, lambda d: d.speedup), 21, hint)
            if any(d.token_speedup for d in each):
                hint = f"measured speed-up over dense of one token after a prompt, 95% interval; {key[2]}"
                yield Column(f"of a token{number}", _times(key, lambda d: d.token_speedup), 21, hint)
            if any(d.speedup_pytorch for d in each):
                hint = f"measured speed-up over dense in PyTorch, 95% interval; {key[2]}"
                yield Column(f"of PyTorch{number}", _times(key, lambda d: d.speedup_pytorch), 21, hint)


def _kilobytes(name: str) -> Callable[[Point], str]:
    return lambda point: next((kilobytes(each.bytes) for each in point.deployed if each.format == name), "")


def _achieved(name: str) -> Callable[[Point], str]:
    """Return the cell of the primary metric in a format that changes outputs."""

    def cell(point: Point) -> str:
        found = next((each for each in point.deployed if each.format == name), None)
        return "" if found is None else spread(found.test, point.metric)

    return cell


def _times(key: tuple[str, int, str], speedup: Callable[[Deployed], Estimate | None]) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        found = (each for each in point.deployed if (each.format, each.batch_size, each.hardware) == key)
        return next((times(speedup(each)) for each in found), "")

    return cell


def times(speedup: Estimate | None) -> str:
    """1.82× [1.75, 1.90]; empty for None."""
    return "" if speedup is None else ratio_interval(speedup.mean, speedup.low, speedup.high)


def asked(point: Point) -> str:
    """50.00% of channels, or of heads."""
    requested = point.requested_sparsity
    return "" if requested is None else f"{percent(requested)} of {in_words(point.budget, point.unit)}"


def macs(point: Point) -> str:
    """MACs dense / remaining; `0 left` if none remain, `–` if none are counted."""
    if point.speedup is not None:
        return ratio(point.speedup)
    return "0 left" if point.macs else "–"


def spread(estimate: Estimate | None, metric: Metric) -> str:
    """Mean and standard deviation."""
    if estimate is None:
        return "not finite"
    if estimate.std is None:
        return metric.written(estimate.mean)
    mean, std = (metric.written(value, width=estimate.std) for value in (estimate.mean, estimate.std))
    return f"{mean} ± {std}"


def interval(estimate: Estimate | None, metric: Metric) -> str:
    """Ends of the interval of the mean; empty if values do not differ."""
    if estimate is None or estimate.low is None or estimate.high is None or not has_spread(estimate):
        return ""
    width = (estimate.high - estimate.low) / 2
    return " – ".join(metric.written(end, width=width) for end in (estimate.low, estimate.high))


def difference(estimate: Estimate | None, metric: Metric, unit: str = "") -> str:
    """Signed mean difference, with its interval if seeds differ; for fractions in percentage points.

    Args:
        estimate: the difference; None: empty
        metric: metric that formats the values
        unit: unit after each value
    """
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None or not has_spread(estimate):
        return f"{metric.written(estimate.mean, '+')}{unit}"
    width = (estimate.high - estimate.low) / 2
    ends = (estimate.mean, estimate.low, estimate.high)
    mean, low, high = (f"{metric.written(value, '+', width)}{unit}" for value in ends)
    return f"{mean} [{low}, {high}]"


def seeds(point: Point) -> str:
    """Number of seeds of a point; `2 of 8` if a search did not run all of them."""
    run = len(point.seeds)
    return f"{run} of {run + point.stopped}" if point.stopped else str(run)


def verdict(point: Point) -> str:
    """Match verdict of a point; `–` if not tested; `answer` of a search, `stopped` if it did not run all seeds."""
    if point.answer:
        return "answer"
    if point.stopped:
        return "stopped"
    return "–" if point.matching in (None, "not tested") else str(point.matching)
