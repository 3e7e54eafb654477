"""Distributed pruning sweeps: plan, run, store and compare the trials that a Hydra config defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.results.store_results import StoreResults

__version__ = "0.1.0"


def open(uri: str = "store", options: Mapping[str, Any] | None = None) -> StoreResults:
    """Open a store to read its sweeps. Nothing in the store is changed, and no code that it names is run.

        sweep = orchestrator.open("store").sweep()  # the last saved sweep
        sweep.frame(by="point")  # a pandas DataFrame
        sweep.plot.tradeoff()  # matplotlib axes

    Args:
        uri: the `store.uri` of the sweeps: a directory, or a URI such as `s3://bucket/prefix` or `gs://...`
        options: the `store.options` of the sweeps: arguments of the file system, such as
            `{"endpoint_url": "http://host:9000"}`

    Raises:
        OrchestratorError: there is no store at `uri`, or it is damaged or from another release
    """
    from orchestrator.results.store_results import open_store

    return open_store(uri, options or {})
