"""Objectives of a trial for a search."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from factories import make_plan, make_records

from orchestrator.config.key_rules import violations
from orchestrator.config.schema import Config, ConfigError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.sweep.outcome import Outcome, invalid_margin, objective, unmeasured


def chain_of(dense: float, *rounds: tuple[float, float]) -> list[StageRecord]:
    """Return records from the dense network's validation accuracy and each round's (sparsity, validation accuracy)."""
    plan = make_plan(("random_unstructured",), (0.5,), (0,))
    template = next(iter(make_records(plan).values()))
    after = {"val/accuracy": dense, "val/loss": 0.25, "test/accuracy": 0.1}
    found = [replace(template, kind="dense", after=after)]
    for number, (sparsity, accuracy) in enumerate(rounds, start=1):
        metrics = {"val/accuracy": accuracy, "val/loss": number / 2, "test/accuracy": 1.0}
        found.append(replace(template, kind="round", round=number, sparsity=sparsity, after=metrics))
    return found


def test_a_metric_is_that_of_the_last_round() -> None:
    records = chain_of(0.9, (0.5, 0.95), (0.8, 0.7))

    assert objective(None, records) == objective("val/accuracy", records) == 0.7
    assert objective("val/loss", records) == 1.0
    assert objective("sparsity/overall", records) == 0.8
    assert objective("deploy/latency_ms", records, {"deploy/latency_ms": 0.25}) == 0.25
    assert math.isnan(objective("deploy/latency_ms", records))


def test_several_objectives_are_told_as_a_list() -> None:
    plan = make_plan(("random_unstructured",), (0.5,), (0,))
    given = ["val/loss", "parameters/remaining"]
    trial = replace(plan.trials[0], config={**plan.trials[0].config, "objective": given})
    records = make_records(plan)
    outcome, last = Outcome(replace(plan, trials=(trial,)), records), records[trial.stages[-1]]

    assert outcome.objective(0) == [last.after["val/loss"], last.remaining_parameters]
    outcome.require_measured()


@pytest.mark.parametrize(
    ("rounds", "largest"),
    [
        ([(0.5, 0.95), (0.8, 0.7)], 0.5),
        ([(0.5, 0.7), (0.8, 0.9)], 0.8),  # an equal metric matches, and an earlier worse round does not matter
        ([(0.5, 0.89), (0.8, 0.1)], 0.0),
        ([], 0.0),
    ],
)
def test_the_largest_matching_sparsity(rounds: list[tuple[float, float]], largest: float) -> None:
    assert objective("matching_sparsity", chain_of(0.9, *rounds)) == largest


def test_where_lower_is_better_no_rise_matches() -> None:
    rmse = Metric("accuracy", "", "lower", margin=0.0)
    records = [replace(record, metrics=(rmse,)) for record in chain_of(0.9, (0.5, 0.8), (0.8, 0.95))]
    assert objective("matching_sparsity", records) == 0.5


@pytest.mark.parametrize(
    "name", [None, "matching_sparsity", "val/loss", "val/accuracy", "deploy/bytes", "macs/remaining"]
)
def test_what_is_measured_may_be_an_objective(name: str | None) -> None:
    assert not list(unmeasured([name], ["accuracy", "loss"]))


def test_an_objective_that_a_finished_trial_did_not_measure_is_refused() -> None:
    plan = make_plan(("random_unstructured",), (0.5,), (0,))
    trial = replace(plan.trials[0], config={**plan.trials[0].config, "objective": "val/acc"})
    outcome = Outcome(replace(plan, trials=(trial,)), make_records(plan))

    with pytest.raises(ConfigError, match=r"`objective` \(=val/acc\) must be one of val/accuracy, val/loss"):
        outcome.require_measured()


def test_a_margin_in_points_is_refused_for_a_fraction() -> None:
    plan = make_plan(("random_unstructured",), (0.5,), (0,))
    trials = tuple(replace(trial, config={**trial.config, "compare": {"margin": 2}}) for trial in plan.trials)
    plan = replace(plan, trials=trials)
    records = make_records(plan)
    (record, *_) = records.values()
    told = r"`compare.margin` \(=2\) must lie in \[0, 1\): accuracy is a fraction; pass 0.01 for one point."

    (sentence,) = invalid_margin(plan, record.primary)
    assert re.fullmatch(told, sentence)
    with pytest.raises(ConfigError, match=told):
        Outcome(plan, records).require_measured()
    assert not [*invalid_margin(plan, Metric("perplexity", "", "lower", margin=0.1))], "its own scale has no such limit"


@pytest.mark.parametrize(
    "name", ["test/accuracy", "accuracy", "val/", "val/a b", "", [], ["val/loss", "test/loss"], "deploy/params", 3]
)
def test_no_objective_reads_the_test_split(name: object) -> None:
    (sentence,) = violations("", Config, {"objective": name})
    assert f"`objective` (={name}) must be val/ and the name of a metric" in sentence
