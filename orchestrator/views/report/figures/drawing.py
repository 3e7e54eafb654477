"""Draw the figures of a comparison with matplotlib, without pyplot and its global state; equal data, equal SVG.

Lines differ in colour (Okabe and Ito's palette, safe for the colour-blind), marker and dash, so that they can be told
apart in grey as well; matrices use cividis, whose lightness grows with the value.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.core.metrics import Metric
from orchestrator.views.report.figures.by_method import Profile
from orchestrator.views.report.figures.figure_data import FRONT, Matrix, Plot, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.framealpha": 0.75,
    "legend.edgecolor": "none",
    "svg.hashsalt": "pruning-orchestrator",
    "svg.fonttype": "path",
    "text.parse_math": False,  # a name is no formula
}
WIDTH, HEIGHT = 5.2, 3.8
"""Inches of one pair of axes."""
WITHIN, ENTRY = 6, 0.2
"""Entries of a legend that have room within the axes; of a longer one the inches that each is high."""
SPARSE = 0.05
"""Densities below are told apart on a logarithmic axis."""
PERCENT = Metric("density", "%", "higher", margin=0.01, format=".2%")
LETTER = 0.08
"""Inches of a letter of a label."""
WRITTEN = 480
"""Cells of a matrix into which values are written: more take long to draw."""
LONGEST = 48
"""Letters shown of a label."""

_one_at_a_time = threading.Lock()
"""matplotlib's settings are those of the whole process."""


def render(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """Return what `draw` draws as `{"svg": ..., "png": ...}`."""
    with _one_at_a_time:
        return _rendered(draw)


def prepare() -> None:
    """Import what drawing needs, and find the fonts: a second that may pass while others work."""

    def words() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1, 1))
        figure.text(0, 0, "0")
        return figure

    with suppress(Exception):  # what is amiss is said where a figure is left out
        render(words)


def _rendered(draw: Callable[[], Figure]) -> dict[str, bytes]:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with mpl.rc_context(STYLE):
        figure = draw()
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()  # lays the figure out, which takes longest; the files then share the layout
        figure.set_layout_engine("none")
        svg, png = io.BytesIO(), io.BytesIO()
        canvas: Any = FigureCanvasSVG(figure)  # whose methods have no types
        canvas.print_svg(svg, metadata={"Date": None, "Creator": None})
        figure.dpi = 150
        canvas = FigureCanvasAgg(figure)
        canvas.print_png(png)  # `savefig` would draw twice: it asks first whether the layout holds
        return {"svg": svg.getvalue(), "png": png.getvalue()}


def tradeoff(plots: Sequence[Plot]) -> Figure:
    """The primary metric against compression, on a logarithmic axis of base 2."""
    return _panels(plots, "compression (parameters, dense / remaining)", "test", axis=_compression_axis)


def cost(plots: Sequence[Plot]) -> Figure:
    """The primary metric against training steps and scoring, a mark for each operating point."""
    return _panels(plots, "steps from initialisation, with scoring", "test", axis=_axis_from_zero, joined=False)


def deployed(plots: Sequence[Plot], x_label: str) -> Figure:
    """The primary metric against what was measured, a mark for each operating point."""
    return _panels(plots, x_label, "test", axis=_axis_from_zero, joined=False)


def fine_tuning(plots: Sequence[Plot]) -> Figure:
    """Before and after fine-tuning; lines of one method share colour and marker, before is dashed."""
    return _panels(plots, "sparsity (% of prunable weights)", "validation", pairs=True, scale=100.0)


def curves(plots: Sequence[Plot]) -> Figure:
    """Training curves."""
    return _panels(plots, "optimizer steps from initialisation", "validation", markers=False)


def densities(profiles: Sequence[Profile]) -> Figure:
    """What each method keeps of each tensor; on a logarithmic axis, with 0, where some keep little."""
    from matplotlib.figure import Figure

    beside, least = _room_beside([profile.series for profile in profiles])
    wide = max(WIDTH, *(1.6 + 0.45 * len(profile.layers) for profile in profiles))
    tall = HEIGHT + 0.7 * LETTER * max(_longest(profile.layers) for profile in profiles)
    figure = Figure(figsize=(wide + beside, max(tall, least) * len(profiles)), layout="constrained")
    for row, profile in enumerate(profiles):
        axes = figure.add_subplot(len(profiles), 1, row + 1)
        for index, series in enumerate(profile.series):
            _line(axes, series, PERCENT, index, DASHES[index % len(DASHES)], True, 1.0)
        least = min((y for series in profile.series for y in series.y if y), default=1.0)
        if least < SPARSE:
            axes.set_yscale("symlog", linthresh=100 * least)
            axes.yaxis.set_major_formatter(lambda percent, _: f"{percent:g}")  # powers of ten would be formulas
        axes.set_xticks(
            range(len(profile.layers)),
            [*map(_shortened, profile.layers)],
            rotation=45,
            ha="right",
            rotation_mode="anchor",
        )
        axes.set_ylabel("density (% of the tensor)")
        axes.set_ylim(bottom=0)
        axes.set_title(profile.title)
        _legend(axes, len(profile.series))
    return figure


def matrices(panels: Sequence[Matrix], label: str) -> Figure:
    """Matrices, one above the other, each value written into its cell where there is room."""
    from matplotlib.figure import Figure

    shown = [matrix for matrix in panels if matrix.rows and matrix.columns]
    heights = [
        max(2.8, 1.2 + (0.36 if matrix.chance else 0.26) * len(matrix.rows) + 0.7 * LETTER * _longest(matrix.columns))
        for matrix in shown
    ]
    widths = [2.4 + 0.55 * len(matrix.columns) + LETTER * _longest(matrix.rows) for matrix in shown]
    figure = Figure(figsize=(max(widths, default=5.0), sum(heights) or 1.0), layout="constrained")
    for index, matrix in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        image = _matrix(axes, matrix)
        figure.colorbar(image, ax=axes, label=label, fraction=0.04, pad=0.02)
    return figure


def _longest(labels: Sequence[str]) -> int:
    return max(map(len, map(_shortened, labels)), default=0)


def _shortened(label: str) -> str:
    """Leave the middle out of a label that would need more room than the matrix."""
    return label if len(label) <= LONGEST else f"{label[: LONGEST // 2]}…{label[-LONGEST // 2 + 1 :]}"


def _panels(
    plots: Sequence[Plot],
    x_label: str,
    split: str,
    *,
    axis: Callable[[Axes, float], None] | None = None,
    pairs: bool = False,
    markers: bool = True,
    joined: bool = True,
    scale: float = 1.0,
) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(plots)))
    rows = math.ceil(len(plots) / columns) or 1
    beside, least = _room_beside([plot.series for plot in plots])
    figure = Figure(figsize=((WIDTH + beside) * columns, max(HEIGHT, least) * rows), layout="constrained")
    for index, plot in enumerate(plots):
        axes = figure.add_subplot(rows, columns, index + 1)
        for position, series in enumerate(plot.series):
            line = position // 2 if pairs else position
            dash = ("--", "-")[position % 2] if pairs else DASHES[line % len(DASHES)] if joined else "none"
            front = series.label == FRONT
            _line(axes, series, plot.metric, line, ":" if front else dash, markers and not front, scale)
        if axis is not None:
            axis(axes, max((x for series in plot.series for x in series.x), default=1.0))
        axes.set_xlabel(x_label)
        unit = f" ({plot.metric.unit})" if plot.metric.unit else ""
        axes.set_ylabel(f"{split} {plot.metric.title}{unit}")
        _reference(axes, plot)
        axes.set_title(plot.title)
        if plot.series:
            _legend(axes, len(plot.series))
    return figure


def _room_beside(plots: Sequence[Sequence[Series]]) -> tuple[float, float]:
    """Return the inches that the longest legend needs beside the axes, and in height; 0 where all stand within."""
    long = [series for series in plots if len(series) > WITHIN]
    labels = [each.label for series in long for each in series]
    return (0.7 + LETTER * _longest(labels), 0.8 + ENTRY * (1 + max(map(len, long)))) if long else (0.0, 0.0)


def _legend(axes: Axes, entries: int) -> None:
    """Add a legend; a long one beside the axes, where it hides nothing."""
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
        markersize=5,
        label=_shortened(series.label),
    )
    band = [
        (position, *_band(metric, low, high))
        for position, low, high in zip(x, series.low, series.high, strict=False)
        if low is not None and high is not None
    ]
    if band and dash != "none":
        positions, lows, highs = zip(*band, strict=True)
        axes.fill_between(positions, lows, highs, color=colour, alpha=0.15, linewidth=0)


def _reference(axes: Axes, plot: Plot) -> None:
    if plot.reference is None:
        return
    axes.axhline(plot.metric.scale * plot.reference.mean, color="0.25", linewidth=1, label="dense")
    if plot.reference.low is not None and plot.reference.high is not None:
        axes.axhspan(*_band(plot.metric, plot.reference.low, plot.reference.high), color="0.25", alpha=0.1, linewidth=0)


def _band(metric: Metric, low: float, high: float) -> tuple[float, float]:
    """Return the ends of a band; of fractions as far as there are such fractions."""
    if metric.scale == 1:
        return low, high
    return max(0.0, metric.scale * low), min(metric.scale, metric.scale * high)


def _axis_from_zero(axes: Axes, largest: float) -> None:
    axes.set_xlim(left=0, right=1.1 * largest or 1)  # nothing may have been trained


def _compression_axis(axes: Axes, largest: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.9, max(2.0, largest) * 1.15)


def _matrix(axes: Axes, matrix: Matrix) -> Any:
    values = [[math.nan if value is None else value for value in row] for row in matrix.values]
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(
        range(len(matrix.columns)), [*map(_shortened, matrix.columns)], rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(range(len(matrix.rows)), [*map(_shortened, matrix.rows)])
    axes.grid(False)
    axes.set_title(matrix.title)
    if len(matrix.rows) * len(matrix.columns) <= WRITTEN:
        for row, values_of_row in enumerate(matrix.values):
            for column, value in enumerate(values_of_row):
                if value is not None:
                    ink = "black" if value > 0.55 else "white"
                    chance = matrix.chance[row][column] if matrix.chance else None
                    text = f"{value:.2f}" if chance is None else f"{value:.2f}\n({chance:.2f})"
                    axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=7)
    return image
