"""GPT-2."""

from __future__ import annotations

from pruning.dependencies.families.family import DERIVED_HEAD_SIZE, Family, Keys

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
