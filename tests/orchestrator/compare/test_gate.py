"""The gate's verdicts, by hand and simulated, its table, and its JUnit XML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from factories import ACCURACY, PARAMETERS, make_plan, make_records, sweep_info

from orchestrator.compare.baseline import Baseline, false_alarms, make_baseline, margin_for, read_baseline, text_of
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.gate import Status, Verdict, alarms, not_worse, passes, verdicts
from orchestrator.compare.statistics import estimate
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.views.report.verdicts import gate_table, junit

WAS = (0.90, 0.91, 0.92)


def compared(values: Sequence[float] = WAS, **changes: Any) -> Comparison:
    """Return the comparison of dense networks and of points at 50%, the seeds of which have these test accuracies."""
    plan = make_plan(("l1_unstructured",), (0.5,), range(len(values)), rounds=1)
    records = make_records(plan)
    for trial, value in zip(plan.trials, values, strict=True):
        for key in trial.stages:
            records[key] = replace(records[key], after={**records[key].after, "test/accuracy": value}, **changes)
    return compare_trials(plan, records)


def baseline_of(comparison: Comparison, **changes: Any) -> Baseline:
    """Return its baseline as a file says it, fields changed as by an editor."""
    made = json.loads(text_of(make_baseline(sweep_info(), comparison, {})))
    return read_baseline(json.dumps(made | changes).encode())


def statuses(found: Sequence[Verdict], figure: str = "test/accuracy") -> list[Status]:
    return [each.status for each in found if each.figure == figure]


def by(*losses: float) -> list[float]:
    return [value - loss for value, loss in zip(WAS, losses, strict=False)]


def test_golden_by_hand() -> None:
    # the losses are 0.003 +- t(0.975, 2) * 0.001 / sqrt(3) = 0.003 +- 0.002484
    now = compared(by(0.002, 0.003, 0.004))

    def at(margin: float) -> list[Status]:
        return statuses(verdicts(baseline_of(compared(), margins={"test/accuracy": margin}), now))

    assert at(0.0055) == ["pass", "pass"]
    assert at(0.0054) == ["fail", "fail"]
    dense, point = (each for each in verdicts(baseline_of(compared()), now) if each.metric)
    assert (point.baseline, point.now) == pytest.approx((0.91, 0.907))
    assert point.change is not None
    assert (point.change.mean, point.change.low) == pytest.approx((-0.003, -0.005484), abs=1e-6)
    assert dense.point is not None
    assert (dense.point.line, dense.point.round) == ("dense", 0)


def test_where_less_is_better_more_is_the_loss() -> None:
    error = Metric("rmse", "", "lower", margin=0.01)
    worse, better = estimate([0.02, 0.03, 0.04]), estimate([-0.02, -0.03, -0.04])

    assert not_worse(worse, error, 0.01)[0] == "fail"
    assert not_worse(better, error, 0.01)[0] == "pass"


@pytest.mark.parametrize(
    ("differences", "status", "said"),
    [
        ([0.0, 0.0, 0.0], "pass", ""),
        ([0.02, 0.02], "pass", ""),
        ([-0.005, -0.005], "undecided", "it is worse by 0.50% at every seed, which leaves no spread to test with"),
        ([-0.02, -0.02, -0.02], "fail", "it is worse by 2.00% at every seed"),
        ([-0.02, -0.03, -0.04], "fail", "it is worse by 3.00%"),
        ([-0.01, 0.01], "fail", "a loss of up to 12.71% is not ruled out; more seeds help"),
        ([0.5], "undecided", "one seed has no interval; run more"),
        ([0.1, math.nan], "fail", "a value is not finite"),
    ],
)
def test_each_verdict_says_why(differences: list[float], status: Status, said: str) -> None:
    assert not_worse(estimate(differences), ACCURACY, 0.01) == (status, said)


@pytest.mark.parametrize("spread", [0.003, 0.003 * math.sqrt(2)])  # of the differences, or of either run's values
def test_false_alarms_and_power_at_five_seeds(spread: float) -> None:
    """A margin of a point, a standard deviation of 0.3: without a difference, and for a loss of twice the margin."""
    runs, draw = 4000, np.random.default_rng(0)

    def failing(loss: float) -> float:
        drawn = draw.normal(-loss, spread, (runs, 5))
        return sum(not_worse(estimate(row), ACCURACY, 0.01)[0] == "fail" for row in drawn.tolist()) / runs

    assert failing(0.0) <= 0.05
    assert failing(0.02) >= 0.8
    assert failing(0.01) == pytest.approx(0.975, abs=0.01)  # what passes although it loses the margin is one in forty


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.003), (3, 0.003), (5, 0.003), (5, 0.006)])
def test_the_chance_of_a_false_alarm_is_what_is_drawn(seeds: int, spread: float) -> None:
    runs, draw = 8000, np.random.default_rng(seeds)
    drawn = draw.normal(0, spread, (runs, seeds)) - draw.normal(0, spread, (runs, seeds))
    often = sum(not_worse(estimate(row), ACCURACY, 0.01)[0] == "fail" for row in drawn.tolist()) / runs

    assert false_alarms(seeds, spread, 0.01) == pytest.approx(often, abs=0.015)
    assert false_alarms(seeds, spread, margin_for(seeds, spread)) == pytest.approx(0.05, abs=1e-4)
    assert false_alarms(seeds, 0.0, 0.01) == 0.0


def test_what_a_seed_is_missing_for_is_undecided() -> None:
    found = verdicts(baseline_of(compared()), compared(WAS[:2]))

    assert statuses(found) == statuses(found, "parameters/remaining") == ["undecided", "undecided"]
    assert {each.reason for each in found} == {"seed 2 is missing"}
    assert (passes(found, False), passes(found, True)) == (False, True)


def test_one_seed_is_undecided_but_for_what_is_counted() -> None:
    found = verdicts(baseline_of(compared(WAS[:1])), compared(WAS[:1]))

    assert (statuses(found), statuses(found, "parameters/remaining")) == (["undecided"] * 2, ["pass"] * 2)


def test_a_point_that_is_not_there_is_undecided_and_a_failed_trial_fails() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    dense = {key: record for key, record in make_records(plan).items() if record.kind == "dense"}
    left = compare_trials(plan, dense, {plan.trials[0].stages[-1]: "loss is nan"})
    found = verdicts(baseline_of(compare_trials(plan, make_records(plan))), left)

    assert statuses(found) == ["pass", "undecided"]
    assert "undecided: l1_unstructured at 50.00%, test/accuracy: the sweep does not have it" in gate_table(found)
    assert (found[-1].figure, found[-1].status, found[-1].reason) == (plan.trials[0].name, "fail", "loss is nan")
    assert not passes(found, allow_undecided=True)


def test_a_size_may_grow_by_its_margin() -> None:
    held = baseline_of(compared())

    def grown(by: float) -> list[Status]:
        return statuses(verdicts(held, compared(parameters=round(PARAMETERS * (1 + by)))), "parameters/remaining")

    assert grown(0.009) == grown(-0.5) == ["pass", "pass"]
    assert grown(0.015) == ["pass", "fail"]  # half of them are pruned: what is left has grown by 3%


def test_a_point_may_have_margins_of_its_own_and_what_has_none_is_not_held() -> None:
    held = json.loads(text_of(baseline_of(compared(), margins={"test/accuracy": 0.001})))
    held["points"][1]["margins"] = {"test/accuracy": 0.1}
    found = verdicts(read_baseline(json.dumps(held).encode()), compared(by(0.002, 0.003, 0.004)))

    assert [(each.figure, each.status) for each in found] == [("test/accuracy", "fail"), ("test/accuracy", "pass")]


def test_a_baseline_is_read_as_it_was_written_and_keeps_margins() -> None:
    first = make_baseline(sweep_info(), compared(), {})
    edited = read_baseline(text_of(first).replace('"test/accuracy": 0.01', '"test/accuracy": 0.05').encode())
    again = make_baseline(sweep_info("second"), compared(by(0.1, 0.2, 0.3)), {}, edited)

    assert read_baseline(text_of(first).encode()) == first
    assert first.margins == {"test/accuracy": 0.01, "parameters/remaining": 0.02}
    assert again.margins == {"test/accuracy": 0.05, "parameters/remaining": 0.02}
    assert '"test/accuracy": [0.9, 0.91, 0.92],' in text_of(first)
    assert "hunter2" not in text_of(first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(format=2), "2"),
        (lambda data: data.update(margin={}), "unknown field `margin`"),
        (lambda data: data.pop("points"), "missing required field `points`"),
        (lambda data: data["margins"].update({"test/acuracy": 0.01}), "`margins` names 'test/acuracy', which"),
        (lambda data: data["margins"].update({"test/accuracy": -1}), "Expected `float` >= 0"),
        (lambda data: data["margins"].update({"test/accuracy": "1"}), "Expected `float`, got `str`"),
        (lambda data: data["points"][0].update(seeds=[0, 1]), "must have one value for each of its `seeds`"),
        (lambda data: data["points"][0].update(seeds=[0, 1, 1]), "must have one value for each of its `seeds`"),
    ],
)
def test_a_mistyped_baseline_says_what_is_wrong(change: Any, said: str) -> None:
    data = json.loads(text_of(make_baseline(sweep_info(), compared(), {})))
    change(data)

    with pytest.raises(ValueError, match=r".") as error:
        read_baseline(json.dumps(data).encode())
    assert said in str(error.value)


def test_a_margin_beyond_a_fraction_and_another_metric_are_mistakes() -> None:
    with pytest.raises(OrchestratorError, match=r"the margin of `test/accuracy` \(=1.0\) must lie in \[0, 1\)"):
        verdicts(baseline_of(compared(), margins={"test/accuracy": 1.0}), compared())
    with pytest.raises(OrchestratorError, match="is compared by test/rmse, the baseline has test/accuracy"):
        verdicts(baseline_of(compared()), compared(metrics=(Metric("rmse", "", "lower", 0.1),)))


def test_no_point_in_common_is_a_mistake() -> None:
    plan = make_plan(("random_unstructured",), (0.9,), range(2), rounds=1)
    other = replace(compare_trials(plan, make_records(plan)), dense=())

    with pytest.raises(OrchestratorError, match="it has random_unstructured of cnn on digits: run"):
        verdicts(baseline_of(compared()), other)


def test_an_unfinished_sweep_is_no_baseline() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    records = make_records(plan)
    del records[plan.trials[1].stages[-1]]

    with pytest.raises(OrchestratorError, match="1 of 3 trials of synthetic have not finished, such as 'l1_unstruct"):
        make_baseline(sweep_info(), compare_trials(plan, records), {})
    with pytest.raises(OrchestratorError, match="a figure of dense at a sparsity of 0 is not finite"):
        make_baseline(sweep_info(), compared((0.9, math.nan, 0.9)), {})


def test_margins_that_would_be_missed_too_often_are_told() -> None:
    (dense, point) = alarms(compared(), make_baseline(sweep_info(), compared(), {}))

    assert dense.startswith("dense of cnn on digits at a sparsity of 0: 3 seeds with a standard deviation of 1.00%")
    assert "its margin of 1.00% in 89% of equally good runs" in point
    assert list(alarms(compared((0.9, 0.9001, 0.9002)), make_baseline(sweep_info(), compared(), {}))) == []
    assert "one seed: every later run is undecided" in next(
        alarms(compared((0.9,)), make_baseline(sweep_info(), compared((0.9,)), {}))
    )


TABLE = """\
cnn on digits
sparsity %               figure  baseline       now  change [95% interval]   limit   verdict
dense
     dense      test/accuracy %     91.00     90.70   -0.30 [-0.55, -0.05]   -1.00      pass
     dense parameters/remaining    10,154    10,154                  +0.0%   +2.0%      pass
l1_unstructured
     50.00      test/accuracy %     91.00     88.00   -3.00 [-5.48, -0.52]   -1.00      fail
     50.00 parameters/remaining     5,126     5,126                  +0.0%   +2.0%      pass

fail: l1_unstructured at 50.00%, test/accuracy: it is worse by 3.00%"""


def mixed() -> tuple[Verdict, ...]:
    held = baseline_of(compared())
    little = verdicts(held, compared(by(0.002, 0.003, 0.004)))
    much = verdicts(held, compared(by(0.02, 0.03, 0.04)))
    return (*little[:2], *much[2:])


def test_golden_table() -> None:
    table = "\n".join(gate_table(mixed()))

    assert table.startswith(TABLE)
    assert table.endswith("\n4 limits: 3 pass, 1 fail, 0 undecided.")


@pytest.mark.parametrize("allowed", [False, True])
def test_junit_has_a_case_for_each_limit(allowed: bool) -> None:
    odd = replace(mixed()[0], status="undecided", reason='<"one" & \x01other>')  # a letter that XML cannot hold
    suites = ElementTree.fromstring(junit((*mixed(), odd), allowed, "gate of x"))
    (suite,) = suites

    assert (suites.tag, suite.tag, suite.get("name")) == ("testsuites", "testsuite", "gate of x")
    assert [case.get("name") for case in suite][1:4] == [
        "dense, parameters/remaining",
        "l1_unstructured at 50.00%, test/accuracy",
        "l1_unstructured at 50.00%, parameters/remaining",
    ]
    assert [[child.tag for child in case] for case in suite] == [
        *([], [], ["failure"], []),
        ["skipped" if allowed else "failure"],
    ]
    assert suite[4][0].get("message") == '<"one" & \\x01other>'
    counts = {"tests": "5", "failures": "1" if allowed else "2", "errors": "0", "skipped": "1" if allowed else "0"}
    assert suites.attrib == counts
    assert suite.attrib == {**counts, "name": "gate of x"}
