"""The smaller stock network computes what the masked one computes, and stock classes load it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import nn

import pruning
from pruning.choices.axes import FamilyUnit
from pruning.measure.macs import macs

pytest.importorskip("transformers", reason="transformers is not installed")

from small_transformers import KINDS, UNITS_OF_KINDS, class_of, inputs_of, logits, network_of, random_sizes

UNITS = {**dict.fromkeys(("GPT2", "Bert"), ("layer", "mlp"))}
"""Units of a kind; all units for others."""
TOLERANCE = 1e-4


def pruned(kind: str, unit: FamilyUnit, seed: int) -> tuple[Any, pruning.PruningPlan, str]:
    """Return a random network pruned by a random budget, its plan, and the budget."""
    draw = random.Random(1000 * seed + KINDS.index(kind))
    network = network_of(kind, seed, **random_sizes(kind, draw))
    budget = draw.choice(["channels", "parameters", "bytes", "macs"])
    amount = draw.uniform(0.1, 0.5) if budget == "channels" else draw.uniform(0.01, 0.08)
    scope = draw.choice(["layer", "global"])
    given = {"sparsity": amount, "budget": budget, "scope": scope, "example": inputs_of(network)}
    return network, pruning.prune(network, "magnitude", unit=unit, **given), budget


def hold_law(kind: str, unit: FamilyUnit, seed: int) -> None:
    """Hold a random network to the laws: equal outputs, and exactly the size that the plan has counted."""
    network, plan, budget = pruned(kind, unit, seed)
    inputs = inputs_of(network)

    smaller: Any = pruning.smaller_transformer(network, inputs)

    said = smaller.resized
    assert type(smaller) is type(network)
    assert said.after == sum(each.numel() for each in smaller.parameters())
    assert said.after < said.before or said.padding
    changes_outputs = (kind, unit) in (("Bert", "layer"), ("ViT", "residual"))
    assert bool(said.differs) is changes_outputs
    assert changes_outputs or said.difference < TOLERANCE
    assert float(logits(network).std()) > 1e-3
    if budget in ("parameters", "macs") and not said.padding:
        total = {"parameters": (said.before, said.after), "macs": (products(network), products(smaller))}[budget]
        assert plan.details["removed"] == pytest.approx(1 - total[1] / total[0], abs=1e-12)


def products(network: nn.Module) -> int:
    """Return the multiply-accumulates of a network with all its zeros."""
    return macs(network, dict(inputs_of(network))).total


CASES = [(kind, unit) for kind in KINDS for unit in UNITS.get(kind, UNITS_OF_KINDS)]


@sampled(12)
@pytest.mark.parametrize(("kind", "unit"), CASES)
def test_masked_equals_smaller(kind: str, unit: FamilyUnit) -> None:
    hold_law(kind, unit, seed=0)


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize(("kind", "unit"), CASES)
@pytest.mark.parametrize("seeds", [range(1, 14)], ids=str)
def test_masked_equals_smaller_on_hundreds_of_networks(kind: str, unit: FamilyUnit, seeds: Sequence[int]) -> None:
    for seed in seeds:
        hold_law(kind, unit, seed)


@pytest.mark.parametrize(("kind", "unit"), [("Qwen2", "layer"), ("Llama", "heads"), ("ViT", "heads"), ("GPT2", "mlp")])
def test_stock_classes_load_what_was_saved(kind: str, unit: FamilyUnit, tmp_path: Path) -> None:
    network = network_of(kind)
    pruning.prune(network, "magnitude", unit=unit, sparsity=0.3)
    smaller: Any = pruning.smaller_transformer(network)

    smaller.save_pretrained(tmp_path)
    loaded, said = class_of(kind).from_pretrained(tmp_path, output_loading_info=True)

    assert not any(said.values())
    assert torch.allclose(logits(loaded.eval()), logits(network), atol=1e-5)


def test_all_units_go_one_after_another_and_layers_keep_their_types() -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "layer_types": types}
    network = network_of("Qwen3", tie_word_embeddings=True, attention_bias=True, **window)
    for unit, gone in (("layer", 0.25), ("heads", 0.3), ("mlp", 0.5), ("residual", 0.25)):
        pruning.prune(network, "magnitude", unit=unit, sparsity=gone, scope="layer", uniform=unit in ("heads", "mlp"))
    pruning.remove_all(network)

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    said = smaller.resized
    sizes = {"num_hidden_layers": (4, 3), "num_attention_heads": (3, 2), "num_key_value_heads": (3, 2)}
    sizes |= {"intermediate_size": (10, 6), "hidden_size": (12, 9)}  # half of all units are 20, with a whole layer's
    assert {key: said.config[key] for key in sizes} == sizes
    assert smaller.config.layer_types == [types[number] for number in said.layers]
    assert smaller.config.rms_norm_eps == pytest.approx(1e-3 * 12 / 9)
    assert [layer.self_attn.layer_idx for layer in smaller.model.layers] == [0, 1, 2]
    assert smaller.lm_head.weight is smaller.model.embed_tokens.weight
    assert said.difference < TOLERANCE


def test_norms_of_heads_compute_the_same_with_the_eps_of_a_narrower_residual() -> None:
    network = network_of("Qwen3", rms_norm_eps=0.5, attention_bias=True)
    pruning.prune(network, "magnitude", unit="residual", sparsity=0.5)

    said: Any = pruning.smaller_transformer(network, inputs_of(network)).resized

    assert said.config["rms_norm_eps"] == (0.5, 1.0)
    assert said.difference < TOLERANCE


def test_it_generates_the_tokens_of_the_masked_network() -> None:
    network = network_of("Llama", tie_word_embeddings=True)
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.5)
    prompt = inputs_of(network)["input_ids"][:1, :4]
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}

    smaller: Any = pruning.smaller_transformer(network)

    assert len(smaller.model.layers) == 2
    assert torch.equal(smaller.generate(prompt, **given), network.generate(prompt, **given))


def test_layers_with_fewer_units_are_filled_up_with_empty_ones() -> None:
    network = network_of("Llama")
    weights = network.model.layers[0].mlp
    with torch.no_grad():
        for each in (weights.gate_proj.weight, weights.up_proj.weight, weights.down_proj.weight.T):
            each[[1, 4, 5]] = 0
        for layer in network.model.layers[1:]:  # one factor that is 0 is enough
            layer.mlp.up_proj.weight[0] = 0
            layer.mlp.down_proj.weight[:, 9] = 0

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    assert smaller.resized.config == {"intermediate_size": (10, 8)}
    assert smaller.resized.padding == {"mlp": 1}
    assert smaller.resized.difference < TOLERANCE


def test_a_number_of_heads_that_the_configuration_refuses_is_filled_up() -> None:
    network = network_of("Llama", hidden_size=16, num_attention_heads=4, num_key_value_heads=4)
    attention = network.model.layers
    with torch.no_grad():
        for layer in attention:
            layer.self_attn.v_proj.weight[:4] = 0

    smaller: Any = pruning.smaller_transformer(network)

    assert smaller.config.num_attention_heads == 4
    assert smaller.resized.padding == {"heads": 4}


def test_the_network_of_a_wrapper_is_found_and_settings_stay() -> None:
    network = network_of("Mistral").double()
    network.model.embed_tokens.weight.requires_grad_(False)
    network.generation_config.temperature = 0.5
    pruning.prune(network, "magnitude", unit="mlp", sparsity=0.3)
    wrapper = nn.Sequential()
    wrapper.network = network
    before = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}

    smaller: Any = pruning.smaller_transformer(wrapper.train())

    assert smaller.training
    assert smaller.dtype == torch.float64
    assert [name for name, each in smaller.named_parameters() if not each.requires_grad] == [
        "model.embed_tokens.weight"
    ]
    assert smaller.generation_config.temperature == 0.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapper.state_dict().items())
    assert torch.allclose(logits(smaller.eval()), logits(network.eval()), atol=1e-10)


class Wrapper(nn.Module):
    """Wrapper with the configuration of its network, which it calls on the next token of the vocabulary."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.net, self.config = network, network.config

    def forward(self, tokens: torch.Tensor, shift: int = 1) -> torch.Tensor:
        found: torch.Tensor = self.net(input_ids=tokens + shift).logits.sum()
        return found


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bert"])
def test_the_network_of_a_wrapper_with_its_configuration_is_found(kind: str) -> None:
    network = network_of(kind)
    pruning.prune(Wrapper(network), "magnitude", unit="mlp", sparsity=0.3)

    smaller: Any = pruning.smaller_transformer(Wrapper(Wrapper(network)))

    assert type(smaller) is type(network)
    assert smaller.resized.after < smaller.resized.before
    assert torch.allclose(logits(smaller), logits(network), atol=1e-5)


def test_two_networks_in_one_wrapper_are_refused() -> None:
    both = Wrapper(network_of("Llama"))
    both.other = network_of("Llama")

    with pytest.raises(ValueError, match=r"^`model` \(a Wrapper\) must be one network of a stock class"):
        pruning.smaller_transformer(both)


@pytest.mark.parametrize(
    ("kind", "head"), [("Llama", "lm_head"), ("GPT2", "lm_head"), ("Bert", "cls.predictions.decoder")]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_tied_as_in_the_network_whatever_its_configuration_says(
    kind: str, head: str, tied: bool, tmp_path: Path
) -> None:
    network = network_of(kind, tie_word_embeddings=not tied)
    pairs = {"weight": network.get_input_embeddings().weight, "bias": network.get_submodule(head).bias}
    if kind == "Bert":
        pairs["bias"] = network.cls.predictions.bias
    for leaf, parameter in pairs.items():
        if parameter is not None:
            setattr(network.get_submodule(head), leaf, parameter if tied else nn.Parameter(parameter.detach() + 0.5))
    pruning.prune(network, "magnitude", unit="mlp", sparsity=0.3)

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))
    smaller.save_pretrained(tmp_path)
    loaded = class_of(kind).from_pretrained(tmp_path).eval()

    assert smaller.resized.config["tie_word_embeddings"] == (not tied, tied)
    assert smaller.resized.difference < TOLERANCE
    assert (smaller.get_input_embeddings().weight is smaller.get_submodule(head).weight) is tied
    assert torch.equal(logits(loaded), logits(smaller))


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_difference_of_an_example_with_labels_is_that_of_logits(return_dict: bool) -> None:
    network, tokens = network_of("Bert"), inputs_of(network_of("Bert"))["input_ids"]
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.25)

    smaller: Any = pruning.smaller_transformer(network, {"input_ids": tokens})
    labelled: Any = pruning.smaller_transformer(
        network, {"input_ids": tokens, "labels": tokens, "return_dict": return_dict}
    )

    assert labelled.resized.difference == smaller.resized.difference > 1e-3


def test_the_difference_of_a_wrapped_network_is_that_on_the_inputs_that_it_gets() -> None:
    network, tokens = network_of("Bert"), inputs_of(network_of("Bert"))["input_ids"] % 20
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.25)
    expected: Any = pruning.smaller_transformer(network, {"input_ids": tokens + 3})

    for example in ((tokens, 3), {"tokens": tokens, "shift": 3}):
        smaller: Any = pruning.smaller_transformer(Wrapper(network).eval(), example)
        assert smaller.resized.difference == expected.resized.difference > 1e-3
    assert not network._forward_pre_hooks


def test_a_wrapper_that_does_not_call_its_network_on_the_example_is_refused() -> None:
    wrapper = nn.Sequential(nn.Identity())
    wrapper[0].network = network_of("Llama")

    with pytest.raises(
        ValueError, match=r"^`model` \(a Sequential\) must call its '0.network', a LlamaForCausalLM, on"
    ):
        pruning.smaller_transformer(wrapper, torch.ones(2))


@pytest.mark.parametrize("kind", ["Llama", "ViT"])
def test_hidden_states_with_fewer_channels_have_no_difference(kind: str) -> None:
    whole = network_of(kind)
    network = type(whole.base_model)(whole.config).eval()
    pruning.prune(network, "magnitude", unit="residual", sparsity=0.25)

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    assert smaller(**inputs_of(network)).last_hidden_state.shape[-1] == 9
    assert smaller.resized.difference is None
    assert smaller.resized.differs[0] == "the hidden states that it returns have only the channels that are left"


@pytest.mark.parametrize(("kind", "layers"), [("Llama", "model.layers"), ("GPT2", "transformer.h")])
def test_each_module_keeps_its_mode(kind: str, layers: str) -> None:
    network = network_of(kind).train()
    with torch.no_grad():
        for parameter in network.get_submodule(f"{layers}.1").parameters():
            parameter.zero_()
    for frozen in ("2.mlp", "3"):
        network.get_submodule(f"{layers}.{frozen}").eval()
    expected = {
        f"{layers}.{new}{name and '.'}{name}": module.training
        for new, old in enumerate((0, 2, 3))
        for name, module in network.get_submodule(f"{layers}.{old}").named_modules()
    }

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    modes = {name: module.training for name, module in smaller.named_modules()}
    assert {name: modes[name] for name in expected} == expected
    assert {*expected.values()} == {True, False}
    assert all(mode for name, mode in modes.items() if name not in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_in_16_bits_keeps_its_dtypes_and_all_buffers(kind: str, dtype: torch.dtype) -> None:
    network = network_of(kind, **({"head_dim": 8} if kind in ("Llama", "Qwen3") else {}))
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.5)
    pruning.remove_all(network.to(dtype).float().to(dtype))

    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    before, after = dict(network.named_buffers()), dict(smaller.named_buffers())
    kept = {name: before[name] for name in after if ".layers." not in name and ".h." not in name}
    assert bool(after) is (kind not in ("GPT2", "ViT"))
    assert all(after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in kept.items())
    assert {each.dtype for each in smaller.parameters()} == {dtype}
    assert bool(smaller.resized.difference) is (kind == "Bert")


def test_a_masked_vit_is_converted_as_the_page_on_torch_says() -> None:
    network = network_of("ViT")
    pruning.prune(network, "magnitude", unit="residual", sparsity=0.25)
    expected, inputs = logits(network), {"pixel_values": inputs_of(network)["pixel_values"].double()}
    network.double()
    smaller: Any = pruning.smaller_transformer(network)

    pruning.MaskSet.collect(network).apply(network)

    assert torch.allclose(logits(network, inputs), expected.double(), atol=1e-5)
    assert logits(smaller, inputs).dtype == torch.float64


def test_the_frequencies_of_dynamic_rotary_embeddings_are_those_for_the_same_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    network = network_of("Llama", rope_parameters=rope, max_position_embeddings=6, head_dim=8)
    pruning.prune(network, "magnitude", unit="layer", sparsity=0.25)
    long, short = inputs_of(network)["input_ids"], inputs_of(network)["input_ids"][:, :4]

    logits(network, {"input_ids": long})
    smaller: Any = pruning.smaller_transformer(network)

    assert torch.equal(smaller.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    assert torch.equal(logits(smaller, {"input_ids": short}), logits(network, {"input_ids": short}))


def test_the_difference_of_a_network_that_normalises_after_additions_is_stated() -> None:
    network = network_of("Bert")
    plan = pruning.prune(network, "magnitude", unit="layer", sparsity=0.25)

    said: Any = pruning.smaller_transformer(network, inputs_of(network)).resized

    assert plan.details["kept"] == {"bert.encoder.layer": 3}
    assert not [name for name in plan.masks if "LayerNorm" in name]
    assert float(logits(network).std(1).mean()) > 1e-3  # tokens still differ behind the removed layer
    assert 1e-3 < said.difference < 1
    assert said.differs == ("the masked network keeps the norms of removed layers, which this one has not",)


def test_a_network_of_no_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`model` \(a Linear\) must be one network of a stock class.*pruning.shrink"):
        pruning.smaller_transformer(nn.Linear(2, 2))


def test_the_page_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/smaller-transformers.md").read_text()
    monkeypatch.chdir(tmp_path)

    exec("\n".join(re.findall(r"^```python transformers\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)), {})

    (said,) = re.findall(r"^prints `(.*)`", page, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == [said, "3 4"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bert", "ViT"])  # in GPT-2 only the head is quantised
def test_a_quantised_network_is_refused_by_a_sentence(kind: str) -> None:
    network = torch.ao.quantization.quantize_dynamic(network_of(kind), {nn.Linear}, dtype=torch.qint8)
    said = (
        r"^`model` \(whose '.*', a torch.ao.nn.quantized.dynamic.*Linear, has no parameter 'weight'\) must hold its w"
    )

    with pytest.raises(ValueError, match=said):
        pruning.smaller_transformer(network)
    for unit in UNITS.get(kind, UNITS_OF_KINDS):
        with pytest.raises(ValueError, match=said):
            pruning.prune(network, "magnitude", unit=unit, sparsity=0.3)


def test_a_network_that_its_configuration_does_not_build_is_refused_by_a_sentence() -> None:
    bert = type(network_of("Bert").bert)(network_of("Bert").config, add_pooling_layer=False)
    pruning.prune(bert, "magnitude", unit="mlp", sparsity=0.3)

    with pytest.raises(ValueError, match=r"`model` \(a BertModel with .* cannot be built from its configuration: "):
        pruning.smaller_transformer(bert)
