"""Networks that a saved sweep may name by `_target_`: stock classes of libraries, which run only code of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from orchestrator.catalogue.models import PLAIN_NAME, STORED_MODEL_TYPES
from orchestrator.config.sources import LABELS
from orchestrator.workloads.model_building import OURS


def is_stock(model: Any) -> bool:
    """Return whether a model's `_target_` is a stock class, whose arguments are plain values and further such classes.

    Texts must be plain names: transformers would load code for a name on the hub, in place of its own.
    """
    named = isinstance(model, Mapping) and isinstance(model.get("_target_"), str)
    return named and _is_plain({key: value for key, value in model.items() if key not in LABELS.union(OURS)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        parts = {key: each for key, each in value.items() if key != "_target_"}
        room, _, name = str(value.get("_target_", "")).rpartition(".")
        known = room in _STOCK and _STOCK[room](room, name) if "_target_" in value else "model_type" not in value
        return known and all(map(_is_plain, parts.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float) or PLAIN_NAME.holds(value)


def _is_listed_model(room: str, name: str) -> bool:
    """Return whether a class is the network, or the configuration, of a listed type of model."""
    found = getattr(import_module(room), name, None)
    config = getattr(found, "config_class", found)
    return isinstance(found, type) and getattr(config, "model_type", None) in STORED_MODEL_TYPES


def _is_module(room: str, name: str) -> bool:
    found = getattr(import_module(room), name, None)
    return isinstance(found, type) and issubclass(found, nn.Module)


def _is_registered(room: str, name: str) -> bool:
    return name in import_module(room).list_models(import_module(room))


_STOCK: Mapping[str, Callable[[str, str], bool]] = {
    "transformers": _is_listed_model,
    "torchvision.models": _is_registered,
    "torch.nn": _is_module,
}
"""Module -> function (module, name) that tells whether a name in it is a stock class."""
