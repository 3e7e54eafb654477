"""Comparisons of sweeps whose trials a search has chosen: what was stopped is shown, and never tested."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_plan, make_record, make_records, sweep_info
from searched_plans import crossing, grid, records_of, run_search

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Point
from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.compare.statistics import Estimate
from orchestrator.core.events import Decision
from orchestrator.core.metrics import Metric
from orchestrator.core.specs import Plan
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.views.report import plain_files, report_files, tables
from orchestrator.views.report.answers import answer_lines
from orchestrator.views.report.figures import figure_data
from orchestrator.views.report.figures.figure_data import FRONT
from orchestrator.views.report.page import comparison_tables
from orchestrator.views.tracking.run_contents import STOPPED, STOPPED_TAG, SweepView

PLAN = grid(("l1_unstructured", "random_unstructured"), (0.5, 0.7, 0.9), seeds=6)
RECORDS = make_records(PLAN)
STOPPED_TRIALS = {
    trial.name: "ruled out"
    for trial in PLAN.trials
    if trial.name.startswith("l1") and trial.config["schedule"]["sparsity"] >= 0.7 and trial.config["seed"] >= 2
}
SEARCH = Decision(stopped=STOPPED_TRIALS, answers=("it is so",), ended=True)
LEFT = {
    key: record
    for key, record in RECORDS.items()
    if not any(trial.name in STOPPED_TRIALS and key in trial.stages[1:] for trial in PLAN.trials)
}


def test_a_stopped_point_is_marked_and_neither_tested_nor_best() -> None:
    compared = compare_trials(PLAN, LEFT, search=SEARCH)
    points = {(point.line, round(point.asked_sparsity, 1)): point for point in compared.points}
    stopped = points["l1_unstructured", 0.7]

    assert (len(stopped.seeds), stopped.stopped, stopped.matching, stopped.best) == (2, 4, "not tested", False)
    assert points["l1_unstructured", 0.5].matching == "yes"
    assert points["random_unstructured", 0.7].best is False, "a point without a rival is not the best"
    assert compare_trials(PLAN, LEFT).points != compared.points, "without the search it would be tested"


def test_tests_of_a_line_end_before_what_was_stopped() -> None:
    unrun = {key: record for key, record in LEFT.items() if record.requested_sparsity != 0.7 or "x" in key[:0]}
    stopped = {trial.name: "ruled out" for trial in PLAN.trials if "sparsity=0.7" in trial.name}
    compared = compare_trials(PLAN, unrun, search=Decision(stopped=stopped, ended=True))

    assert [point.matching for point in compared.lines["cnn", "digits", "random_unstructured"]] == ["no", "not tested"]
    assert compared.search is not None
    assert [(point.finished, point.seeds) for point in compared.search.points] == [(0, 6), (0, 6)]


def test_a_candidate_ruled_out_within_its_training_has_a_row() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.8, 0.9), rounds=2)
    records = make_records(plan)
    ends = {trial.name: trial.stages for trial in plan.trials if "sparsity=0.5" not in trial.name}
    unrun = {key for name, stages in ends.items() for key in stages[1 if "sparsity=0.9" in name else 2 :]}
    left = {key: record for key, record in records.items() if key not in unrun}
    compared = compare_trials(plan, left, search=Decision(stopped=dict.fromkeys(ends, "ruled out"), ended=True))
    text = [*tables.text_table(compared)]

    assert compared.search is not None
    assert {each.sparsity: each.begun for each in compared.search.points} == {0.8: True, 0.9: False}
    (row,) = (line.split() for line in text if "stopped" in line)
    assert row == ["80.00", "stopped", "0", "of", "3"]
    page = "".join(comparison_tables(compared))
    assert page.count("<td>stopped</td>") == 1


def test_every_table_says_what_was_stopped_and_why() -> None:
    compared = compare_trials(PLAN, LEFT, search=SEARCH)
    text = "\n".join([*tables.text_table(compared), *tables.notes(compared), *answer_lines(compared)])
    summary = plain_files.points_csv(compared).decode()

    assert "stopped" in text
    assert "2 of 6" in text
    assert "Answer: it is so." in text
    assert (
        "Stopped, and so not tested: l1_unstructured at 70.00% (2 of 6 seeds), 90.00% (2 of 6 seeds): ruled out."
        in text
    )
    assert summary.splitlines()[0].endswith(",stopped")
    assert '"stopped": 4' in plain_files.as_json(compared).decode()
    assert {compared.trials[name] for name in STOPPED_TRIALS} == {"stopped"}


def test_a_sweep_without_a_search_has_no_word_of_it() -> None:
    compared = compare_trials(PLAN, RECORDS)
    text = "\n".join([*tables.text_table(compared), *tables.notes(compared)])

    for output in (text, plain_files.points_csv(compared).decode(), plain_files.as_json(compared).decode()):
        assert "stopped" not in output
        assert "search" not in output.lower()
    assert not [each for each in audit(PLAN, RECORDS, compared) if "search" in each.rule]


def test_the_audit_counts_the_looks_and_does_not_miss_what_was_stopped() -> None:
    plan = grid(("l1_unstructured",), seeds=8)
    decisions, ran = run_search(Matching(), plan, records_of(plan, crossing(0.63)))
    compared = compare_trials(plan, ran, search=decisions[-1])
    found = {each.rule: each for each in audit(plan, ran, compared)}

    assert found["a search says what it has seen and left out"].verdict == "pass"
    assert (
        "7 looks at validation figures, 4 of them tests" in found["a search says what it has seen and left out"].reason
    )
    assert found["every trial finished"].verdict == "pass"
    assert "that the search stopped" in found["every trial finished"].reason
    unended = replace(decisions[-1], ended=False)
    assert "fail" in {
        each.verdict
        for each in audit(plan, ran, compare_trials(plan, ran, search=unended))
        if each.rule.startswith("a search")
    }


def test_a_search_that_tested_its_answer_gives_the_only_answer() -> None:
    plan = grid(("l1_unstructured",), seeds=8)
    decisions, ran = run_search(Matching(), plan, records_of(plan, crossing(0.63)))
    compared = compare_trials(plan, ran, search=decisions[-1])
    notes = "\n".join([*tables.notes(compared), *answer_lines(compared)])

    assert {point.matching for point in compared.points} == {"not tested"}
    assert sum(point.answer for point in compared.points) == 1
    assert "matches dense" in notes
    assert "Largest matching sparsity" not in notes
    assert "would be a second answer" in notes
    assert " answer " in "\n".join(tables.text_table(compared))


def test_a_run_of_a_stopped_trial_is_scheduled_and_says_why() -> None:
    view = SweepView(sweep_info(), PLAN, LEFT)
    index = next(index for index, trial in enumerate(PLAN.trials) if trial.name in STOPPED_TRIALS)
    assert index in view.decide(SEARCH)
    content = view.content(index)
    assert content is not None
    assert (content.status, content.tags[STOPPED_TAG]) == (STOPPED, "ruled out")

    assert index in view.decide(Decision(ended=True)), "a wider search runs it"
    content = view.content(index)
    assert content is not None
    assert content.status == "RUNNING"


@pytest.mark.slow
def test_a_frontier_is_drawn_with_intervals_and_what_was_stopped() -> None:
    plan = grid(("l1_unstructured", "random_unstructured"), (0.5, 0.7, 0.9), seeds=4)
    chosen = {"search": {"kind": "frontier", "against": ["parameters", "macs"]}}
    plan = Plan(plan.stages, tuple(replace(each, config={**each.config, **chosen}) for each in plan.trials))
    decisions, ran = run_search(Frontier(["parameters", "macs"]), plan, make_records(plan))
    compared = compare_trials(plan, ran, search=decisions[-1])
    plot, macs = figure_data.frontier(compared)
    front, stopped = ({each.label: each for each in plot.series}[label] for label in (FRONT, figure_data.STOPPED))
    drawn = report_files.draw(plan, ran, compared, None)

    assert (plot.title, macs.title) == ("cnn on digits, parameters", "cnn on digits, macs")
    assert plot.x_label == "remaining parameters (% of dense)"
    assert len(front.x) == 3
    assert list(front.x) == sorted(front.x)
    assert [each.label for each in plot.series if None not in each.low and each.label != FRONT] == ["l1_unstructured"]
    assert stopped.low == (None,) * 3, "one seed has no interval"
    assert b"Pareto front" in drawn["frontier"]["svg"]
    assert not figure_data.frontier(compare_trials(PLAN, LEFT, search=SEARCH))


def test_the_best_networks_of_a_frontier_are_those_of_the_least_loss_and_of_the_highest_scores() -> None:
    plan = grid(("l1_unstructured", "random_unstructured"), (0.5, 0.7, 0.9), seeds=4)
    chosen = {"search": {"kind": "frontier", "against": ["parameters"]}}
    plan = Plan(plan.stages, tuple(replace(each, config={**each.config, **chosen}) for each in plan.trials))
    decisions, ran = run_search(Frontier(["parameters"]), plan, make_records(plan))
    compared = compare_trials(plan, ran, search=decisions[-1])
    points = sorted(
        (each for each in compared.points if each.answer), key=lambda each: -each.val.mean if each.val else 0
    )
    metric = Metric("acc", "%", "higher", margin=0.01)

    def score(point: Point, mean: float) -> HarnessScore:
        own = Estimate(4, mean)
        where = point.model, point.data, point.line, 1, point.asked_sparsity, point.asked_sparsity
        return HarnessScore(*where, "arc_easy", None, metric, (0, 1, 2, 3), own, 0.5, own, None)

    def named(point: Point) -> str:
        return f"{point.line} at {point.asked_sparsity:.2%}"

    scores = [score(point, 0.4 + 0.01 * number) for number, point in enumerate(points)]
    *_, by_loss, by_harness = answer_lines(replace(compared, harness=tuple(scores)))

    assert len(points) > 1
    assert points[0].val != points[-1].val
    assert by_loss.startswith(f"Best cnn on digits by {points[0].metric.title} on validation: {named(points[0])}: ")
    assert f"{points[0].remaining_parameters:,.0f} parameters" in by_loss
    assert by_harness.startswith("Best cnn on digits by lm-evaluation-harness, which the search has not seen: ")
    assert (
        f"{named(points[-1])}, mean gain over dense in all its figures {scores[-1].score.mean - 0.5:+.4f}."
        in by_harness
    )


def test_a_race_on_records_tests_no_candidate_without_all_its_seeds() -> None:
    plan = make_plan(sparsities=(0.5, 0.9), seeds=range(6))
    records = {key: make_record(plan, key) for key in plan.stages}
    decisions, ran = run_search(Halving(), plan, records)
    whole, all_ran = run_search(Halving(first=6), plan, records)
    compared = compare_trials(plan, ran, search=decisions[-1])
    every = compare_trials(plan, all_ran, search=whole[-1])

    assert {(point.line, len(point.seeds), point.stopped) for point in compared.operating_points} == {
        ("random_unstructured", 1, 5),
        ("l1_unstructured", 1, 5),
    }
    assert all(point.matching == "not tested" for point in compared.operating_points)
    assert "the best at 90.00% after 1 seed, when no other was left to rank" in compared.search.stopped.values()
    assert not any(point.stopped for point in every.operating_points)
