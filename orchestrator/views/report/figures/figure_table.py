"""Figures of a report: each row has a name, the data, the drawing and the caption; files and Python methods use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.compare.comparison import Comparison
from orchestrator.compare.sensitivity import sensitivity_curves
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.report.figures import drawing, figure_data, layer_data
from orchestrator.views.report.figures.layer_data import MOST_LAYERS, ReadFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPED = f"More than {MOST_LAYERS} tensors: all entries by block, and by role in the block."


class Source(NamedTuple):
    """Results that figures are made from."""

    plan: Plan
    records: Mapping[str, StageRecord]
    comparison: Comparison
    read: ReadFile | None = None
    """Reads a file of a stage, for the overlap of masks; None: without this figure."""
    in_report: bool = True
    """Whether the figure is for the report, which shows many layers in groups, and densities only where they differ."""


@dataclass(frozen=True)
class FigureRow:
    """A figure: its data, empty if a run has none, and how an element of them is drawn."""

    data: Callable[[Source], Sequence[drawing.Drawn]]
    draw: Callable[[Axes, Any], None]
    caption: str
    """Sentences below the figure in the report; empty: the figure is drawn in Python only."""
    needs: str = "a finished round"
    """Words for what a run without the figure lacks."""


def _tradeoff(source: Source) -> tuple[figure_data.Plot, ...]:
    found = source.comparison
    return tuple(plot for text in figure_data.texts(found) for plot in figure_data.tradeoff(found, text=text))


COSTS = "finished rounds of two lines at unequal "
MEASURED = "measurements of `deploy`"
points = partial(drawing.plot, points=True)
pairs = partial(drawing.plot, pairs=True)
FIGURES: Mapping[str, FigureRow] = {
    "tradeoff": FigureRow(
        _tradeoff,
        partial(drawing.plot, doubling=True),
        "Test figures against compression. Bands: 95% intervals over seeds. Grey: dense, with its interval.",
    ),
    "fine_tuning": FigureRow(
        lambda source: figure_data.fine_tuning(source.comparison),
        pairs,
        "Validation figures before and after fine-tuning.",
        "a finished round with a training after pruning",
    ),
    "curves": FigureRow(
        lambda source: figure_data.curves(source.plan, source.records, source.comparison),
        drawing.plot,
        "Validation figures along the training of each method's sparsest networks, mean over seeds. "
        "Marks: the start of a round, after pruning and before training.",
        "a finished round, and a training",
    ),
    "cost": FigureRow(
        lambda source: figure_data.tradeoff(source.comparison, "cost"),
        points,
        "Test figures against the training cost: optimizer steps, and the cost of scoring in steps. "
        "Vertical lines: 95% intervals over seeds.",
        f"{COSTS}cost",
    ),
    "training_macs": FigureRow(
        lambda source: figure_data.tradeoff(source.comparison, "training_macs"),
        points,
        "Test figures against the multiply-accumulates of all training, forward and backward, under the "
        "masks of each step. Vertical lines: 95% intervals over seeds. Masks save no time in PyTorch.",
        f"{COSTS}recorded multiply-accumulates",
    ),
    "parameters": FigureRow(lambda source: figure_data.pareto(source.comparison, "parameters"), points, ""),
    "macs": FigureRow(lambda source: figure_data.pareto(source.comparison, "macs"), points, ""),
    "latency": FigureRow(
        lambda source: figure_data.pareto(source.comparison, "latency"),
        points,
        "Test figures against the measured latency of deployed networks. Dotted: the Pareto front.",
        MEASURED,
    ),
    "bytes": FigureRow(
        lambda source: figure_data.pareto(source.comparison, "bytes"),
        points,
        "Test figures against the bytes of deployed networks.",
        MEASURED,
    ),
    "token_speed": FigureRow(
        lambda source: figure_data.token_speed(source.comparison),
        drawing.token_speed,
        "Test figures against the tokens a second that deployed language models generate one by one after a "
        "prompt. Horizontal lines: 95% intervals of the speed-up over dense; vertical: of the difference from dense by "
        "window of text, else over seeds.",
        "measurements of tokens by `deploy=huggingface`",
    ),
    "frontier": FigureRow(
        lambda source: figure_data.frontier(source.comparison),
        points,
        "Validation figures of the networks that a search ran, with 95% intervals over seeds. Dotted: the "
        "frontier that the search found. Networks that it stopped before all seeds have a marker of their own.",
        "an answer of search=frontier",
    ),
    "sensitivity": FigureRow(
        lambda source: layer_data.layers_alone(sensitivity_curves(source.plan, source.records)),
        drawing.plot,
        "Validation figures with one layer, or one block, alone pruned; bands: 95% intervals over seeds.",
        "layers that were pruned alone",
    ),
    "mask_history": FigureRow(
        lambda source: layer_data.mask_history(source.records, source.comparison),
        pairs,
        "Masks that change within a training, at each line's sparsest point, mean over seeds: the fraction "
        "of the kept weights that the first masks kept, and the fraction of all weights that was ever kept (explored).",
        "a finished round whose masks change within the training",
    ),
    "layers": FigureRow(
        lambda source: layer_data.layer_sparsity(source.records, source.comparison, grouped=source.in_report),
        partial(drawing.matrix, label="sparsity"),
        f"Sparsity of each tensor, mean over seeds. {GROUPED}",
        "a finished trial",
    ),
    "densities": FigureRow(
        lambda source: layer_data.densities(
            source.records, source.comparison, compared=source.in_report, grouped=source.in_report
        ),
        drawing.densities,
        f"Density of each tensor by method, at the most frequent requested sparsity; mean over seeds. {GROUPED}",
        "a finished trial",
    ),
    "layer_errors": FigureRow(
        lambda source: layer_data.layer_errors(source.records, source.comparison, grouped=source.in_report),
        drawing.layer_errors,
        "Error of each layer that was pruned with calibration data, at the most frequent sparsity: squared change of "
        "the layer's outputs on the calibration data / their square; mean over seeds. "
        f"More than {MOST_LAYERS} layers: the plain mean by block and by role.",
        "a trial pruned layer by layer",
    ),
    "overlap": FigureRow(
        lambda source: layer_data.overlap_of(source.records, source.comparison, source.read),
        partial(drawing.matrix, label="kept by both"),
        "Fraction of kept entries that two methods have in common at the same seed; on the diagonal, for two "
        "seeds of one method. In brackets: the value by chance, with equally many entries kept in each tensor.",
        "masks of two methods",
    ),
}
"""Name of a figure -> its row. The name is that of its files and, unless it is an argument, of its method in Python."""
