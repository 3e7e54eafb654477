"""Units of several kinds removed from one masked network: in turns by one plan, or by one plan after another."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from sampling import sampled

import pruning
from pruning.choices.axes import Unit
from pruning.measure.macs import macs

pytest.importorskip("transformers", reason="transformers is not installed")

from small_transformers import inputs_of, logits, network_of

DEEP = {"num_hidden_layers": 8, "intermediate_size": 40}


def loss(network: Any, batch: Any) -> Any:
    """Return the loss of a language model."""
    return network(**batch).loss


def texts() -> list[dict[str, torch.Tensor]]:
    """Return a batch with its labels."""
    given = inputs_of(network_of("Llama"))["input_ids"]
    return [{"input_ids": given, "labels": given}]


def size(network: Any) -> int:
    """Return the number of parameters; a tied one counts once."""
    return sum(each.numel() for each in network.parameters())


@sampled(3)
@pytest.mark.parametrize(
    ("kind", "by_layers", "sparsity"),
    [
        ("Llama", 0.0, 0.25),
        ("Llama", 0.5, 0.5),
        ("Llama", 1.0, 0.5),
        ("Qwen3", 0.3, 0.25),
        ("GPT2", 0.5, 0.4),
        ("ViT", 0.5, 0.25),
    ],
)
def test_layers_reach_their_part_and_hidden_units_the_rest(kind: str, by_layers: float, sparsity: float) -> None:
    sizes = {"n_layer": 8, "n_inner": 40} if kind == "GPT2" else DEEP
    network = network_of(kind, **sizes)
    whole, stack = size(network), next(each for each in network.modules() if isinstance(each, torch.nn.ModuleList))
    a_layer = size(stack[0])

    plan = pruning.prune(
        network,
        "magnitude",
        unit="layer_and_mlp",
        sparsity=sparsity,
        budget="parameters",
        by_layers=by_layers,
    )
    smaller: Any = pruning.smaller_transformer(network)

    layers = math.ceil(round(by_layers * sparsity * whole / a_layer, 9))
    assert len(smaller.resized.layers) == 8 - layers
    assert plan.details["removed"] == pytest.approx(1 - size(smaller) / whole, abs=1e-12)
    assert sparsity <= plan.details["removed"] < sparsity + plan.details["step"]
    assert not smaller.resized.padding
    torch.testing.assert_close(logits(smaller), logits(network), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rounds_end_with_the_sizes_of_one_pruning() -> None:
    network, at_once = (network_of("Llama", **DEEP) for _ in range(2))
    given: dict[str, Any] = {"unit": "layer_and_mlp", "budget": "parameters"}
    plans = [pruning.prune(network, "magnitude", sparsity=0.1 * number, **given) for number in range(1, 6)]
    one: Any = pruning.prune(at_once, "magnitude", sparsity=0.5, **given)

    assert all(later.masks.nested_in(earlier.masks) for earlier, later in pairwise(plans))
    assert 0.5 <= plans[-1].details["removed"] < 0.5 + plans[-1].details["step"]
    assert plans[-1].details["kept"] == one.details["kept"]


def test_floors_and_rounding_are_for_hidden_units_and_layers_give_what_they_can() -> None:
    network = network_of("Llama", **DEEP)
    given: dict[str, Any] = {"unit": "layer_and_mlp", "budget": "parameters", "scope": {"round_to": 8}}
    plan = pruning.prune(network, "magnitude", sparsity=0.3, by_layers=0.4, **given)
    most = pruning.prune(network, "magnitude", sparsity=0.9, by_layers=1.0, **given)

    assert plan.details["kept"]["model.layers"] == 7
    assert plan.details["kept"]["model.layers.0.mlp.gate_proj.weight"] % 8 == 0
    assert most.details["kept"]["model.layers"] == 1
    assert most.details["removed"] >= 0.9


def test_batches_and_names_may_be_iterators() -> None:
    one, other = (network_of("Llama", **DEEP) for _ in range(2))
    names = [name for name, _ in one.named_parameters() if name.endswith("proj.weight")]
    given = {"sparsity": 0.4, "loss": loss}

    listed = pruning.prune(one, "minitron", batches=texts(), parameters=names, **given)
    read_once = pruning.prune(other, "minitron", batches=iter(texts()), parameters=iter(names), **given)

    assert listed.masks == read_once.masks


@pytest.mark.parametrize("budget", ["parameters", "bytes", "macs"])
@sampled(8)
@pytest.mark.parametrize("kind", ["Llama", "ViT"])
def test_a_budget_counts_what_other_units_removed(kind: str, budget: str) -> None:
    network = network_of(kind, **DEEP)
    inputs = inputs_of(network)
    for unit, sparsity in (("layer", 0.2), ("heads", 0.3), ("mlp", 0.5), ("layer", 0.6)):
        plan = pruning.prune(network, "magnitude", unit=unit, sparsity=sparsity, budget=budget, example=inputs)
    smaller = pruning.smaller_transformer(network)

    def cost(model: torch.nn.Module) -> float:
        if budget == "macs":
            return float(macs(model, dict(inputs)).total)
        if budget == "parameters":
            return float(size(model))
        return float(sum(each.nbytes for each in (*model.parameters(), *model.buffers())))

    assert plan.details["removed"] >= 0.6
    assert plan.details["removed"] == pytest.approx(1 - cost(smaller) / cost(network_of(kind, **DEEP)), abs=1e-12)
    torch.testing.assert_close(logits(smaller), logits(network), rtol=1e-4, atol=1e-4)


def test_minitron_ranks_layers_by_block_influence_and_hidden_units_under_their_masks() -> None:
    both, one, other = (network_of("Llama", **DEEP) for _ in range(3))
    batches = texts()

    plan = pruning.prune(both, "minitron", sparsity=0.4, batches=batches, loss=loss)
    layers = pruning.prune(one, "shortgpt", sparsity=0.2, budget="parameters", batches=batches, loss=loss)
    hidden = pruning.prune(one, "minitron_mlp", sparsity=0.4, budget="parameters", batches=batches, loss=loss)
    alone = pruning.prune(other, "minitron_mlp", sparsity=0.4, budget="parameters", batches=batches, loss=loss)

    assert {name: mask.tolist() for name, mask in plan.masks.items()} == {
        name: mask.tolist() for name, mask in {**layers.masks, **hidden.masks}.items()
    }
    assert plan.details["removed"] == hidden.details["removed"]
    assert alone.details["kept"] != hidden.details["kept"]


def test_two_units_are_refused_where_they_cannot_go() -> None:
    def refused(said: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=said):
            pruning.prune(network_of("Llama"), "magnitude", unit="layer_and_mlp", sparsity=0.25, **given)

    refused(r"^`scope.budget` \(='channels'\) counts units of one kind.* use 'parameters', 'bytes' or 'macs'")
    refused(r"^`unit.by_layers` \(=2\) must lie in \[0, 1\]", budget="parameters", by_layers=2)
    refused(r"scores only whole units of kind", budget="parameters", score="block_influence")
    refused(r"^`dynamics.kind` \(='free'\) cannot", budget="parameters", dynamics="free")
    refused(r"^`repair.kind` \(='bn_stats'\) cannot", budget="parameters", repair="bn_stats")
    with pytest.raises(ValueError, match=r"^`unit.by_layers` \(=0.9\) is for unit.kind 'layer_and_mlp'"):
        pruning.prune(network_of("Llama"), "magnitude", unit="mlp", sparsity=0.25, by_layers=0.9)
    with pytest.raises(ValueError, match=r"has no dependency groups of its own; ask for those of 'layer' or 'mlp'"):
        pruning.dependency_groups(network_of("Llama"), unit=Unit("layer_and_mlp"))
