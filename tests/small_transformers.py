"""Small random networks of the stock classes of transformers: every family, all options that a unit must respect."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pruning.choices.axes import FamilyUnit

VOCABULARY, TOKENS = 24, 9
LLAMA_LIKE = ("Llama", "Mistral", "Qwen2", "Qwen3")
KINDS = (*LLAMA_LIKE, "GPT2", "Bert", "ViT")
UNITS_OF_KINDS: tuple[FamilyUnit, ...] = ("layer", "heads", "mlp", "residual")
"""Units of these networks, which have no experts; those of mixtures are in small_mixtures.py."""


def config_of(kind: str, **sizes: Any) -> Any:
    """Return a configuration of a kind, in which `sizes` replace defaults."""
    plain = {"hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 4, "num_attention_heads": 3}
    if kind in LLAMA_LIKE:
        plain |= {"num_key_value_heads": 3, "head_dim": 4, "rms_norm_eps": 1e-3}
    if kind == "ViT":
        plain |= {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
    else:
        plain |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
        plain |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "GPT2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        names |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
        plain = {names.get(name, name): value for name, value in plain.items()}
    return getattr(transformers, f"{kind}Config")(**{**plain, **sizes})


def class_of(kind: str) -> Any:
    """Return the stock class of a kind."""
    heads = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "ViT": "ForImageClassification"}
    return getattr(transformers, f"{kind}{heads.get(kind, 'ForCausalLM')}")


def network_of(kind: str, seed: int = 0, **sizes: Any) -> Any:
    """Return a network in evaluation mode whose parameters, biases and norms too, are all random."""
    config = config_of(kind, **sizes)
    network = class_of(kind)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name.lower() and parameter.ndim == 1 else 0.3 * noise)
    return network


def random_sizes(kind: str, draw: random.Random) -> dict[str, Any]:
    """Draw sizes and options: grouped heads, tied embeddings, biases or none, sliding windows."""
    groups, shared, size = draw.choice([2, 3, 4]), draw.choice([1, 2, 3]), draw.choice([2, 4, 6])
    heads = groups * (shared if kind in LLAMA_LIKE else 1)
    width = heads * draw.choice([4, 6]) if kind in LLAMA_LIKE else heads * size
    layers = draw.randint(3, 5)
    names = ("n_embd", "n_layer", "n_head", "n_inner") if kind == "GPT2" else None
    usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    found = dict(zip(names or usual, (width, layers, heads, draw.choice([8, 12, 17])), strict=True))
    if kind in LLAMA_LIKE:
        found |= {"num_key_value_heads": groups, "head_dim": size, "tie_word_embeddings": draw.random() < 0.5}
        found |= {"rms_norm_eps": draw.choice([1e-6, 1e-2])}
    if kind in ("Llama", "Qwen3"):
        found["attention_bias"] = draw.random() < 0.5
    if kind == "Llama":
        found["mlp_bias"] = draw.random() < 0.5
    if kind in ("Qwen2", "Qwen3") and draw.random() < 0.7:
        types = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        found |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "layer_types": types}
    if kind == "Mistral":
        found["sliding_window"] = draw.choice([None, 3])
    if kind == "ViT":
        found["qkv_bias"] = draw.random() < 0.5
    return found


def inputs_of(network: nn.Module, seed: int = 1) -> Mapping[str, Tensor]:
    """Return inputs of a network, a batch of two."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = network.config
    if config.model_type == "vit":
        return {"pixel_values": torch.randn(2, config.num_channels, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)}


def logits(network: nn.Module, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the logits of a network."""
    with torch.no_grad():
        found: Tensor = network(**(inputs or inputs_of(network))).logits
    return found
