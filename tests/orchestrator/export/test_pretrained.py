"""A shrunk network of transformers is written as its own class, if its configuration can express the sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from orchestrator.deploy.formats.format import Example, call
from orchestrator.deploy.shrunk_network import shrunk
from orchestrator.export.pretrained import save_pretrained
from orchestrator.export.stored_network import StoredNetwork


class OfTokens(SimpleNamespace):
    """A stored network, without a store."""

    model: nn.Module

    def inputs(self) -> list[Example]:
        return [(torch.arange(10).reshape(2, 5),), (torch.arange(5).reshape(1, 5),)]


def llama(*empty: int) -> StoredNetwork:
    """Return a Llama of two layers; the given number of leading units is masked in each layer's MLP."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=11, max_position_embeddings=16, **sizes, eos_token_id=2)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    for layer, count in zip(model.model.layers, empty, strict=True):
        with torch.no_grad():
            layer.mlp.up_proj.weight[:count] = 0
    return cast(StoredNetwork, OfTokens(model=model))


@pytest.mark.slow  # imports transformers
def test_sizes_that_a_configuration_can_say_are_said_in_it(tmp_path: Path) -> None:
    kept = llama(5, 5)

    assert save_pretrained(kept, shrunk(kept.model, kept.inputs()[0]), tmp_path) == "LlamaForCausalLM"

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    assert loaded.config.intermediate_size == 7
    assert loaded.model.layers[1].mlp.down_proj.weight.shape == (8, 7)
    with torch.no_grad():
        for inputs in kept.inputs():
            assert torch.allclose(call(loaded, inputs).logits, call(kept.model, inputs).logits, atol=1e-5)


@pytest.mark.slow
def test_sizes_that_it_cannot_say_leave_without_it(tmp_path: Path) -> None:
    kept = llama(5, 3)

    assert save_pretrained(kept, shrunk(kept.model, kept.inputs()[0]), tmp_path) == ""
    assert save_pretrained(kept, nn.Linear(2, 2), tmp_path) == ""
    assert not list(tmp_path.iterdir())
