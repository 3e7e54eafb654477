"""Presets of the choices that are values and no code: units, scopes and dynamics, as a sweep names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pruning.catalogue.allocations import ALLOCATIONS


@dataclass(frozen=True)
class Preset:
    """Values of a choice under one name.

    Args:
        meaning: one sentence.
        sets: field of the choice -> its value; the others keep their defaults.
    """

    meaning: str
    sets: Mapping[str, Any]


UNITS: Mapping[str, Preset] = MappingProxyType(
    {
        "entry": Preset("single entries", {"kind": "entry"}),
        "block": Preset("so many consecutive entries of an output's weights", {"kind": "block", "size": 4}),
        "channel": Preset(
            "whole channels along `dim`: 0 takes output channels; the outputs of the last tensor stay",
            {"kind": "channel", "spare_last": True},
        ),
        "group": Preset(
            "channels, units and heads with all that must go with them, so that what is pruned can be taken out "
            "(docs/how-to/shrink.md); with scope=layer or global, and scope.budget, scope.round_to, scope.min_kept, "
            "scope.normalise=group",
            {"kind": "group"},
        ),
    }
)
SCOPES: Mapping[str, Preset] = MappingProxyType(
    {
        "layer": Preset("each tensor by itself, all to the same sparsity", {"kind": "layer"}),
        "global": Preset("all tensors ranked as one", {"kind": "global"}),
        "global_kept": Preset("all tensors ranked as one, but each keeps its best", {"kind": "global", "min_kept": 1}),
        "row": Preset("the weights of each output by themselves (arXiv 2306.11695)", {"kind": "row"}),
        "window": Preset(
            "`n` are kept of each `m` consecutive entries along the input dimension (arXiv 2104.08378)",
            {"kind": "window", "n": 2, "m": 4},
        ),
        **{
            name: Preset(f"{row.meaning}{row.paper and f' ({row.paper})'}", {"kind": "layer", "allocation": name})
            for name, row in ALLOCATIONS.items()
            if name != "each"
        },
    }
)
DYNAMICS: Mapping[str, Preset] = MappingProxyType(
    {
        "nested": Preset("only what is left is ranked", {"kind": "nested"}),
        "free": Preset(
            "at every re-scoring within a round all entries compete, with the weights that they had", {"kind": "free"}
        ),
    }
)
