"""Columns of a comparison table, and the text of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.compare.audit.rounds import TOLERANCE
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import DeployedPoint
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
    """Column of the comparison table. Those with a `width` are in the table; the page has the others in a fold."""

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
SEEDS = Column("seeds", lambda p: seeds(p), 5)
ASKED_WEIGHTS = Column(
    "asked %",
    lambda p: "" if p.requested_sparsity is None else in_points(p.requested_sparsity),
    8,
    "requested sparsity, of the prunable weights",
)
ASKED = Column("asked", lambda p: asked(p), 15, "requested sparsity, and the quantity it is a fraction of")
REACHED = Column(
    "reached %",
    lambda p: "" if p.reached is None or p.budget == WEIGHTS else in_points(p.reached),
    9,
    "achieved fraction of the quantity that was asked for",
)
CONSIDERED = Column(
    "prunable %",
    lambda p: "" if p.considered is None else in_points(p.considered),
    10,
    "share of the network's matrix weights that are prunable here; the others stay dense",
)
OF_A_TOKEN = Column(
    "parameters / a token's",
    lambda p: "" if (used := p.active_parameters) is None else f"{p.remaining_parameters:,.0f} / {used:,.0f}",
    23,
    "remaining parameters, and those of them that one token uses: the others are experts that it is not routed to",
)
WHOLE = 0.9995
"""Share of the matrix weights from which the column says nothing."""
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
    Column(
        "vs dense [95% interval]",
        lambda p: difference(p.difference, p.metric) if p.round else "",
        23,
        "paired by seed; for fractions in percentage points",
    ),
    MATCH,
    Column("size", lambda p: ratio(p.compression), 6, "parameters, dense / remaining"),
    Column("MACs", lambda p: macs(p), 6, f"multiply-accumulates, dense / remaining: a theoretical speed-up; {NO_MACS}"),
    SEEDS,
    Column("95% interval", lambda p: interval(p.test, p.metric), hint="of the mean on test, over seeds"),
    Column(
        "before fine-tuning",
        lambda p: spread(p.val_before, p.metric) if p.val_before and p.val_before != p.val else "",
        hint="mean ± standard deviation on the validation split",
    ),
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
    Column(
        "harmed most",
        lambda p: ", ".join(f"{each.label} -{in_points(each.loss)}" for each in p.harmed),
        hint="classes that lose most against dense, in percentage points, mean over seeds",
    ),
)
NARROW = tuple(column for column in COLUMNS if column.width)
ALWAYS = COLUMNS[:2]
"""Columns that are never folded into the line above the table."""


def narrow(comparison: Comparison, points: Sequence[Point]) -> tuple[Column, ...]:
    """Return the columns of the main table, with the cost if points at one level differ in it.

    The requested sparsity follows the achieved one if they differ at a point, and the achieved fraction follows the
    requested one if it is a fraction of another quantity. The share of the prunable weights follows if some are not.
    The parameters that are left, and those that one token uses, follow the seeds for mixtures of experts.
    """
    unequal = {id(point) for point, _ in comparison.costlier}
    cost = [COST] if any(id(point) in unequal for point in points) else []
    of_weights = all(point.budget == WEIGHTS for point in points)
    asking = [ASKED_WEIGHTS if of_weights else ASKED] if any(map(reached_another, points)) else []
    asking += [REACHED] if any(REACHED.cell(point) for point in points) else []
    asking += [CONSIDERED] if any(p.considered is not None and p.considered < WHOLE for p in points) else []
    of_a_token = [OF_A_TOKEN] if any(point.active_parameters is not None for point in points) else []
    return (NARROW[0], *asking, *NARROW[1:], *of_a_token, *cost)


def blocks(
    comparison: Comparison, points: Sequence[Point], *, beside: bool = False
) -> Iterator[tuple[str, Sequence[Column], Sequence[Point]]]:
    """Yield (end of the title, columns, points) of a panel's tables: the main one, further texts, formats.

    Args:
        comparison: comparison of the trials
        points: points of the panel
        beside: a single further test set stands in the main table
    """
    main, further = narrow(comparison, points), names_of_further(points)
    if beside and len(further) == 1:
        place = 1 + main.index(MATCH)
        main, further = (*main[:place], *on_further(further[0]), *main[place:]), []
    yield "", main, points
    for name in further:
        yield f": {name}", (NARROW[0], *on_further(name)), points
    for split in dict.fromkeys(each.split for point in points for each in point.asked):
        asking = [point for point in points if any(each.split == split for each in point.asked)]
        yield f": further metrics on {split}", (NARROW[0], *on_asked(asking, split)), asking
    for name in dict.fromkeys(each.format for point in points for each in point.deployed):
        measured = [point for point in points if any(each.format == name for each in point.deployed)]
        changed = any(each.test for point in measured for each in point.deployed if each.format == name)
        shown = (*NARROW[: 2 if changed else 1], *measured_columns(measured, name))
        yield f": deployed as {name}, speed-up over dense [95% interval]", shown, measured


def folded(
    points: Sequence[Point], shown: Sequence[Column]
) -> tuple[tuple[Column, ...], tuple[tuple[Column, str], ...]]:
    """Return the columns in which these points differ, and the others with the text that all points have.

    Columns without a text, and the cost if it is the steps, are in neither.
    """
    differing, constant = [], []
    for column in shown:
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


def on_asked(points: Sequence[Point], split: str) -> Iterator[Column]:
    """Yield a column for each metric on a test split that options of the task ask for."""
    for metric in dict.fromkeys(each.metric for point in points for each in point.asked if each.split == split):
        yield Column(metric.heading, _asked(split, metric), 15, "on test: mean ± standard deviation")


def _asked(split: str, metric: Metric) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        found = (each for each in point.asked if (each.split, each.metric) == (split, metric))
        return next((spread(each.test, metric) for each in found), "")

    return cell


def measured_columns(points: Sequence[Point], name: str) -> Iterator[Column]:
    """Yield the columns of the deployment measurements in a format."""
    every = [each for point in points for each in point.deployed if each.format == name]

    def first(point: Point) -> DeployedPoint | None:
        return next((each for each in point.deployed if each.format == name), None)

    yield Column(f"{name} kB", lambda p: kilobytes(each.bytes) if (each := first(p)) else "", 8, "size when deployed")
    if any(each.test for each in every):
        hint = f"of the networks in {name}, measured in its runtime: mean ± standard deviation"
        yield Column(
            f"{name} {{metric}}", lambda p: spread(each.test, p.metric) if (each := first(p)) else "", 15, hint
        )
    machines = list(dict.fromkeys(each.hardware for each in every))
    for key in dict.fromkeys((name, each.batch_size, each.hardware) for each in every):
        number = f" #{1 + machines.index(key[2])}" if len(machines) > 1 else ""
        here = [each for each in every if (each.batch_size, each.hardware) == key[1:]]
        rivals = list(dict.fromkeys(runtime for each in here for runtime in each.dense_runtimes))
        over = f"in the fastest runtime here ({', '.join(rivals)})" if rivals else "in the same format"
        for heading, what, speedup in (
            (f"at batch {key[1]}", over, lambda each: each.speedup),
            ("of a token", "of one token after a prompt", lambda each: each.token_speedup),
            ("of PyTorch", "in PyTorch", lambda each: each.speedup_pytorch),
            ("of int8", "in 8 bits, in its fastest runtime here", lambda each: each.speedup_int8),
        ):
            if any(map(speedup, here)):
                hint = f"measured speed-up over dense {what}, 95% interval; {key[2]}"
                yield Column(f"{heading}{number}", _times(key, speedup), 21, hint)


def _times(key: tuple[str, int, str], speedup: Callable[[DeployedPoint], Estimate | None]) -> Callable[[Point], str]:
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
    """Mean ± standard deviation over seeds, the mean alone of one seed; `not finite` if a seed's value is not."""
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
