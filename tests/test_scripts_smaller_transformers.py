"""The check of smaller transformers: what it counts, and that it finds a planted fault."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pruning
from orchestrator.export.stock_loading import GENERATED, answers
from scripts.benchmarks import bench_smaller_transformers as bench
from scripts.benchmarks.stock_networks import NETWORKS, Network, Sizes, llama_parameters
from tests.small_transformers import VOCABULARY, network_of

SIZES = Sizes(layer=4, residual=12, heads=3, head_size=4, mlp=10)


def tied(size: Sizes) -> int:
    """Count as for SmolLM2, with a small vocabulary."""
    return llama_parameters(size) - (49152 - VOCABULARY) * size.residual


def small_llama() -> Any:
    return network_of("Llama", tie_word_embeddings=True, max_position_embeddings=64)


SMALL = Network("Llama", small_llama, SIZES, tied, {"layer": (3, 2), "mlp": (5, 2), "residual": (6, 3)})


ONE = replace(SMALL, smaller={"mlp": (5, 2)})
"""A unit alone: what finds a fault is the same for each."""


def answers_in_process(fault: float = 0.0, token: int = 0) -> Any:
    """Return a replacement of the other process, whose logits and tokens are off by a fault."""

    def asked_of(python: str, network: Any, asked: dict[str, Tensor]) -> dict[str, Tensor]:
        found = answers(network, asked)
        return {**found, "0": found["0"] + fault, GENERATED: found[GENERATED] + token}

    return asked_of


@pytest.mark.slow
def test_each_unit_and_size_has_a_row_whose_parameters_the_arithmetic_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "stock_answers", answers_in_process())

    found = [*bench.rows(SMALL, "python")]

    assert [(row.unit, row.size) for row in found] == [*SMALL.cases()]
    assert all(row.met and row.equal and row.generated and row.after == row.expected < row.before for row in found)


@pytest.mark.parametrize(("fault", "token"), [(2e-4, 0), (0.0, 1)])
def test_other_logits_and_other_tokens_miss_the_bar(monkeypatch: pytest.MonkeyPatch, fault: float, token: int) -> None:
    monkeypatch.setattr(bench, "stock_answers", answers_in_process(fault, token))

    assert not any(row.met for row in bench.rows(ONE, "python"))


def test_a_smaller_network_unlike_the_masked_one_misses_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_fault(masked: Any) -> Any:
        smaller: Any = smaller_transformer(masked)
        with torch.no_grad():
            smaller.model.norm.weight.mul_(1.001)
        return smaller

    smaller_transformer = pruning.smaller_transformer
    monkeypatch.setattr(bench, "stock_answers", answers_in_process())
    monkeypatch.setattr(pruning, "smaller_transformer", with_a_fault)

    assert not any(row.met for row in bench.rows(ONE, "python"))


def test_a_network_of_other_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "stock_answers", answers_in_process())
    other = Network("Llama", small_llama, SIZES, lambda size: tied(size) + 1, SMALL.smaller)

    with pytest.raises(SystemExit, match="parameters"):
        next(bench.rows(other, "python"))


def test_an_interpreter_that_has_the_project_is_refused() -> None:
    with pytest.raises(SystemExit, match="must not have this project"):
        bench.check_without_project(sys.executable)


@pytest.mark.parametrize("network", NETWORKS[2:], ids=lambda network: network.name)
def test_random_weights_reach_every_parameter(network: Network) -> None:
    dense = network.load()

    assert sum(each.numel() for each in dense.parameters()) == network.parameters(network.sizes)
    assert all(bool(torch.count_nonzero(each)) for each in dense.parameters())


@pytest.mark.slow
def test_another_process_loads_a_smaller_network_with_stock_transformers() -> None:
    assert all(row.met and row.difference <= bench.BAR for row in bench.rows(ONE, sys.executable))
