from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from factories import ACCURACY, DENSE_STEPS, PARAMETERS, ROUND_STEPS, SIZES, config, make_plan, make_records, plan_of

from orchestrator.compare.audit.rule import Finding
from orchestrator.compare.compare_trials import compare_trials, merge_plans
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.round_columns import Chosen
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import NETWORK, Plan, StageSpec
from orchestrator.views.report.plain_files import as_json, points_csv, rows_csv
from orchestrator.views.report.tables import audit_notes, failure_notes, notes, text_table


def with_accuracy(record: StageRecord, accuracy: float) -> StageRecord:
    return replace(record, after={**record.after, "test/accuracy": accuracy})


def golden() -> tuple[Plan, dict[str, StageRecord]]:
    """Three seeds, one method, dense 0.96 0.97 0.98; at 50% each loses 0.01, at 90% they lose 0.05, 0.06, 0.07."""
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), rounds=1)
    records = make_records(plan)
    for trial in plan.trials:
        seed = trial.config["seed"]
        dense, last = trial.stages
        records[dense] = with_accuracy(records[dense], 0.96 + 0.01 * seed)
        loss = 0.01 if trial.config["schedule"]["sparsity"] == 0.5 else 0.05 + 0.01 * seed
        records[last] = with_accuracy(records[last], 0.96 + 0.01 * seed - loss)
    return plan, records


def only(points: tuple[Point, ...], sparsity: float, line: str = "") -> Point:
    (point,) = [p for p in points if abs(p.sparsity - sparsity) < 0.01 and line in p.line and p.final]
    return point


def test_golden_summary_by_hand() -> None:
    found = compare_trials(*golden())

    (dense,) = found.dense
    assert dense.test is not None
    assert dense.test.mean == pytest.approx(0.97)
    assert dense.test.std == pytest.approx(0.01)
    half, ninety = only(found.points, 0.5), only(found.points, 0.9)
    assert half.test is not None
    assert half.difference is not None
    assert half.test.mean == pytest.approx(0.96)
    assert (half.difference.mean, half.difference.std) == pytest.approx((-0.01, 0.0))
    assert ninety.difference is not None
    # paired by seed: differences -0.05, -0.06, -0.07; t(0.975, 2) * 0.01 / sqrt(3) = 0.0248414
    assert ninety.difference.mean == pytest.approx(-0.06)
    assert ninety.difference.low == pytest.approx(-0.06 - 0.0248414, abs=1e-6)
    assert ninety.seeds == (0, 1, 2)


def line_of(losses: Sequence[Sequence[float]], margin: float | None = None) -> Comparison:
    """Return the comparison of a line of points; the seeds of a point lose the given amounts against a dense 0.9."""
    sparsities = [0.1 * (1 + index) for index in range(len(losses))]
    plan = make_plan(("l1_unstructured",), sparsities, range(len(losses[0])), rounds=1)
    records = {key: with_accuracy(record, 0.9) for key, record in make_records(plan).items()}
    for trial in plan.trials:
        loss = losses[sparsities.index(trial.config["schedule"]["sparsity"])][trial.config["seed"]]
        records[trial.stages[-1]] = with_accuracy(records[trial.stages[-1]], 0.9 - loss)
    return compare_trials(plan, records, margin=margin)


def verdicts(comparison: Comparison) -> list[str | None]:
    return [point.matching for point in comparison.operating_points]


LITTLE, MUCH = (0.002, 0.003, 0.004), (0.02, 0.03, 0.04)


def test_a_match_rules_a_loss_of_the_margin_out() -> None:
    # 0.003 +- t(0.975, 2) * 0.001 / sqrt(3) = 0.003 +- 0.002484: a loss of up to 0.005484
    assert verdicts(line_of([LITTLE])) == ["yes"]
    assert verdicts(line_of([LITTLE], margin=0.0055)) == ["yes"]
    assert verdicts(line_of([LITTLE], margin=0.0054)) == ["no"]


def test_a_line_is_tested_up_to_its_first_failure() -> None:
    comparison = line_of([LITTLE, LITTLE, MUCH, LITTLE])
    largest = comparison.largest_matching["cnn", "digits", "l1_unstructured"]

    assert verdicts(comparison) == ["yes", "yes", "no", "not tested"]
    assert largest is not None
    assert largest.sparsity == pytest.approx(0.2, abs=0.01)
    assert [point.matching for point in comparison.dense] == [None]


def test_fewer_seeds_do_not_match_more_often() -> None:
    """Losses of 5 and 1 points average to what dense's own wide interval would have held."""
    assert verdicts(line_of([(0.05, 0.01)])) == ["no"]
    noisy = (0.0, 0.008, -0.006, 0.002, 0.004, -0.004)
    assert [verdicts(line_of([noisy[:seeds]]))[0] for seeds in (2, 3, 6)] == ["no", "no", "yes"]


def test_the_cost_stands_in_the_table_where_lines_differ_in_it() -> None:
    plan = make_plan(("random_unstructured", "l1_unstructured"), (0.5,), (0,), rounds=1)
    records = make_records(plan)
    alike = "\n".join(text_table(compare_trials(plan, records)))
    longer = plan.trials[1].stages[-1]
    found = compare_trials(plan, {**records, longer: replace(records[longer], steps=1000)})
    heading, *rows = [line.split() for line in text_table(found) if line.startswith(("sparsity", " "))]

    assert "cost" not in alike
    assert heading[-1] == "cost"
    assert [row[-1] for row in rows] == ["300", "400", "1,300"]
    assert [(point.line, other.line) for point, other in found.costlier] == [("l1_unstructured", "random_unstructured")]
    assert any("cost: optimizer steps" in line for line in notes(found))


def test_what_was_asked_for_stands_beside_what_was_reached_where_that_is_something_else() -> None:
    plan = make_plan(("l1_unstructured", "lamp"), (0.5, 0.9), (0,), rounds=1)
    records = make_records(plan)
    alike = compare_trials(plan, records)
    grouped = {key for trial in plan.trials if trial.config["method"]["name"] == "lamp" for key in trial.stages[1:]}
    chosen = {"unit": {"kind": "group"}, "scope": {"budget": "macs"}}
    stages = {
        key: replace(spec, fields={**spec.fields, **chosen}) if key in grouped else spec
        for key, spec in plan.stages.items()
    }
    scoring = {"score": "magnitude", "removed": 0.52}
    for key in grouped:
        records[key] = replace(records[key], sparsity=0.7147, details={"scoring": scoring})
    found = compare_trials(Plan(stages, plan.trials), records)
    heading, *rows = [line.split() for line in text_table(found) if line.startswith(("sparsity", "     "))]

    assert "asked" not in "".join(text_table(alike))
    assert {point.best for point in alike.points} == {True, False}
    assert heading[:3] == ["sparsity", "%", "asked"]
    assert [" ".join(row[1:4]) for row in rows[1:]] == [
        "50.00% of weights",
        "90.00% of weights",
        "50.00% of MACs",
        "90.00% of MACs",
    ]
    assert [(point.budget, point.reached) for point in found.points[2:]] == [("MACs", 0.52), ("MACs", 0.52)]
    assert not any(point.best for point in found.points), "a half of weights is no half of multiply-accumulates"
    assert found.costlier == ()
    assert any(
        "asked: the requested sparsity; sparsity: the achieved one, of the prunable weights." in line
        for line in notes(found)
    )
    assert any("*: the best mean at this sparsity." in line for line in notes(alike))
    starred = replace(found, points=tuple(replace(point, best=True) for point in found.points))
    assert any("*: the best mean at this requested sparsity." in line for line in notes(starred))
    halves = replace(found, points=tuple(replace(p, requested_sparsity=p.sparsity - 0.01) for p in alike.points))
    assert any("   49.00 " in line for line in text_table(halves)), "more than rounding to entries"


@pytest.mark.parametrize(("seeds", "told"), [(1, 0), (2, 1), (3, 0)])
def test_why_intervals_of_two_seeds_are_wide_is_told_once(seeds: int, told: int) -> None:
    # t(0.975, n - 1) of any table: 12.706, 4.303, 2.776
    note = (
        "2 seeds: t = 12.7. Intervals from two seeds extend 12.7 standard errors on either side of the mean, from "
        "three 4.3, from five 2.8."
    )

    assert [*notes(line_of([(0.01, 0.02, 0.04)[:seeds]] * 3))].count(note) == told


def test_one_seed_is_untested() -> None:
    comparison = line_of([(0.0,), (0.5,)])

    assert verdicts(comparison) == ["untested", "untested"]
    assert comparison.largest_matching == {}


def test_differences_that_are_all_equal_are_untested() -> None:
    assert verdicts(line_of([(0.01, 0.01, 0.01), LITTLE, (0.5, 0.5, 0.5), MUCH])) == [
        "untested",
        "yes",
        "untested",
        "no",
    ]


def test_a_network_whose_accuracy_is_not_finite_does_not_match() -> None:
    assert verdicts(line_of([LITTLE, (0.0, math.nan, 0.0), LITTLE])) == ["yes", "no", "not tested"]


def test_the_margin_is_that_of_the_trials_the_strictest_where_they_differ() -> None:
    def configured(*margins: float | None) -> Plan:
        return plan_of(
            [config("l1_unstructured", 0.9, seed, compare={"margin": margin}) for seed, margin in enumerate(margins)]
        )

    def margins(plan: Plan, margin: float | None = None) -> list[float]:
        return [metric.margin for metric in compare_trials(plan, make_records(plan), margin=margin).metrics]

    plan = configured(0.03, 0.02)
    assert margins(configured(0.03)) == [0.03]
    assert margins(plan) == [0.02]
    assert margins(plan, 0.05) == [0.05]
    assert margins(configured(0.03, None)) == margins(make_plan()) == [ACCURACY.margin] == [0.01]
    with pytest.raises(
        OrchestratorError, match=r"`compare.margin` \(=2\) must lie in \[0, 1\): accuracy is a fraction"
    ):
        margins(configured(2))
    with pytest.raises(OrchestratorError, match=r"`margin` \(=2\) must lie in \[0, 1\): accuracy is a fraction"):
        margins(plan, 2)
    assert margins(configured(2), 0.02) == [0.02], "a margin that is typed replaces that of a saved sweep"
    assert set(plan.stages) == set(plan_of([config("l1_unstructured", 0.9, seed) for seed in (0, 1)]).stages)


def test_networks_that_differ_in_what_is_redacted_are_no_seeds_of_one_point() -> None:
    plan = plan_of(
        [
            config("l1_unstructured", 0.9, seed, 1, model={"name": "own", "token": token})
            for token in ("one", "other")
            for seed in (0, 1)
        ]
    )
    comparison = compare_trials(plan, make_records(plan))

    assert [point.seeds for point in comparison.operating_points] == [(0, 1), (0, 1)]
    assert [point.seeds for point in comparison.dense] == [(0, 1), (0, 1)]
    assert list(comparison.lines) == [("own", "digits", "l1_unstructured"), ("own", "digits", "l1_unstructured #2")]


def test_rows_are_tidy_one_for_each_trial_and_round() -> None:
    plan = make_plan()
    records = make_records(plan)
    rows = compare_trials(plan, records).rows

    assert [(row.trial, row.round) for row in rows] == [(t.name, k) for t in plan.trials for k in range(3)]
    assert [row.final for row in rows[:3]] == [False, False, True]
    last = rows[2]
    assert last.compression == PARAMETERS / (PARAMETERS - round(last.sparsity * sum(SIZES.values())))
    assert last.speedup == pytest.approx(2.0)
    assert rows[0].val_before is None
    assert last.val_before == records[last.stage].before["val/accuracy"]


def test_shared_and_own_cost() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), seeds=(0,), rounds=2)
    found = compare_trials(plan, make_records(plan))

    last = [row for row in found.rows if row.final]
    assert [(row.total_steps, row.own_steps) for row in last] == [(DENSE_STEPS + 2 * ROUND_STEPS, 2 * ROUND_STEPS)] * 2
    assert found.cost.steps == DENSE_STEPS + 4 * ROUND_STEPS
    assert found.cost.unshared_steps == 2 * (DENSE_STEPS + 2 * ROUND_STEPS)


def test_the_best_is_marked_where_lines_compete() -> None:
    plan = make_plan(sparsities=(0.9,))
    found = compare_trials(plan, make_records(plan))

    assert only(found.points, 0.9, "l1").best
    assert not only(found.points, 0.9, "random").best
    assert not any(point.best for point in compare_trials(*golden()).points)


def test_an_iterative_line_with_one_end_has_a_point_after_every_round() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), rounds=3)
    found = compare_trials(plan, make_records(plan))

    assert [point.round for point in found.operating_points] == [1, 2, 3]
    several = make_plan(methods=("l1_unstructured",), sparsities=(0.5, 0.9), rounds=3)
    assert [point.round for point in compare_trials(several, make_records(several)).operating_points] == [3, 3]


def test_lines_are_named_by_what_tells_them_apart() -> None:
    three = {"kind": "geometric", "sparsity": 0.9, "rounds": 3, "amount": None}
    configs = [
        config("l1_unstructured", 0.9, 0),
        config("l1_unstructured", 0.9, 0, schedule=three),
        config("l1_unstructured", 0.9, 0, schedule=three, prune={"include": ["fc*"], "exclude": []}),
        config("random_unstructured", 0.9, 0),
    ]
    plan = plan_of(configs)

    assert {point.line for point in compare_trials(plan, make_records(plan)).points} == {
        "l1_unstructured, rounds=2",
        'l1_unstructured, rounds=3, include=["*"]',
        'l1_unstructured, rounds=3, include=["fc*"]',
        "random_unstructured",
    }


def test_optimizers_and_dense_networks_are_told_apart() -> None:
    def trained(optimizer: str, lr: float, epochs: int) -> dict[str, Any]:
        train = {"epochs": epochs, "optimizer": {"_target_": f"torch.optim.{optimizer}", "lr": lr}}
        tuned = {"epochs": epochs, "optimizer": {"_target_": "torch.optim.Adam", "lr": lr}}
        return config("l1_unstructured", 0.9, 0, train=train, finetune=tuned)

    plan = plan_of([trained("Adam", 0.1, 2), trained("SGD", 0.1, 2), trained("SGD", 0.2, 2), trained("SGD", 0.2, 3)])
    found = compare_trials(plan, make_records(plan))

    assert [point.line for point in found.dense] == [
        "dense, optimizer=Adam",
        "dense, optimizer=SGD, epochs=2, lr=0.1",
        "dense, optimizer=SGD, epochs=2, lr=0.2",
        "dense, optimizer=SGD, epochs=3",
    ]
    assert {point.line for point in found.points} == {
        "l1_unstructured, optimizer=Adam",
        "l1_unstructured, optimizer=SGD, train.epochs=2, train.optimizer.lr=0.1",
        "l1_unstructured, optimizer=SGD, train.epochs=2, train.optimizer.lr=0.2",
        "l1_unstructured, optimizer=SGD, train.epochs=3",
    }
    assert sum(line in [point.line for point in found.dense] for line in text_table(found)) == 4


def test_networks_and_data_sets_are_compared_apart() -> None:
    other = {"name": "mlp", "kind": "mlp"}
    plan = plan_of([config("l1_unstructured", 0.9, 0), config("l1_unstructured", 0.9, 0, model=other)])
    found = compare_trials(plan, make_records(plan))

    assert found.panels == (("cnn", "digits"), ("mlp", "digits"))
    assert len(found.dense) == 2
    assert not any(point.best for point in found.points)


def test_a_trial_that_failed_is_told_and_its_finished_rounds_are_kept() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,))
    records = make_records(plan)
    lost = plan.trials[0].stages[2]
    del records[lost]
    found = compare_trials(plan, records, {lost: "loss is nan"})

    assert found.trials[plan.trials[0].name] == "failed"
    assert found.failures == {plan.trials[0].name: "loss is nan"}
    assert only(found.points, 0.9).seeds == (1, 2)
    assert sum(row.trial == plan.trials[0].name for row in found.rows) == 2


def test_nothing_finished_is_an_empty_comparison() -> None:
    plan = make_plan()
    found = compare_trials(plan, {})

    assert found.rows == ()
    assert found.operating_points == ()
    assert set(found.trials.values()) == {"unfinished"}
    assert list(text_table(found)) == []


def test_a_trial_that_was_trained_and_not_measured_is_called_that() -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0, 1))
    trial, other = plan.trials
    deployed = StageSpec("deploy", {"format": "shrink"}, {NETWORK: trial.stages[-1]})
    measured = StageSpec("measure", {"format": "shrink"}, {NETWORK: deployed.key})
    records = make_records(plan)
    stages = {**plan.stages, deployed.key: deployed, measured.key: measured}
    found = compare_trials(Plan(stages, (replace(trial, measured=(measured.key,)), other)), records)

    assert found.trials == {trial.name: "unmeasured", other.name: "finished"}
    assert list(failure_notes(found)) == [
        "1 of 2 trials did not finish:",
        f"  {trial.name}: trained, not measured",
    ]


def test_merging_a_sweep_with_itself_changes_nothing() -> None:
    plan = make_plan()
    records = make_records(plan)

    assert compare_trials(merge_plans([plan, plan]), records) == compare_trials(plan, records)


def test_trials_that_are_one_chain_under_two_names_are_one_sample() -> None:
    plan, records = golden()
    twins = tuple(replace(trial, name=f"{trial.name} again") for trial in plan.trials)
    found = compare_trials(Plan(plan.stages, (*plan.trials, *twins)), records)

    assert only(found.points, 0.9).difference == only(compare_trials(plan, records).points, 0.9).difference
    assert only(found.points, 0.9).seeds == (0, 1, 2)


def test_merging_adds_seeds_and_counts_no_stage_twice() -> None:
    first, second = make_plan(seeds=(0, 1)), make_plan(seeds=(1, 2))
    records = {**make_records(first), **make_records(second)}
    merged, whole = compare_trials(merge_plans([first, second]), records), make_plan(seeds=(0, 1, 2))

    assert {point.seeds for point in merged.points} == {(0, 1, 2)}
    assert merged.cost == compare_trials(whole, records).cost


def test_what_one_seed_cannot_tell_is_not_denied() -> None:
    plan = make_plan(methods=("l1_unstructured",), seeds=(0,), rounds=1)
    found = list(notes(compare_trials(plan, make_records(plan))))
    assert any("l1_unstructured: not known, because a test needs two or more seeds" in line for line in found)
    assert list(notes(compare_trials(plan, {}))) == []


def test_trials_that_failed_for_one_reason_are_told_together() -> None:
    plan = make_plan(seeds=(0, 1))
    dense = {trial.config["seed"]: trial.stages[0] for trial in plan.trials}
    found = list(failure_notes(compare_trials(plan, {}, {dense[0]: "loss is nan", dense[1]: "out of memory"})))

    assert found == [
        "8 of 8 trials did not finish, 8 of them failed:",
        f"  {plan.trials[0].name} and 3 more: loss is nan",
        f"  {next(trial.name for trial in plan.trials if trial.config['seed'] == 1)} and 3 more: out of memory",
    ]


def test_the_terminal_hears_of_each_rule_that_fails() -> None:
    findings = (Finding("a", "pass", "because"), Finding("b", "fail", "2 of 3"), Finding("c", "not applicable", "x"))
    assert list(audit_notes(findings)) == ["Audit: 1 of 3 rules pass, 1 fail, 1 do not apply.", "  b: 2 of 3"]
    of_many = Finding("d", "fail", "1 seed", of_many=True)
    assert list(audit_notes((*findings, of_many), "python -m orchestrator.compare one")) == [
        "Audit: 1 of 4 rules pass, 2 fail, 1 do not apply.",
        "  b: 2 of 3",
        "  1 rule about comparisons can pass with more trials only; `python -m orchestrator.compare one` lists all.",
    ]
    assert list(audit_notes((*findings, of_many)))[-1] == "  d: 1 seed"


def test_the_text_table_fits_a_terminal_and_says_what_it_knows() -> None:
    lines = list(text_table(compare_trials(*golden())))

    assert max(map(len, lines)) <= 79
    assert any("97.00 ± 1.00" in line for line in lines)
    assert any("-6.00 [-8.48, -3.52]" in line and " no " in line for line in lines)


def test_csv_and_json_read_back() -> None:
    plan, records = golden()
    found = compare_trials(plan, records)
    rows = list(csv.DictReader(io.StringIO(rows_csv(found).decode())))
    points = list(csv.DictReader(io.StringIO(points_csv(found).decode())))

    assert [float(row["test"]) for row in rows] == [row.test for row in found.rows]
    assert [float(point["test_mean"]) for point in points[1:]] == [
        point.test.mean for point in found.operating_points if point.test
    ]
    assert json.loads(as_json(found))["cost"]["steps"] == found.cost.steps
    (metric,) = json.loads(as_json(found))["metrics"]
    assert (metric["name"], metric["margin"]) == ("accuracy", 0.01)


def test_the_rows_say_what_was_chosen_what_scoring_took_and_what_died() -> None:
    plan, records = golden()
    key = plan.trials[0].stages[1]
    said = {
        "unit": {"kind": "entry"},
        "scope": {"kind": "layer", "allocation": "erk"},
        "dynamics": {"kind": "nested"},
        "repair": {"kind": "obs"},
        "restart": {"weights": "keep", "rates": 0},
    }
    stages = {**plan.stages, key: replace(plan.stages[key], fields={**plan.stages[key].fields, **said})}
    scoring = {"score": "snip", "examples": 20, "passes": 6, "rescorings": 3, "removed": 0.2}
    records[key] = replace(
        records[key],
        details={"scoring": scoring, "dead_tensors": ["fc1.weight", "fc2.weight"]},
        measurements={"seconds": 2.0, "scoring": 0.5, "selection": 0.25},
    )
    found = csv.DictReader(io.StringIO(rows_csv(compare_trials(Plan(stages, plan.trials), records)).decode()))
    dense, scored, _, by_a_class, *_ = ({name: row[name] for name in Chosen._fields} for row in found)

    assert scored == {
        "score": "snip",
        "unit": "entry",
        "scope": "layer by erk",
        "dynamics": "nested",
        "repair": "obs",
        "budget": "weights",
        "reached": "0.2",
        "restart": "weights=keep rates=0",
        "scored_examples": "20",
        "scoring_passes": "6",
        "rescorings": "3",
        "scoring_seconds": "0.5",
        "selection_seconds": "0.25",
        "dead_layers": "fc1.weight fc2.weight",
    }
    assert set(dense.values()) == {""}
    assert {name: value for name, value in by_a_class.items() if value} == {
        "budget": "weights",
        "reached": str(records[plan.trials[1].stages[1]].sparsity),
        "restart": "keep",
    }


def test_the_rows_say_where_early_stopping_would_have_ended_whatever_was_selected() -> None:
    plan, records = golden()
    key = plan.trials[0].stages[1]
    losses = {100: 0.5, 200: 0.25, 300: 0.25, 400: 0.75}
    curve = [CurvePoint(at, 1.0, 0.0, {"val/loss": loss, "val/accuracy": at / 1000}) for at, loss in losses.items()]
    records[key] = replace(records[key], curve=(CurvePoint(50, 0.5, 0.0, {"train/loss": 1.0}), *curve), best_step=400)

    row = next(row for row in compare_trials(plan, records).rows if row.stage == key)

    assert (row.early_step, row.early_val) == (200, 0.2)
    assert records[key].least_loss == curve[1]
    assert replace(records[key], curve=curve[:0]).least_loss is None


def test_what_is_not_finite_becomes_null() -> None:
    plan, records = golden()
    key = plan.trials[0].stages[1]
    records[key] = replace(with_accuracy(records[key], float("nan")), macs_remaining=0.0)
    found = compare_trials(plan, records)

    assert only(found.points, 0.5).test is None
    assert json.loads(as_json(found))["points"][0]["speedup"] is None
    assert any("not finite" in line for line in text_table(found))


def test_comparing_needs_no_heavy_import() -> None:
    heavy = "{'torch', 'ray', 'mlflow', 'matplotlib', 'scipy'}"
    code = f"import sys, orchestrator.compare.compare_trials; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_the_table_and_its_notes_say_what_a_match_is() -> None:
    comparison = line_of([LITTLE, MUCH, MUCH], margin=0.0125)
    lines = list(text_table(comparison))

    assert [line.split()[-4] for line in lines[-4:-1]] == ["yes", "no", "–"]
    assert max(map(len, lines)) <= 79
    assert any(
        "a loss of 1.25 points of accuracy or more against dense is ruled out" in line for line in notes(comparison)
    )
    assert any(" untested " in line for line in text_table(line_of([(0.0,)])))


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (ACCURACY, "a loss of 1.00 points of accuracy or more"),
        (Metric("mean_error", "m", "lower", margin=0.5, format=".2f"), "a loss of 0.50 m of mean error or more"),
        (Metric("perplexity", "", "lower", margin=0.1, format=".1f"), "a loss of 0.1 in perplexity or more"),
        (Metric("rmse", "m", "lower", margin=0.0), "any loss of rmse"),
    ],
)
def test_what_a_match_rules_out_is_said_in_the_metric_s_words(metric: Metric, said: str) -> None:
    assert metric.loss == said


def test_where_lower_is_better_a_rise_is_the_loss() -> None:
    rmse = Metric("rmse", "", "lower", margin=0.02)

    def measured(losses: Sequence[float]) -> list[str | None]:
        plan = make_plan(("l1_unstructured",), (0.9,), (0, 1, 2), 1)
        records = {
            key: replace(each, metrics=(rmse,), after={"val/rmse": 1.0, "test/rmse": 1.0 + 0.001 * index})
            for index, (key, each) in enumerate(make_records(plan).items())
        }
        for trial, loss in zip(plan.trials, losses, strict=True):
            dense, last = records[trial.dense], trial.stages[-1]
            records[last] = replace(records[last], after={**dense.after, "test/rmse": dense.after["test/rmse"] + loss})
        found = compare_trials(plan, records)
        assert any("0.0200 in rmse or more" in line for line in notes(found))
        assert " test rmse " in " ".join(text_table(found))
        return [point.matching for point in found.points]

    assert measured((0.001, 0.002, 0.003)) == ["yes"]
    assert measured((-0.1, -0.11, -0.12)) == ["yes"]
    assert measured((0.05, 0.06, 0.07)) == ["no"]


def test_the_best_of_lines_is_the_lowest_where_lower_is_better() -> None:
    plan = make_plan(sparsities=(0.9,), rounds=1)
    rmse = Metric("rmse", "", "lower", margin=0.02)
    found = compare_trials(
        plan,
        {
            key: replace(
                each,
                metrics=(rmse,),
                after={
                    **each.after,
                    "test/rmse": each.sparsity
                    + (each.spec["fields"].get("method", {}).get("name") == "l1_unstructured"),
                },
            )
            for key, each in make_records(plan).items()
        },
    )

    assert [(point.line, point.best) for point in found.points] == [
        ("random_unstructured", True),
        ("l1_unstructured", False),
    ]


def test_further_test_sets_and_the_classes_that_are_harmed_most() -> None:
    plan = make_plan(("l1_unstructured",), (0.9,), (0, 1), 1)
    records = make_records(plan)
    for key, record in records.items():
        hits = [10, 9, 8, 5, 10**5] if record.round == 0 else [10, 3, 7 + plan.stages[key].fields["seed"], 6, 10**5 - 1]
        details = {"measured": {"test": {"hits": hits, "of": [10, 10, 10, 0, 10**5]}}}
        after = {**record.after, "test_shifted/accuracy": 0.8 - 0.1 * record.round}
        records[key] = replace(record, details=details, after=after)
    found = compare_trials(plan, records)
    (point,), (dense,) = found.points, found.dense

    assert [(each.label, round(each.loss, 9)) for each in point.harmed] == [(1, 0.6), (2, 0.05)], (
        "3 is not in the split, and what 4 loses is shown as 0"
    )
    assert dense.harmed == ()
    (shifted,) = point.further
    assert shifted.name == "shifted"
    assert shifted.test is not None
    assert shifted.difference is not None
    assert (shifted.test.mean, shifted.difference.mean) == pytest.approx((0.7, -0.1))
    table = "\n".join(text_table(found))
    assert "cnn on digits: shifted" in table
    assert "shifted accuracy %" in table
    assert any(
        "Classes that l1_unstructured at 90.01% harms most, in points: 1 (-60.00), 2 (-5.00)" in n for n in notes(found)
    )
    (row,) = [
        row for row in csv.DictReader(io.StringIO(points_csv(found).decode())) if row["line"] == "l1_unstructured"
    ]
    assert float(row["shifted_test_mean"]) == pytest.approx(0.7)
    assert row["harmed"] == "1:0.6 2:0.05"
    lines = list(csv.DictReader(io.StringIO(rows_csv(found).decode())))
    assert {round(float(line["test_shifted/accuracy"]), 9) for line in lines} == {0.8, 0.7}
    assert not {"test/accuracy", "val/loss"} & lines[0].keys(), "which have columns of their own"
