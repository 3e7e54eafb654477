"""Drawing of a report's figures with matplotlib, without pyplot's global state; equal data give equal SVG."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.views.report.figures import plot_axes as drawn
from orchestrator.views.report.figures.by_method import Profile
from orchestrator.views.report.figures.figure_data import Matrix, Plot, Series
from orchestrator.views.report.figures.plot_axes import WITHIN, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def tradeoff(plots: Sequence[Plot]) -> Figure:
    """Draw the primary metric against compression, one axes for each panel."""
    return _panels(plots, drawn.tradeoff)


def cost(plots: Sequence[Plot]) -> Figure:
    """Draw the primary metric against training steps and scoring."""
    return _panels(plots, drawn.cost)


def training_macs(plots: Sequence[Plot]) -> Figure:
    """Draw the primary metric against multiply-accumulates of training."""
    return _panels(plots, drawn.training_macs)


def deployed(plots: Sequence[Plot], x_label: str) -> Figure:
    """Draw the primary metric against a measured quantity."""
    return _panels(plots, lambda axes, plot: drawn.deployed(axes, plot, x_label))


def token_speed(plots: Sequence[Plot]) -> Figure:
    """Draw the primary metric against tokens a second."""
    return _panels(plots, drawn.token_speed)


def frontier(plots: Sequence[Plot]) -> Figure:
    """Draw the frontier that a search found."""
    return _panels(plots, drawn.frontier)


def fine_tuning(plots: Sequence[Plot]) -> Figure:
    """Draw the primary metric before and after fine-tuning."""
    return _panels(plots, drawn.fine_tuning)


def curves(plots: Sequence[Plot]) -> Figure:
    """Draw training curves."""
    return _panels(plots, drawn.curves)


def sensitivity(plots: Sequence[Plot]) -> Figure:
    """Draw validation figures against the sparsity of a layer that is pruned alone."""
    return _panels(plots, drawn.sensitivity)


def mask_history(plots: Sequence[Plot]) -> Figure:
    """Draw the history of masks that change."""
    return _panels(plots, drawn.mask_history)


def densities(profiles: Sequence[Profile]) -> Figure:
    """Draw the density of each tensor by method, one panel above the other."""
    return _profiles(profiles, drawn.densities)


def layer_errors(profiles: Sequence[Profile]) -> Figure:
    """Draw the error of each layer by method, one panel above the other."""
    return _profiles(profiles, drawn.layer_errors)


def _profiles(profiles: Sequence[Profile], draw: Callable[[Axes, Profile], None]) -> Figure:
    from matplotlib.figure import Figure

    beside, least = _room_beside([profile.series for profile in profiles])
    wide = max(WIDTH, *(1.6 + 0.45 * len(profile.layers) for profile in profiles))
    tall = HEIGHT + 0.7 * LETTER * max(_longest(profile.layers) for profile in profiles)
    figure = Figure(figsize=(wide + beside, max(tall, least) * len(profiles)), layout="constrained")
    for row, profile in enumerate(profiles):
        draw(figure.add_subplot(len(profiles), 1, row + 1), profile)
    return figure


def matrices(panels: Sequence[Matrix], label: str) -> Figure:
    """Draw matrices, one above the other."""
    from matplotlib.figure import Figure

    shown = [matrix for matrix in panels if matrix.rows and matrix.columns]
    heights = [
        max(2.8, 1.2 + (0.36 if matrix.chance else 0.26) * len(matrix.rows) + 0.7 * LETTER * _longest(matrix.columns))
        for matrix in shown
    ]
    widths = [2.4 + 0.55 * len(matrix.columns) + LETTER * _longest(matrix.rows) for matrix in shown]
    figure = Figure(figsize=(max(widths, default=5.0), sum(heights) or 1.0), layout="constrained")
    for index, matrix in enumerate(shown):
        drawn.matrix(figure.add_subplot(len(shown), 1, index + 1), matrix, label)
    return figure


def _panels(plots: Sequence[Plot], draw: Callable[[Axes, Plot], None]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(3, max(1, len(plots)))
    rows = math.ceil(len(plots) / columns) or 1
    beside, least = _room_beside([plot.series for plot in plots])
    figure = Figure(figsize=((WIDTH + beside) * columns, max(HEIGHT, least) * rows), layout="constrained")
    for index, plot in enumerate(plots):
        draw(figure.add_subplot(rows, columns, index + 1), plot)
    return figure


def _longest(labels: Sequence[str]) -> int:
    return max(map(len, map(shortened, labels)), default=0)


def _room_beside(plots: Sequence[Sequence[Series]]) -> tuple[float, float]:
    """Return width and height in inches of the largest legend beside axes; 0 if all legends fit within."""
    long = [series for series in plots if len(series) > WITHIN]
    labels = [each.label for series in long for each in series]
    return (0.7 + LETTER * _longest(labels), 0.8 + ENTRY * (1 + max(map(len, long)))) if long else (0.0, 0.0)
