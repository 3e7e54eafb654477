"""Whole passes of a network for calibration: calls with batches, and the order in which its parts are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pruning.graph.tracing import copied

Batch = Any


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call a network with a copy of a batch: a dict by keyword, a tuple or list by position, else one argument."""
    if isinstance(batch, Mapping):
        args, kwargs = copied(((), dict(batch)))
    else:
        args, kwargs = copied((tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}))
    return model(*args, **kwargs)


@contextmanager
def without_key_caches(model: nn.Module) -> Iterator[None]:
    """Set `use_cache` of the configurations of transformers' models to False: calibration reads no cache of keys."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
