"""Llama and networks like it: Llama, SmolLM2, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import replace

from pruning.dependencies.families.family import Family, Keys

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
