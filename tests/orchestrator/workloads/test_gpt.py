"""Small GPT: causal, of the documented size, and trained as in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import PruneFields
from orchestrator.workloads import model_building
from orchestrator.workloads.networks.gpt import gpt

PRUNE = PruneFields(("Linear",))


def small(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return gpt(**{"input_shape": [8], "classes": 11, "layers": 2, "heads": 2, "width": 8, **changes}).eval()


def test_it_has_0_8_million_parameters_of_which_linear_layers_are_pruned() -> None:
    model = gpt([128], 65)
    pruned = model_building.prunable(model, PRUNE)

    assert sum(each.numel() for each in model.parameters()) == 4 * 12 * 128**2 + (65 + 128 + 65) * 128 + 9 * 2 * 128
    assert len(pruned) == 4 * 6 + 1
    assert sum(each.module.get_parameter("weight").numel() for each in pruned) == 4 * 12 * 128**2 + 65 * 128
    assert model.embedding.weight is not model.head.weight


def test_a_token_sees_those_before_it_only() -> None:
    model, tokens = small(), torch.randint(0, 11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    first, second = model(tokens), model(changed)

    assert first.shape == (3, 8, 11)
    assert torch.equal(first[:, :5], second[:, :5])
    assert (first[:, 5:] != second[:, 5:]).any(-1).all()


def test_its_attention_is_that_of_the_definition() -> None:
    model = small(heads=1)
    attention, x = model.blocks[0].attention, torch.randn(1, 4, 8)
    query, key, value = (layer(x) for layer in (attention.query, attention.key, attention.value))
    scores = (query @ key.transpose(1, 2) / 8**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)

    torch.testing.assert_close(attention(x), attention.out(scores.softmax(-1) @ value))


def test_it_begins_near_the_uniform_guess() -> None:
    tokens = torch.randint(0, 65, (4, 128))
    torch.manual_seed(0)

    assert F.cross_entropy(gpt([128], 65)(tokens).flatten(0, 1), tokens.flatten()).item() == pytest.approx(
        4.17, abs=0.1
    )


def test_dropout_is_for_training_alone() -> None:
    model, tokens = small(dropout=0.5), torch.randint(0, 11, (1, 8))

    assert torch.equal(model(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input_shape": [1, 8, 8]}, r"`model.input_shape` \(=\[1, 8, 8\]\) must be \[length of a block of tokens\]"),
        ({"context": 4}, r"`model.context` \(=4\) must be at least 8, the length of a block of tokens"),
        ({"heads": 3}, r"`model.heads` \(=3\) must divide `model.width` \(=8\)"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OrchestratorError, match=said):
        small(**changes)
    if "context" in changes:
        with pytest.raises(OrchestratorError, match=r"`model.context` \(=8\) must be at least 9"):
            small()(torch.zeros(1, 9, dtype=torch.int64))
