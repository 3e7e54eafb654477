"""Drawing of a figure's data into matplotlib axes, of the report or of a caller.

Lines differ in colour (Okabe and Ito's palette, safe for colour-blind readers), marker and dash, so that they also
differ in grey; matrices use cividis, whose lightness grows with the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from orchestrator.core.metrics import Metric
from orchestrator.core.redact import shown
from orchestrator.views.report.figures.by_method import Profile
from orchestrator.views.report.figures.figure_data import FRONT, Matrix, Plot, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
WITHIN = 6
"""Maximum number of legend entries within the axes; a longer legend goes beside them."""
SPARSE = 0.05
"""Density below which the axis is logarithmic."""
PERCENT = Metric("density", "%", "higher", margin=0.01, format=".2%")
ERROR = Metric("error", "", "lower", margin=0.0, format=".3g")
WRITTEN = 480
"""Maximum number of matrix cells with written values: more take long to draw."""
WIDE = 10
"""Ratio of the largest and the smallest figure above which the axis of tokens a second is logarithmic."""
LONGEST = 48
"""Maximum number of characters shown of a label."""


def tradeoff(axes: Axes, plot: Plot, against: str = "compression") -> None:
    """Draw the primary metric against compression, on a logarithmic axis of base 2, or against sparsity in percent."""
    if against == "compression":
        _plot(axes, plot, "compression (parameters, dense / remaining)", "test", axis=_compression_axis)
    else:
        _plot(axes, plot, "sparsity (% of prunable weights)", "test", scale=100.0)


def cost(axes: Axes, plot: Plot) -> None:
    """Draw the primary metric against training steps and scoring, a marker for each operating point."""
    deployed(axes, plot, "steps from initialisation, with scoring")


def training_macs(axes: Axes, plot: Plot) -> None:
    """Draw the primary metric against the training's multiply-accumulates, with intervals of the points."""
    deployed(axes, plot, "multiply-accumulates of training, from initialisation")


def deployed(axes: Axes, plot: Plot, x_label: str) -> None:
    """Draw the primary metric against a measured or counted quantity, a marker for each operating point."""
    _plot(axes, plot, x_label, "test", axis=_axis_from_zero, joined=False)


def token_speed(axes: Axes, plot: Plot) -> None:
    """Draw the primary metric against tokens a second, with both intervals; on a logarithmic axis if it varies much."""
    _plot(axes, plot, "tokens a second, generated one by one, measured", "test", axis=_axis_from_zero, joined=False)
    heights = [y for series in plot.series for y in series.y]
    if min(heights) > 0 and max(heights) > WIDE * min(heights):
        _logarithmic(axes)


def frontier(axes: Axes, plot: Plot) -> None:
    """Draw the metric on validation against a quantity, with intervals; the frontier that a search found is dotted."""
    _plot(axes, plot, plot.x_label, "validation", axis=_axis_from_zero, joined=False)


def fine_tuning(axes: Axes, plot: Plot) -> None:
    """Draw the metric before and after fine-tuning; a method's lines share colour and marker, `before` is dashed."""
    _plot(axes, plot, "sparsity (% of prunable weights)", "validation", pairs=True, scale=100.0)


def curves(axes: Axes, plot: Plot) -> None:
    """Draw training curves, with a marker at the start of each round: after pruning, before its first step."""
    _plot(axes, plot, "optimizer steps from initialisation", "validation")


def sensitivity(axes: Axes, plot: Plot) -> None:
    """Draw validation figures against the sparsity of a layer that is pruned alone, a line for each layer."""
    _plot(axes, plot, "sparsity (% of the layer that is pruned alone)", "validation", scale=100.0)


def mask_history(axes: Axes, plot: Plot) -> None:
    """Draw shares of entries while masks change; a line's two series have one colour, the first one is dashed."""
    _plot(axes, plot, "optimizer steps of the training", "share of", pairs=True)


def densities(axes: Axes, profile: Profile) -> None:
    """Draw the density of each tensor by method; the axis is symmetric-logarithmic if a density is below SPARSE."""
    for index, series in enumerate(profile.series):
        _line(axes, series, PERCENT, index, DASHES[index % len(DASHES)], True, 1.0)
    least = min((y for series in profile.series for y in series.y if y), default=1.0)
    if least < SPARSE:
        axes.set_yscale("symlog", linthresh=100 * least)
        axes.yaxis.set_major_formatter(lambda percent, _: f"{percent:g}")  # powers of ten would be formulas
    _name_columns(axes, profile.layers)
    axes.set_ylabel("density (% of the tensor)")
    scaled = axes.yaxis.get_transform()
    top = float(scaled.transform([100 * (max((y for series in profile.series for y in series.y), default=0) or 1)])[0])
    axes.set_ylim(*scaled.inverted().transform([-0.03 * top, 1.05 * top]))  # room for whole markers at both ends
    axes.set_title(shown(profile.title))
    _legend(axes, len(profile.series))


def layer_errors(axes: Axes, profile: Profile) -> None:
    """Draw the error of each layer by method, on a logarithmic axis if all errors are positive."""
    for index, series in enumerate(profile.series):
        _line(axes, series, ERROR, index, DASHES[index % len(DASHES)], True, 1.0)
    if all(y > 0 for series in profile.series for y in series.y):
        _logarithmic(axes)
    _name_columns(axes, profile.layers)
    axes.set_ylabel("error / square of the outputs")
    axes.set_title(shown(profile.title))
    _legend(axes, len(profile.series))


def _logarithmic(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers: powers of ten would be formulas, which STYLE does not parse."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def matrix(axes: Axes, found: Matrix, label: str) -> None:
    """Draw a matrix with a colour bar; values are written into the cells if there are at most WRITTEN cells."""
    values = [[math.nan if value is None else value for value in row] for row in found.values]
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    _name_columns(axes, found.columns)
    axes.set_yticks(range(len(found.rows)), [*map(shortened, found.rows)])
    axes.grid(False)
    axes.set_title(shown(found.title))
    if len(found.rows) * len(found.columns) <= WRITTEN:
        for row, values_of_row in enumerate(found.values):
            for column, value in enumerate(values_of_row):
                if value is not None:
                    ink = "black" if value > 0.55 else "white"
                    chance = found.chance[row][column] if found.chance else None
                    text = f"{value:.2f}" if chance is None else f"{value:.2f}\n({chance:.2f})"
                    axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=7)
    explained = f"{label} (in brackets: by chance)" if found.chance else label
    axes.figure.colorbar(image, ax=axes, label=explained, fraction=0.04, pad=0.02)


def shortened(label: str) -> str:
    """Make a label safe to display, and cut the middle of a long one."""
    label = shown(label)
    return label if len(label) <= LONGEST else f"{label[: LONGEST // 2]}…{label[-LONGEST // 2 + 1 :]}"


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [*map(shortened, names)], rotation=45, ha="right", rotation_mode="anchor")


def _plot(
    axes: Axes,
    plot: Plot,
    x_label: str,
    split: str,
    *,
    axis: Callable[[Axes, float], None] | None = None,
    pairs: bool = False,
    joined: bool = True,
    scale: float = 1.0,
) -> None:
    for position, series in enumerate(plot.series):
        line = position // 2 if pairs else position
        dash = ("--", "-")[position % 2] if pairs else DASHES[line % len(DASHES)] if joined else "none"
        front = series.label == FRONT
        _line(axes, series, plot.metric, line, ":" if front else dash, not front, scale)
    if axis is not None:
        axis(axes, max((x for series in plot.series for x in series.x), default=1.0))
    axes.set_xlabel(x_label)
    unit = f" ({plot.metric.unit})" if plot.metric.unit else ""
    axes.set_ylabel(shown(f"{split} {plot.metric.title}{unit}"))
    _reference(axes, plot)
    axes.set_title(fill(shown(plot.title), LONGEST))
    if plot.series:
        _legend(axes, len(plot.series))


def _legend(axes: Axes, entries: int) -> None:
    """Add a legend; a long one goes beside the axes, where it covers no data."""
    if entries > WITHIN:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    else:
        axes.legend()


def _line(axes: Axes, series: Series, metric: Metric, index: int, dash: Any, marked: bool, scale: float) -> None:
    colour = COLOURS[index % len(COLOURS)]
    x = [scale * value for value in series.x]
    axes.plot(
        x,
        [metric.scale * value for value in series.y],
        color=colour,
        linestyle=dash,
        marker=MARKERS[index % len(MARKERS)] if marked else None,
        markevery=None if series.marks is None else list(series.marks),
        markersize=5,
        label=shortened(series.label),
    )
    for left, right, height in zip(series.left, series.right, series.y, strict=False):
        if left is not None and right is not None:
            axes.hlines(metric.scale * height, left, right, color=colour, alpha=0.6, linewidth=1)
    band = [
        (position, *_band(metric, low, high))
        for position, low, high in zip(x, series.low, series.high, strict=False)
        if low is not None and high is not None
    ]
    if not band:
        return
    positions, lows, highs = zip(*band, strict=True)
    if dash == "none":
        axes.vlines(positions, lows, highs, color=colour, alpha=0.6, linewidth=1)
    else:
        axes.fill_between(positions, lows, highs, color=colour, alpha=0.15, linewidth=0)


def _reference(axes: Axes, plot: Plot) -> None:
    if plot.reference is None:
        return
    axes.axhline(plot.metric.scale * plot.reference.mean, color="0.25", linewidth=1, label="dense")
    if plot.reference.low is not None and plot.reference.high is not None:
        axes.axhspan(*_band(plot.metric, plot.reference.low, plot.reference.high), color="0.25", alpha=0.1, linewidth=0)


def _band(metric: Metric, low: float, high: float) -> tuple[float, float]:
    """Return the ends of a band in the axis's unit; bands of fractions are clipped to [0%, 100%]."""
    if metric.scale == 1:
        return low, high
    return max(0.0, metric.scale * low), min(metric.scale, metric.scale * high)


def _axis_from_zero(axes: Axes, largest: float) -> None:
    axes.set_xlim(left=0, right=1.1 * largest or 1)  # `largest` is 0 if nothing was trained


def _compression_axis(axes: Axes, largest: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.9, max(2.0, largest) * 1.15)
