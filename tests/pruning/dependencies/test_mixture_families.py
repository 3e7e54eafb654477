"""Families of mixtures: the masked network, the smaller one, and that which a stock class loads from disk are equal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.choices.axes import FamilyUnit
from pruning.dependencies.families.family import MIXTURES, family_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TYPES = [each for family in MIXTURES for each in family.model_types]
UNITS: tuple[FamilyUnit, ...] = ("layer", "heads", "mlp", "expert")
CASES = [
    (kind, unit) for kind in TYPES for unit in UNITS if (own := family_of(kind)) is not None and own.expresses(unit)
]
TOKENS = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(5))
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "shared_expert_intermediate_size": 12,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "shared_intermediate_size": 12,
    "sliding_window": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def network_of(kind: str, seed: int = 0, **given: Any) -> Any:
    """Return a small random mixture in evaluation mode."""
    plain = transformers.AutoConfig.for_model(kind)
    sizes: dict[str, Any] = {key: value for key, value in SIZES.items() if hasattr(plain, key)}
    if getattr(plain, "head_dim", None) is None:
        sizes.pop("head_dim", None)
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if kind == "qwen3_next":
        kinds = ["full_attention", "linear_attention", "full_attention"]  # without any full one, the stock class fails
        sizes["layer_types"] = (2 * kinds)[: given.get("num_hidden_layers", 4)]
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **given})
    torch.manual_seed(seed)
    found = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for name, each in [*found.named_parameters(), *found.named_buffers()]:
            if isinstance(each, nn.Parameter) or name.endswith("correction_bias"):
                each.copy_((0.1 if each.ndim == 1 else 0.4) * torch.randn(each.shape) + float("norm" in name))
    return found


def random_sizes(kind: str, draw: random.Random) -> dict[str, Any]:
    """Draw sizes, and which layers are mixtures."""
    layers = draw.randint(3, 5)
    found: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": draw.choice([16, 24])}
    if kind in ("qwen2_moe", "qwen3_moe"):
        found["mlp_only_layers"] = draw.sample(range(layers - 1), draw.randint(0, layers - 2))
    if kind == "llama4_text":
        found["moe_layers"] = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "exaone_moe"):
        found["first_k_dense_replace"] = draw.randint(0, layers - 1)
    if kind in ("mixtral", "phimoe"):
        found["sliding_window"] = draw.choice([None, 3])
    return found


def logits(network: nn.Module, **given: Any) -> Tensor:
    """Return the logits of a network."""
    with torch.no_grad():
        found: Tensor = network(input_ids=TOKENS, **given).logits
    return found


def hold_law(kind: str, units: tuple[FamilyUnit, ...], folder: Path, seed: int = 0, **sizes: Any) -> Any:
    """Hold a random network to the law, and return the smaller one."""
    network = network_of(kind, seed, **sizes)
    dense = logits(network)
    for unit in units:
        pruning.prune(network, "magnitude", unit=unit, sparsity=0.5 if unit == "expert" else 0.3, scope="layer")

    smaller: Any = pruning.smaller_transformer(network, {"input_ids": TOKENS})
    smaller.save_pretrained(folder)
    loaded, said = type(network).from_pretrained(folder, output_loading_info=True, experts_implementation="eager")

    assert smaller.resized.after < smaller.resized.before
    assert not smaller.resized.padding
    assert not any(said.values())
    padded = torch.ones_like(TOKENS)
    padded[1, :3] = 0
    for given in ({}, {"attention_mask": padded}):
        expected = logits(network, **given)
        torch.testing.assert_close(logits(smaller, **given), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits(loaded.eval(), **given), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(network), dense)
    return smaller


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "unit"), CASES)
def test_masked_equals_smaller_and_loaded(kind: str, unit: FamilyUnit, tmp_path: Path) -> None:
    hold_law(kind, (unit,), tmp_path)
    for seed in range(1, 4):
        hold_law(kind, (unit,), tmp_path, seed, **random_sizes(kind, random.Random(f"{kind} {unit} {seed}")))


@sampled(16)
@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss", "deepseek_v3", "llama4_text", "ernie4_5_moe"])
def test_units_go_one_after_another(kind: str, tmp_path: Path) -> None:
    family = family_of(kind)
    assert family is not None
    hold_law(kind, tuple(unit for unit in UNITS if family.expresses(unit)), tmp_path)


@pytest.mark.parametrize(
    ("kind", "only", "sizes"),
    [
        (
            "qwen3_next",
            1,
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
        ),
        ("ernie4_5_moe", 1, {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "num_hidden_layers": 3}),
    ],
)
def test_the_last_layer_of_a_kind_that_a_family_needs_stays(kind: str, only: int, sizes: dict[str, Any]) -> None:
    network = network_of(kind, **sizes)

    def score(model: nn.Module, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {
            name: torch.full_like(each, 0.0 if f"layers.{only}." in name else 1.0)
            for name, each in model.named_parameters()
        }

    plan = pruning.prune(network, score, unit="layer", sparsity=0.5, scope="layer")
    assert plan.details["kept"] == {"model.layers": 1}
    smaller: Any = pruning.smaller_transformer(network)
    assert only in smaller.resized.layers
    torch.testing.assert_close(logits(smaller), logits(network))
