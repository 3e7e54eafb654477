"""unit=sizes: transformers of the sizes asked for, equal to separate prunings of each unit in turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling import sampled

import pruning
from pruning.choices.axes import Unit

pytest.importorskip("transformers", reason="transformers is not installed")

from small_mixtures import network_of as mixture_of
from small_transformers import inputs_of, logits, network_of

DEEP = {"num_hidden_layers": 6, "intermediate_size": 40}


def sizes_in(network: Any) -> tuple[int, int, int]:
    """Return the number of layers, the width of the MLPs and that of the residual stream."""
    config = network.config
    names = ("n_layer", "n_inner", "n_embd") if config.model_type == "gpt2" else ()
    found = names or ("num_hidden_layers", "intermediate_size", "hidden_size")
    layers, mlp, residual = (getattr(config, name) for name in found)
    return layers, mlp, residual


@sampled(2)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Bert", "ViT"])
def test_the_smaller_network_has_the_sizes_asked_for(kind: str) -> None:
    network = network_of(kind, **({"n_layer": 6, "n_inner": 40} if kind == "GPT2" else DEEP))
    sizes = {"layers": 4, "mlp": 13} | ({"residual": 6} if kind in ("Llama", "Qwen3") else {})

    plan = pruning.prune(network, "magnitude", unit={"kind": "sizes", **sizes}, budget="parameters")
    smaller: Any = pruning.smaller_transformer(network, inputs_of(network))

    assert sizes_in(smaller) == (4, 13, sizes.get("residual", 12))
    assert plan.details["removed"] == pytest.approx(1 - smaller.resized.after / smaller.resized.before, abs=1e-12)
    assert not smaller.resized.padding
    if kind != "Bert":  # which keeps the norms of removed layers in the masked network
        torch.testing.assert_close(logits(smaller), logits(network), rtol=1e-4, atol=1e-4)


def test_units_go_one_after_another_under_the_masks_of_those_before() -> None:
    together, apart = (network_of("Llama", **DEEP) for _ in range(2))
    batches = [dict(inputs_of(together))]

    plan = pruning.prune(together, "minitron_sizes", layers=4, heads=2, mlp=10, batches=batches)
    for method, sparsity in (("shortgpt", 1 / 3), ("minitron_heads", 5 / 9), ("minitron_mlp", 5 / 6)):
        last = pruning.prune(apart, method, sparsity=sparsity, batches=batches)  # a removed layer counts as empty

    assert {"model.layers": 4, "model.layers.0.self_attn.q_proj.weight": 2}.items() <= plan.details["kept"].items()
    names = [name for name in last.masks if ".mlp." in name]
    assert names
    assert all(torch.equal(plan.masks[name], last.masks[name]) for name in names)


@pytest.mark.parametrize(
    ("kind", "key", "asked", "left"),
    [("mixtral", "num_local_experts", 7, 7), ("deepseek_v3", "n_routed_experts", 3, 6)],
)
def test_experts_have_a_number_of_their_own(kind: str, key: str, asked: int, left: int) -> None:
    network = mixture_of(kind)

    plan = pruning.prune(network, "magnitude", unit={"kind": "sizes", "experts": asked}, budget="parameters")
    smaller: Any = pruning.smaller_transformer(network)

    assert getattr(smaller.config, key) == left, "of deepseek_v3, in each of two groups"
    assert plan.details["removed"] == pytest.approx(1 - smaller.resized.after / smaller.resized.before, abs=1e-12)


def test_as_many_as_there_are_removes_nothing() -> None:
    network = network_of("Llama", **DEEP)

    plan = pruning.prune(network, "magnitude", unit={"kind": "sizes", "layers": 6, "heads": 3}, budget="parameters")

    assert plan.masks.sparsity() == 0
    assert plan.details["removed"] == 0


def test_sizes_are_refused_where_no_network_has_them() -> None:
    def refused(said: str, **given: Any) -> None:
        scope = given.pop("scope", {})
        with pytest.raises(ValueError, match=said):
            pruning.prune(
                network_of("Llama"),
                "magnitude",
                unit={"kind": "sizes", **given},
                scope={"budget": "parameters", **scope},
            )

    refused(r"^`unit.kind` \(='sizes'\) keeps .*pass one or more of unit.layers, unit.experts, unit.heads")
    refused(r"^`unit.layers` \(=5\) must be a number that all layers can keep: they have 4, and can keep", layers=5)
    refused(r"^`unit.heads` \(=0\) must be an int of at least 1", heads=0)
    refused(r"^`unit.residual` \(=8\) must .* can keep 3, 6, 9, 12; without the key they keep all", residual=8)
    refused(r"^`scope.kind` \(='global'\) cannot", mlp=4, scope={"kind": "global"})
    refused(r"^`scope.min_kept` \(=2\) cannot", mlp=4, scope={"min_kept": 2})
    refused(r"^`scope.round_to` \(=2\) is for", mlp=4, scope={"round_to": 2})
    refused(r"^`scope.budget` \(='channels'\) counts units of one kind", mlp=4, scope={"budget": "channels"})
    with pytest.raises(ValueError, match=r"^`schedule.sparsity` \(=0.5\) cannot"):
        pruning.prune(network_of("Llama"), "minitron_sizes", layers=3, sparsity=0.5)
    with pytest.raises(ValueError, match=r"^`unit.layers` \(=3\) is for unit.kind 'sizes', and"):
        pruning.prune(network_of("Llama"), "magnitude", unit=Unit("mlp", layers=3), sparsity=0.25)
