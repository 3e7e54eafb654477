"""Figure of docs/does-it-pay.md, from the measurements of scripts/does_it_pay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.views.report.figures.drawing import COLOURS, MARKERS, render
from scripts.pages.pay_cells import BEST, SPARSE
from scripts.pages.pay_tables import Record, Recorded, chosen, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4
"""Panels in a row."""


def figure(record: Record) -> bytes:
    """Return the figure as SVG: speed-up against weights / weights left, one panel for each runtime."""
    return render(lambda: _drawn(record["layers"]))["svg"]


def _drawn(cells: Sequence[Recorded]) -> Figure:
    from matplotlib.figure import Figure

    panels = list(groups([cell for cell in cells if cell["against"] != BEST], "runtime"))
    if best := chosen(cells, runtime=SPARSE, against=BEST):
        panels.append((f"sparse kernels over {BEST}", best))
    down = -(-len(panels) // ACROSS)
    drawn = Figure(figsize=(2.9 * ACROSS, 2.6 * down + 1.0), layout="constrained")
    axes = drawn.subplots(down, ACROSS, sharex=True, sharey=True, squeeze=False).flatten()
    for axis, (title, of_panel) in zip(axes, panels, strict=False):
        _panel(axis, title, of_panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    drawn.supxlabel("weights / weights left; solid: unstructured, dashed: channels, dotted: their ratio", fontsize=9)
    drawn.supylabel("speed-up over dense", fontsize=9)
    lines, names = axes[0].get_legend_handles_labels()
    drawn.legend(lines, names, loc="outside upper center", ncols=3, fontsize=7)
    return drawn


def _panel(axis: Axes, title: str, cells: Sequence[Recorded]) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for of in (axis.xaxis, axis.yaxis):
        of.set_major_formatter(lambda value, _: f"{value:g}")
    axis.plot([1, 32], [1, 32], color="grey", linewidth=0.8, linestyle=":")
    axis.axhline(1, color="grey", linewidth=0.8)
    for place, (layer, of_layer) in enumerate(groups(cells, "subject")):
        for pattern, style in (("unstructured", "-"), ("channels", "--")):
            found = [cell for cell in of_layer if cell["pattern"] == pattern]
            axis.plot(
                [1 / (1 - cell["sparsity"]) for cell in found],
                [cell["speedup"] for cell in found],
                linestyle=style,
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                markersize=3,
                linewidth=1,
                label=layer if style == "-" else None,
            )
