"""Verdicts of the gate, by hand and simulated, its table, and its JUnit XML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
from factories import ACCURACY, PARAMETERS, make_plan, make_records, sweep_info

from orchestrator.compare.baseline import (
    Baseline,
    false_alarms,
    make_baseline,
    margin_for,
    read_baseline,
    text_of,
)
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.statistics import estimate
from orchestrator.compare.verdicts import Status, Verdict, alarms, not_worse, passes, verdicts
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.planning.plan import deployments
from orchestrator.views.report.side_by_side import gate_table, junit

WAS = (0.90, 0.91, 0.92)
TORCH = {"shrink": "torch 2"}


class Swept(NamedTuple):
    """A sweep and its comparison."""

    plan: Plan
    records: dict[str, StageRecord]
    comparison: Comparison


def swept(plan: Plan, records: dict[str, StageRecord], failures: dict[str, str] | None = None) -> Swept:
    return Swept(plan, records, compare_trials(plan, records, failures))


def compared(
    values: Sequence[float] = WAS, speedups: Sequence[float] = (), runtimes: Mapping[str, str] = TORCH, **changes: Any
) -> Swept:
    """Return a sweep with the seeds' test accuracies, dense and at 50%, and speed-ups at 50%."""
    plan = make_plan(("l1_unstructured",), (0.5,), range(len(values)), rounds=1)
    stages, records, trials = dict(plan.stages), make_records(plan), list(plan.trials)
    for trial, value in zip(plan.trials, values, strict=True):
        for key in trial.stages:
            records[key] = replace(records[key], after={**records[key].after, "test/accuracy": value}, **changes)
    for place, (trial, speedup) in enumerate(zip(plan.trials, speedups, strict=False)):
        asked = {"formats": list(runtimes), "batch_sizes": [1], "seconds": 1.0, "blocks": 2, "threads": 1}
        dense = StageSpec("dense", {"device": "cpu", "sources": {}, "seed": trial.config["seed"]})
        specs, measuring = deployments(asked, dense, plan.stages[trial.stages[-1]])
        stages |= {spec.key: spec for spec in (dense, *specs)}
        trials[place] = replace(trial, measured=measuring)
        figures = {"bytes": 5000.0, "dense_bytes": 9000.0, "latency_ms/1": 1.0, "dense_ms/1": speedup}
        figures |= {"speedup/1": speedup, "speedup_low/1": 1.0, "speedup_high/1": 9.0}
        for spec in (dense, *specs):
            runtime = runtimes.get(spec.fields.get("format", ""), "")
            records[spec.key] = replace(
                records[trial.stages[-1]],
                key=spec.key,
                after={},
                measurements=figures,
                environment={"processor": "one", "threads": "1", "runtime": runtime},
                spec=spec.to_json(),
            )
    return swept(Plan(stages, tuple(trials)), records)


def made(found: Swept, before: Baseline | None = None, name: str = "synthetic") -> Baseline:
    return make_baseline(sweep_info(name), found.comparison, found.plan, found.records, before)


def baseline_of(found: Swept, **changes: Any) -> Baseline:
    """Return the sweep's baseline as read from a file in which fields were edited."""
    return read_baseline(json.dumps(json.loads(text_of(made(found))) | changes).encode())


def judged(held: Baseline, found: Swept) -> tuple[Verdict, ...]:
    return verdicts(held, found.comparison, found.plan, found.records)


def statuses(found: Sequence[Verdict], figure: str = "test/accuracy") -> list[Status]:
    return [each.status for each in found if each.figure == figure]


def by(*losses: float) -> list[float]:
    return [value - loss for value, loss in zip(WAS, losses, strict=False)]


def test_golden_by_hand() -> None:
    # the losses are 0.003 +- t(0.975, 2) * 0.001 / sqrt(3) = 0.003 +- 0.002484
    now = compared(by(0.002, 0.003, 0.004))

    def at(margin: float) -> list[Status]:
        return statuses(judged(baseline_of(compared(), margins={"test/accuracy": margin}), now))

    assert at(0.0055) == ["pass", "pass"]
    assert at(0.0054) == ["fail", "fail"]
    dense, point = (each for each in judged(baseline_of(compared()), now) if each.metric)
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
    """Simulate a margin of one point and a standard deviation of 0.3, for no difference and for twice the margin."""
    runs, draw = 4000, np.random.default_rng(0)

    def failing(loss: float) -> float:
        drawn = draw.normal(-loss, spread, (runs, 5))
        return sum(not_worse(estimate(row), ACCURACY, 0.01)[0] == "fail" for row in drawn.tolist()) / runs

    assert failing(0.0) <= 0.05
    assert failing(0.02) >= 0.8
    assert failing(0.01) == pytest.approx(0.975, abs=0.01)  # one in forty passes in spite of a loss of the margin


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.003), (3, 0.003), (5, 0.003), (5, 0.006)])
def test_the_chance_of_a_false_alarm_is_what_is_drawn(seeds: int, spread: float) -> None:
    runs, draw = 8000, np.random.default_rng(seeds)
    drawn = draw.normal(0, spread, (runs, seeds)) - draw.normal(0, spread, (runs, seeds))
    often = sum(not_worse(estimate(row), ACCURACY, 0.01)[0] == "fail" for row in drawn.tolist()) / runs

    assert false_alarms(seeds, spread, 0.01) == pytest.approx(often, abs=0.015)
    assert false_alarms(seeds, spread, margin_for(seeds, spread)) == pytest.approx(0.05, abs=1e-4)
    assert false_alarms(seeds, 0.0, 0.01) == 0.0


def test_what_a_seed_is_missing_for_is_undecided() -> None:
    found = judged(baseline_of(compared()), compared(WAS[:2]))

    assert statuses(found) == statuses(found, "parameters/remaining") == ["undecided", "undecided"]
    assert {each.reason for each in found} == {"seed 2 is missing"}
    assert (passes(found, False), passes(found, True)) == (False, True)


def test_one_seed_is_undecided_but_for_what_is_counted() -> None:
    found = judged(baseline_of(compared(WAS[:1])), compared(WAS[:1]))

    assert (statuses(found), statuses(found, "parameters/remaining")) == (["undecided"] * 2, ["pass"] * 2)


def test_a_point_that_is_not_there_is_undecided_and_a_failed_trial_fails() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    dense = {key: record for key, record in make_records(plan).items() if record.kind == "dense"}
    left = swept(plan, dense, {plan.trials[0].stages[-1]: "loss is nan"})
    found = judged(baseline_of(swept(plan, make_records(plan))), left)

    assert statuses(found) == ["pass", "undecided"]
    assert "undecided: l1_unstructured at 50.00%, test/accuracy and 1 more: the sweep does not have it" in gate_table(
        found
    )
    assert (found[-1].figure, found[-1].status, found[-1].reason) == (plan.trials[0].name, "fail", "loss is nan")
    assert not passes(found, allow_undecided=True)


def test_a_line_that_is_gone_fails_and_the_lines_there_are_told() -> None:
    plan = make_plan(("l1_unstructured", "random_unstructured"), (0.5,), range(3), rounds=1)
    held = baseline_of(swept(plan, make_records(plan)))
    less = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    found = judged(held, swept(less, make_records(less)))

    gone = [each for each in found if each.point is not None and each.point.line == "random_unstructured"]
    said = (
        "the sweep has no line 'random_unstructured' of cnn on digits; it has dense of cnn on digits; l1_unstructured "
    )
    assert [(each.status, each.reason.startswith(said)) for each in gone] == [("fail", True)] * 2
    assert not passes(found, allow_undecided=True)
    assert {each.status for each in found if each not in gone} == {"pass"}
    (suite,) = ElementTree.fromstring(junit(found, True, "gate of x"))
    messages = [str(failure.get("message")) for failure in suite.iter("failure")]
    assert [text.startswith(said) for text in messages] == [True] * 2
    assert re.search(r"; test/accuracy %: baseline [\d.]+, limit -1.00, seeds 0, 1, 2$", messages[0])
    assert re.search(r"; parameters/remaining: baseline 5,126, limit \+2.0%, seeds 0, 1, 2$", messages[1])


def asking(budget: str) -> Swept:
    """Return a sweep whose sparsities are fractions of a whole-network budget."""
    found = compared()
    points = tuple(replace(point, unit="group", budget=budget) for point in found.comparison.points)
    return found._replace(comparison=replace(found.comparison, points=points))


def test_points_asked_for_fractions_of_unlike_things_are_told_apart() -> None:
    held = baseline_of(asking("MACs"))

    assert statuses(judged(held, asking("MACs"))) == ["pass", "pass"]
    found = judged(held, asking("parameters"))
    assert statuses(found) == ["pass", "fail"]
    assert {each.reason for each in found if each.status == "fail"} == {
        "the sparsity of line 'l1_unstructured' of cnn on digits is a fraction of parameters (unit=group), but in the "
        "baseline of MACs (unit=group)"
    }
    assert "fail: l1_unstructured at 50.00% of MACs (unit=group), test/accuracy and 1 more: the sparsity" in "\n".join(
        gate_table(found)
    )


@pytest.mark.parametrize("budget", ["weights", "MACs"])
def test_a_baseline_that_does_not_say_of_what_its_sparsities_are_is_read_as_before(budget: str) -> None:
    data = json.loads(text_of(made(asking(budget))))
    for point in data["points"]:
        del point["asked_of"]
        point["margins"] = {"test/accuracy": 0.07}
    before = read_baseline(json.dumps(data).encode())

    assert statuses(judged(before, asking(budget))) == ["pass", "pass"]
    again = made(asking(budget), before)
    assert [point.margins for point in again.points] == [{"test/accuracy": 0.07}] * 2
    assert [point.name for point in again.points] == [point.name for point in made(asking(budget)).points]


def test_a_size_may_grow_by_its_margin() -> None:
    held = baseline_of(compared())

    def grown(by: float) -> list[Status]:
        return statuses(judged(held, compared(parameters=round(PARAMETERS * (1 + by)))), "parameters/remaining")

    assert grown(0.009) == grown(-0.5) == ["pass", "pass"]
    assert grown(0.015) == ["pass", "fail"]  # half of them are pruned: the remaining ones have grown by 3%


SPEEDUP = "deploy/shrink/1/speedup"


def test_a_measured_speedup_is_held_by_its_ratio() -> None:
    held = baseline_of(compared(speedups=(2.0, 2.1, 2.2)))
    slower = compared(speedups=(1.90, 1.99, 2.10))  # ratios 0.9500 0.9476 0.9545, whose lower limit is 0.942
    found = judged(held, slower)

    (it,) = (each for each in found if each.figure == SPEEDUP)
    assert it.change is not None
    assert (it.change.mean, it.change.low) == pytest.approx((-0.0493, -0.0579), abs=2e-4)
    assert statuses(found, SPEEDUP) == statuses(found, "deploy/shrink/bytes") == ["pass"]
    tighter = baseline_of(compared(speedups=(2.0, 2.1, 2.2)), margins={SPEEDUP: 0.057})
    assert statuses(judged(tighter, slower), SPEEDUP) == ["fail"]
    lines = [" ".join(line.split()) for line in gate_table(found)]
    assert "50.00 deploy/shrink/1/speedup 2.10× 2.00× -4.9% [-5.8%, -4.1%] -10.0% pass" in lines


def test_on_other_hardware_a_speedup_is_undecided_and_nothing_else() -> None:
    held = baseline_of(compared(speedups=(2.0, 2.1, 2.2)))
    found = judged(held, compared(speedups=(1.0, 1.1, 1.2), runtimes={"shrink": "torch 3"}))

    (undecided,) = (each for each in found if each.status != "pass")
    where = "measured on processor one, threads 1, runtime torch"
    assert (undecided.figure, undecided.status) == (SPEEDUP, "undecided")
    assert undecided.reason == f"{where} 3, but for the baseline on {where.removeprefix('measured on ')} 2"


def test_formats_have_runtimes_of_their_own() -> None:
    both = compared(speedups=(2.0, 2.1, 2.2), runtimes={"shrink": "torch 2", "onnx": "onnxruntime 1"})
    newer = compared(speedups=(2.0, 2.1, 2.2), runtimes={"shrink": "torch 2", "onnx": "onnxruntime 2"})

    assert passes(judged(baseline_of(both), both), False)
    (undecided,) = (each for each in judged(baseline_of(both), newer) if each.status != "pass")
    where = "processor one, threads 1, runtime onnxruntime"
    assert undecided.figure == "deploy/onnx/1/speedup"
    assert undecided.reason == f"measured on {where} 2, but for the baseline on {where} 1"


def test_a_sweep_measured_on_unlike_hardware_is_undecided_though_its_baseline_was_as_well() -> None:
    found = compared(speedups=(2.0, 2.1, 2.2))
    last = next(key for key in reversed(found.records) if found.plan.stages[key].kind == "measure")
    mixed = {**found.records, last: replace(found.records[last], environment={"processor": "two"})}
    both = swept(found.plan, mixed)

    assert statuses(judged(baseline_of(both), both), SPEEDUP) == ["undecided"]


def test_a_speedup_of_one_seed_and_one_that_is_missing_are_undecided() -> None:
    one = compared(WAS[:1], speedups=(2.0,))

    assert statuses(judged(baseline_of(one), one), SPEEDUP) == ["undecided"]
    missing = judged(baseline_of(compared(speedups=(2.0, 2.1, 2.2))), compared(speedups=(2.0, 2.1)))
    assert [each.reason for each in missing if each.figure == SPEEDUP] == ["seed 2 is missing"]
    gone = judged(baseline_of(compared(speedups=(2.0, 2.1, 2.2))), compared())
    assert [each.reason for each in gone if each.figure == SPEEDUP] == ["the sweep does not have it"]


def test_a_point_may_have_margins_of_its_own_and_what_has_none_is_not_held() -> None:
    held = json.loads(text_of(baseline_of(compared(), margins={"test/accuracy": 0.001})))
    held["points"][1]["margins"] = {"test/accuracy": 0.1}
    found = judged(read_baseline(json.dumps(held).encode()), compared(by(0.002, 0.003, 0.004)))

    assert [(each.figure, each.status) for each in found] == [("test/accuracy", "fail"), ("test/accuracy", "pass")]


def test_a_baseline_is_read_as_it_was_written_and_keeps_margins() -> None:
    first = made(compared())
    edited = read_baseline(text_of(first).replace('"test/accuracy": 0.01', '"test/accuracy": 0.05').encode())
    again = made(compared(by(0.1, 0.2, 0.3)), edited, "second")

    assert read_baseline(text_of(first).encode()) == first
    assert first.margins == {"test/accuracy": 0.01, "parameters/remaining": 0.02}
    assert again.margins == {"test/accuracy": 0.05, "parameters/remaining": 0.02}
    assert '"test/accuracy": [0.9, 0.91, 0.92],' in text_of(first)
    assert f'"parameters/remaining": [{PARAMETERS}, {PARAMETERS}, {PARAMETERS}]' in text_of(first)
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
    data = json.loads(text_of(made(compared())))
    change(data)

    with pytest.raises(ValueError, match=r".") as error:
        read_baseline(json.dumps(data).encode())
    assert said in str(error.value)


def test_a_margin_beyond_a_fraction_and_another_metric_are_mistakes() -> None:
    with pytest.raises(OrchestratorError, match=r"the margin of `test/accuracy` \(=1.0\) must lie in \[0, 1\)"):
        judged(baseline_of(compared(), margins={"test/accuracy": 1.0}), compared())
    with pytest.raises(OrchestratorError, match="is compared by test/rmse, but the baseline has test/accuracy"):
        judged(baseline_of(compared()), compared(metrics=(Metric("rmse", "", "lower", 0.1),)))


def test_no_point_in_common_is_a_mistake() -> None:
    plan = make_plan(("random_unstructured",), (0.9,), range(2), rounds=1)
    other = swept(plan, make_records(plan))
    other = other._replace(comparison=replace(other.comparison, dense=()))

    with pytest.raises(OrchestratorError, match="the sweep has random_unstructured of cnn on digits: run"):
        judged(baseline_of(compared()), other)


def test_an_unfinished_sweep_is_no_baseline() -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    records = make_records(plan)
    del records[plan.trials[1].stages[-1]]

    with pytest.raises(
        OrchestratorError, match="1 of 3 trials of synthetic have not finished, for example 'l1_unstruct"
    ):
        made(swept(plan, records))
    with pytest.raises(OrchestratorError, match=r"a figure of dense at a sparsity of 0\.00% is not finite"):
        made(compared((0.9, math.nan, 0.9)))


def test_margins_that_would_be_missed_too_often_are_told() -> None:
    (said,) = alarms(compared().comparison, made(compared()))

    assert said.startswith(
        "2 of 2 points would miss the margin in more than 5% of equally good runs that share no random"
    )
    assert "the worst is l1_unstructured of cnn on digits at a sparsity of 50.00%, in 89% of them" in said
    assert re.search(
        r"3 seeds with a standard deviation of 0\.01; pass more seeds, or `margins` of 0\.0\d+ at this", said
    )
    assert "%" not in said.partition("deviation")[2], "the scale of margins"
    (wide,) = alarms(compared((0.1, 0.9)).comparison, made(compared((0.1, 0.9))))
    assert wide.endswith("pass more seeds")  # the sufficient margin would exceed 1
    assert list(alarms(compared((0.9, 0.9001, 0.9002)).comparison, made(compared()))) == []
    (single,) = alarms(compared((0.9,)).comparison, made(compared((0.9,))))
    assert single == "2 of 2 points have one seed, so every later run will be undecided there"


TABLE = """\
cnn on digits
   asked %               figure  baseline       now  change [95% interval]   limit   verdict
dense
     dense      test/accuracy %     91.00     90.70   -0.30 [-0.55, -0.05]   -1.00      pass
     dense parameters/remaining    10,154    10,154                  +0.0%   +2.0%      pass
l1_unstructured
     50.00      test/accuracy %     91.00     88.00   -3.00 [-5.48, -0.52]   -1.00      fail
     50.00 parameters/remaining     5,126     5,126                  +0.0%   +2.0%      pass
"""
FAILED = "fail: l1_unstructured at 50.00%, test/accuracy: it is worse by 3.00%"


def mixed() -> tuple[Verdict, ...]:
    held = baseline_of(compared())
    little = judged(held, compared(by(0.002, 0.003, 0.004)))
    much = judged(held, compared(by(0.02, 0.03, 0.04)))
    return (*little[:2], *much[2:])


def test_golden_table() -> None:
    table = "\n".join(gate_table(mixed()))

    assert table.startswith(f"4 limits: 3 pass, 1 fail, 0 undecided.\n{FAILED}\n\n{TABLE}")


def test_a_measured_loss_is_told_before_lines_that_are_missing_and_doubts() -> None:
    dense, size, loss, _ = mixed()
    assert loss.point is not None
    gone = [
        replace(each, status="fail", now=None, change=None, reason="the sweep has no line 'random'")
        for each in (loss, size, dense)
    ]
    doubt = replace(dense, status="undecided", reason="one seed")

    (counts, first, second, third, empty, *_) = gate_table([doubt, *gone, loss])

    assert counts == "5 limits: 0 pass, 4 fail, 1 undecided."
    assert first == "fail: l1_unstructured at 50.00%, test/accuracy: it is worse by 3.00%"
    assert second == "fail: l1_unstructured at 50.00%, test/accuracy and 2 more: the sweep has no line 'random'"
    assert third == "undecided: dense, test/accuracy: one seed"
    assert empty == ""


@pytest.mark.parametrize("allowed", [False, True])
def test_junit_has_a_case_for_each_limit(allowed: bool) -> None:
    odd = replace(mixed()[0], status="undecided", reason='<"one" & \x01other>')  # a character that XML forbids
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
    failed = "it is worse by 3.00%; test/accuracy %: baseline 91.00, now 88.00, limit -1.00, seeds 0, 1, 2"
    assert suite[2][0].get("message") == failed
    odd_one = '<"one" & \\x01other>; test/accuracy %: baseline 91.00, now 90.70, limit -1.00, seeds 0, 1, 2'
    assert suite[4][0].get("message") == odd_one
    counts = {"tests": "5", "failures": "1" if allowed else "2", "errors": "0", "skipped": "1" if allowed else "0"}
    assert suites.attrib == counts
    assert suite.attrib == {**counts, "name": "gate of x"}
