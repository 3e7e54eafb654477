"""Stock transformers of no family: their structure is read from shapes and proven, or refused with what failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.choices.axes import FamilyUnit
from pruning.dependencies.families import proof, structure
from pruning.dependencies.families.family import Keys
from pruning.dependencies.families.family_groups import stock_transformer

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "ffn_dim": 12, "attention_heads": 4}.items()
}
BART = {"d_model": 16, **SIDES, **TOKENS, "decoder_start_token_id": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused and gated in halves": ("Phi3ForCausalLM", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "fused by head": ("GPTNeoXForCausalLM", {**SIZES, **TOKENS}),
    "lists by layer": (
        "SmolLM3ForCausalLM",
        {**SIZES, **TOKENS, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    ),
    "bias shared by layers": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 3, "num_heads": 4, "vocab_size": 40}
        | {"relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
    ),
    "norms after, two sides": ("BartForConditionalGeneration", BART),
    "compressed heads, dense and sparse layers": (
        "AXK1ForCausalLM",
        {**SIZES, **TOKENS, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
        | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4},
    ),
    "heads in pairs": ("DiffLlamaForCausalLM", {**SIZES, **TOKENS, "num_key_value_heads": 4}),
    "heads by layer": (
        "LagunaForCausalLM",
        {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4}
        | {"shared_expert_intermediate_size": 8, "num_experts_per_tok": 2, "mlp_layer_types": ["dense"] * 3}
        | {"num_attention_heads_per_layer": [4, 8, 4], "layer_types": ["full_attention"] * 3},
    ),
    "bias for all layers": (
        "CpmAntForCausalLM",
        {"hidden_size": 16, "num_attention_heads": 4, "dim_head": 4, "dim_ff": 12, "num_hidden_layers": 3}
        | {"vocab_size": 40, "prompt_length": 2, "prompt_types": 4, "segment_types": 4}
        | {"position_bias_num_buckets": 8, "position_bias_max_distance": 16},
    ),
}
"""Class and sizes of each small network, by what tells its structure apart."""


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be proven yet in this process."""
    monkeypatch.setattr(proof, "_PROVEN", {})
    monkeypatch.setattr(proof, "_UNPROVEN", {})


def network_of(kind: str) -> Any:
    """Return a network whose parameters, biases and norms too, are random."""
    name, sizes = KINDS[kind]
    return random_network(name, **sizes)


def random_network(name: str, **sizes: Any) -> Any:
    """Return a network of a class."""
    made = getattr(transformers, name)
    network = made(made.config_class(**sizes)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return network


def inputs_of(network: Any) -> Mapping[str, Tensor]:
    """Return tokens for each side of a network."""
    generator = torch.Generator().manual_seed(4)
    names = ("input_ids", *(["decoder_input_ids"] if network.config.is_encoder_decoder else []))
    return {name: torch.randint(3, 40, (2, 9), generator=generator) for name in names}


def logits(network: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of a network."""
    with torch.no_grad():
        found: Tensor = network(**inputs).logits
    return found


def hold_law(kind: str, unit: FamilyUnit, folder: Path) -> Any:
    """Hold a pruned network to the law: masked, smaller and loaded compute the same; return the smaller one."""
    network = network_of(kind)
    inputs = inputs_of(network)
    pruning.prune(network, "magnitude", unit=unit, sparsity=0.3)

    smaller: Any = pruning.smaller_transformer(network, inputs)
    smaller.save_pretrained(folder)
    loaded, said = type(network).from_pretrained(folder, output_loading_info=True)

    assert smaller.resized.after < smaller.resized.before
    assert not smaller.resized.padding
    assert bool(smaller.resized.differs) is ("norms after" in kind and unit == "layer")
    assert smaller.resized.differs or smaller.resized.difference < 1e-4
    assert not any(said.values())
    assert torch.equal(logits(loaded.eval(), inputs), logits(smaller, inputs))
    return smaller


CELLS: list[tuple[str, FamilyUnit]] = [
    ("fused and gated in halves", "heads"),
    ("fused and gated in halves", "mlp"),
    ("lists by layer", "layer"),
]
ALL: list[tuple[str, FamilyUnit]] = [(kind, unit) for kind in KINDS for unit in ("layer", "heads", "mlp")]
REFUSED: list[tuple[str, FamilyUnit]] = [
    ("fused by head", "heads"),
    ("norms after, two sides", "heads"),
    ("heads in pairs", "layer"),
]


@sampled(2)
@pytest.mark.parametrize(("kind", "unit"), CELLS)
def test_masked_equals_smaller_equals_loaded(kind: str, unit: FamilyUnit, tmp_path: Path) -> None:
    hold_law(kind, unit, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "unit"), [each for each in ALL if each not in (*CELLS, *REFUSED)])
def test_masked_equals_smaller_equals_loaded_in_all_kinds(kind: str, unit: FamilyUnit, tmp_path: Path) -> None:
    hold_law(kind, unit, tmp_path)


def test_lists_with_an_entry_for_each_layer_are_cut(tmp_path: Path) -> None:
    whole = network_of("lists by layer").config.no_rope_layers

    smaller = hold_law("lists by layer", "layer", tmp_path)

    assert smaller.config.no_rope_layers == [whole[number] for number in smaller.resized.layers]
    assert [layer.self_attn.layer_idx for layer in smaller.model.layers] == [0, 1]


@pytest.mark.slow
def test_the_layer_with_a_bias_for_all_stays() -> None:
    network = network_of("bias shared by layers")
    found: Any = stock_transformer(network)

    assert found.needed == ["encoder.block.0", "decoder.block.0"]
    (width,) = found.parts("heads")
    assert width.order[0] is structure._IN_LIST  # a head of the bias is that of all layers, which lose the same heads
    assert len(width.groups) == 2


def test_fused_heads_are_read_in_parts_and_gates_in_halves() -> None:
    found: Any = stock_transformer(network_of("fused and gated in halves"))

    (heads,), (hidden,) = found.parts("heads"), found.parts("mlp")

    queries, keys = [0] * 8 + [1] * 8, [0] * 4 + [1] * 4
    assert heads.groups[0]["model.layers.0.self_attn.qkv_proj.weight", 0].tolist() == [*queries, *keys, *keys]
    assert hidden.groups[0]["model.layers.0.mlp.gate_up_proj.weight", 0].tolist() == [*range(12), *range(12)]


@pytest.mark.parametrize(
    ("name", "unit", "said"),
    [
        ("OPTForCausalLM", "heads", "no keys of its configuration set the number of heads without their size"),
        ("Olmo2ForCausalLM", "heads", "the smaller network computes something else than the masked one"),
        ("DiffLlamaForCausalLM", "layer", "the smaller network computes something else than the masked one"),
        ("OPTForCausalLM", "residual", "whose model_type has no row in the table of families"),
    ],
)
def test_a_unit_that_is_not_proven_is_refused_with_what_failed(name: str, unit: FamilyUnit, said: str) -> None:
    own = {"ffn_dim": 12, "word_embed_proj_dim": 16} if name.startswith("OPT") else {"num_key_value_heads": 2}
    network = random_network(name, **SIZES, **TOKENS, **own)

    with pytest.raises(
        ValueError, match=rf"^`unit.kind` \(='{unit}'\) cannot be pruned in a {name}, .*{said}.*; prune"
    ):
        pruning.prune(network, "magnitude", unit=unit, sparsity=0.3)
    assert all(bool((parameter != 0).any()) for parameter in network.parameters())


def test_a_part_that_is_not_proven_stays_whole_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)

    def fail_for_the_encoder(twin: Any, unit: FamilyUnit, readings: Any, call: Any) -> Any:
        return "it fails" if "encoder_ffn_dim" in readings[0].name else readings[0]

    monkeypatch.setattr(proof, "_first_proven", fail_for_the_encoder)
    found: Any = stock_transformer(network_of("norms after, two sides"))

    assert found.expresses("mlp")
    for _ in range(2):  # the proof is made once, and its limits are said in each call
        with pytest.warns(
            UserWarning, match=r"removes nothing of what `encoder_ffn_dim` counts in a Bart.*: it fails\.$"
        ):
            found.check("mlp")
    assert [[*width.keys] for width in found.parts("mlp")] == [["decoder_ffn_dim"]]


def test_a_proof_leaves_layers_of_each_kind_alone() -> None:
    layers = structure.Layers("layers", 4, "", Keys(), kinds=((0, 1), (2,), (3,)))

    removals = [removed for (removed,) in proof._removals("layer", layers)]

    assert [[*each] for each in removals] == [[0, 2], [1, 3], [0, 1], [2], [3], [2, 3], [0, 1, 3], [0, 1, 2]]


def test_a_network_of_images_inside_two_is_read() -> None:
    side = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 2}
    network = random_network("CLIPForImageClassification", vision_config=side, text_config={**SIZES, **TOKENS})

    ((layers, *_),) = structure.layer_readings(network)
    ((hidden, *_),) = structure.mlp_readings(network)

    assert (layers.path, layers.name[1]) == ("vision_model.encoder.layers", "vision_config.num_hidden_layers")
    assert [*hidden.keys] == ["vision_config.intermediate_size"]


SPEECH: dict[str, Any] = {
    **SIZES,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "vocab_size": 12,
} | {
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["layer", "mlp"])
def test_a_convolution_that_its_class_parametrises_stays(unit: FamilyUnit) -> None:
    network = random_network("Wav2Vec2ForCTC", **SPEECH)
    sound = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))

    with pytest.warns(UserWarning, match="pos_conv_embed.conv.weight stays dense"):
        pruning.prune(network, "magnitude", unit=unit, sparsity=0.3, example=sound)
    smaller: Any = pruning.smaller_transformer(network, sound)

    ours, theirs = (each.wav2vec2.encoder.pos_conv_embed.conv.weight for each in (network, smaller))
    assert smaller.resized.after < smaller.resized.before
    assert torch.equal(ours, theirs)
    assert smaller.resized.differs or smaller.resized.difference < 1e-4


def test_a_wrong_reading_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    right = structure.mlp_readings

    def wrong(network: nn.Module) -> list[list[structure.Width]]:
        return [[each for each in readings if each.order[1] == "blocks"] for readings in right(network)]

    monkeypatch.setitem(proof.READ, "mlp", (wrong, ""))

    with pytest.raises(ValueError, match="computes something else than the masked one"):
        pruning.prune(network_of("fused and gated in halves"), "magnitude", unit="mlp", sparsity=0.3)


@pytest.mark.slow
def test_a_network_of_images_is_proven_on_its_example_whatever_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    sizes = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
    network = random_network("DeiTForImageClassification", **sizes)
    images = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))

    with pytest.raises(ValueError, match="is proven on an example; pass `example`"):
        pruning.prune(network, "magnitude", unit="layer", sparsity=0.3)
    with pytest.raises(ValueError, match="does not run on the example"):
        pruning.prune(network, "magnitude", unit="layer", sparsity=0.3, example=images[:, :1])
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.3, example=images)
    smaller: Any = pruning.smaller_transformer(network, images)

    assert smaller.config.num_hidden_layers == 2
    assert smaller.resized.difference < 1e-4


def sharing_keys() -> Any:
    """Return a Gemma 3n whose last layer reads the keys and values of an earlier one."""
    config = transformers.Gemma3nTextConfig(
        **TOKENS,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=4,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    torch.manual_seed(0)
    network = transformers.Gemma3nForCausalLM(config).eval()
    for parameter in network.parameters():
        parameter.data *= 3
    return network


def test_layers_that_share_keys_lose_the_same_heads() -> None:
    network, tokens = sharing_keys(), {"input_ids": torch.arange(24).reshape(2, 12) + 3}
    pruning.prune(network, "magnitude", unit="heads", sparsity=0.34)

    assert pruning.smaller_transformer(network, tokens).resized.difference < 1e-4


@pytest.mark.parametrize("given", [True, False])
def test_a_smaller_network_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(proof, "_failure", lambda *_: "")  # any reading is taken
    network, tokens = sharing_keys(), {"input_ids": torch.arange(24).reshape(2, 12) + 3}
    pruning.prune(network, "magnitude", unit="heads", sparsity=0.34)

    with pytest.raises(ValueError, match=r"\(a Gemma3nForCausalLM\) computes something else .* type unit='group' and"):
        pruning.smaller_transformer(network, tokens if given else None)


@pytest.mark.slow
def test_a_deep_network_is_proven_by_its_first_layers() -> None:
    sizes = {**SIZES, **TOKENS, "num_key_value_heads": 2, "num_hidden_layers": 11}
    network = random_network("SmolLM3ForCausalLM", **sizes)

    pruning.prune(network, "magnitude", unit="layer", sparsity=0.4)
    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    assert len(smaller.model.layers) == 6
    assert smaller.resized.difference < 1e-4


@pytest.mark.slow
def test_a_mixture_without_some_experts_is_refused() -> None:
    network = network_of("compressed heads, dense and sparse layers")
    pruning.prune(network, "magnitude", unit="expert", sparsity=0.5)

    with pytest.raises(ValueError, match=r"with 2 of 4 experts in 'model.layers.1.mlp'\) must have all of them"):
        pruning.smaller_transformer(network)
