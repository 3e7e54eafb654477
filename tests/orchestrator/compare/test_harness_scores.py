"""Scores on tasks of lm-evaluation-harness: paired by document, averaged over seeds, with an interval that covers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import pytest
from factories import make_plan, make_records

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.harness_scores import evaluated, paired_by_document
from orchestrator.core.metrics import Metric
from orchestrator.core.records import Answers, StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec
from orchestrator.views.report import plain_files, tables

ACC = Metric("acc", "", "higher", margin=0.0)
SAME, OTHER = "0" * 64, "1" * 64


def pair(one: Sequence[float], other: Sequence[float], documents: str = SAME) -> list[Answers | None]:
    return [Answers(SAME, tuple(one)), Answers(documents, tuple(other))]


def test_documents_are_paired_and_averaged_over_seeds() -> None:
    found = paired_by_document([pair([1, 0, 1, 0], [1, 1, 1, 0]), pair([0, 0, 1, 1], [1, 1, 1, 0])])

    assert found is not None
    assert (found.n, found.mean) == (4, pytest.approx((-0.5 - 1 + 0 + 0.5) / 4))
    assert found.std == pytest.approx(sqrt((0.25**2 + 0.75**2 + 0.25**2 + 0.75**2) / 3))
    assert found.high == pytest.approx(found.mean + 3.182446305 * found.std / 2)


def test_other_documents_and_figures_without_scores_are_not_paired() -> None:
    assert paired_by_document([]) is None
    assert paired_by_document([pair([1.0, 0.0], [1.0, 1.0], OTHER)]) is None
    assert paired_by_document([[Answers(SAME, (1.0, 0.0)), None]]) is None
    mixed = [pair([1.0], [0.0]), [Answers(OTHER, (1.0,)), Answers(OTHER, (0.0,))]]
    assert paired_by_document(mixed) is None


def test_the_interval_covers_the_true_difference() -> None:
    draws, covered, unpaired = random.Random(0), 0, 0.0
    for _ in range(1000):
        ease = [draws.random() for _ in range(100)]  # both networks find the same documents hard
        other = [float(draws.random() < each) for each in ease]
        one = [
            score if draws.random() < 0.8 else float(draws.random() < 0.9 * each)
            for score, each in zip(other, ease, strict=True)
        ]
        found = paired_by_document([pair(one, other)])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.2 * (0.9 - 1) * 0.5 <= found.high
        unpaired += (found.high - found.low) / 1000
    assert 925 <= covered <= 975, "a binomial count of 1000 at 0.95 lies in 925 to 975 but for 3 in 10,000"
    assert unpaired < 0.6 * 2 * 1.98 * sqrt(2 * 0.25 / 100), "pairing narrows the interval of two independent means"


def with_harness(rounds: int = 1) -> tuple[Plan, dict[str, StageRecord]]:
    """Return a sweep of two seeds whose last and dense networks are evaluated on one task of four documents."""
    plan = make_plan(("wanda",), (0.5,), seeds=(0, 1), rounds=rounds)
    records, stages, trials = make_records(plan), dict(plan.stages), []
    for seed, trial in enumerate(plan.trials):
        keys = []
        for network, scores in ((trial.dense, (1.0, 1.0, 1.0, 0.0)), (trial.stages[-1], (1.0, 0.0, 1.0, float(seed)))):
            spec = StageSpec("harness", {"harness": {"task": "easy", "shots": 5}}, {NETWORK: network})
            stages[spec.key] = spec
            keys.append(spec.key)
            records[spec.key] = replace(
                records[network],
                key=spec.key,
                kind="harness",
                metrics=(ACC, Metric("perplexity", "", "lower", margin=0.0)),
                after={"easy/acc": sum(scores) / 4, "easy/perplexity": 2.0 + len(keys)},
                measurements={"seconds": 1.0, "documents": 4},
                details={"answers": {"easy/acc": {"documents": SAME, "scores": list(scores)}}},
                spec=spec.to_json(),
            )
        trials.append(replace(trial, measured=tuple(keys)))
    return replace(plan, stages=stages, trials=tuple(trials)), records


def test_points_have_a_score_for_each_task_and_metric_in_tables_and_files() -> None:
    plan, records = with_harness()
    comparison = compare_trials(plan, records)
    accuracy, perplexity = comparison.harness

    assert (accuracy.task, accuracy.shots, accuracy.metric.name, accuracy.seeds) == ("easy", 5, "acc", (0, 1))
    assert (accuracy.score.mean, accuracy.dense, accuracy.difference.mean) == pytest.approx((0.625, 0.75, -0.125))
    assert accuracy.documents is not None
    assert (accuracy.documents.n, accuracy.documents.mean) == (4, pytest.approx(-0.125))
    assert (perplexity.documents, perplexity.difference.mean) == (None, 1.0)
    (text,) = ["\n".join(tables.text_table(comparison))]
    assert "easy (5-shot) acc (higher is better), wanda" in text
    assert tables.HARNESS_NOTE in text
    lines = plain_files.harness_csv(comparison).decode().splitlines()
    assert lines[0].split(",") == list(plain_files.HARNESS_COLUMNS)
    assert len(lines) == 3
    assert comparison.to_json()["harness"][0]["score"]["mean"] == 0.625


def test_figures_of_the_last_network_have_names_for_the_tracker() -> None:
    plan, records = with_harness()
    found = {name: value for name, value, _ in evaluated(plan.trials[1], records)}

    assert found == {"harness/easy/acc": 0.75, "harness/easy/perplexity": 4.0}
    assert evaluated(plan.trials[1], make_records(make_plan(("wanda",), (0.5,), seeds=(0, 1), rounds=1))) == []


def test_a_record_of_an_evaluation_is_read_again_and_needs_its_documents() -> None:
    plan, records = with_harness()
    record = records[plan.trials[0].measured[0]]

    assert StageRecord.from_json(record.to_json()).typed.answers["easy/acc"].scores == (1.0, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"`measurements` must have 'documents', above 0"):
        StageRecord.from_json(replace(record, measurements={}).to_json())
