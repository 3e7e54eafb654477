"""Baseline: the figures of a finished sweep, and margins by which later sweeps may be worse. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from orchestrator.compare.comparison import Comparison
from orchestrator.compare.pairing import (
    PointName,
    figures,
    hardware,
    is_latency,
    is_primary,
    is_size,
    is_speedup,
    measured_on,
    name_of,
    primary_figure,
)
from orchestrator.compare.statistics import LEVEL, t_quantile
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.plain_data import Count, Fraction, Margin, Number, parse_json, read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown_json
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import percent

FORMAT: Literal[1] = 1
SIZE_MARGIN, SPEED_MARGIN = 0.02, 0.1
"""Default margins: the fractions by which sizes may grow and measured speed-ups may fall."""
FALSE_ALARMS = 0.05
"""Largest false alarm rate of a margin that a new baseline does not report."""


class BaselinePoint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The figures of one operating point, or of the dense network, by seed."""

    model: str
    data: str
    line: str
    sparsity: Fraction
    asked_of: str = ""
    """Quantity that the sparsity is a fraction of; empty in baselines of earlier releases."""
    round: Count
    seeds: Annotated[tuple[Count, ...], Meta(min_length=1)]
    values: Mapping[str, tuple[Number, ...]]
    """Figure -> its value at each of `seeds`, in the figure's own scale."""
    margins: Mapping[str, Margin] = {}
    """Figure -> its margin at this point, instead of the baseline's margin."""

    def __post_init__(self) -> None:
        """Raise ValueError unless every figure has one value for each seed, and seeds are unique."""
        for figure, values in self.values.items():
            if len(values) != len(self.seeds) or len(set(self.seeds)) != len(self.seeds):
                raise ValueError(f"`{figure}` of {self.line!r} must have one value for each of its `seeds`, all unique")

    @property
    def name(self) -> PointName:
        """Name of the point."""
        return PointName(self.model, self.data, self.line, self.sparsity, self.asked_of, self.round)


class Baseline(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a baseline file: plain data that people read and edit."""

    format: Literal[1]
    sweep: str
    command: str
    hardware: tuple[str, ...]
    """Processors that the sweep ran on."""
    margins: Mapping[str, Margin]
    """Figure -> by how much it may be worse: for a metric in its own scale (0.01 of a fraction is one point), for a
    size or a speed-up as a fraction. A figure without a margin is not checked."""
    points: Annotated[tuple[BaselinePoint, ...], Meta(min_length=1)]
    measured_on: Mapping[str, tuple[str, ...]] = {}
    """Deployment format -> processors, threads and runtimes on which its latency was measured."""

    def __post_init__(self) -> None:
        """Raise ValueError for a margin without a figure, for example a misspelled one."""
        held = {figure for point in self.points for figure in point.values}
        for margins, known in [(self.margins, held), *((point.margins, point.values) for point in self.points)]:
            if unknown := sorted(set(margins) - set(known)):
                raise ValueError(f"`margins` names {unknown[0]!r}, which is none of {', '.join(sorted(known))}")

    def named_as(self, names: Iterable[PointName]) -> dict[PointName, BaselinePoint]:
        """Return name -> point; a point without `asked_of` takes it from the same point in `names`."""
        full = {name._replace(asked_of=""): name for name in names}
        return {full.get(point.name, point.name): point for point in self.points}


def make_baseline(
    info: SweepInfo,
    comparison: Comparison,
    plan: Plan,
    records: Mapping[str, StageRecord],
    before: Baseline | None = None,
) -> Baseline:
    """Return the baseline of a finished sweep.

    Args:
        info: name and command of the sweep
        comparison: comparison of the sweep's trials
        plan: plan of the sweep
        records: stage key -> record
        before: earlier baseline whose margins are kept; None: each metric's own margin, `SIZE_MARGIN`, `SPEED_MARGIN`

    Raises:
        OrchestratorError: a trial has not finished, or a figure is not finite
    """
    if missing := [trial for trial, status in comparison.trials.items() if status != "finished"]:
        stopped = "stopped" in comparison.trials.values()
        again = "with search=none, as its search stopped trials" if stopped else "which runs the missing stages"
        raise OrchestratorError(
            f"{len(missing)} of {len(comparison.trials)} trials of {info.name} have not finished, for example "
            f"{missing[0]!r}; a baseline needs all trials: run the sweep again, {again}."
        )
    points = {name_of(point): point for point in comparison.shown}
    kept = {} if before is None else before.named_as(points)
    found = []
    for name, values in figures(comparison, plan, records).items():
        seeds = sorted(values[primary_figure(points[name])])
        if not all(math.isfinite(value) for by_seed in values.values() for value in by_seed.values()):
            raise OrchestratorError(f"a figure of {name.line} at a sparsity of {percent(name.sparsity)} is not finite.")
        listed = {
            figure: tuple(by_seed[seed] for seed in seeds)
            for figure, by_seed in values.items()
            if by_seed.keys() >= set(seeds) and not is_latency(figure)
        }
        own = kept[name].margins if name in kept else {}
        margins = {figure: margin for figure, margin in own.items() if figure in listed}
        found.append(BaselinePoint(**name._asdict(), seeds=tuple(seeds), values=listed, margins=margins))
    pairs = [(points[each.name], figure) for each in found for figure in each.values]
    margins = {figure: point.metric.margin for point, figure in pairs if is_primary(figure, point.metric)}
    for figure in (figure for _, figure in pairs if figure not in margins):
        margins[figure] = SPEED_MARGIN if is_speedup(figure) else SIZE_MARGIN
    if before is not None:
        margins = {figure: margin for figure, margin in before.margins.items() if figure in margins}
    where = hardware(records.values()), measured_on(plan, records)
    return Baseline(FORMAT, info.name, info.command, where[0], margins, tuple(found), where[1])


def read_baseline(content: bytes) -> Baseline:
    """Parse a baseline file; raise ValueError, which names the fault."""
    return read_as(Baseline, parse_json(content))


def text_of(baseline: Baseline) -> str:
    """Format the baseline as JSON for people: each list of values takes one line."""
    data: dict[str, Any] = to_builtins(baseline)
    for point in data["points"]:
        counts = {figure: [*map(int, values)] for figure, values in point["values"].items() if is_size(figure)}
        point["values"] |= counts
        if not point["margins"]:
            del point["margins"]
    text = shown_json(data, indent=2)
    return re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def false_alarms(seeds: int, spread: float, margin: float) -> float:
    """Return how often an equally good run misses the margin, if the two runs share no random draw.

    The t statistic of the differences then has a noncentral t distribution with n - 1 degrees of freedom and
    noncentrality sqrt(n) * margin / (sqrt(2) * spread).

    Args:
        seeds: n, at least 2
        spread: standard deviation of each run's values over its seeds
        margin: margin in the same scale
    """
    from scipy.special import nctdtr

    if spread == 0:
        return 0.0
    shift = math.sqrt(seeds) * margin / (math.sqrt(2) * spread)
    return float(nctdtr(seeds - 1, shift, t_quantile(LEVEL, seeds - 1)))


def margin_for(seeds: int, spread: float, alarms: float = FALSE_ALARMS) -> float:
    """Return the margin at which `false_alarms` equals `alarms`."""
    from scipy.special import nctdtrinc

    shift = float(nctdtrinc(seeds - 1, alarms, t_quantile(LEVEL, seeds - 1)))
    return shift * math.sqrt(2) * spread / math.sqrt(seeds)
