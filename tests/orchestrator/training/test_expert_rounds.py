"""Sweeps that remove whole experts of a stock mixture: counts, nested rounds, restored networks and refusals."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composition import composed
from sampling import sampled
from small_trials import planned

import pruning
from orchestrator.config.round_schema import Prune
from orchestrator.config.schema import ConfigError
from orchestrator.core.specs import Job, PruneFields
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome
from orchestrator.workloads.model_building import prunable
from orchestrator.workloads.weight_files import load_state, plain_state
from pruning.mixtures.finding import mixtures

pytest.importorskip("transformers")
from small_mixtures import TOKENS, network_of

SHORT = (
    *("+sweep=language_model", "cluster=inline", "tracking=none", "data.block=8", "train.steps=4", "finetune.steps=2"),
    *("train.eval_every=null", "data.root=book.txt", "model=huggingface", "model.path=net"),
    *("unit=expert", "score=reap", "score.examples=8"),
)


@pytest.fixture(autouse=True)
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(["the", "cat", "sat", "on"], k=400)))
    network_of("deepseek_v3").config.save_pretrained(tmp_path / "net")


def run(*line: str) -> Outcome:
    return conductor.run([Job(line, composed(*SHORT, *line))])


@pytest.mark.slow
def test_rounds_remove_experts_of_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run("schedule=geometric", "schedule.sparsity=0.5", "schedule.rounds=2")
    rounds = sorted((r for r in outcome.records.values() if r.kind == "round"), key=lambda r: r.sparsity)

    assert outcome.status == "finished"
    assert [record.details["scoring"]["removed"] for record in rounds] == [0.25, 0.5]
    assert all(record.details["scoring"]["score"] == "reap" for record in rounds)
    (mixture,) = mixtures(network_of("deepseek_v3"))
    one = sum(each[0].numel() for each in mixture.stacks.values())
    unused = [record.remaining_parameters - record.details["active_parameters"] for record in rounds]
    assert unused == [(left - (mixture.top_k or 0)) * one for left in (6, 4)]
    said = capsys.readouterr().out
    active, total = pruning.active_parameters(network_of("deepseek_v3")), network_of("deepseek_v3").num_parameters()
    assert "sparsity 0.5 removes 4 of 8 experts in each of 1 layer and leaves 4; before, a token uses" in said
    assert f"a token uses {active:,} of {total:,} parameters" in said
    assert "50.00% of experts" in said


@sampled(2)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("method=reap",), "scored 0, to go first; .* a larger score.examples$"),
        (("method=wanda",), "pruned by magnitude; .* score.examples, or .* score.calibrate_all_experts=true$"),
    ],
)
def test_records_and_tables_name_experts_without_tokens(
    line: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("data.block=4", "score.examples=1", "schedule.sparsity=0.5", "prune.include=['*.experts.*']")
    short = [each for each in SHORT if not each.startswith(("unit=", "score"))]
    outcome = conductor.run([Job(line, composed(*short, *line, *few))])
    (record,) = (r for r in outcome.records.values() if r.kind == "round")

    assert any(re.match(f"no token is routed to model.layers.*{said}", each) for each in record.warnings)
    shown = capsys.readouterr()
    assert "Warning of trial, round 1: no token is routed to" in " ".join(shown.out.split())
    assert "UserWarning" not in shown.err
    scoring = record.details["scoring"]
    layers = (each["tokens"] for each in scoring.get("layers", {}).values() if "tokens" in each)
    tokens = [*scoring.get("tokens", {}).values(), *layers]
    assert any(0 in own for own in tokens)
    assert {sum(own) for own in tokens} == {8}


def test_the_documented_pattern_names_routed_experts_and_no_shared_ones() -> None:
    network = network_of("deepseek_v3")
    routed = {name for mixture in mixtures(network) for name in mixture.stacks}
    every = PruneFields(types=tuple(Prune().types))
    assert any("shared_experts" in each.name for each in prunable(network, every))
    assert {each.name for each in prunable(network, replace(every, include=("*.experts.*",)))} == routed


def test_experts_out_of_reach_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match=r"nothing was trained(.|\n)*leaves 1 of the 4 experts of .* at most 0.5"):
        run("schedule.sparsity=0.75", "schedule.rounds=3")


@pytest.mark.slow
def test_every_token_counts_for_every_expert_if_asked() -> None:
    layer_by_layer = ("unit=entry", "method=wanda", "score=wanda", "score.examples=8", "schedule.sparsity=0.5")
    found = {}
    for asked in ("false", "true"):
        outcome = run(*layer_by_layer, "prune.include=['*.experts.*']", f"score.calibrate_all_experts={asked}")
        (record,) = (r for r in outcome.records.values() if r.kind == "round")
        layers = record.details["scoring"]["layers"].values()
        found[asked] = [each["tokens"] for each in layers if "tokens" in each]

    assert found["true"] == [[64] * 8] * 2
    assert [sum(tokens) for tokens in found["false"]] == [64 * network_of("deepseek_v3").config.num_experts_per_tok] * 2


def test_calibration_of_all_experts_is_in_keys_only_if_asked_and_for_layers_only() -> None:
    line = ("unit=entry", "score=wanda", "method=wanda", "schedule.sparsity=0.5")
    (plain,) = (s for s in planned(composed(*SHORT, *line)).stages.values() if s.parent)
    (all_tokens,) = (
        s for s in planned(composed(*SHORT, *line, "score.calibrate_all_experts=true")).stages.values() if s.parent
    )
    assert "calibrate_all_experts" not in plain.fields["score"]
    assert all_tokens.fields["score"]["calibrate_all_experts"] is True
    with pytest.raises(ConfigError, match=r"`score.calibrate_all_experts` \(=true\) is for pruning layer by layer"):
        run("schedule.sparsity=0.5", "score.calibrate_all_experts=true")


def test_a_network_rebuilt_from_its_weights_routes_among_survivors() -> None:
    model, rebuilt = (network_of("mixtral").float() for _ in range(2))
    pruning.prune(model, "reap", sparsity=0.5, batches=[TOKENS])
    state: dict[str, Any] = plain_state(model)
    load_state(rebuilt, state)
    torch.testing.assert_close(rebuilt(TOKENS).logits, model(TOKENS).logits)
