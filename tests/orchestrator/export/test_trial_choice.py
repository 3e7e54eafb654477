"""Choice of the trial to export: parsed conditions, and choices from comparisons made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from factories import make_plan, make_record

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.deployment_points import DeployedPoint
from orchestrator.compare.statistics import Estimate
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.deploy.formats.format import ExportError
from orchestrator.export.trial_choice import (
    Condition,
    conditions,
    ending_with,
    figures_text,
    points_meeting,
    smallest_stage,
    trial_named,
)

VAL = {("magnitude", 0.5): (0.97, 0.99), ("magnitude", 0.9): (0.95, 0.96), ("random_unstructured", 0.9): (0.80, 0.82)}
"""(method, sparsity) -> primary metric on validation for each seed; dense networks have 0.98."""


@pytest.fixture(scope="module")
def sweep() -> tuple[Plan, dict[str, StageRecord]]:
    plan = make_plan(("magnitude", "random_unstructured"), (0.5, 0.9), seeds=(0, 1), rounds=1)
    records = {key: with_val(make_record(plan, key), 0.98) for key in plan.stages}
    for trial in plan.trials:
        asked = trial.config["method"]["name"], trial.config["schedule"]["sparsity"]
        key = trial.stages[-1]
        if asked in VAL:
            records[key] = with_val(records[key], VAL[asked][trial.config["seed"]])
        else:
            del records[key]
    return plan, records


def measured(machine: str, milliseconds: float) -> DeployedPoint:
    """Return the deployment of a network of ten bytes, timed on some machine."""
    return DeployedPoint(
        "onnx", 1, machine, milliseconds, 4.0, Estimate(1, 1.0, None, None, None), 10.0, 40.0, None, None
    )


def with_val(record: StageRecord, value: float) -> StageRecord:
    return replace(record, after={**record.after, "val/accuracy": value, "test/accuracy": 0.5})


def lines(text: str, plan: Plan, records: Mapping[str, StageRecord]) -> list[tuple[str, float]]:
    return [
        (point.method, point.requested_sparsity or 0.0)
        for point in points_meeting(text, compare_trials(plan, records), plan, records)
    ]


def test_conditions_are_read_as_they_are_written() -> None:
    assert conditions("val/accuracy>=dense-0.005") == (Condition("accuracy", ">=", True, -0.005),)
    assert conditions(" val/loss < .4 and val/top5 >= dense + 2 ") == (
        Condition("loss", "<", False, 0.4),
        Condition("top5", ">=", True, 2.0),
    )
    assert conditions("val/loss<=dense") == (Condition("loss", "<=", True, 0.0),)


@pytest.mark.parametrize("text", ["", "accuracy>=1", "val/accuracy", "val/accuracy>=dense*2", "val/a>1 or val/b>1"])
def test_what_is_no_condition_is_told(text: str) -> None:
    with pytest.raises(ExportError, match=r"`--best` \(=.*\) must be conditions such as 'val/loss<=dense\+0.1'"):
        conditions(text)


def test_a_metric_without_its_split_is_asked_after() -> None:
    with pytest.raises(ExportError, match=r"is not a condition; did you mean 'val/accuracy>=dense-5'\?$"):
        conditions("accuracy>=dense-5")


def test_no_choice_is_made_by_test_figures() -> None:
    with pytest.raises(ExportError, match=r"must name metrics on validation; type val/accuracy"):
        conditions("test/accuracy>=dense-1")


def test_means_over_seeds_meet_conditions_in_the_scale_of_margins(sweep: tuple[Plan, dict[str, StageRecord]]) -> None:
    assert lines("val/accuracy>=dense", *sweep) == [("magnitude", 0.5)], "0.98 is the mean of 0.97 and 0.99"
    assert lines("val/accuracy>=dense-0.025", *sweep) == [("magnitude", 0.5), ("magnitude", 0.9)]
    assert lines("val/accuracy>=0.956", *sweep) == [("magnitude", 0.5)]
    assert len(lines("val/accuracy>=0.5", *sweep)) == 3
    assert lines("val/accuracy>=0.5 and val/accuracy<0.9", *sweep) == [("random_unstructured", 0.9)]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("val/accuracy>=97", "accuracy is a fraction between 0 and 1; type val/accuracy>=0.97."),
        ("val/accuracy>=dense-0.5", "0.5 is 50 points of it; type val/accuracy>=dense-0.005 for 0.5 points, or name"),
        ("val/loss<2 and val/accuracy>=dense-1", "1 is 100 points of it; type val/accuracy>=dense-0.01 for 1 points"),
    ],
)
def test_a_condition_in_points_is_refused(
    sweep: tuple[Plan, dict[str, StageRecord]], condition: str, told: str
) -> None:
    with pytest.raises(ExportError, match="must be in the metric's own scale, as margins: accuracy is a") as refused:
        lines(condition, *sweep)
    assert told in str(refused.value)


def test_the_figures_of_the_chosen_trial_are_said(sweep: tuple[Plan, dict[str, StageRecord]]) -> None:
    plan, records = sweep
    asked = "val/accuracy>=dense-0.025 and val/accuracy<0.99"
    points = points_meeting(asked, compare_trials(plan, records), plan, records)
    stage = next(point.stages[1] for point in points if point.requested_sparsity == 0.9)
    said = figures_text(asked, stage, points, plan, records)
    assert said == "val/accuracy 0.955, dense 0.98; val/accuracy 0.955 (mean over 2 seeds); 2 met it"


def test_where_none_meets_it_the_closest_is_told(sweep: tuple[Plan, dict[str, StageRecord]]) -> None:
    plan, records = sweep
    with pytest.raises(
        ExportError, match=r"met by no trial: the closest is magnitude at 50.* with val/accuracy 0.98, dense 0.98"
    ):
        lines("val/accuracy>dense", plan, records)
    with pytest.raises(
        ExportError, match=r"asks for val/top9, which was not measured; type one of val/accuracy, val/loss"
    ):
        lines("val/top9>dense", plan, records)
    dense = {key: record for key, record in records.items() if record.kind == "dense"}
    with pytest.raises(ExportError, match="nothing to choose from: no pruned trial is finished"):
        lines("val/accuracy>dense", plan, dense)


def test_the_fewest_bytes_leave_by_the_best_validated_seed(sweep: tuple[Plan, dict[str, StageRecord]]) -> None:
    plan, records = sweep
    points = points_meeting("val/accuracy>=0.5", compare_trials(plan, records), plan, records)
    sizes = {(p.method, p.requested_sparsity): p.stages for p in points}

    def size(stage: str) -> float:
        return 10.0 if stage in sizes["magnitude", 0.9] else 20.0

    stage = smallest_stage(points, size, records)
    assert ending_with(stage, plan).trial.name == "magnitude sparsity=0.9 seed=1"
    faster = smallest_stage(
        [replace(point, speedup=9.0 if point.sparsity < 0.8 else 2.0) for point in points], lambda _: 1.0, records
    )
    assert ending_with(faster, plan).trial.name == "magnitude sparsity=0.5 seed=1"
    timed = [
        replace(
            point, deployed=(measured(f"pen {index}", 0.1), measured("abacus", 1.0 if point.sparsity < 0.8 else 2.0))
        )
        for index, point in enumerate(points)
    ]
    found = smallest_stage(timed, lambda _: 1 / 0, records)
    assert ending_with(found, plan).trial.name == "magnitude sparsity=0.5 seed=1", "the faster one, as measured"
    assert smallest_stage(points[:1], lambda _: 1 / 0, records) == sizes["magnitude", 0.5][1], (
        "one point is not weighed"
    )


def test_a_trial_is_named_by_how_it_begins(sweep: tuple[Plan, dict[str, StageRecord]]) -> None:
    plan, records = sweep
    assert trial_named("magnitude sparsity=0.9 seed=0", plan, records).trial.config["seed"] == 0
    assert trial_named("random_unstructured sparsity=0.9 seed=1", plan, records).stage in records
    with pytest.raises(
        ExportError, match=r"`--trial` \(='mag'\) matches several: the sweep has 'magnitude sparsity=0.5"
    ):
        trial_named("mag", plan, records)
    with pytest.raises(ExportError, match=r"`--trial` \(='x'\) is not in the sweep, which has 'magnitude"):
        trial_named("x", plan, records)
    with pytest.raises(ExportError, match=r"`--trial` or `--best` must be given"):
        trial_named(None, plan, records)
    with pytest.raises(
        ExportError,
        match=r"`--trial` \(='random_unstructured sparsity=0.5 seed=0'\) is not finished.*=none if",
    ):
        trial_named("random_unstructured sparsity=0.5 seed=0", plan, records)
