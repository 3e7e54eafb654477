"""Known families of stock transformers, a value each."""

from __future__ import annotations

from dataclasses import replace

from pruning.dependencies.families.family import DERIVED_HEAD_SIZE, Family, Keys

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

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN_AND_MISTRAL, GPT2, BERT, VIT)
"""All families; another one is its value above and its place here."""

MODEL_TYPES = ", ".join(name for family in FAMILIES for name in family.model_types)
"""Known values of `config.model_type`, for messages."""


def family_of(model_type: str) -> Family | None:
    """Return the family of a `config.model_type`; None if there is none."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
