"""Experts of a mixture in a plan: their numbers by its configuration, and its parameters by its weight file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_language_models import write_text
from small_trials import composed, planned

from orchestrator.planning.expert_counts import ROUNDED, SHARES, Experts, experts_of, experts_told

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (MIXTRAL, Experts(8, 2)),
        ({"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 2}, Experts(16, 4, 2)),
        ({"moe_num_experts": 4, "moe_k": 3, "n_group": None}, Experts(4, 3)),
        ({"hidden_size": 8}, None),
    ],
)
def test_experts_are_those_of_the_configuration(tmp_path: Path, config: dict[str, int], found: Experts | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert experts_of({"config": config}) == found
    assert experts_of({"weights": str(tmp_path)}) == found
    assert experts_of({"path": str(tmp_path), "overrides": {"num_local_experts": 6, "num_experts_per_tok": 2}})


def test_equally_many_experts_of_each_group_go() -> None:
    assert Experts(8, 2).told(0.3) == "sparsity 0.3 removes 2 of 8 experts in each layer and leaves 6"
    assert Experts(8, 2).told(0.9).endswith("and leaves 1, fewer than the 2 of a token: a real run refuses it")
    assert Experts(12, 2, 4).told(0.3) == "sparsity 0.3 removes 4 of 12 experts in each layer and leaves 8"


def test_a_plan_tells_the_parameters_of_a_token_and_the_experts_that_are_left(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **MIXTRAL}))
    experts = {f"layers.0.mlp.experts.{number}.w1.weight": torch.zeros(3, 5) for number in range(8)}
    stack = {"layers.1.moe.input_linear.weight": torch.zeros(8, 3, 5)}
    save_file({**experts, **stack, "layers.0.mlp.gate.weight": torch.zeros(8, 5)}, tmp_path / "model.safetensors")
    line = ("+sweep=smollm2", "model=huggingface", f"model.weights={tmp_path}", f"data.root={tmp_path / 'a.txt'}")
    line += ("data.tokenizer=bytes",)
    plans = {method: planned(composed(*line, f"method={method}")) for method in ("man", "wanda")}
    narrowed = planned(composed(*line, "method=magnitude", "unit=mlp", "scope=layer"))

    parameters = "a token uses 100 of 280 parameters"
    assert [*experts_told(plans["man"])] == [
        parameters,
        "sparsity 0.5 removes 4 of 8 experts in each layer and leaves 4",
    ]
    assert [*experts_told(plans["wanda"])] == [parameters]
    assert [*experts_told(narrowed)] == [parameters, ROUNDED]


def test_a_plan_tells_that_processes_balance_routers_by_their_shares(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt")
    line = ("+sweep=experts", f"data.root={tmp_path / 'a.txt'}", "method=reap", "parallel=ddp", "parallel.processes=2")
    line += ("cluster.cpus_per_trial=2",)

    assert SHARES in [*experts_told(planned(composed(*line)))]
    assert SHARES not in [*experts_told(planned(composed(*line, "model.config.output_router_logits=false")))]
