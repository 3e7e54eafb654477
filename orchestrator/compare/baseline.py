"""A baseline: the figures of a finished sweep that later ones are held to, and by how much they may be worse. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, to_builtins

from orchestrator.compare.comparison import Comparison, Point, Row
from orchestrator.compare.statistics import LEVEL, t_quantile
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.plain_data import Count, Fraction, Margin, Number, parse_json, read_as
from orchestrator.core.records import StageRecord

FORMAT: Literal[1] = 1
SIZES: Mapping[str, float] = {"parameters/remaining": 0.02}
"""Figures that are counted, not drawn -> the fraction by which they may grow, unless the user says otherwise."""
FALSE_ALARMS = 0.05
"""More of them than this are told as a baseline is written."""


class PointName(NamedTuple):
    """What a point is called in every sweep that has it."""

    model: str
    data: str
    line: str
    sparsity: float
    """The one asked for, and the achieved one where none was."""
    round: int

    @property
    def panel(self) -> str:
        """The model and the data set."""
        return f"{self.model} on {self.data}"


class BaselinePoint(Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one operating point, or of the dense network, by seed."""

    model: str
    data: str
    line: str
    sparsity: Fraction
    round: Count
    seeds: Annotated[tuple[Count, ...], Meta(min_length=1)]
    values: Mapping[str, tuple[Number, ...]]
    """Figure -> its value at each of `seeds`, in the figure's own scale."""
    margins: Mapping[str, Margin] = {}
    """What holds here instead of the margins of all points."""

    def __post_init__(self) -> None:
        """Refuse figures that are not those of the seeds."""
        for figure, values in self.values.items():
            if len(values) != len(self.seeds) or len(set(self.seeds)) != len(self.seeds):
                raise ValueError(f"`{figure}` of {self.line!r} must have one value for each of its `seeds`, all unlike")

    @property
    def name(self) -> PointName:
        """What it is called."""
        return PointName(self.model, self.data, self.line, self.sparsity, self.round)


class Baseline(Struct, frozen=True, forbid_unknown_fields=True):
    """What a baseline file says: plain data that people read and edit."""

    format: Literal[1]
    sweep: str
    command: str
    hardware: tuple[str, ...]
    margins: Mapping[str, Margin]
    """Figure -> by how much it may be worse: of a metric in its own scale (0.01 of a fraction is a point), of a size as
    a fraction. A figure without a margin is not held."""
    points: Annotated[tuple[BaselinePoint, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        """Refuse margins that hold nothing, as a misspelled one."""
        held = {figure for point in self.points for figure in point.values}
        for margins, known in [(self.margins, held), *((point.margins, point.values) for point in self.points)]:
            if unknown := sorted(set(margins) - set(known)):
                raise ValueError(f"`margins` names {unknown[0]!r}, which is none of {', '.join(sorted(known))}")


def figures(comparison: Comparison) -> dict[PointName, dict[str, dict[int, float]]]:
    """Return the figures that can be held of the dense networks and the operating points: figure -> seed -> value."""
    rows = {row.stage: row for row in comparison.rows}
    return {
        name_of(point): _figures(point, [rows[stage] for stage in point.stages])
        for point in (*comparison.dense, *comparison.operating_points)
    }


def name_of(point: Point) -> PointName:
    """Return what a point is called; the last digits of its sparsity may differ between machines."""
    sparsity = point.sparsity if point.requested_sparsity is None else point.requested_sparsity
    return PointName(point.model, point.data, point.line, round(sparsity, 6), point.round)


def primary_figure(point: Point) -> str:
    """Return the name of the figure by which a point is compared: on the test split, as in a comparison."""
    return f"test/{point.metric.name}"


def _figures(point: Point, rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(primary_figure(point), {})[row.seed] = row.test
        found.setdefault("parameters/remaining", {})[row.seed] = row.remaining_parameters
    return found


def make_baseline(
    info: SweepInfo, comparison: Comparison, records: Mapping[str, StageRecord], before: Baseline | None = None
) -> Baseline:
    """Return the baseline of a finished sweep.

    Args:
        before: whose margins are kept; by default the margin of each metric, as a match has it, and `SIZES`

    Raises:
        OrchestratorError: a trial has not finished, or a figure is not finite
    """
    if missing := [trial for trial, status in comparison.trials.items() if status != "finished"]:
        raise OrchestratorError(
            f"{len(missing)} of {len(comparison.trials)} trials of {info.name} have not finished, such as "
            f"{missing[0]!r}: a baseline holds all of a sweep; run it again, which runs what is missing."
        )
    points = {name_of(point): point for point in (*comparison.dense, *comparison.operating_points)}
    kept = {} if before is None else {point.name: point.margins for point in before.points}
    found = []
    for name, values in figures(comparison).items():
        seeds = sorted(values[primary_figure(points[name])])
        if not all(math.isfinite(value) for by_seed in values.values() for value in by_seed.values()):
            raise OrchestratorError(f"a figure of {name.line} at a sparsity of {name.sparsity:g} is not finite.")
        listed = {figure: tuple(by_seed[seed] for seed in seeds) for figure, by_seed in values.items()}
        margins = {figure: margin for figure, margin in kept.get(name, {}).items() if figure in listed}
        found.append(BaselinePoint(*name, seeds=tuple(seeds), values=listed, margins=margins))
    margins = {**{primary_figure(point): point.metric.margin for point in points.values()}, **SIZES}
    if before is not None:
        margins = {figure: margin for figure, margin in before.margins.items() if figure in margins}
    return Baseline(FORMAT, info.name, info.command, hardware(records.values()), margins, tuple(found))


def hardware(records: Iterable[StageRecord]) -> tuple[str, ...]:
    """Return the processors that a sweep ran on."""
    return tuple(sorted({record.environment.get("processor", "unknown") for record in records}))


def read_baseline(content: bytes) -> Baseline:
    """Return what a baseline file says; raise ValueError, which says what is wrong with it."""
    return read_as(Baseline, parse_json(content))


def text_of(baseline: Baseline) -> str:
    """Return the baseline as JSON for people: a list of figures takes a line."""
    data: dict[str, Any] = to_builtins(baseline)
    for point in data["points"]:
        if not point["margins"]:
            del point["margins"]
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def false_alarms(seeds: int, spread: float, margin: float) -> float:
    """Return how often a run that is as good misses the margin, where neither shares a draw with the other.

    The t statistic of the differences then has a noncentral law with n - 1 degrees and sqrt(n) * margin / std.

    Args:
        seeds: n, at least 2
        spread: the standard deviation of each run's values over its seeds
        margin: in the same scale
    """
    from scipy.special import nctdtr

    if spread == 0:
        return 0.0
    shift = math.sqrt(seeds) * margin / (math.sqrt(2) * spread)
    return float(nctdtr(seeds - 1, shift, t_quantile(LEVEL, seeds - 1)))


def margin_for(seeds: int, spread: float, alarms: float = FALSE_ALARMS) -> float:
    """Return the margin at which `false_alarms` are `alarms`."""
    from scipy.special import nctdtrinc

    shift = float(nctdtrinc(seeds - 1, alarms, t_quantile(LEVEL, seeds - 1)))
    return shift * math.sqrt(2) * spread / math.sqrt(seeds)
