"""Results of a store, opened for reading, and of its saved sweeps: trials, comparison, tables, figures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import html, shown
from orchestrator.core.specs import Plan
from orchestrator.results import frames
from orchestrator.results.equal_cost import COLUMNS, at_equal_cost, paired_by_window
from orchestrator.results.trial_results import ResultsError, TrialResults, no_choice, not_there
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.store.saved_sweep import SavedSweep, status_of
from orchestrator.store.store import Store
from orchestrator.views.report import tables
from orchestrator.views.report.answers import answer_lines
from orchestrator.views.report.plain_files import HARNESS_COLUMNS, WINDOW_COLUMNS, harness_row
from pruning.measure.garbage_collection import collector_paused

if TYPE_CHECKING:
    from pandas import DataFrame

    from orchestrator.results.plots import Plots

By = Literal["point", "trial", "round", "step", "mask_update", "layer", "generation", "sensitivity"]
_OF_STAGES: Mapping[str, Callable[[Plan, Mapping[str, StageRecord]], DataFrame]] = {
    "round": frames.by_round,
    "mask_update": frames.by_mask_update,
    "layer": frames.by_layer,
    "generation": frames.by_generation,
    "sensitivity": frames.by_sensitivity,
}
"""`by` -> the frame of finished stages."""
LINES = 60
"""Maximum number of table rows that a sweep shows in a notebook."""


class SweepResults:
    """Results of a sweep at the time it was opened; `store.sweep(name)` reads the current ones."""

    def __init__(self, store: Store, saved: SavedSweep) -> None:
        failures = {key: shown(reason) for key, reason in saved.failures.items()}
        self.store, self.saved = store, replace(saved, failures=failures)
        self.name, self.command = saved.info.name, shown(saved.info.command)

    def __repr__(self) -> str:
        """Show the sweep's name, status and number of trials."""
        return f"<sweep {self.name!r}: {self.status}, {len(self.trials)} trials>"

    def __str__(self) -> str:
        """Return the table that a sweep prints, with the notes below it."""
        found = self.comparison()
        return "\n".join(map(shown, (*tables.text_table(found), *tables.notes(found), *answer_lines(found))))

    def _repr_html_(self) -> str:
        """Return the tables and the tradeoff figure as HTML, for a notebook."""
        from orchestrator.views.report.figures import drawing, figure_data
        from orchestrator.views.report.figures.figure_table import FIGURES
        from orchestrator.views.report.page import comparison_tables

        comparison = self.comparison()
        finished = sum(status == "finished" for status in comparison.trials.values())
        parts = [
            f"<p><b>{html(self.name)}</b>: {self.status}, {finished} of {len(self.trials)} trials finished</p>",
            *_first(comparison_tables(comparison, folds=False)),
        ]
        if comparison.operating_points:
            drawn = drawing.render(lambda: drawing.figure(figure_data.tradeoff(comparison), FIGURES["tradeoff"].draw))
            image = base64.b64encode(drawn["svg"]).decode()
            parts.append(f'<img alt="tradeoff" style="background: white" src="data:image/svg+xml;base64,{image}">')
        return "\n".join(parts)

    @property
    def plan(self) -> Plan:
        """Stages, each once, and trials."""
        return self.saved.plan

    @property
    def records(self) -> Mapping[str, StageRecord]:
        """Stage key -> record of the finished stage."""
        return self.saved.records

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the sweep, without secrets."""
        return self.saved.info.config

    @property
    def environment(self) -> Mapping[str, str]:
        """Software releases that the sweep ran with."""
        return self.saved.info.environment

    @property
    def status(self) -> str:
        """`finished`, `failed`, `unfinished`, or `running` while a driver trains a stage of it."""
        return status_of(self.store, self.saved, self.saved.settled(self.records))

    @cached_property
    def trials(self) -> tuple[TrialResults, ...]:
        """Trials of the sweep, in order."""
        return tuple(TrialResults(self.store, self.saved, trial) for trial in self.plan.trials)

    def trial(self, name: str) -> TrialResults:
        """Return a trial.

        Args:
            name: name of the trial, or a prefix that fits no other

        Raises:
            ResultsError: no trial or several fit the name; the message lists close matches
        """
        if not isinstance(name, str):
            raise ResultsError(f"`name` (={name!r}) must be a string; pass a number to `sweep.trials[...]`.")
        found = [trial for trial in self.trials if trial.name == name]
        found = found or [trial for trial in self.trials if trial.name.startswith(name)]
        if len(found) > 1:
            names = ", ".join(repr(trial.name) for trial in found[:3])
            raise ResultsError(f"`name` (={name!r}) fits {len(found)} trials, {names} among them; type more of it.")
        if not found:
            raise not_there("name", name, [trial.name for trial in self.trials], "the sweep has")
        return found[0]

    def comparison(self, margin: float | None = None) -> Comparison:
        """Return the operating points over seeds with their intervals, differences from dense, and verdicts.

        Args:
            margin: loss that a match may hide, in the metric's own scale; None: the margin of the sweep's configuration
        """
        if margin is None:
            return self._compared
        return compare_trials(self.plan, self.records, self.saved.failures, margin, self.saved.search)

    def frame(self, by: By = "point") -> DataFrame:
        """Return the results as a pandas DataFrame.

        Each setting that varies between trials has a column with its dotted name.

        Args:
            by: one row for each `point`: operating point over seeds, with intervals, as in summary.csv; `trial`: trial
                after its last round; `round`: trial and round, as in trials.csv; `step`: point of a training curve;
                `mask_update`: change of the masks within a training; `layer`: trial, round and prunable tensor, with
                its density and the error of its layer; `generation`: trial, round and prompt; `sensitivity`: layer that
                was pruned alone and sparsity, as in sensitivity.csv

        Raises:
            ResultsError: `by` is not one of these
        """
        if by not in get_args(By):
            raise no_choice("by", by, get_args(By))
        with collector_paused():
            if by == "point":
                return frames.by_point(self.plan, self.comparison())
            if by == "trial":
                stopped = None if self.saved.search is None else self.saved.search.stopped
                return frames.by_trial(self.plan, self.records, self.saved.failures, stopped)
            if by in _OF_STAGES:
                return _OF_STAGES[by](self.plan, self.records)
            return frames.by_step(self.plan.trials, self.records, frames.parameters(self.plan))

    def equal_cost(self, budget: float | None = None, reference: str | None = None) -> DataFrame:
        """Return for each method and sparsity the point with the largest training cost up to a budget, paired by seed.

        The cost is `total_training_macs`. A method without a point up to the budget has a row without figures.

        Args:
            budget: multiply-accumulates of training; None: those of each point's own dense training
            reference: method whose test figures at the same sparsity are subtracted, seed by seed; None: the dense
                network within the budget, or else the cheapest one

        Raises:
            ResultsError: the budget is not a positive number, or no method has the name `reference`
        """
        return frames.of_rows(at_equal_cost(self.comparison(), budget, reference), COLUMNS)

    def paired_by_window(self, reference: str | None = None) -> DataFrame:
        """Return the differences in cross-entropy between language models, paired by window of held-out text.

        Each row subtracts `reference` from `line`, in nats per token, for networks pruned from the same dense network
        to the same sparsity. `difference` is the mean over seeds, `windows_low` and `windows_high` its 95% interval
        over windows, and `draws_std` the standard deviation of the difference over seeds.

        Args:
            reference: method that is subtracted, or `dense`; None: all pairs

        Raises:
            ResultsError: no network was compared with a method of this name
        """
        return frames.of_rows(paired_by_window(self.comparison(), reference), WINDOW_COLUMNS)

    def harness(self) -> DataFrame:
        """Return the scores on tasks of lm-evaluation-harness, a row for each point, task and metric.

        `difference` is the mean over seeds of a network's score minus that of its own dense network, and `seeds_std`
        its standard deviation. `documents_low` and `documents_high` are its 95% interval over `documents`, paired by
        document; None for a figure that is not a mean over documents.
        """
        return frames.of_rows([*map(harness_row, self.comparison().harness)], HARNESS_COLUMNS)

    @property
    def plot(self) -> Plots:
        """Figures of the sweep in matplotlib axes: `sweep.plot.tradeoff(ax=ax)`."""
        from orchestrator.results.plots import Plots

        return Plots(self.store, self.saved, self.comparison())

    def read(self, key: str, name: str) -> bytes:
        """Read a file of a finished stage and check its digest."""
        return self.store.read(key, name)

    @cached_property
    def _compared(self) -> Comparison:
        return compare_trials(self.plan, self.records, self.saved.failures, search=self.saved.search)


def _first(parts: Iterable[str]) -> Iterator[str]:
    """Yield the HTML parts of tables up to `LINES` rows in all, because a notebook file keeps its output."""
    lines = 0
    for part in parts:
        lines += part.startswith("<tr")
        if lines <= LINES or not part.startswith("<tr"):
            yield part
    if lines > LINES:
        yield f"<p>and {lines - LINES} more rows: <code>sweep.frame()</code> has all</p>"


SWEEP_COLUMNS = ("date", "status", "trials", "finished", "bytes", "command")


class StoreResults:
    """Sweeps of a store. Reading changes nothing in the store, and imports nothing that it names.

    Args:
        store: store to read from, opened read-only
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def __repr__(self) -> str:
        """Show the store's URI and its number of sweeps."""
        return f"<store {str(self.store)!r}: {len(self.store.sweeps())} sweeps>"

    def _repr_html_(self) -> str:
        """Return the table of sweeps as HTML, for a notebook."""
        return str(self.sweeps().to_html())

    def sweeps(self) -> DataFrame:
        """Return one row for each sweep, indexed by name, the last saved first.

        `date` is the time of the last save, in local time; `trials` and `finished` are counts; `bytes` is the size of
        the sweep's stages and checkpoints.
        """
        from pandas import DataFrame, Index

        with given_as("uri"):
            found = saved_sweep.summaries(self.store)
        rows = [
            (
                None if each.saved is None else datetime.fromtimestamp(int(each.saved)),
                each.status,
                each.trials,
                each.finished,
                each.bytes,
                shown(each.command),
            )
            for each in found
        ]
        return DataFrame(rows, Index([each.name for each in found], name="sweep"), list(SWEEP_COLUMNS))

    def sweep(self, name: str | None = None) -> SweepResults:
        """Return a sweep.

        Args:
            name: name of the sweep, or a prefix that fits no other; None: the sweep saved last

        Raises:
            OrchestratorError: no sweep or several fit the name, or the sweep cannot be read
        """
        if not isinstance(name, str | None):
            raise ResultsError(f"`name` (={name!r}) must be a string, or None for the sweep saved last.")
        with given_as("uri"), collector_paused():
            full = saved_sweep.chosen_sweep(self.store, name, argument="name")
            return SweepResults(self.store, saved_sweep.load(self.store, full))


def open_store(uri: str, options: Mapping[str, Any]) -> StoreResults:
    """Open the store at `uri` for reading; see `orchestrator.open`."""
    if not isinstance(uri, str):
        raise ResultsError(f"`uri` (={uri!r}) must be a string: a directory or a URI such as s3://bucket/prefix.")
    with given_as("uri"):
        return StoreResults(Store(uri, options=options, read_only=True).opened(exists=True))
