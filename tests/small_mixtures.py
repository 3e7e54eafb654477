"""Small random mixtures of experts of the stock classes of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

EXPERTS, TOKENS = 8, torch.randint(3, 24, (3, 7), generator=torch.Generator().manual_seed(5))
KINDS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


def network_of(kind: str, experts: int = EXPERTS, **given: Any) -> Any:
    """Return a small random mixture in evaluation mode, in float64."""
    sizes = {"hidden_size": 12, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4, "vocab_size": 24}
    sizes |= {"num_local_experts": experts, "num_experts": experts, "n_routed_experts": experts, "pad_token_id": 0}
    if kind == "deepseek_v3":
        sizes |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 6}
        sizes |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, "num_experts_per_tok": 2, **given})
    found = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, each in [*found.named_parameters(), *found.named_buffers()]:
            if isinstance(each, nn.Parameter) or name.endswith("correction_bias"):
                each.copy_((0.1 if each.ndim == 1 else 0.5) * torch.randn(each.shape, generator=generator))
            if "norm" in name:
                each.add_(1)
    return found


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of the next tokens."""
    logits = model(input_ids=batch).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
