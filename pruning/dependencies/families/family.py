"""Families of stock transformers: where their layers are, and which smaller sizes a configuration expresses.

A family is plain data, so nothing here imports transformers. Paths of modules are relative to a layer, to the base
network (`LlamaModel`), or to the whole network (`LlamaForCausalLM`). A path that a network lacks is ignored: an
optional norm or a head of another task needs no family of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        head_size: size of a head; None: no key of its own, or several that stay as they are.
        mlp: number of hidden units of each MLP.
        residual: width of the residual stream.
        experts: number of experts of each mixture; None: the family has none.
        norm_eps: the constant that norms add to the variance.
        by_layer: lists with one entry for each layer.
        numbers: lists of numbers of layers.
        first: numbers of layers at the start that are of another kind.
        last: numbers of last layers of a kind.
    """

    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    key_value_heads: str | None = None
    head_size: str | None = None
    mlp: str = "intermediate_size"
    residual: str = "hidden_size"
    experts: str | None = None
    norm_eps: str = "layer_norm_eps"
    by_layer: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def of_layers(self, config: Any, kept: Sequence[int]) -> dict[str, Any]:
        """Return the values of keys that tell layers apart, for a network of some layers of one with `config`."""
        found: dict[str, Any] = {self.layers: len(kept)}
        for key in (*self.by_layer, *self.numbers, *self.first, *self.last):
            value = getattr(config, key, None)
            if value is None or (key in self.by_layer and not value):
                continue
            if key in self.by_layer:
                found[key] = [value[number] for number in kept]
            elif key in self.numbers:
                found[key] = [new for new, old in enumerate(kept) if old in value]
            else:
                found[key] = (
                    sum(old < value for old in kept) if key in self.first else sum(n <= value for n in kept) - 1
                )
        return found


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
        beside_queries: modules, or parameters, in a layer that have outputs, or entries, for the heads of queries.
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
        needed: module that one layer must have: of the layers with it, if not all have it, the last one always stays.
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
    beside_queries: tuple[str, ...] = ()
    norms_after: bool = False
    root_mean_square: bool = False
    head_norms: Mapping[str, str] = field(default_factory=dict)
    stream: Mapping[str, int] = field(default_factory=dict)
    readers: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[FamilyUnit, Mapping[str, Any]] = field(default_factory=dict)
    heads_divide_width: bool = False
    needed: str = ""

    def expresses(self, unit: FamilyUnit) -> tuple[str, ...]:
        """Return the keys of the configuration that a smaller number of a unit changes; empty if it is refused."""
        if unit in self.refused:
            return ()
        found: dict[FamilyUnit, tuple[str | None, ...]] = {
            "layer": (self.keys.layers, *self.keys.by_layer, *self.keys.numbers, *self.keys.first, *self.keys.last),
            "heads": (self.keys.heads, self.keys.key_value_heads, self.keys.head_size),
            "mlp": (self.keys.mlp,),
            "residual": (self.keys.residual, self.keys.head_size, self.keys.norm_eps),
            "expert": (self.keys.experts,),
        }
        return tuple(key for key in found[unit] if key is not None)

    def limit(self, unit: FamilyUnit) -> str:
        """Return the restriction on a unit that can go, as a sentence; empty without one."""
        if unit in self.refused:
            return ""
        said = [f"only with {key}={value}" for key, value in self.needs.get(unit, {}).items()]
        if unit == "expert" and self.keys.experts:
            said.append("as many as a token is routed to, or more")
        if unit == "mlp" and self.keys.experts:
            said.append("hidden units of experts, equally many in each, in steps of 16 bytes of a row")
        if unit == "heads" and self.keys.key_value_heads:
            said.append("whole groups: a key and value head with its query heads")
        if unit in ("heads", "residual") and self.heads_divide_width:
            said.append("the number of heads must divide the residual width")
        if unit == "layer" and self.needed:
            said.append(f"the last layer with `{self.needed}` stays, if not all layers have it")
        if unit == "layer" and self.norms_after:
            said.append("the masked network keeps the norms of a removed layer, so the smaller one computes others")
        if unit == "residual" and not self.root_mean_square:
            said.append("LayerNorm subtracts the mean of all channels, so the smaller network computes others")
        return "; ".join(said)


LLAMA = Family(
    name="Llama (SmolLM2)",
    model_types=("llama",),
    keys=Keys(
        key_value_heads="num_key_value_heads", head_size="head_dim", norm_eps="rms_norm_eps", by_layer=("layer_types",)
    ),
    layers="layers",
    queries="self_attn.q_proj",
    keys_and_values=("self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    norms=("input_layernorm", "post_attention_layernorm"),
    root_mean_square=True,
    head_norms={"self_attn.q_norm": "self_attn.q_proj", "self_attn.k_norm": "self_attn.k_proj"},
    stream={"embed_tokens.weight": 1, "norm.weight": 0},
    readers={"lm_head.weight": 1, "score.weight": 1, "qa_outputs.weight": 1},
    heads_divide_width=True,
)

QWEN_AND_MISTRAL = replace(
    LLAMA, name="Mistral, Qwen2, Qwen3", model_types=("mistral", "qwen2", "qwen3"), heads_divide_width=False
)

_COMPRESSED = replace(
    LLAMA,
    keys=replace(LLAMA.keys, head_size=None),
    queries="self_attn.kv_b_proj",
    keys_and_values=(),
    beside_queries=("self_attn.q_b_proj", "self_attn.q_proj"),
)
"""Llama, but keys and values of heads are built by one module, and the sizes of heads have keys of their own."""

_IN_STACKS = "its channels are stacked in the parameters of experts; prune unit='mlp' or unit='expert' instead"
_NORM_OF_ALL_HEADS = "its queries and keys are normalised over all heads together; prune unit='expert' instead"
_STREAM_OF_NORMS = (
    "its residual stream begins anew at each norm, so no layer can be left out; prune unit='expert' instead"
)
_SHARED_HEADS = "its linear attention has as many heads by the same key; prune unit='expert' instead"
_ROUTED_INPUTS = (
    "its router weighs the inputs of experts, not their outputs; prune unit='layer' or unit='heads' instead"
)


def _mixture(
    name: str,
    *model_types: str,
    experts: str | None,
    mlp: str = LLAMA.keys.mlp,
    by_layer: tuple[str, ...] = ("layer_types",),
    numbers: tuple[str, ...] = (),
    first: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    refused: Mapping[FamilyUnit, str] | None = None,
    needs: Mapping[FamilyUnit, Mapping[str, Any]] | None = None,
    beside_queries: tuple[str, ...] = (),
    needed: str = "",
    like: Family = LLAMA,
    shared: str = "mlp.shared_experts",
) -> Family:
    """Return a family of mixtures of experts, whose attention is as in the family `like`.

    `mlp` is the key of the width of experts. `shared` is an MLP beside them whose width is a multiple of that key; an
    MLP with a key of its own stays.
    """
    return replace(
        like,
        name=name,
        model_types=model_types,
        keys=replace(like.keys, experts=experts, mlp=mlp, by_layer=by_layer, numbers=numbers, first=first, last=last),
        mlp_inputs=(f"{shared}.gate_proj", f"{shared}.up_proj"),
        mlp_output=f"{shared}.down_proj",
        refused={"residual": _IN_STACKS, **(refused or {})},
        needs=needs or {},
        beside_queries=beside_queries or like.beside_queries,
        heads_divide_width=False,
        needed=needed,
    )


_OF_EXPERTS = "moe_intermediate_size"
_MLP_ONLY: Mapping[FamilyUnit, Mapping[str, Any]] = {"layer": {"decoder_sparse_step": 1}}
MIXTURES = (
    _mixture(
        "Mixtral, Granite-MoE", "mixtral", "phimoe", "granitemoe", "granitemoeshared", experts="num_local_experts"
    ),
    _mixture(
        "Qwen-MoE",
        *("qwen2_moe", "qwen3_moe", "qwen3_next"),
        experts="num_experts",
        mlp=_OF_EXPERTS,
        numbers=("mlp_only_layers",),
        needs=_MLP_ONLY,
        needed="self_attn",
    ),
    _mixture("OLMoE", "olmoe", "flex_olmo", experts="num_experts", refused={"heads": _NORM_OF_ALL_HEADS}),
    _mixture("GPT-OSS", "gpt_oss", experts="num_local_experts", beside_queries=("self_attn.sinks",)),
    _mixture(
        "MiniMax",
        "minimax",
        experts="num_local_experts",
        refused={"layer": _STREAM_OF_NORMS, "heads": _SHARED_HEADS},
    ),
    _mixture("MiniMax-M2", "minimax_m2", experts="num_local_experts", refused={"heads": _NORM_OF_ALL_HEADS}),
    _mixture(
        "DeepSeek",
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        experts="n_routed_experts",
        mlp=_OF_EXPERTS,
        by_layer=("layer_types", "mlp_layer_types"),
        first=("first_k_dense_replace",),
        like=_COMPRESSED,
    ),
    _mixture(
        "GLM-4-MoE, dots.llm1",
        *("glm4_moe", "dots1", "solar_open"),
        experts="n_routed_experts",
        mlp=_OF_EXPERTS,
        first=("first_k_dense_replace",),
    ),
    _mixture(
        "EXAONE-MoE, Hunyuan 3",
        *("exaone_moe", "hy_v3"),
        experts="num_experts",
        mlp=_OF_EXPERTS,
        by_layer=("layer_types", "mlp_layer_types"),
        first=("first_k_dense_replace",),
    ),
    _mixture(
        "Command-MoE",
        "cohere2_moe",
        experts="num_experts",
        by_layer=("layer_types", "mlp_layer_types"),
        first=("first_k_dense_replace",),
    ),
    _mixture(
        "Ernie 4.5 MoE",
        "ernie4_5_moe",
        experts="moe_num_experts",
        mlp=_OF_EXPERTS,
        first=("moe_layer_start_index",),
        last=("moe_layer_end_index",),
        needs={"layer": {"moe_layer_interval": 1}},
        needed="mlp.experts",
    ),
    _mixture(
        "AFMoE",
        "afmoe",
        experts="num_experts",
        mlp=_OF_EXPERTS,
        first=("num_dense_layers",),
        beside_queries=("self_attn.gate_proj",),
    ),
    _mixture(
        "Llama 4",
        "llama4_text",
        experts="num_local_experts",
        shared="feed_forward.shared_expert",
        by_layer=("layer_types", "no_rope_layers"),
        numbers=("moe_layers",),
        refused={"expert": _ROUTED_INPUTS},
    ),
)
"""Families of mixtures of experts."""

GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    keys=Keys(layers="n_layer", heads="n_head", mlp="n_inner", residual="n_embd", norm_eps="layer_norm_epsilon"),
    refused={"heads": DERIVED_HEAD_SIZE, "residual": DERIVED_HEAD_SIZE},
    layers="h",
    mlp_inputs=("mlp.c_fc",),
    mlp_output="mlp.c_proj",
    norms=("ln_1", "ln_2", "ln_cross_attn"),
    needs={"layer": {"scale_attn_by_inverse_layer_idx": False}},
)

BERT = Family(
    name="BERT (MiniLM)",
    model_types=("bert",),
    keys=Keys(),
    refused={"heads": DERIVED_HEAD_SIZE, "residual": DERIVED_HEAD_SIZE},
    layers="encoder.layer",
    mlp_inputs=("intermediate.dense",),
    mlp_output="output.dense",
    norms=("attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm"),
    norms_after=True,
)

VIT = Family(
    name="ViT",
    model_types=("vit",),
    keys=Keys(head_size="head_dim"),
    layers="layers",
    queries="attention.q_proj",
    keys_and_values=("attention.k_proj", "attention.v_proj"),
    attention_output="attention.o_proj",
    mlp_inputs=("mlp.fc1",),
    mlp_output="mlp.fc2",
    norms=("layernorm_before", "layernorm_after"),
    stream={
        "embeddings.cls_token": 2,
        "embeddings.mask_token": 2,
        "embeddings.position_embeddings": 2,
        "embeddings.patch_embeddings.projection.weight": 0,
        "embeddings.patch_embeddings.projection.bias": 0,
        "layernorm.weight": 0,
        "layernorm.bias": 0,
        "pooler.dense.weight": 1,
    },
    readers={"classifier.weight": 1},
)

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN_AND_MISTRAL, *MIXTURES, GPT2, BERT, VIT)
"""All families; another one is its value above and its place here."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a `config.model_type`; None if there is none."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
