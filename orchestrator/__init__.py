"""Distributed pruning sweeps: plan, run, store and compare the trials that a Hydra config defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.results.store_results import StoreResults

__version__ = "0.1.0"


def open(uri: str = "store", options: Mapping[str, Any] | None = None) -> StoreResults:
    """Open a store to read its sweeps; nothing in the store is changed, and no code that it names is run.

        sweep = orchestrator.open("store").sweep()  # the newest sweep
        sweep.frame(by="point")  # a pandas DataFrame
        sweep.plot.tradeoff()  # matplotlib axes

    Args:
        uri: the `store.uri` of the sweeps: a directory, or an address such as `s3://bucket/prefix`, `gs://...`
        options: the `store.options` of the sweeps, for the file system: `{"endpoint_url": "http://host:9000"}`

    Raises:
        OrchestratorError: the store does not exist, is damaged, or belongs to another release
    """
    from orchestrator.results.store_results import open_store

    return open_store(uri, options or {})
