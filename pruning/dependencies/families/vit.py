"""The vision transformer (ViT) of transformers."""

from __future__ import annotations

from pruning.dependencies.families.family import Family, Keys

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
