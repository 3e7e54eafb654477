"""Deployment measurements: summarised by point, never across kinds of machines, and shown in tables and files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import factories
import pytest

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.baseline import make_baseline
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.deployment_points import figures_of, headline
from orchestrator.compare.secondary_figures import FurtherTestSet, WindowDifference
from orchestrator.compare.statistics import Estimate
from orchestrator.compare.verdicts import verdicts
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import DENSE, NETWORK, Plan, StageSpec
from orchestrator.views.report.columns import measured_columns
from orchestrator.views.report.figures import drawing
from orchestrator.views.report.figures.figure_data import FRONT, front, pareto, token_speed
from orchestrator.views.report.figures.figure_table import FIGURES
from orchestrator.views.report.plain_files import points_csv
from orchestrator.views.report.tables import text_table

SPEEDUPS = {0: 1.0, 1: 2.0, 2: 4.0}
"""Speed-up of each seed."""


def deploying(seeds: tuple[int, ...] = (0, 1, 2), sizes: tuple[int, int] = (1, 8)) -> Plan:
    """Return the plan of a line whose trials are deployed as ONNX and measured at these batch sizes."""
    plan = factories.make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=seeds)
    stages, trials = dict(plan.stages), []
    for trial in plan.trials:
        pair = [StageSpec("deploy", {"format": "onnx"}, {NETWORK: key}) for key in (trial.stages[-1], trial.dense)]
        inputs = {NETWORK: pair[0].key, DENSE: pair[1].key}
        latency = StageSpec("measure", {"format": "onnx", "measure": {"batch_sizes": list(sizes)}}, inputs)
        stages |= {spec.key: spec for spec in (*pair, latency)}
        trials.append(replace(trial, measured=(latency.key,)))
    return Plan(stages, tuple(trials))


def plain(plan: Plan) -> Plan:
    """Return the plan without its deployment and measurement stages."""
    return replace(plan, stages={k: spec for k, spec in plan.stages.items() if spec.kind in ("dense", "round")})


def measured(plan: Plan, processor: Callable[[int], str] = lambda _: "Pen") -> dict[str, StageRecord]:
    """Return records of all stages; each seed has the speed-up in `SPEEDUPS`, doubled at the second batch size."""
    records: dict[str, StageRecord] = factories.make_records(plain(plan))
    for trial in plan.trials:
        seed, last = int(trial.config["seed"]), records[trial.stages[-1]]
        figures: dict[str, float] = {"seconds": 1.0, "bytes": 1000.0 * (1 + seed), "dense_bytes": 8000.0}
        figures |= {"memory/8": 100.0 * (1 + seed), "dense_memory/8": 1000.0}
        sizes = plan.stages[trial.measured[0]].fields["measure"]["batch_sizes"]
        for size, times in zip(sizes, (SPEEDUPS[seed], 2 * SPEEDUPS[seed]), strict=True):
            figures |= {f"latency_ms/{size}": 1 / times, f"dense_ms/{size}": 1.0, f"speedup/{size}": times}
            figures |= {f"speedup_low/{size}": 0.9 * times, f"speedup_high/{size}": 1.1 * times}
        environment = {"processor": processor(seed), "threads": "1", "runtime": "onnxruntime 1"}
        for key in (*plan.stages[trial.measured[0]].inputs.values(), *trial.measured):
            spec = plan.stages[key]
            records[key] = replace(
                last,
                key=key,
                kind=spec.kind,
                spec=spec.to_json(),
                after={},
                measurements=figures,
                environment=environment,
            )
    return records


def quantised(plan: Plan) -> dict[str, StageRecord]:
    """Return the records in a format that changes outputs: networks reach 0.8 + seed / 100, dense networks 0.9."""
    records = measured(plan)
    for trial in plan.trials:
        (key,), test = trial.measured, 0.8 + 0.01 * int(trial.config["seed"])
        after = {"val/accuracy": 0.7, "test/accuracy": test, "test/top5": 1.0}
        records[key] = replace(records[key], after=after, details={"dense": {"test/accuracy": 0.9}})
    return records


def summary(plan: Plan, records: Mapping[str, StageRecord]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(points_csv(compare_trials(plan, records)).decode())))


def test_seeds_are_averaged_as_ratios_with_an_interval_over_them() -> None:
    plan = deploying()
    (point,) = compare_trials(plan, measured(plan)).operating_points[-1:]
    one, eight = point.deployed

    assert (one.format, one.batch_size, eight.batch_size) == ("onnx", 1, 8)
    assert one.speedup.mean == pytest.approx(2.0)
    # t(0.975, 2) = 4.30265, times log(2) / sqrt(3)
    assert one.speedup.high == pytest.approx(2 * math.exp(4.30265 * math.log(2) / math.sqrt(3)), rel=1e-4)
    assert (one.latency_ms, one.dense_ms) == pytest.approx((0.5, 1.0))
    assert (eight.speedup.mean, eight.bytes, eight.dense_bytes) == pytest.approx((4.0, 2000.0, 8000.0))
    assert (eight.memory, eight.dense_memory) == pytest.approx((200.0, 1000.0))
    assert one.memory is None


def test_one_seed_has_the_interval_of_its_measurement() -> None:
    plan = deploying((1,))
    (point,) = compare_trials(plan, measured(plan)).operating_points[-1:]

    speedup = point.deployed[0].speedup
    assert (speedup.mean, speedup.low, speedup.high) == pytest.approx((2.0, 1.8, 2.2))


def with_tokens(plan: Plan, dense_ms: float, speedup: float, low: float, high: float) -> dict[str, StageRecord]:
    """Return records in which one more token takes 2 ms at batch 8."""
    records = measured(plan)
    (key,) = plan.trials[0].measured
    times = {"token_ms/8": 2.0, "dense_token_ms/8": dense_ms}
    ratios = {"token_speedup/8": speedup, "token_speedup_low/8": low, "token_speedup_high/8": high}
    records[key] = replace(records[key], measurements={**records[key].measurements, **times, **ratios})
    return records


def test_the_latency_of_a_token_stands_beside_that_of_a_prompt() -> None:
    plan = deploying((1,))
    records, (trial,) = with_tokens(plan, 3.0, 1.5, 1.4, 1.6), plan.trials
    (point,) = compare_trials(plan, records).operating_points[-1:]
    one, eight = point.deployed

    assert one.token_speedup is None
    assert (eight.token_ms, eight.dense_token_ms) == pytest.approx((2.0, 3.0))
    assert "1.50× [1.40, 1.60]" in "\n".join(text_table(compare_trials(plan, records)))
    row = summary(plan, records)[-1]
    assert (float(row["onnx_8_token_ms"]), row["onnx_8_token_speedup_high"]) == (pytest.approx(2.0), "1.6")
    told = {name: value for name, value, _ in headline(trial, records)}
    assert (told["deploy/onnx/8/token_ms"], told["deploy/onnx/8/token_speedup"]) == (2.0, 1.5)


def test_a_figure_shows_tokens_a_second_and_the_metric_with_both_intervals() -> None:
    plan = deploying((1,))
    comparison = compare_trials(plan, with_tokens(plan, 4.0, 2.0, 1.5, 2.5))
    (plot,) = token_speed(comparison)
    (own, dense) = plot.series

    assert plot.title == "cnn on digits, onnx, batch 8"
    assert (own.x, own.left, own.right) == ((4000.0,), (3000.0,), (5000.0,))
    assert (dense.label, dense.x, dense.left) == ("dense", (2000.0,), (None,))
    assert not token_speed(compare_trials(plan, measured(plan)))

    (point,) = comparison.operating_points[-1:]
    perplexity = replace(point.metric, name="perplexity", better="lower")
    twice = replace(
        point, metric=perplexity, test=Estimate(1, 20.0), further=(FurtherTestSet("plays", Estimate(1, 400.0), None),)
    )
    named = (point.model, point.data, "test", point.line, "dense", point.asked_sparsity, 0.5, (0,))
    window = WindowDifference(*named, Estimate(16, 1.0, 0.5, 1 - math.log(2), 1 + math.log(4)), Estimate(1, 1.0))
    text, plays = token_speed(replace(comparison, points=(twice,), windows=(window,)))

    assert (text.series[0].low, text.series[0].high) == ((pytest.approx(10.0),), (pytest.approx(80.0),))
    assert plays.title == "cnn on digits: plays, onnx, batch 8"
    assert (plays.series[0].y, plays.series[0].low) == ((400.0,), (None,))
    assert drawing.render(lambda: drawing.figure((text, plays), FIGURES["token_speed"].draw))["svg"]


def test_unlike_machines_are_never_averaged() -> None:
    plan = deploying()
    records = measured(plan, lambda seed: "Pen" if seed else "Abacus")
    (point,) = compare_trials(plan, records).operating_points[-1:]

    assert [(each.hardware.split(",")[0], each.speedup.n) for each in point.deployed if each.batch_size == 1] == [
        ("processor Abacus", 1),
        ("processor Pen", 2),
    ]
    headings = [column.heading(point.metric) for column in measured_columns([point], "onnx")]
    assert {"at batch 1 #1", "at batch 1 #2"} <= set(headings)


def test_it_stands_in_table_and_summary_and_in_none_where_nothing_is_deployed() -> None:
    plan = deploying((1,))
    records = measured(plan)
    text = "\n".join(text_table(compare_trials(plan, records)))
    without = replace(plan, trials=tuple(replace(trial, measured=()) for trial in plan.trials))

    assert "cnn on digits: deployed as onnx, speed-up over dense [95% interval]" in text
    assert "2.00× [1.80, 2.20]" in text
    assert "4.00× [3.60, 4.40]" in text
    assert summary(plan, records)[-1]["onnx_8_speedup_mean"] == "4.0"
    assert "deployed" not in "\n".join(text_table(compare_trials(without, records)))
    assert not any("onnx" in name for name in summary(without, records)[-1])


def test_what_deploys_and_measures_is_no_cost_of_training() -> None:
    plan = deploying()
    trained = replace(plain(plan), trials=tuple(replace(trial, measured=()) for trial in plan.trials))
    records = measured(plan)

    assert compare_trials(plan, records).cost == compare_trials(trained, records).cost


def test_a_tracker_is_told_when_all_is_measured() -> None:
    plan = deploying((1,))
    records = measured(plan)
    (trial,) = plan.trials
    told = {name: value for name, value, _ in headline(trial, records)}

    assert told == {
        "deploy/latency_ms": 0.5,
        "deploy/speedup": 2.0,
        "deploy/bytes": 2000.0,
        "deploy/onnx/8/latency_ms": 0.25,
        "deploy/onnx/8/speedup": 4.0,
        "deploy/onnx/8/memory": 200.0,
    }
    assert not list(headline(trial, {key: record for key, record in records.items() if record.kind != "measure"}))


@pytest.mark.parametrize("sizes", [(8, 1), (8, 16), (1, 16)])
def test_figures_stand_in_the_order_of_the_batch_sizes_that_were_asked_for(sizes: tuple[int, int]) -> None:
    plan = deploying((1,), sizes)
    records, (trial,) = measured(plan), plan.trials
    first, second = sizes

    names = [f"deploy/onnx/{size}/{name}" for size in sizes for name in ("latency_ms", "speedup")]
    assert [name for name, *_ in figures_of(trial, records) if name != "deploy/onnx/8/memory"] == [
        *names,
        "deploy/onnx/bytes",
    ]
    told = {name: value for name, value, _ in headline(trial, records)}
    assert (told["deploy/speedup"], told[f"deploy/onnx/{second}/speedup"]) == (2.0, 4.0)
    assert f"deploy/onnx/{first}/speedup" not in told
    (point,) = compare_trials(plan, records).operating_points[-1:]
    assert [each.batch_size for each in point.deployed] == list(sizes)


def test_the_audit_asks_for_measured_speed_ups_where_trials_are_deployed() -> None:
    plan = deploying()
    records = measured(plan)

    def verdict(records: Mapping[str, StageRecord]) -> tuple[str, str]:
        findings = audit(plan, records, compare_trials(plan, records))
        return next((each.verdict, each.reason) for each in findings if "speed-up" in each.rule)

    assert verdict(records) == ("pass", "both are given for every point, and measured where a trial ends")
    lost = {key: record for key, record in records.items() if record.kind != "measure"}
    assert verdict(lost)[0] == "fail"
    assert "was not measured" in verdict(lost)[1]


def test_the_front_holds_what_no_other_is_better_than_in_both() -> None:
    places = [(1.0, 0.5), (2.0, 0.9), (2.0, 0.8), (3.0, 0.9), (4.0, 0.95), (5.0, 0.7)]

    assert front(places, factories.ACCURACY) == [(1.0, 0.5), (2.0, 0.9), (4.0, 0.95)]
    lower = replace(factories.ACCURACY, better="lower")
    assert front(places, lower) == [(1.0, 0.5)]


@pytest.mark.slow
def test_figures_show_points_and_dense_against_milliseconds_and_bytes() -> None:
    plan = deploying()
    comparison = compare_trials(plan, measured(plan, lambda seed: "Pen" if seed else "Abacus"))
    latency, sizes = pareto(comparison, "latency"), pareto(comparison, "bytes")

    assert len(latency) == 4, "of two batch sizes on two machines"
    assert latency[0].title.startswith("cnn on digits, onnx, batch 1, processor Abacus")
    assert [series.label for series in latency[0].series] == ["l1_unstructured", "dense", FRONT]
    assert latency[0].series[0].x == (1.0,)
    assert [plot.title for plot in sizes] == ["cnn on digits, onnx"]
    assert (sizes[0].series[0].x, sizes[0].series[1].x) == ((1000.0,), (8000.0,))
    assert drawing.render(lambda: drawing.figure(latency, FIGURES["latency"].draw))["svg"]
    assert not pareto(compare_trials(plan, factories.make_records(plain(plan))), "latency")


def test_what_networks_achieve_in_a_format_that_changes_outputs_stands_beside_what_they_were_trained_to() -> None:
    plan = deploying()
    comparison = compare_trials(plan, quantised(plan))
    (point,) = comparison.operating_points[-1:]
    one, text = point.deployed[0], "\n".join(text_table(comparison))
    row = summary(plan, quantised(plan))[-1]

    assert (one.test, one.val, one.dense_test) == (
        Estimate(3, *map(pytest.approx, (0.81, 0.01, 0.81 - 0.024841, 0.81 + 0.024841))),  # t(0.975, 2) / sqrt(3)
        Estimate(3, *map(pytest.approx, (0.7, 0.0, 0.7, 0.7))),
        pytest.approx(0.9),
    )
    assert "onnx accuracy %" in text
    assert "81.00 ± 1.00" in text
    assert text.count("test accuracy %") == 2, "of the networks, and beside those as onnx"
    assert [float(row[f"onnx_{name}"]) for name in ("test_mean", "val_mean", "dense_test")] == pytest.approx(
        [0.81, 0.7, 0.9]
    )
    series = pareto(comparison, "bytes")[0].series
    assert (series[0].y, series[1].y) == (pytest.approx((0.81,)), pytest.approx((0.9,)))
    without = "\n".join(text_table(compare_trials(plan, measured(plan))))
    assert "onnx accuracy %" not in without
    assert without.count("test accuracy %") == 1
    assert not any("test_mean" in name for name in summary(plan, measured(plan))[-1] if name.startswith("onnx"))


def test_a_tracker_and_a_gate_are_told_of_it_and_the_gate_by_the_margin_of_the_metric() -> None:
    plan = deploying()
    records = quantised(plan)
    comparison, trial = compare_trials(plan, records), plan.trials[0]
    told = {name: value for name, value, _ in headline(trial, records)}
    info = factories.sweep_info()
    baseline = make_baseline(info, comparison, plan, records)
    worse = {
        key: replace(
            each, after={"val/accuracy": 0.7, "test/accuracy": 0.75 + 0.001 * each.measurements["bytes"] / 1e3}
        )
        if each.kind == "measure"
        else each
        for key, each in records.items()
    }

    assert {name: told[name] for name in told if "/onnx/test" in name or "/onnx/val" in name} == {
        "deploy/onnx/test/accuracy": 0.8,
        "deploy/onnx/test/top5": 1.0,
        "deploy/onnx/val/accuracy": 0.7,
    }
    assert baseline.margins["deploy/onnx/test/accuracy"] == factories.ACCURACY.margin
    assert "deploy/onnx/test/top5" not in baseline.margins
    failed = [each for each in verdicts(baseline, compare_trials(plan, worse), plan, worse) if each.status == "fail"]
    assert [(each.figure, each.metric) for each in failed] == [("deploy/onnx/test/accuracy", factories.ACCURACY)]
