"""Plain data of a comparison's figures. Pure; `orchestrator.views.report.figures.drawing` draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from orchestrator.compare.audit.compared_points import EQUAL_COST
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import DeployedPoint
from orchestrator.compare.secondary_figures import DENSE
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import percent, whole_number

FRONT, STOPPED = "Pareto front", "stopped by the search"
"""Labels of the series of points that no other point beats in both quantities, and of networks without all seeds."""
CURVES, LINES = 6, 20
"""Maximum number of curves in a plot, and of lines in a figure: more cannot be read."""
X_LABELS: Mapping[str, str] = {
    "compression": "compression (parameters, dense / remaining)",
    "sparsity": "sparsity (% of prunable weights)",
    "cost": "steps from initialisation, with scoring",
    "training_macs": "multiply-accumulates of training, from initialisation",
    "parameters": "remaining parameters (% of dense)",
    "active_parameters": "remaining parameters that a token uses",
    "macs": "remaining multiply-accumulates (% of dense)",
    "token_latency": "milliseconds of one more token, measured",
    "latency": "milliseconds of a call, measured",
    "bytes": "bytes, deployed",
}
"""Quantity on the x axis -> its label."""
COUNTED = ("parameters", "macs")
"""Quantities of `X_LABELS` in % of dense."""
DEPLOYED = {"latency": "latency_ms", "token_latency": "token_ms", "bytes": "bytes"}
"""Measured quantity -> its field of a deployed point."""
SECOND = 1000.0
"""A second in milliseconds."""
Coordinates = tuple[float, float]
Value = float | Estimate | None
Kind = tuple[str, int, str]
"""Format, batch size and machine."""


@dataclass(frozen=True)
class Series:
    """One line of a plot; `low` and `high` bound y, `left` and `right` x, None at points without an interval."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    marks: tuple[int, ...] | None = None
    """Indices of points with a marker; None: all points."""
    left: tuple[float | None, ...] = ()
    right: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Plot:
    """Lines in one pair of axes, and the dense network (`reference`) as a horizontal line with its band."""

    title: str
    metric: Metric
    series: tuple[Series, ...]
    reference: Estimate | None = None
    x_label: str = ""
    split: str = "test"
    """Word before the metric's title at the y axis."""


@dataclass(frozen=True)
class Panel:
    """Points of one model and data set."""

    title: str
    metric: Metric
    dense: tuple[Point, ...]
    all_lines: Mapping[str, tuple[Point, ...]]
    """Operating points of each line, sorted by sparsity."""

    @property
    def lines(self) -> dict[str, tuple[Point, ...]]:
        """Lines that figures show: the LINES with the best means on validation, in the original order."""
        best = sorted(self.all_lines, key=lambda line: _validated(self.all_lines[line]), reverse=True)[:LINES]
        return {line: points for line, points in self.all_lines.items() if line in best}

    @property
    def points(self) -> list[Point]:
        """Operating points of the lines that figures show."""
        return [point for points in self.lines.values() for point in points]


def panels(comparison: Comparison) -> list[Panel]:
    """Return the panels of a comparison."""
    points = (*comparison.dense, *comparison.points)
    return [
        Panel(
            f"{panel[0]} on {panel[1]}",
            next(point.metric for point in points if (point.model, point.data) == panel),
            tuple(point for point in comparison.dense if (point.model, point.data) == panel),
            {line: each for (*of, line), each in comparison.lines.items() if tuple(of) == panel},
        )
        for panel in comparison.panels
    ]


def left_out(comparison: Comparison) -> str:
    """Return a note on panels whose figures do not show all lines; empty if they do."""
    counts = Counter(f"{model} on {data}" for model, data, _ in comparison.lines)
    many = [f"{title} ({whole_number(count)} lines)" for title, count in counts.items() if count > LINES]
    return (
        f"Figures show only the {LINES} lines with the best means on validation for {', '.join(many)}." if many else ""
    )


def texts(comparison: Comparison) -> tuple[str, ...]:
    """Return `test` and the names of the further test sets."""
    return ("test", *dict.fromkeys(each.name for point in comparison.points for each in point.further))


def series(label: str, places: Iterable[tuple[Value, Value]], marks: tuple[int, ...] | None = None) -> Series:
    """Return the known places as a series in order of x; an Estimate has an interval."""
    known = sorted(
        [(_estimated(x), _estimated(y)) for x, y in places if x is not None and y is not None],
        key=lambda place: place[0].mean,
    )
    x, y = ([place[axis] for place in known] for axis in (0, 1))
    left, right = (tuple(getattr(each, end) for each in x) for end in ("low", "high"))
    low, high = (tuple(getattr(each, end) for each in y) for end in ("low", "high"))
    return Series(label, tuple(each.mean for each in x), tuple(each.mean for each in y), low, high, marks, left, right)


def _estimated(value: float | Estimate) -> Estimate:
    return value if isinstance(value, Estimate) else Estimate(1, float(value))


def _drawn(lines: Mapping[str, Iterable[tuple[Value, Value]]]) -> tuple[Series, ...]:
    """Return the series of lines that have places."""
    found = (series(label, places) for label, places in lines.items())
    return tuple(each for each in found if each.x)


def tradeoff(comparison: Comparison, against: str = "compression", text: str = "test") -> tuple[Plot, ...]:
    """Return the primary metric with its 95% interval, line by line, on a text.

    Against a cost, dense networks are points, and panels are left out in which fewer than two lines have a recorded
    cost, or all points the same one.

    Args:
        comparison: comparison of the trials
        against: `compression`, `sparsity`, `cost` (steps of training and scoring) or `training_macs`
        text: `test`, or the name of a further test set
    """
    plots, costs = [], against in ("cost", "training_macs")
    for panel in panels(comparison):

        def places(points: Iterable[Point], on: str = text) -> list[tuple[Value, Value]]:
            return [(_quantity(point, against), point.on(on)) for point in points]

        lines = _drawn({line: places(points) for line, points in panel.lines.items()})
        if (text != "test" and not lines) or (costs and (len(lines) < 2 or not _spread_out(lines))):
            continue
        dense = [point.on(text) for point in panel.dense]
        if against == "training_macs":
            lines, dense = (*lines, *_drawn({point.line: places([point]) for point in panel.dense})), []
        name = panel.title if text == "test" else f"{panel.title}: {text}"
        plots.append(Plot(name, panel.metric, lines, dense[0] if len(dense) == 1 else None, X_LABELS[against]))
    return tuple(plots)


def _quantity(point: Point, against: str) -> float | None:
    """Return a quantity as a figure shows it; None if it is not known."""
    if against in COUNTED:
        left = 1 / point.compression if against == "parameters" else point.macs_left
        return None if left is None else 100 * left
    if against in DEPLOYED:
        first = point.deployed[0] if point.deployed else None
        return None if first is None else getattr(first, DEPLOYED[against])
    if against == "active_parameters":
        return point.active_parameters or point.remaining_parameters
    found: float | None = {
        "sparsity": 100 * point.sparsity,
        "compression": point.compression,
        "cost": point.total_cost,
        "training_macs": point.total_training_macs,
    }[against]
    return found


def fine_tuning(comparison: Comparison) -> tuple[Plot, ...]:
    """Return the primary metric on validation against sparsity, before and after fine-tuning: two series a line.

    Lines that were not trained after pruning are left out.
    """
    plots = []
    for panel in panels(comparison):
        trained = {
            label: points
            for label, points in panel.lines.items()
            if any(point.val_before is not None and point.val_before != point.val for point in points)
        }
        found = _drawn(
            {
                f"{label}, {when}": [
                    (_quantity(point, "sparsity"), value and value.mean)
                    for point in points
                    for value in [point.val_before if when == "before" else point.val]
                ]
                for label, points in trained.items()
                for when in ("before", "after")
            }
        )
        if found:
            plots.append(Plot(panel.title, panel.metric, found, None, X_LABELS["sparsity"], "validation"))
    return tuple(plots)


def curves(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Plot, ...]:
    """Return the training curves on validation of each line's sparsest networks, mean over seeds.

    Panels without a training are left out.
    """
    plots = []
    for panel in panels(comparison):
        found = []
        for label, points in list(panel.lines.items())[:CURVES]:
            point = max(points, key=lambda point: point.sparsity)
            chains = [[*(records[spec.key] for spec in plan.lineage(key)), records[key]] for key in point.stages]
            found.append(_mean_curve(f"{label} to {percent(point.sparsity)}", chains))
        if _spread_out(found):
            words = "optimizer steps from initialisation"
            plots.append(Plot(panel.title, panel.metric, tuple(found), None, words, "validation"))
    return tuple(plots)


def pareto(comparison: Comparison, against: str) -> tuple[Plot, ...]:
    """Return the primary metric on test against a size or a time, with dense and the Pareto front.

    Args:
        comparison: comparison of the trials
        against: `parameters` or `macs`, counted, in % of dense; `latency`, a plot for each format, batch size and
            machine, or `bytes`, a plot for each format
    """
    if against in ("parameters", "macs"):
        return tuple(
            _with_front(panel, panel.title, against, partial(_counted, of=against)) for panel in panels(comparison)
        )
    plots = []
    for panel in panels(comparison):
        kinds = _kinds(each for point in panel.points for each in point.deployed)
        if against == "bytes":
            kinds = {kind: kind[0] for kind in {kind[0]: kind for kind in reversed(kinds)}.values()}
        for kind, words in kinds.items():
            plots.append(
                _with_front(panel, f"{panel.title}, {words}", against, partial(_measured, kind=kind, of=against))
            )
    return tuple(plots)


def _kinds(deployed: Iterable[DeployedPoint]) -> dict[Kind, str]:
    """Return kind of measurement -> its name, with the machine if another one measured the same."""
    found = dict.fromkeys(map(_kind, deployed))
    machines = Counter(kind[:2] for kind in found)
    return {kind: f"{kind[0]}, batch {kind[1]}" + (f", {kind[2]}" if machines[kind[:2]] > 1 else "") for kind in found}


def _kind(each: DeployedPoint) -> Kind:
    return each.format, each.batch_size, each.hardware


def _of_kind(point: Point, kind: Kind) -> Iterator[DeployedPoint]:
    yield from (each for each in point.deployed if _kind(each) == kind)


Compared = Iterator[tuple[Coordinates, Coordinates]]
"""Place of a point, and that of its dense network."""


def _counted(point: Point, dense: float, of: str) -> Compared:
    if (left := _quantity(point, of)) is not None and point.test is not None:
        yield (left, point.test.mean), (100.0, dense)


def _measured(point: Point, dense: float, kind: Kind, of: str) -> Compared:
    """Yield the places of a deployed network and of dense; a format that changes outputs has figures of its own."""
    for each in _of_kind(point, kind) if point.test is not None else ():
        x, dense_x = (each.latency_ms, each.dense_ms) if of == "latency" else (each.bytes, each.dense_bytes)
        achieved = point.test if each.test is None else each.test
        assert achieved is not None
        yield (x, achieved.mean), (dense_x, dense if each.dense_test is None else each.dense_test)


def _with_front(panel: Panel, name: str, against: str, places: Callable[[Point, float], Compared]) -> Plot:
    """Return a plot of the points' places, with the mean of the dense networks and the Pareto front of all lines."""
    known = [point.test.mean for point in panel.dense if point.test is not None]
    own = fmean(known) if known else math.nan
    found = {line: [each for p in points for each in places(p, own)] for line, points in panel.all_lines.items()}
    dense = [place for each in found.values() for _, place in each if known]
    dense = dense or [(100.0, own)] * bool(known and against in COUNTED)
    lines = {line: [place for place, _ in each] for line, each in found.items()}
    lines |= {DENSE: [(fmean(x for x, _ in dense), fmean(y for _, y in dense))]} if dense else {}
    best = front([place for each in lines.values() for place in each], panel.metric)
    drawn = {line: each for line, each in lines.items() if line in (*panel.lines, DENSE)}
    return Plot(name, panel.metric, _drawn({**drawn, FRONT: best}), None, X_LABELS[against])


def front(places: Sequence[Coordinates], metric: Metric) -> list[Coordinates]:
    """Return the Pareto front: places that no other place beats in both, in order of x."""
    found: list[Coordinates] = []
    for x, y in sorted(places, key=lambda place: (place[0], -metric.gain(place[1], 0.0))):
        if not found or metric.gain(y, found[-1][1]) > 0:
            found.append((x, y))
    return found


def frontier(comparison: Comparison) -> tuple[Plot, ...]:
    """Return a plot of the primary metric on validation for each panel with a frontier and each of its quantities."""
    search = comparison.search
    if search is None:
        return ()
    plots, networks = [], set(search.networks)
    for panel in panels(comparison):
        points = [point for each in panel.all_lines.values() for point in each]
        best = [point for point in points if networks.issuperset(point.stages)]
        for against in search.against if best else ():
            groups = {line: [point for point in each if not point.stopped] for line, each in panel.lines.items()}
            groups |= {
                STOPPED: [point for point in points if point.stopped],
                FRONT: [point for point in best if not point.stopped],
            }
            found = _drawn(
                {
                    label: [(_quantity(point, against), _validation(point, against, label)) for point in each]
                    for label, each in groups.items()
                }
            )
            name = f"{panel.title}, {against}" if len(search.against) > 1 else panel.title
            plots.append(Plot(name, panel.metric, found, None, X_LABELS[against], "validation"))
    return tuple(plots)


def _validation(point: Point, against: str, label: str) -> Value:
    """Return the metric on validation, in the deployed format if it changes outputs and is measured."""
    in_format = point.deployed[0].val if point.deployed and against in DEPLOYED else None
    found = in_format or point.val
    return found.mean if found and label == FRONT else found


def token_speed(comparison: Comparison) -> tuple[Plot, ...]:
    """Return plots of the primary metric against tokens a second: one for each text, format, batch size and machine.

    Horizontal intervals are those of the measured speed-up over dense. Vertical ones are those of the difference from
    dense by window of the text, else those over seeds.
    """
    plots = []
    for panel in panels(comparison):
        deployed = [each for point in panel.points for each in point.deployed if each.token_speedup is not None]
        for kind, words in _kinds(deployed).items():
            for text in texts(comparison):
                lines = {
                    line: [place for point in points for place in _of_tokens(comparison, point, kind, text)]
                    for line, points in panel.lines.items()
                }
                if not any(lines.values()):
                    continue
                rates = [
                    _dense_rate(each) for point in panel.points for each in _of_kind(point, kind) if each in deployed
                ]
                lines |= {DENSE: [(fmean(rates), point.on(text)) for point in panel.dense]}
                name = f"{panel.title}{'' if text == 'test' else f': {text}'}, {words}"
                label = "tokens a second, generated one by one, measured"
                plots.append(Plot(name, panel.metric, _drawn(lines), None, label))
    return tuple(plots)


def _of_tokens(comparison: Comparison, point: Point, kind: Kind, text: str) -> Iterator[tuple[Value, Value]]:
    """Yield the tokens a second and the metric of a deployed network; its speed-up has the interval."""
    for each in _of_kind(point, kind):
        if (speedup := each.token_speedup) is not None:
            ends = (None if end is None else _dense_rate(each) * end for end in (speedup.low, speedup.high))
            rate = Estimate(speedup.n, _dense_rate(each) * speedup.mean, None, *ends)
            own = each.test if text == "test" and each.test is not None else _by_window(comparison, point, text)
            yield rate, own


def _dense_rate(each: DeployedPoint) -> float:
    """Return the tokens that the dense network generates in a second, in all examples of the batch."""
    assert each.dense_token_ms is not None
    return SECOND * each.batch_size / each.dense_token_ms


def _by_window(comparison: Comparison, point: Point, text: str) -> Estimate | None:
    """Return the metric on a text; with the interval of its difference from dense by window, where there is one."""
    own = point.on(text)
    if own is None or point.metric.name != "perplexity":
        return own
    for found in comparison.windows:
        place = (found.model, found.data, found.line, found.text, found.reference)
        if place == (*point.line_key, text, DENSE) and found.sparsity == point.asked_sparsity:
            factor = {end: getattr(found.windows, end) for end in ("low", "high")}
            ends = {end: own.mean * math.exp(at - found.windows.mean) for end, at in factor.items() if at is not None}
            return Estimate(own.n, own.mean, own.std, **ends)
    return own


def _validated(points: Sequence[Point]) -> float:
    gains = [point.metric.gain(point.val.mean, 0.0) for point in points if point.val is not None]
    return fmean(gains) if gains else -math.inf


def _spread_out(found: Iterable[Series]) -> bool:
    """Whether the points lie apart on an x axis that begins at 0."""
    places = [x for each in found for x in each.x]
    return bool(places) and max(places) > (1 + EQUAL_COST) * min(places)


def _curve(chain: Sequence[StageRecord]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield ((place in the chain, total step), primary metric on validation); a round starts after pruning."""
    offset = 0
    for place, record in enumerate(chain):
        name = f"val/{record.primary.name}"
        for step, metrics in ((0, record.before), *((point.step, point.metrics) for point in record.curve)):
            if name in metrics:
                yield (place, offset + step), metrics[name]
        offset += record.steps


def _mean_curve(label: str, chains: Sequence[Sequence[StageRecord]]) -> Series:
    """Average curves over their common steps, with a mark at the start of each round."""
    curves = [dict(_curve(chain)) for chain in chains]
    shared = sorted(set.intersection(*map(set, curves)))
    first = {place: index for index, (place, _) in reversed([*enumerate(shared)])}
    marks = tuple(first[place] for place, record in enumerate(chains[0]) if record.round and place in first)
    return series(label, [(float(at[1]), fmean(curve[at] for curve in curves)) for at in shared], marks)
