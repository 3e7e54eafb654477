"""Units of stock transformers: their members, budgets, scores and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn
from torch.nn import functional

import pruning
from pruning.choices.axes import Schedule, Scope, Unit

pytest.importorskip("transformers", reason="transformers is not installed")

from small_transformers import UNITS_OF_KINDS, inputs_of, logits, network_of

GROUPED = {"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "attention_bias": True}
"""Three groups of heads, each a key and value head of 4 entries with two query heads."""


def scored(network: nn.Module, low: str) -> Any:
    """Return a score that ranks the entries of one tensor lowest, by their place."""

    def score(*_: Any, **__: Any) -> dict[str, Tensor]:
        places = {name: torch.arange(each.numel()).reshape(each.shape) for name, each in network.named_parameters()}
        return {name: 1e-6 * place + float(low not in name) for name, place in places.items()}

    return score


def zeros_of(plan: pruning.PruningPlan, name: str, dim: int) -> list[int]:
    """Return the positions along a dimension whose entries are all masked; the others must be whole."""
    rows = plan.masks[name].movedim(dim, 0)
    rows = rows.reshape(len(rows), -1)
    assert bool((rows.all(1) | ~rows.any(1)).all())
    return (~rows.any(1)).nonzero().flatten().tolist()


def test_a_removed_layer_passes_the_residual_stream_on() -> None:
    network, same = (network_of("Llama", mlp_bias=True, attention_bias=True, use_cache=False) for _ in range(2))

    plan = pruning.prune(network, scored(network, "layers.1."), unit="layer", sparsity=0.25)

    removed = {name for name, mask in plan.masks.items() if not mask.any()}
    assert removed == {name for name, _ in same.named_parameters() if "layers.1." in name}
    assert all(mask.all() for name, mask in plan.masks.items() if name not in removed)
    del same.model.layers[1]
    same.config.num_hidden_layers = 3
    assert torch.equal(logits(network), logits(same))


def test_a_group_of_heads_is_a_key_and_value_head_with_its_queries() -> None:
    network = network_of("Llama", **GROUPED)
    attention = "model.layers.2.self_attn"

    plan = pruning.prune(network, "magnitude", unit="heads", sparsity=0.3, scope={"round_to": 8})

    (gone,) = (~plan.masks[f"{attention}.k_proj.bias"]).reshape(3, 4).all(1).nonzero().flatten().tolist()
    of_keys, of_queries = [*range(4 * gone, 4 * gone + 4)], [*range(8 * gone, 8 * gone + 8)]
    for name in ("k_proj", "v_proj"):
        assert (
            zeros_of(plan, f"{attention}.{name}.weight", 0) == zeros_of(plan, f"{attention}.{name}.bias", 0) == of_keys
        )
    assert zeros_of(plan, f"{attention}.q_proj.weight", 0) == of_queries
    assert zeros_of(plan, f"{attention}.o_proj.weight", 1) == of_queries
    assert f"{attention}.o_proj.bias" not in plan.masks


@pytest.mark.parametrize(("kind", "gates"), [("Llama", ["gate_proj", "up_proj"]), ("ViT", ["fc1"]), ("GPT2", ["c_fc"])])
def test_a_hidden_unit_goes_with_its_gate_and_its_reader(kind: str, gates: list[str]) -> None:
    network = network_of(kind)

    plan = pruning.prune(network, "magnitude", unit="mlp", sparsity=0.4)

    for name in plan.masks:
        path, _, leaf = name.rpartition(".")
        writes = path.rpartition(".")[2] in gates
        along = int((kind == "GPT2") is writes) if leaf == "weight" else 0
        first = next(
            each for each in plan.masks if each.startswith(path.rpartition(".")[0]) and each.endswith(".weight")
        )
        assert zeros_of(plan, name, along) == zeros_of(plan, first, int(kind == "GPT2"))
        assert len(zeros_of(plan, name, along)) == 4


def test_a_channel_of_the_residual_stream_goes_from_all_that_read_or_write_it() -> None:
    network = network_of("Mistral", tie_word_embeddings=True)

    plan = pruning.prune(network, "magnitude", unit="residual", sparsity=0.25)

    (gone,) = {tuple(zeros_of(plan, name, 0)) for name in plan.masks if "norm" in name}
    readers = ("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name in plan.masks:
        reads = name.rpartition(".")[0].rpartition(".")[2] in readers
        assert zeros_of(plan, name, int(reads)) == list(gone)
    assert len(gone) == 3
    assert len(plan.masks) == 1 + 4 * 9 + 1  # the tied embedding once


def test_layers_keep_equal_widths_unless_they_are_ranked_together() -> None:
    network = network_of("Llama")
    with torch.no_grad():
        network.model.layers[0].mlp.down_proj.weight.mul_(1e-3)
        network.model.layers[0].mlp.gate_proj.weight.mul_(1e-3)

    def kept(**scope: Any) -> list[int]:
        choices = pruning.Choices(unit=Unit("mlp"), scope=Scope(**scope), schedule=schedule)
        return [*pruning.plan(network, choices).details["kept"].values()]

    schedule = Schedule(0.25)
    assert kept(kind="layer") == kept(kind="global", uniform=True) == [7, 7, 7, 7]
    assert kept(kind="global")[0] < min(kept(kind="global")[1:])
    assert kept(kind="layer", round_to=4) == [4, 4, 4, 4]
    assert kept(kind="global", min_kept=6)[0] == 6
    assert sum(kept(kind="global")) == 30


def test_a_step_of_equal_widths_is_a_unit_of_every_layer() -> None:
    network = network_of("Llama")

    details = pruning.prune(network, "random", unit="mlp", sparsity=0.35).details

    assert details["removed"] == pytest.approx(0.4)
    assert details["step"] == pytest.approx(0.1)


def test_heads_keep_a_number_that_divides_the_width_of_a_llama() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}

    llama = pruning.prune(network_of("Llama", **sizes), "magnitude", unit="heads", sparsity=0.3).details
    qwen = pruning.prune(network_of("Qwen2", **sizes), "magnitude", unit="heads", sparsity=0.3).details

    assert {*llama["kept"].values()} == {2}  # 3 heads do not divide 16
    assert llama["step"] == pytest.approx(0.5)
    assert {*qwen["kept"].values()} == {2}
    assert qwen["step"] == pytest.approx(0.25)


def test_a_layer_with_an_excluded_weight_stays() -> None:
    network = network_of("Llama")
    weights = [name for name, each in network.named_parameters() if each.ndim == 2 and "embed" not in name]
    names = [name for name in weights if name != "model.layers.0.mlp.up_proj.weight"]

    plan = pruning.prune(network, scored(network, "layers.0."), unit="layer", sparsity=0.6, parameters=names)

    assert plan.details["kept"] == {"model.layers": 1}
    assert sorted({name.split(".")[2] for name in plan.masks}) == ["1", "2", "3"]


@pytest.mark.parametrize("unit", UNITS_OF_KINDS)
@sampled(3)
@pytest.mark.parametrize("method", ["magnitude", "random", "taylor", "snip", "wanda"])
def test_scores_rank_the_units(method: str, unit: str) -> None:
    network = network_of("Llama", tie_word_embeddings=True)
    batches = [inputs_of(network, seed) for seed in range(2)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        return functional.cross_entropy(model(**batch).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    given = {"batches": batches, "loss": loss, "size": lambda batch: len(batch["input_ids"])}
    given |= {"order": "at_once"} if method == "wanda" else {}
    generator = torch.Generator().manual_seed(0)

    details = pruning.prune(
        network, method, unit=unit, sparsity=0.25, scope="layer", **given, generator=generator
    ).details

    assert details["removed"] >= 0.25


def test_refusals_come_before_anything_is_computed() -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a score was computed")

    def refused(network: nn.Module, said: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=said):
            pruning.prune(network, never, **{"sparsity": 0.25, **given})

    refused(
        nn.Linear(2, 2), r"^`unit.kind` \(='layer'\) is for networks of transformers, .*type unit='group'", unit="layer"
    )
    for kind in ("GPT2", "Bert"):
        refused(network_of(kind), "^`unit.kind` .='heads'. cannot .* no size of a head .*; prune unit=", unit="heads")
        refused(network_of(kind), "^`unit.kind` .='residual'. cannot .*; prune unit=", unit="residual")
    inverse = network_of("GPT2", scale_attn_by_inverse_layer_idx=True)
    refused(inverse, "scale_attn_by_inverse_layer_idx=True; it needs .*=False: prune another unit", unit="layer")
    refused(
        network_of("Llama"),
        "^`sparsity` .=0.9. cannot be reached: it must be at most 0.75.*; type a lower sparsity.$",
        unit="layer",
        sparsity=0.9,
    )
    refused(network_of("Llama"), "^`example` .=None. must be an input .* 'macs'", unit="mlp", budget="macs")
    refused(
        network_of("Llama"),
        "^`scope.uniform` .=True. is for unit.kind 'heads' or 'mlp' or 'expert' .* and unit.kind is 'layer'",
        unit="layer",
        uniform=True,
    )
    refused(
        network_of("Llama"), "`scope.kind` .='row'. cannot be combined with dependency groups", unit="mlp", scope="row"
    )
    headed = network_of("Llama")
    headed.extra = nn.Linear(12, 2)
    refused(headed, "nothing says whether 'extra.weight' reads the residual stream; prune unit=", unit="residual")
    wrapper = nn.Sequential(network_of("Llama"), nn.Linear(2, 2))
    refused(wrapper, r"`model` is a Sequential; type unit='group'", unit="layer")


def test_the_groups_can_be_seen_without_an_example() -> None:
    groups = pruning.dependency_groups(network_of("Llama", **GROUPED), unit=Unit("heads"))

    assert [(group.units, group.width) for group in groups] == [(3, 4)] * 4
    with pytest.raises(ValueError, match=r"^`example` \(=None\) must be an input of the network"):
        pruning.dependency_groups(nn.Linear(2, 2))
