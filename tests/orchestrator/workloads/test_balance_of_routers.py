"""Trainings of mixtures include the loss that balances the load of their experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator.workloads.tasks.language_modelling import LanguageModelling

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(12).reshape(2, 6) % 7


def mixture(**changes: Any) -> Any:
    """Return a small Mixtral."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=7,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        router_aux_loss_coef=0.5,
        **changes,
    )
    return transformers.MixtralForCausalLM(config)


def test_the_loss_of_pairs_has_the_balance_as_the_networks_own_loss_has_it() -> None:
    model, pair = mixture(output_router_logits=True), (TOKENS[:, :-1], TOKENS[:, 1:])
    answer = model(pair[0])
    plain = mixture()(pair[0])

    found = LanguageModelling().loss(model, pair)

    expected = torch.nn.functional.cross_entropy(plain.logits.flatten(0, 1), pair[1].flatten()) + 0.5 * answer.aux_loss
    torch.testing.assert_close(found, expected)
    assert answer.aux_loss.item() > 0.5


def test_the_balance_counts_once_where_the_network_computes_its_loss() -> None:
    model, batch = mixture(output_router_logits=True), {"input_ids": TOKENS, "labels": TOKENS}

    torch.testing.assert_close(LanguageModelling().loss(model, batch), model(**batch).loss)


def test_networks_without_the_option_train_by_cross_entropy_alone() -> None:
    model, pair = mixture(), (TOKENS[:, :-1], TOKENS[:, 1:])

    expected = torch.nn.functional.cross_entropy(model(pair[0]).logits.flatten(0, 1), pair[1].flatten())
    torch.testing.assert_close(LanguageModelling().loss(model, pair), expected)
