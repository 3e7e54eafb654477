"""Presets of choices without code (units and scopes), under the names that sweeps use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pruning.catalogue.allocations import ALLOCATIONS


@dataclass(frozen=True)
class Preset:
    """A named set of values for the fields of a choice.

    Args:
        meaning: one sentence.
        sets: field of the choice -> its value; other fields keep their defaults.
    """

    meaning: str
    sets: Mapping[str, Any]


UNITS: Mapping[str, Preset] = MappingProxyType(
    {
        "entry": Preset("single entries", {"kind": "entry"}),
        "block": Preset(
            "blocks of `size` (1x4) consecutive inputs of an output, in a convolution at one kernel position; the last "
            "one is shorter if `size` does not divide the inputs",
            {"kind": "block", "size": 4},
        ),
        "block_16x4": Preset(
            "blocks of four inputs of 16 consecutive outputs, which processors with AMX multiply in 8 bits "
            "(docs/how-to/sparse.md)",
            {"kind": "block", "size": 4, "outputs": 16},
        ),
        "channel": Preset(
            "whole channels along `dim` (0 for output channels); the last tensor stays dense",
            {"kind": "channel", "spare_last": True},
        ),
        "group": Preset(
            "channels, hidden units and heads, each with everything that must be removed with it, so that the network "
            "can be shrunk (docs/how-to/shrink.md); goes with scope=layer or global, and with scope.budget, "
            "scope.round_to, scope.min_kept and scope.normalise=group",
            {"kind": "group"},
        ),
        "layer": Preset(
            "whole blocks of a stock class of transformers (docs/reference/transformers.md), so that stock "
            "transformers loads the smaller network; as heads, mlp and residual, goes with the same scopes as group",
            {"kind": "layer"},
        ),
        "heads": Preset(
            "a key and value head with its query heads, in all layers equally many (with scope=layer, or "
            "scope.uniform=true)",
            {"kind": "heads"},
        ),
        "mlp": Preset(
            "hidden units of the MLPs, with their gates, in all layers equally many (with scope=layer, or "
            "scope.uniform=true)",
            {"kind": "mlp"},
        ),
        "residual": Preset(
            "channels of the residual stream, in everything that reads or writes them", {"kind": "residual"}
        ),
        "expert": Preset(
            "experts of a mixture, with their rows of the router, which then chooses among the others; in all layers "
            "equally many, and of the experts in each group (with scope=layer)",
            {"kind": "expert"},
        ),
        "layer_and_mlp": Preset(
            "whole blocks of a transformer, then hidden units of the others; unit.by_layers says how much the blocks "
            "make up of what is removed, scope.budget of what (not channels)",
            {"kind": "layer_and_mlp"},
        ),
        "sizes": Preset(
            "whole blocks, experts, heads, hidden units and residual channels of a transformer in turns, until "
            "unit.layers, unit.experts, unit.heads, unit.mlp and unit.residual of them are left",
            {"kind": "sizes"},
        ),
    }
)
SCOPES: Mapping[str, Preset] = MappingProxyType(
    {
        "layer": Preset("each tensor ranked separately, all to the same sparsity", {"kind": "layer"}),
        "global": Preset("all tensors ranked together", {"kind": "global"}),
        "global_kept": Preset(
            "all tensors ranked together, but each keeps at least its best unit", {"kind": "global", "min_kept": 1}
        ),
        "row": Preset("the weights of each output ranked separately (arXiv 2306.11695)", {"kind": "row"}),
        "window": Preset(
            "windows of `m` consecutive entries along the input dimension, each keeps `n` (arXiv 2104.08378)",
            {"kind": "window", "n": 2, "m": 4},
        ),
        **{
            name: Preset(f"{row.meaning}{row.paper and f' ({row.paper})'}", {"kind": "layer", "allocation": name})
            for name, row in ALLOCATIONS.items()
            if name != "each"
        },
    }
)
