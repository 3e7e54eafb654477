"""Results of lm-evaluation-harness as figures: directions, filters, and scores of documents."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.workloads.harness_library import Evaluation, read_results


def sample(document: str, kept: str = "none", **scores: Any) -> dict[str, Any]:
    return {"doc_hash": document, "filter": kept, **scores}


def read(results: dict[str, Any], samples: dict[str, Any], **more: Any) -> Evaluation:
    better = {"acc": True, "perplexity": False, "exact_match": True}
    found = {"higher_is_better": dict.fromkeys(samples, better), "group_subtasks": {}, "n-samples": {}, **more}
    found["n-samples"] = {name: {"effective": len(each)} for name, each in samples.items()}
    return read_results({**found, "results": results, "samples": samples})


def test_means_over_documents_keep_their_scores_and_other_figures_do_not() -> None:
    samples = {"easy": [sample("a", acc=1.0, perplexity=(-2.0, 3)), sample("b", acc=0, perplexity=(-1.0, 2))]}
    values = {"alias": "easy", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": "N/A", "perplexity,none": 7.5}
    found = read({"easy": values}, samples)

    assert found.figures == {"easy/acc": 0.5, "easy/perplexity": 7.5}
    assert {metric.name: metric.better for metric in found.metrics} == {"acc": "higher", "perplexity": "lower"}
    assert {name: each.scores for name, each in found.answers.items()} == {"easy/acc": (1.0, 0.0)}
    assert (found.documents, found.warnings) == (2, ())


def test_a_figure_that_is_another_aggregate_of_the_scores_is_not_paired() -> None:
    samples = {"easy": [sample("a", acc=1.0), sample("b", acc=0.0)]}

    assert read({"easy": {"acc,none": 0.7}}, samples).answers == {}


def test_filters_are_in_the_names_of_metrics() -> None:
    samples = {"sums": [sample("a", "strict-match", exact_match=1.0), sample("a", "flexible", exact_match=0.0)]}
    found = read({"sums": {"exact_match,strict-match": 1.0, "exact_match,flexible": 0.0}}, samples)

    assert found.figures == {"sums/exact_match_strict_match": 1.0, "sums/exact_match_flexible": 0.0}
    assert found.answers["sums/exact_match_flexible"].scores == (0.0,)


def test_a_group_has_the_documents_of_its_members() -> None:
    samples = {"one": [sample("a", acc=1.0), sample("b", acc=0.0)], "two": [sample("c", acc=1.0)]}
    values = {"all": {"acc,none": 2 / 3}, "some": {"acc,none": 0.5}, "one": {"acc,none": 0.5}, "two": {"acc,none": 1.0}}
    found = read(values, samples, group_subtasks={"all": ["some", "two"], "some": ["one"]})

    assert found.answers["all/acc"].scores == (1.0, 0.0, 1.0)
    assert found.answers["some/acc"] == found.answers["one/acc"]
    assert found.answers["one/acc"].documents != found.answers["two/acc"].documents
    assert found.documents == 3


@pytest.mark.parametrize(("name", "value"), [("acc", float("nan")), ("odd", 1.0)])
def test_a_figure_that_is_not_finite_or_has_no_direction_is_left_out_with_a_warning(name: str, value: float) -> None:
    found = read({"easy": {f"{name},none": value}}, {"easy": [sample("a", acc=1.0)]})

    assert (found.figures, found.metrics) == ({}, ())
    assert found.warnings == (f"easy/{name} is left out: it is not finite, or its better direction is not known",)
