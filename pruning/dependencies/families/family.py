"""The adapter of a family of transformers: where its layers are, and which smaller sizes its configuration expresses.

A family is plain data, so nothing here imports transformers. Paths of modules are relative to a layer, to the base
network (`LlamaModel`), or to the whole network (`LlamaForCausalLM`). A path that a network lacks is ignored: an
optional norm or a head of another task needs no family of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pruning.choices.axes import FamilyUnit

DERIVED_HEAD_SIZE = (
    "its configuration has no size of a head and divides the residual width by the number of heads; prune "
    "unit='layer' or unit='mlp' instead"
)
"""Why neither heads nor the residual width can go."""


@dataclass(frozen=True)
class Keys:
    """Names of sizes in the configuration.

    Args:
        layers: number of layers.
        heads: number of attention heads.
        key_value_heads: number of key and value heads; None: as many as heads.
        head_size: size of a head; None: the configuration derives it from the residual width, so heads cannot go.
        mlp: number of hidden units of each MLP.
        residual: width of the residual stream.
        norm_eps: the constant that norms add to the variance.
        by_layer: lists with one entry for each layer.
    """

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    key_value_heads: str | None = None
    head_size: str | None = None
    mlp: str = "intermediate_size"
    residual: str = "hidden_size"
    norm_eps: str = "layer_norm_eps"
    by_layer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Adapter of a family of stock transformers.

    Args:
        name: name in messages and in the table.
        model_types: values of `config.model_type`.
        keys: names of sizes in the configuration.
        refused: unit -> why a stock configuration cannot express fewer of them, and what to do instead.
        layers: list of layers in the base network.
        queries, keys_and_values: modules in a layer whose outputs are heads; empty if heads are refused.
        attention_output: module in a layer that reads the heads; empty if heads are refused.
        mlp_inputs: modules in a layer whose outputs are hidden units; gates are among them.
        mlp_output: module in a layer that reads the hidden units.
        norms: norms in a layer.
        norms_after: whether norms follow the residual additions, as in BERT, so that a masked layer still normalises.
        root_mean_square: whether norms divide by the root mean square (RMSNorm) and subtract no mean.
        head_norms: norm in a layer -> the module whose heads it normalises.
        stream: parameter of the base network, outside of the layers -> dimension of the residual stream.
        readers: parameter of the whole network, outside of the base network -> dimension of the residual stream.
        needs: unit -> key of the configuration -> the only value with which that unit can go.
        heads_divide_width: whether the configuration demands that the number of heads divides the residual width.
    """

    name: str
    model_types: tuple[str, ...]
    keys: Keys
    layers: str
    mlp_inputs: tuple[str, ...]
    mlp_output: str
    norms: tuple[str, ...]
    refused: Mapping[FamilyUnit, str] = field(default_factory=dict)
    queries: str = ""
    keys_and_values: tuple[str, ...] = ()
    attention_output: str = ""
    norms_after: bool = False
    root_mean_square: bool = False
    head_norms: Mapping[str, str] = field(default_factory=dict)
    stream: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[FamilyUnit, Mapping[str, Any]] = field(default_factory=dict)
    heads_divide_width: bool = False

    def expresses(self, unit: FamilyUnit) -> tuple[str, ...]:
        """Return the keys of the configuration that a smaller number of a unit changes; empty if it is refused."""
        if unit in self.refused:
            return ()
        found: dict[FamilyUnit, tuple[str | None, ...]] = {
            "layer": (self.keys.layers, *self.keys.by_layer),
            "heads": (self.keys.heads, self.keys.key_value_heads, self.keys.head_size),
            "mlp": (self.keys.mlp,),
            "residual": (self.keys.residual, self.keys.head_size, self.keys.norm_eps),
        }
        return tuple(key for key in found[unit] if key is not None)

    def limit(self, unit: FamilyUnit) -> str:
        """Return the restriction on a unit that can go, as a sentence; empty without one."""
        if unit in self.refused:
            return ""
        said = [f"only with {key}={value}" for key, value in self.needs.get(unit, {}).items()]
        if unit == "heads" and self.keys.key_value_heads:
            said.append("whole groups: a key and value head with its query heads")
        if unit in ("heads", "residual") and self.heads_divide_width:
            said.append("the number of heads must divide the residual width")
        if unit == "layer" and self.norms_after:
            said.append("the masked network keeps the norms of a removed layer, so the smaller one computes others")
        if unit == "residual" and not self.root_mean_square:
            said.append("LayerNorm subtracts the mean of all channels, so the smaller network computes others")
        return "; ".join(said)
