"""Distributed pruning sweeps: plan, run, store and compare the trials that a Hydra config defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.results.sweep_results import StoreResults

__version__ = "0.1.0"


def open(uri: str = "store", options: Mapping[str, Any] | None = None) -> StoreResults:
    """Open a store to look at its sweeps; nothing in it is changed, and no code that it names is run.

        sweep = orchestrator.open("store").sweep()  # the one saved last
        sweep.frame(by="point")  # a pandas DataFrame
        sweep.plot.tradeoff()  # matplotlib axes

    Args:
        uri: a directory, or `s3://bucket/prefix`, `gs://...`: the `store.uri` that the sweeps ran with
        options: of its file system, such as `{"endpoint_url": "http://host:9000"}`: their `store.options`

    Raises:
        OrchestratorError: there is no store, or it is damaged or of another release
    """
    from orchestrator.results.sweep_results import open_store

    return open_store(uri, options or {})
