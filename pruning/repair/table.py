"""The table of repairs: what a choice may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from pruning.repair.constants import absorb_bias
from pruning.repair.least_squares import least_squares
from pruning.repair.statistics import bn_stats
from pruning.repair.surgeon import obs, obs_joint

REPAIRS: Mapping[str, Callable[..., dict[str, Tensor]]] = MappingProxyType(
    {
        "obs": obs,
        "obs_joint": obs_joint,
        "least_squares": least_squares,
        "absorb_bias": absorb_bias,
        "bn_stats": bn_stats,
    }
)
"""Name -> (model, kept, batches, loss, *, size, masks, ...) -> {name of a parameter or buffer: new value}."""
