"""Figures of a sweep: each method draws one figure in matplotlib axes and returns the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from orchestrator.compare.comparison import Comparison
from orchestrator.results.trial_results import ResultsError, no_choice, not_there
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.views.report.figures import drawing, figure_data
from orchestrator.views.report.figures.figure_table import FIGURES, FigureRow, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Against = Literal["sparsity", "compression", "cost", "training_macs"]
Size = Literal["parameters", "macs", "latency", "bytes"]


class Plots:
    """Figures of a sweep, for example `sweep.plot.tradeoff(ax=ax)`.

    Each method takes `ax`, the matplotlib axes to draw in (None: a new pyplot figure), and returns the axes. The
    caller's rcParams apply. If a figure exists several times, for example for several networks or data sets, `panel`
    selects one by its title or the beginning of its title.
    """

    def __init__(self, store: Store, saved: SavedSweep, comparison: Comparison) -> None:
        self._source = Source(saved.plan, saved.records, comparison, store.read, in_report=False)

    def tradeoff(
        self,
        against: Against = "sparsity",
        *,
        text: str = "test",
        panel: str | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the primary metric on test with its 95% interval over seeds, and dense as a line with a band.

        Args:
            against: x axis: `sparsity`, `compression` (dense / remaining parameters), `cost` (training steps and
                scoring), or `training_macs` (multiply-accumulates of all training)
            text: for `sparsity` and `compression`: `test`, or the name of a further test set
            panel: title of the figure, needed if there are several
            ax: axes to draw in
        """
        _check("against", against, get_args(Against))
        if against in ("cost", "training_macs"):
            _check("text", text, ("test",))
            return self._draw(FIGURES[against], panel, ax)
        _check("text", text, figure_data.texts(self._source.comparison))
        row = replace(
            FIGURES["tradeoff"],
            data=lambda source: figure_data.tradeoff(source.comparison, against, text),
            draw=partial(drawing.plot, doubling=against == "compression"),
        )
        return self._draw(row, panel, ax)

    def pareto(self, against: Size = "parameters", *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on test against a size or a time, with the Pareto front.

        Args:
            against: x axis: `parameters` or `macs`, counted, as a fraction of dense; `latency` or `bytes`, measured on
                the deployed network
            panel: title of the figure, needed if there are several, for example for several formats
            ax: axes to draw in
        """
        _check("against", against, get_args(Size))
        return self._draw(FIGURES[against], panel, ax)

    def token_speed(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on test against the tokens a second of deployed language models, with intervals."""
        return self._draw(FIGURES["token_speed"], panel, ax)

    def frontier(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation against a quantity, with the frontier that `search=frontier` found."""
        return self._draw(FIGURES["frontier"], panel, ax)

    def fine_tuning(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation against sparsity, before and after fine-tuning."""
        return self._draw(FIGURES["fine_tuning"], panel, ax)

    def curves(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation during training of each method's sparsest networks, marking rounds."""
        return self._draw(FIGURES["curves"], panel, ax)

    def mask_history(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the overlap with the first masks, and the explored fraction, against the step of the training."""
        return self._draw(FIGURES["mask_history"], panel, ax)

    def sensitivity(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric, or the loss, on validation against the sparsity of a layer that is pruned alone."""
        return self._draw(FIGURES["sensitivity"], panel, ax)

    def densities(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the density of each layer for each method, at the most frequent requested sparsity."""
        return self._draw(FIGURES["densities"], panel, ax)

    def layer_errors(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the error of each layer that was pruned with calibration data, at the most frequent sparsity."""
        return self._draw(FIGURES["layer_errors"], panel, ax)

    def layers(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the sparsity of each layer at each operating point as a heat map."""
        return self._draw(FIGURES["layers"], panel, ax)

    def overlap(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the fraction of kept entries that two methods' masks have in common; in brackets the chance value."""
        return self._draw(FIGURES["overlap"], panel, ax)

    def _draw(self, row: FigureRow, panel: str | None, ax: Axes | None) -> Axes:
        """Draw the element that `panel` selects.

        Raises:
            ResultsError: there is none, no single one with this title, or several without a `panel`
        """
        import matplotlib as mpl

        chosen = _chosen(row.data(self._source), panel, row.needs)
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots(layout="constrained")[1]
        # A name with a dollar sign is no formula.
        with mpl.rc_context({"text.parse_math": False, "text.usetex": False}):
            row.draw(ax, chosen)
        return ax


def _check(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise no_choice(argument, value, known)


def _chosen(found: Sequence[drawing.Drawn], panel: str | None, needs: str) -> drawing.Drawn:
    titles = [each.title for each in found]
    if not found:
        raise ResultsError(f"the figure needs {needs}, which the sweep does not have; draw another figure.")
    if panel is None:
        if len(found) > 1:
            raise ResultsError(f"`panel` must be given; pass one of {', '.join(map(repr, titles))}.")
        return found[0]
    meant = [each for each in found if each.title == panel] or [each for each in found if each.title.startswith(panel)]
    if len(meant) != 1:
        raise not_there("panel", panel, titles, "the figure exists for")
    return meant[0]
