from __future__ import annotations

from dataclasses import replace

from factories import ACCURACY, make_plan, make_records

from orchestrator.core.metrics import Metric
from orchestrator.views.terminal.frame import AxisGroup, ByAxis
from orchestrator.views.terminal.tally import Tally

PERPLEXITY = Metric("perplexity", "", "lower", margin=0.0, format=".1f")


def test_the_best_is_so_on_validation_whatever_the_test_split_says() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0, 1), rounds=1)
    records = make_records(plan)
    for trial, val in zip(plan.trials, (0.90, 0.92, 0.80, 0.95), strict=True):
        last = trial.stages[-1]
        records[last] = replace(records[last], after={"val/accuracy": val, "test/accuracy": 1 - val})
    done = {key: record for key, record in records.items() if key != plan.trials[3].stages[-1]}
    seen = ByAxis(plan, Tally(plan, done))

    assert dict(seen.groups()) == {
        "sparsity": [AxisGroup("0.5", 2, 2, "92.00%"), AxisGroup("0.9", 1, 2, "80.00%")],
        "seed": [AxisGroup("0", 2, 2), AxisGroup("1", 1, 2)],
    }
    assert seen.best() == "best so far on validation: 92.00%, l1_unstructured sparsity=0.5 seed=1"
    assert str(AxisGroup("0.5", 2, 2, "92.00%")) == "0.5 2/2 92.00%"


def test_less_is_better_where_the_metric_says_so_and_unlike_metrics_are_not_compared() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0,), rounds=1)
    records = make_records(plan)
    half, ninety = (trial.stages[-1] for trial in plan.trials)
    for key, value in ((half, 12.0), (ninety, 14.0)):
        records[key] = replace(records[key], metrics=(PERPLEXITY,), after={"val/perplexity": value})
    assert "12.0" in ByAxis(plan, Tally(plan, records)).best()

    records[half] = replace(records[half], metrics=(ACCURACY,), after={"val/accuracy": 0.9})
    assert ByAxis(plan, Tally(plan, records)).best() == ""
