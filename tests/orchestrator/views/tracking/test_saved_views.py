from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from factories import config, make_plan, make_record, plan_of, sweep_info

from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.tracking.run_contents import SweepView


def states(plan: Plan) -> dict[str, Any]:
    """Return name -> state of each view of a sweep."""
    found = SweepView(sweep_info(), plan, measured(plan)).saved_views("parent")
    assert all(len(value) < 5000 for value in found.values()), "MLflow keeps no longer tags"
    views = [json.loads(value) for value in found.values()]
    return {view["name"]: json.loads(view["state"]) for view in views}


def measured(plan: Plan) -> dict[str, StageRecord]:
    """Return the record of the first stage."""
    return {key: make_record(plan, key) for key in list(plan.stages)[:1]}


def grouped(state: dict[str, Any]) -> list[str]:
    return [key["groupByData"] for key in state["groupBy"]["groupByKeys"]]


def test_trials_are_shown_one_by_one_and_averaged_over_seeds() -> None:
    found = states(make_plan())
    trials, means = found["synthetic: trials"], found["synthetic: means over seeds"]

    assert trials["selectedColumns"] == [
        *(f"params.`{name}`" for name in ("method.name", "schedule.sparsity", "seed")),
        *(f"metrics.`{name}`" for name in ("test/accuracy", "difference/test/accuracy")),
        *(f"metrics.`{name}`" for name in ("sparsity/overall", "parameters/compression", "macs/speedup")),
    ]
    assert trials["groupBy"] is None
    assert grouped(means) == ["method.name", "schedule.sparsity"]
    (parallel,) = [chart for chart in trials["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert parallel["selectedParams"] == ["method.name", "schedule.sparsity"]
    assert "test/accuracy" in parallel["selectedMetrics"]
    assert trials["searchFilter"] == "tags.`mlflow.parentRunId` = 'parent'"
    assert means["searchFilter"] == "tags.`mlflow.parentRunId` = 'parent' AND attributes.status = 'FINISHED'"


def test_an_axis_that_only_some_trials_have_tells_groups_apart_but_hides_no_trial() -> None:
    plain = config("l1_unstructured", 0.5, 0)
    structured = [config("ln_structured", 0.5, seed) for seed in (0, 1)]
    found = states(plan_of([plain, *({**each, "method": {**each["method"], "dim": 0}} for each in structured)]))

    assert grouped(found["synthetic: means over seeds"]) == ["method.name", "method.dim"]
    (parallel,) = [chart for chart in found["synthetic: trials"]["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert parallel["selectedParams"] == ["method.name"]


def test_only_views_that_show_something_are_offered() -> None:
    assert states(make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,))) == {}
    assert list(states(make_plan(methods=("l1_unstructured",), sparsities=(0.5,)))) == ["synthetic: trials"]
    assert list(states(make_plan(methods=("l1_unstructured",), seeds=(0,)))) == ["synthetic: trials"]
    assert states(Plan({}, ())) == {}


def test_a_class_that_varies_under_one_name_is_a_parameter() -> None:
    trials = [config("l1_unstructured", 0.5, 0) for _ in range(2)]
    trials[1]["model"] = {"name": "cnn", "_target_": "mine.Net", "width": 8}
    view = SweepView(sweep_info(), plan_of(trials), measured(plan_of(trials)))
    content = view.content(1)

    assert view.axes == ("model.kind", "model._target_")
    assert content is not None
    assert content.params["model._target_"] == "mine.Net"
    assert content.tags["data.kind"] == "digits"
    assert "data.kind" not in content.params


def test_views_wait_for_a_stage_that_says_what_it_is_measured_by() -> None:
    plan = make_plan()
    (key, record), *_ = measured(plan).items()
    lower = {key: replace(record, metrics=(Metric("rmse", "", "lower", 0.1), *record.metrics))}
    state = json.loads(json.loads(next(iter(SweepView(sweep_info(), plan, lower).saved_views("p").values())))["state"])

    assert SweepView(sweep_info(), plan, {}).saved_views("parent") == {}
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`test/rmse`", True)
