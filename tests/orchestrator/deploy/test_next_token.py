"""One more token of a network of transformers, from cached keys and values: the logits of the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled

from orchestrator.deploy.formats.huggingface_format import next_token

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES),
    "MistralForCausalLM": lambda: transformers.MistralConfig(
        vocab_size=50, num_key_value_heads=2, sliding_window=4, **SIZES
    ),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=12),
}


def written(name: str, config: Any, folder: Path) -> Any:
    """Write a network with random weights and return it."""
    torch.manual_seed(0)
    network = getattr(transformers, name)(config).eval()
    network.save_pretrained(folder)
    return network


@sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_computes_the_last_token_of_the_whole_text_as_often_as_it_is_called(name: str, tmp_path: Path) -> None:
    network = written(name, CONFIGS[name](), tmp_path)
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    step = next_token(tmp_path, 1, {"input_ids": tokens})
    assert step is not None
    first, again = step(), step()
    assert isinstance(first, torch.Tensor)
    assert isinstance(again, torch.Tensor)

    assert first.shape == (2, 1, 50)
    torch.testing.assert_close(first[:, -1], network(tokens).logits[:, -1])
    assert torch.equal(first, again)
    assert next_token(tmp_path, 1, (tokens[:, :1],)) is None, "no token before it"


def test_a_network_that_generates_nothing_has_no_step(tmp_path: Path) -> None:
    written("BertForMaskedLM", transformers.BertConfig(vocab_size=50, **SIZES), tmp_path)

    assert next_token(tmp_path, 1, {"input_ids": torch.zeros(1, 4, dtype=torch.long)}) is None
