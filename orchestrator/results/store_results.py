"""Results of a store, opened for reading, as `orchestrator.open` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from orchestrator.core.redact import shown
from orchestrator.results.sweep_results import SweepResults
from orchestrator.results.trial_results import ResultsError
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.store.store import Store
from pruning.measure.garbage_collection import collector_paused

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("date", "status", "trials", "finished", "bytes", "command")


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
        return DataFrame(rows, Index([each.name for each in found], name="sweep"), list(COLUMNS))

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
