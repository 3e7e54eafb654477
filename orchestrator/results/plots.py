"""Figures of a sweep: each method draws one figure in matplotlib axes and returns the axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

from orchestrator.compare.comparison import Comparison
from orchestrator.compare.sensitivity import sensitivity_curves
from orchestrator.results.trial_results import ResultsError, no_choice, not_there
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.views.report.figures import by_method, figure_data, measured
from orchestrator.views.report.figures import plot_axes as drawn
from orchestrator.views.report.figures.measured import token_speed
from orchestrator.views.report.figures.of_layers import layers_alone, mask_history, overlap_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Against = Literal["sparsity", "compression", "cost", "training_macs"]
Size = Literal["parameters", "macs", "latency", "bytes"]


class _Titled(Protocol):
    @property
    def title(self) -> str: ...


T = TypeVar("T", bound=_Titled)


class Plots:
    """Figures of a sweep, for example `sweep.plot.tradeoff(ax=ax)`.

    Each method takes `ax`, the matplotlib axes to draw in (None: a new pyplot figure), and returns the axes. The
    caller's rcParams apply. If a figure exists several times, for example for several networks or data sets, `panel`
    selects one by its title or the beginning of its title.
    """

    def __init__(self, store: Store, saved: SavedSweep, comparison: Comparison) -> None:
        self._store, self._saved, self._comparison = store, saved, comparison

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
        comparison = self._comparison
        _check("text", text, figure_data.texts(comparison) if against in ("sparsity", "compression") else ("test",))
        if against == "cost":
            return _drawn(
                drawn.cost,
                _chosen(figure_data.cost(comparison), panel, "finished rounds of two lines at unequal cost"),
                ax,
            )
        if against == "training_macs":
            needs = "finished rounds of two lines with unequal recorded multiply-accumulates"
            return _drawn(drawn.training_macs, _chosen(figure_data.training_macs(comparison), panel, needs), ax)
        chosen = _chosen(figure_data.tradeoff(comparison, against, text), panel, "a finished round")
        return _drawn(lambda axes, plot: drawn.tradeoff(axes, plot, against), chosen, ax)

    def pareto(self, against: Size = "parameters", *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on test against a size or a time, with the Pareto front.

        Args:
            against: x axis: `parameters` or `macs`, counted, as a fraction of dense; `latency` or `bytes`, measured on
                the deployed network
            panel: title of the figure, needed if there are several, for example for several formats
            ax: axes to draw in
        """
        _check("against", against, get_args(Size))
        needs = "measurements of `deploy`" if against in ("latency", "bytes") else "a finished round"
        chosen = _chosen(measured.against(self._comparison, against), panel, needs)
        return _drawn(lambda axes, plot: drawn.deployed(axes, plot, measured.LABELS[against]), chosen, ax)

    def token_speed(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on test against the tokens a second of deployed language models, with intervals."""
        chosen = _chosen(token_speed(self._comparison), panel, "measurements of tokens by `deploy=huggingface`")
        return _drawn(drawn.token_speed, chosen, ax)

    def frontier(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation against a quantity, with the frontier that `search=frontier` found."""
        plots = by_method.frontier(self._comparison)
        return _drawn(drawn.frontier, _chosen(plots, panel, "an answer of search=frontier"), ax)

    def fine_tuning(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation against sparsity, before and after fine-tuning."""
        return _drawn(
            drawn.fine_tuning,
            _chosen(figure_data.fine_tuning(self._comparison), panel, "a finished round with a training after pruning"),
            ax,
        )

    def curves(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric on validation during training of each method's sparsest networks, marking rounds."""
        plots = figure_data.curves(self._saved.plan, self._saved.records, self._comparison)
        return _drawn(drawn.curves, _chosen(plots, panel, "a finished round, and a training"), ax)

    def mask_history(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the overlap with the first masks, and the explored fraction, against the step of the training."""
        plots = mask_history(self._saved.records, self._comparison)
        needs = "a finished round whose masks change within the training"
        return _drawn(drawn.mask_history, _chosen(plots, panel, needs), ax)

    def sensitivity(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the primary metric, or the loss, on validation against the sparsity of a layer that is pruned alone."""
        curves = sensitivity_curves(self._saved.plan, self._saved.records)
        return _drawn(drawn.sensitivity, _chosen(layers_alone(curves), panel, "layers that were pruned alone"), ax)

    def densities(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the density of each layer for each method, at the most frequent requested sparsity."""
        profiles = by_method.densities(self._saved.records, self._comparison, least=1)
        return _drawn(drawn.densities, _chosen(profiles, panel, "a finished trial"), ax)

    def layer_errors(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the error of each layer that was pruned with calibration data, at the most frequent sparsity."""
        profiles = by_method.layer_errors(self._saved.records, self._comparison)
        return _drawn(drawn.layer_errors, _chosen(profiles, panel, "a trial pruned layer by layer"), ax)

    def layers(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the sparsity of each layer at each operating point as a heat map."""
        matrices = figure_data.layer_sparsity(self._saved.records, self._comparison)
        chosen = _chosen(matrices, panel, "a finished trial")
        return _drawn(lambda axes, matrix: drawn.matrix(axes, matrix, "sparsity"), chosen, ax)

    def overlap(self, *, panel: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the fraction of kept entries that two methods' masks have in common; in brackets the chance value."""
        chosen = _chosen(
            overlap_of(self._saved.records, self._comparison, self._store.read), panel, "masks of two methods"
        )
        return _drawn(lambda axes, matrix: drawn.matrix(axes, matrix, "kept by both"), chosen, ax)


def _check(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise no_choice(argument, value, known)


def _chosen(found: Sequence[T], panel: str | None, needs: str) -> T:
    """Return the figure selected by `panel`.

    Raises:
        ResultsError: there is no figure, no single one with this title, or several without a `panel`
    """
    titles = [each.title for each in found]
    if not found:
        raise ResultsError(f"there is nothing to draw: the figure needs {needs}, which the sweep does not have.")
    if panel is None:
        if len(found) > 1:
            raise ResultsError(f"`panel` must be given: the figure exists for {', '.join(map(repr, titles))}.")
        return found[0]
    meant = [each for each in found if each.title == panel] or [each for each in found if each.title.startswith(panel)]
    if len(meant) != 1:
        raise not_there("panel", panel, titles, "the figure exists for")
    return meant[0]


def _drawn(draw: Callable[[Axes, T], Any], what: T, ax: Axes | None) -> Axes:
    import matplotlib as mpl

    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.subplots(layout="constrained")[1]
    with mpl.rc_context({"text.parse_math": False, "text.usetex": False}):  # a name with a dollar sign is no formula
        draw(ax, what)
    return ax
