"""Whether what a trial asks for fits its network, where the configuration alone cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from orchestrator.config.schema import Prune, is_identity

COMMON_DIMS = (0, 1, -1, -2)
"""Dimensions that every weight of a layer has."""


@dataclass(frozen=True)
class Network:
    """What a trial prunes of its network: the shapes of the parameters, and the patterns that name none of them."""

    shapes: Mapping[str, tuple[int, ...]]
    unmatched: frozenset[tuple[str, str]] = frozenset()
    """(key of `prune`, pattern)."""


def needs_network(config: Mapping[str, Any]) -> bool:
    """Say whether a trial asks for something that may not fit, so that its network is worth building to see."""
    if is_identity(config["method"]):
        return False
    chosen = {key: value for key, value in config["prune"].items() if key in vars(Prune())}
    return isinstance(config["schedule"]["amount"], int) or _rare_dim(config) or chosen != vars(Prune())


def misfits(config: Mapping[str, Any], network: Network) -> Iterator[str]:
    """Yield a sentence for each way in which a trial does not fit its network."""
    if _rare_dim(config):
        yield from _missing_dims(config["method"], network)
    amount, rounds = config["schedule"]["amount"], config["schedule"]["rounds"]
    if not isinstance(amount, int):
        return
    sizes = {name: prod(shape) for name, shape in network.shapes.items()}
    if config["method"].get("scope") == "global":
        sizes = {"all prunable parameters": sum(sizes.values())}
    short = {name: size for name, size in sizes.items() if size < amount * rounds}
    if short:
        listed = ", ".join(f"{name} has {size}" for name, size in short.items())
        yield (
            f"`schedule.amount` (={amount}) over {rounds} round(s) takes {amount * rounds} entries of "
            f"each tensor, but {listed}; pass a smaller count, a float for a fraction, or leave them out with "
            "`prune.exclude`."
        )


def _rare_dim(config: Mapping[str, Any]) -> bool:
    return isinstance(dim := config["method"].get("dim"), int) and dim not in COMMON_DIMS


def _missing_dims(method: Mapping[str, Any], network: Network) -> Iterator[str]:
    dim = int(method["dim"])
    short = {name: len(shape) for name, shape in network.shapes.items() if not -len(shape) <= dim < len(shape)}
    if short:
        listed = ", ".join(f"{name} has {dims}" for name, dims in short.items())
        yield (
            f"`method.dim` (={dim}) must be a dimension of every tensor that is pruned, but {listed}; "
            "pass 0 for output channels, 1 for input channels, or leave them out with `prune.exclude`."
        )
