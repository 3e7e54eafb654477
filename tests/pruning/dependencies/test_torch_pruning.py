"""Smaller transformers beside those of Torch-Pruning, which traces the network instead of knowing its family."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

import pruning

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch_pruning", reason="Torch-Pruning is not installed")

from small_transformers import inputs_of, logits, network_of

FIRST = {"Llama": "model.layers.{}.mlp.gate_proj", "Qwen3": "model.layers.{}.mlp.gate_proj"}
FIRST |= {"Bert": "bert.encoder.layer.{}.intermediate.dense", "ViT": "vit.layers.{}.mlp.fc1"}
"""Kind -> the layer whose outputs are hidden units."""


def removed(network: Any, layer: str, indices: list[int]) -> None:
    """Remove outputs of a layer by Torch-Pruning, with everything that it finds to depend on them."""
    oracle = importlib.import_module("torch_pruning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = oracle.DependencyGraph().build_dependency(
            network, example_inputs=dict(inputs_of(network)), forward_fn=lambda model, given: model(**given).logits
        )
    module = network.get_submodule(layer)
    cut = graph.get_pruner_of_module(module).prune_out_channels
    graph.get_pruning_group(module, cut, idxs=indices).prune()


@pytest.mark.parametrize("kind", FIRST)
def test_hidden_units_leave_the_network_that_torch_pruning_leaves(kind: str) -> None:
    ours, theirs = network_of(kind), network_of(kind)
    plan = pruning.prune(ours, "magnitude", unit="mlp", sparsity=0.3)
    smaller: Any = pruning.smaller_transformer(ours)

    for number in range(4):
        layer = FIRST[kind].format(number)
        gone = (~plan.masks[f"{layer}.weight"].any(1)).nonzero().flatten().tolist()
        assert gone
        removed(theirs, layer, gone)

    assert sum(each.numel() for each in theirs.parameters()) == smaller.resized.after
    assert torch.equal(logits(smaller), logits(theirs))


def test_a_narrower_residual_has_its_tensors_but_for_the_scales_of_norms() -> None:
    ours, theirs = (network_of("Qwen3", tie_word_embeddings=False) for _ in range(2))
    plan = pruning.prune(ours, "magnitude", unit="residual", sparsity=0.3)
    smaller: Any = pruning.smaller_transformer(ours)

    removed(
        theirs, "model.embed_tokens", (~plan.masks["model.embed_tokens.weight"].any(0)).nonzero().flatten().tolist()
    )

    found = theirs.state_dict()
    for name, tensor in smaller.state_dict().items():
        scaled = "norm" in name or "q_proj" in name or "k_proj" in name  # so that RMSNorm computes the same
        assert tensor.shape == found[name].shape
        assert scaled or torch.equal(tensor, found[name])
