"""Drawing of figures with matplotlib, into the axes of a report or of a caller; equal data give equal SVG.

Lines differ in colour (Okabe and Ito's palette, safe for colour-blind readers), marker and dash, so that they also
differ in grey; matrices use cividis, whose lightness grows with the value. pyplot's global state is not used.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from textwrap import fill
from typing import TYPE_CHECKING, Any

from orchestrator.core.metrics import Metric
from orchestrator.core.redact import shown
from orchestrator.views.report.figures.figure_data import FRONT, Plot, Series
from orchestrator.views.report.figures.layer_data import Matrix, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawn = Plot | Profile | Matrix
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
    "text.parse_math": False,  # a name with a dollar sign is no formula
}
WIDTH, HEIGHT = 5.2, 3.8
"""Size of one pair of axes, in inches."""
ENTRY = 0.2
"""Height of an entry of a legend beside the axes, in inches."""
LETTER = 0.08
"""Width of a letter of a label, in inches."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
WITHIN = 5
"""Maximum number of legend entries within the axes; a longer legend goes beside them."""
SPARSE = 0.05
"""Density below which the axis is logarithmic."""
PERCENT = Metric("density", "%", "higher", margin=0.01, format=".2%")
ERROR = Metric("error", "", "lower", margin=0.0, format=".3g")
WRITTEN = 480
"""Maximum number of matrix cells with written values: more take long to draw."""
WIDE = 10
"""Ratio of the largest and the smallest figure above which an axis of figures may be logarithmic."""
LONGEST = 48
"""Maximum number of characters shown of a label."""

_one_at_a_time = threading.Lock()
"""Lock for matplotlib's settings, which are global to the process."""


def render(draw: Callable[[], Figure]) -> dict[str, bytes]:
    """Render the figure that `draw` returns as `{"svg": ..., "png": ...}`."""
    with _one_at_a_time:
        return _rendered(draw)


def prepare() -> None:
    """Import matplotlib and find its fonts ahead of time, which takes about a second."""

    def words() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1, 1))
        figure.text(0, 0, "0")
        return figure

    with suppress(Exception):  # the error is reported later, when a figure is left out
        render(words)


def _rendered(draw: Callable[[], Figure]) -> dict[str, bytes]:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with mpl.rc_context(STYLE):
        figure = draw()
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()  # computes the layout, the slowest part, once for both files
        figure.set_layout_engine("none")
        svg, png = io.BytesIO(), io.BytesIO()
        canvas: Any = FigureCanvasSVG(figure)  # its methods have no types
        canvas.print_svg(svg, metadata={"Date": None, "Creator": None})
        figure.dpi = 150
        canvas = FigureCanvasAgg(figure)
        canvas.print_png(png)  # `savefig` would draw twice, because it checks the layout first
        return {"svg": svg.getvalue(), "png": png.getvalue()}


def figure(found: Sequence[Drawn], draw: Callable[[Axes, Any], None]) -> Figure:
    """Return a figure with a pair of axes for each element: plots side by side, profiles and matrices stacked."""
    from matplotlib.figure import Figure

    across = min(3, max(1, len(found))) if all(isinstance(each, Plot) for each in found) else 1
    down = math.ceil(len(found) / across) or 1
    beside, least = _room_beside([each.series for each in found if not isinstance(each, Matrix)])
    sizes = [_size(each) for each in found] or [(WIDTH, HEIGHT)]
    wide = (max(width for width, _ in sizes) + beside) * across
    heights = [max(height, least) for _, height in sizes]
    tall = sum(heights) if all(isinstance(each, Matrix) for each in found) else max(heights) * down
    drawn = Figure(figsize=(wide, tall), layout="constrained")
    for index, each in enumerate(found):
        draw(drawn.add_subplot(down, across, index + 1), each)
    return drawn


def _size(found: Drawn) -> tuple[float, float]:
    """Return the width and the height of axes in inches, without a legend beside them."""
    if isinstance(found, Plot):
        return WIDTH, HEIGHT
    if isinstance(found, Profile):
        return max(WIDTH, 1.6 + 0.45 * len(found.layers)), HEIGHT + 0.7 * LETTER * _longest(found.layers)
    row = 0.36 if found.chance else 0.26
    tall = max(2.8, 1.2 + row * len(found.rows) + 0.7 * LETTER * _longest(found.columns))
    return 2.4 + 0.55 * len(found.columns) + LETTER * _longest(found.rows), tall


def _longest(labels: Sequence[str]) -> int:
    return max(map(len, map(shortened, labels)), default=0)


def _room_beside(plots: Sequence[Sequence[Series]]) -> tuple[float, float]:
    """Return width and height in inches of the largest legend beside axes; 0 if all legends fit within."""
    long = [series for series in plots if len(series) > WITHIN]
    labels = [each.label for series in long for each in series]
    return (0.7 + LETTER * _longest(labels), 0.8 + ENTRY * (1 + max(map(len, long)))) if long else (0.0, 0.0)


def plot(axes: Axes, found: Plot, *, pairs: bool = False, points: bool = False, doubling: bool = False) -> None:
    """Draw lines with their intervals, and the dense network as a horizontal line with its band.

    Args:
        axes: axes to draw in
        found: lines to draw
        pairs: two series each share colour and marker, the first one is dashed
        points: a marker for each point without a line, from 0 on the x axis
        doubling: the x axis is logarithmic with base 2, as for compression
    """
    for position, series in enumerate(found.series):
        line = position // 2 if pairs else position
        dash = ("--", "-")[position % 2] if pairs else "none" if points else DASHES[line % len(DASHES)]
        front = series.label == FRONT
        _line(axes, series, found.metric, line, ":" if front else dash, not front)
    largest = max((x for series in found.series for x in series.x), default=1.0)
    if doubling:
        _compression_axis(axes, largest)
    elif points:
        axes.set_xlim(left=0, right=1.1 * largest or 1)  # `largest` is 0 if nothing was trained
    axes.set_xlabel(found.x_label)
    unit = f" ({found.metric.unit})" if found.metric.unit else ""
    axes.set_ylabel(shown(f"{found.split} {found.metric.title}{unit}"))
    _reference(axes, found)
    axes.set_title(fill(shown(found.title), LONGEST))
    if found.series:
        _legend(axes, len(found.series))


def token_speed(axes: Axes, found: Plot) -> None:
    """Draw the metric against tokens a second; on a logarithmic axis if it varies much."""
    plot(axes, found, points=True)
    heights = [y for series in found.series for y in series.y]
    if min(heights) > 0 and max(heights) > WIDE * min(heights):
        _logarithmic(axes)


def densities(axes: Axes, profile: Profile) -> None:
    """Draw the density of each tensor by method; the axis is symmetric-logarithmic if a density is below SPARSE and
    they vary much.
    """
    _profile(axes, profile, PERCENT, "density (% of the tensor)")
    least = min((y for series in profile.series for y in series.y if y), default=1.0)
    most = max((y for series in profile.series for y in series.y), default=1.0)
    if least < SPARSE and most > WIDE * least:
        axes.set_yscale("symlog", linthresh=100 * least)
        axes.yaxis.set_major_formatter(lambda percent, _: f"{percent:g}")  # powers of ten would be formulas
    scaled = axes.yaxis.get_transform()
    top = float(scaled.transform([100 * (most or 1)])[0])
    axes.set_ylim(*scaled.inverted().transform([-0.03 * top, 1.05 * top]))  # room for whole markers at both ends


def layer_errors(axes: Axes, profile: Profile) -> None:
    """Draw the error of each layer by method, on a logarithmic axis if all errors are positive."""
    _profile(axes, profile, ERROR, "error / square of the outputs")
    if all(y > 0 for series in profile.series for y in series.y):
        _logarithmic(axes)


def _profile(axes: Axes, profile: Profile, metric: Metric, label: str) -> None:
    for index, series in enumerate(profile.series):
        _line(axes, series, metric, index, DASHES[index % len(DASHES)], True)
    _name_columns(axes, profile.layers)
    axes.set_ylabel(label)
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
    explained = f"{label}\n(in brackets: by chance)" if found.chance else label
    axes.figure.colorbar(image, ax=axes, label=explained, fraction=0.04, pad=0.02)


def shortened(label: str) -> str:
    """Make a label safe to display, and cut the middle of a long one."""
    label = shown(label)
    return label if len(label) <= LONGEST else f"{label[: LONGEST // 2]}…{label[-LONGEST // 2 + 1 :]}"


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [*map(shortened, names)], rotation=45, ha="right", rotation_mode="anchor")


def _legend(axes: Axes, entries: int) -> None:
    """Add a legend; a long one goes beside the axes, where it covers no data."""
    if entries > WITHIN:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    else:
        axes.legend()


def _line(axes: Axes, series: Series, metric: Metric, index: int, dash: Any, marked: bool) -> None:
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(
        series.x,
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
        for position, low, high in zip(series.x, series.low, series.high, strict=False)
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


def _compression_axis(axes: Axes, largest: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0.9, max(2.0, largest) * 1.15)
