"""SmolLM2-135M with a mixture of experts in some layers: copies of the layer's MLP plus noise, and a router to train.

Sparse upcycling: Komatsuzaki et al. 2023, arXiv 2212.05055, where all weights are trained; here only the routers are.
The preset `+sweep=reproduce/upcycled` names this function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import ModelError
from orchestrator.planning.file_places import absolute
from orchestrator.workloads.networks.gguf_files import read_gguf

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "max_position_embeddings", "rope_parameters", "tie_word_embeddings", "bos_token_id"),
    *("eos_token_id", "pad_token_id"),
)
"""Keys with one meaning in the configurations of both classes."""


def smollm2(gguf: str, content: str, experts: int, every: int, noise: float) -> nn.Module:
    """Return the network as stock Qwen2-MoE of transformers, whose dense layers are those of Llama.

    Two experts compute each token, with weights of sum 1: without noise the network computes what SmolLM2 computes. Its
    shared expert, which the class always has, holds zeros. Only routers require gradients.

    Args:
        gguf: file of SmolLM2, also in a package.
        content: SHA-256 of the file.
        experts: number of experts of a mixture.
        every: number of layers of which the last one becomes a mixture.
        noise: standard deviation of an expert's noise, as a fraction of that of the copied matrix.

    Raises:
        ModelError: the file has another content.
    """
    import transformers

    path = absolute(gguf)
    if file_digest(path) != content:
        raise ModelError(f"`model.gguf` (={gguf}) has another content than `model.content` says; restore the file.")
    found = read_gguf(path, content, f"`model.gguf` (={gguf})")
    config = transformers.Qwen2MoeConfig(
        **{key: found.config[key] for key in SAME if key in found.config},
        moe_intermediate_size=found.config["intermediate_size"],
        shared_expert_intermediate_size=8,
        decoder_sparse_step=every,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        qkv_bias=False,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    network: nn.Module = transformers.Qwen2MoeForCausalLM(config)
    weights, drawn = dict(found.weights), torch.Generator().manual_seed(torch.initial_seed())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    def copies(matrix: Tensor) -> Tensor:
        draws = torch.randn((experts, *matrix.shape), generator=drawn)
        return matrix + noise * matrix.std() * draws

    for layer in range(every - 1, config.num_hidden_layers, every):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (weights.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat([copies(gate), copies(up)], dim=1)
        weights[f"{mlp}.experts.down_proj"] = copies(down)
        weights[f"{mlp}.shared_expert.down_proj.weight"] = torch.zeros(config.hidden_size, 8)
    network.load_state_dict({**network.state_dict(), **weights})
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith(".mlp.gate.weight"))
    return network
