"""Multiply-accumulates of trainings in a comparison: totals from the initialisation, means, ratios, and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_plan, make_records
from small_trials import planned, small, train

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, RATES, REWIND, Plan, start_of
from orchestrator.store.store import Store
from orchestrator.views.report.columns import COLUMNS
from orchestrator.views.report.figures import drawing, figure_data
from orchestrator.views.report.figures.figure_table import FIGURES
from orchestrator.views.report.plain_files import points_csv, rows_csv


def counted(record: StageRecord, macs: int) -> StageRecord:
    """Return a record whose training takes this number of multiply-accumulates, a third of them forward."""
    phase = {"steps": 1, "examples": 1, "forward": macs // 3, "backward": macs - macs // 3}
    return replace(record, details={**record.details, "training_macs": {"sparse": phase}})


def totals(comparison: Comparison) -> list[tuple[int | None, int | None]]:
    return [(row.training_macs, row.total_training_macs) for row in comparison.rows]


def chain_of_two() -> tuple[Plan, dict[str, StageRecord]]:
    """Return a dense training of 900 multiply-accumulates, and rounds of 60 and 30."""
    plan = make_plan(("l1_unstructured",), (0.5,), (0,), rounds=2)
    (trial,) = plan.trials
    costs = dict(zip(trial.stages, (900, 60, 30), strict=True))
    return plan, {key: counted(record, costs[key]) for key, record in make_records(plan).items()}


def started(
    costs: Mapping[int, int | None], roles: Mapping[str, int], *, beside: int = 900
) -> tuple[Plan, dict[str, StageRecord]]:
    """Return a trial that begins with a start at step 0 and has one round of 60 multiply-accumulates.

    Args:
        costs: step of a start -> multiply-accumulates up to it; None: not recorded
        roles: role of an input of the round -> step of the start
        beside: multiply-accumulates of the dense training, which is not in the chain
    """
    plan = make_plan(("snip",), (0.5,), (0,), rounds=1)
    (trial,) = plan.trials
    dense, pruned = (plan.stages[key] for key in trial.stages)
    starts = {step: start_of(dense, step) for step in costs}
    pruned = replace(
        pruned, inputs={NETWORK: starts[0].key, **{role: starts[step].key for role, step in roles.items()}}
    )
    stages = {spec.key: spec for spec in (*starts.values(), dense, pruned)}
    last = replace(make_records(plan)[trial.stages[-1]], key=pruned.key)
    records = {dense.key: counted(make_records(plan)[dense.key], beside), pruned.key: counted(last, 60)}
    for step, spec in starts.items():
        record = replace(records[dense.key], key=spec.key, kind="start", steps=step, details={})
        macs = costs[step]
        records[spec.key] = record if macs is None else counted(record, macs)
    return Plan(stages, (replace(trial, stages=(starts[0].key, pruned.key)),)), records


def test_the_total_is_the_sum_over_the_chain() -> None:
    assert totals(compare_trials(*chain_of_two())) == [(900, 900), (60, 960), (30, 990)]


def test_rewinding_within_a_chain_with_its_dense_training_counts_nothing_twice() -> None:
    plan, records = chain_of_two()
    (trial,) = plan.trials
    dense, first, last = (plan.stages[key] for key in trial.stages)
    start = start_of(dense, 100)
    rewound = replace(first, inputs={**first.inputs, REWIND: start.key, RATES: start.key})
    records[start.key] = counted(replace(records[dense.key], key=start.key, kind="start"), 300)
    stages = {start.key: start, dense.key: dense, first.key: rewound, last.key: last}

    assert totals(compare_trials(Plan(stages, plan.trials), records))[1:] == [(60, 960), (30, 990)]


@pytest.mark.parametrize(
    ("costs", "roles", "total"),
    [
        ({0: None}, {}, 60),  # nothing is trained up to step 0, also in an older record
        ({0: None}, {RATES: 0}, 60),
        ({0: None, 100: 300}, {REWIND: 100, RATES: 100}, 360),
        ({0: None, 100: 300, 200: 600}, {REWIND: 100, RATES: 200}, 660),  # the first start is part of the second
        ({0: None, 100: 300, 200: 600}, {REWIND: 100}, 360),
        ({0: None, 100: None}, {RATES: 100}, None),
        ({0: None, 100: 300, 200: None}, {REWIND: 100, RATES: 200}, None),
    ],
)
def test_a_chain_without_its_dense_training_counts_the_furthest_start_once(
    costs: Mapping[int, int | None], roles: Mapping[str, int], total: int | None
) -> None:
    dense, pruned = compare_trials(*started(costs, roles)).rows

    assert (dense.training_macs, dense.total_training_macs) == (900, 900)
    assert (pruned.training_macs, pruned.total_training_macs) == (60, total)


def test_a_start_that_is_missing_leaves_the_total_unknown() -> None:
    plan, records = started({0: None, 100: 300}, {RATES: 100})
    lost = {key: record for key, record in records.items() if (record.kind, record.steps) != ("start", 100)}

    assert len(lost) == len(records) - 1
    assert totals(compare_trials(plan, lost)) == [(900, 900), (60, None)]


def test_an_older_record_leaves_the_totals_after_it_unknown() -> None:
    plan, records = chain_of_two()
    (trial,) = plan.trials
    records[trial.stages[1]] = replace(records[trial.stages[1]], details={})

    assert totals(compare_trials(plan, records)) == [(900, 900), (None, None), (30, None)]


def test_steps_that_no_optimizer_counted_cost_an_unknown_amount() -> None:
    plan, records = chain_of_two()
    record = records[plan.trials[0].dense]

    assert replace(record, details={"training_macs": {}}).training_macs is None
    assert replace(record, details={"training_macs": {}}, steps=0).training_macs == 0
    assert record.figures["training_macs"] == 900.0
    assert "training_macs" not in replace(record, details={}).figures


def seeds(costs: Mapping[int, int | None], dense: int = 1000) -> Comparison:
    """Return a line whose rounds cost a number of multiply-accumulates by seed, after dense trainings."""
    plan = make_plan(("l1_unstructured",), (0.5,), tuple(costs), rounds=1)
    records = make_records(plan)
    for trial in plan.trials:
        first, last = trial.stages
        cost = costs[trial.config["seed"]]
        records[first] = counted(records[first], dense) if dense else replace(records[first], steps=0)
        records[last] = records[last] if cost is None else counted(records[last], cost)
    return compare_trials(plan, records)


def test_a_point_has_means_over_seeds_and_the_ratio_to_dense_is_a_column() -> None:
    (column,) = (column for column in COLUMNS if column.name == "training MACs")
    found = seeds({0: 200, 1: 400})
    (dense,), (point,) = found.dense, found.points

    assert (point.training_macs, point.total_training_macs, point.dense_training_macs) == (300.0, 1300.0, 1000.0)
    assert (column.cell(dense), column.cell(point)) == ("1.00×", "1.30×")
    assert "save no time in PyTorch" in column.hint
    (unknown,), (untrained,) = seeds({0: 200, 1: None}).points, seeds({0: 200}, dense=0).points
    assert (unknown.total_training_macs, unknown.training_ratio, column.cell(unknown)) == (None, None, "")
    assert (untrained.total_training_macs, untrained.training_ratio, column.cell(untrained)) == (200.0, None, "")


def test_the_files_have_the_costs_as_columns() -> None:
    found = seeds({0: 200, 1: None})
    rows, points = (list(csv.DictReader(io.StringIO(write(found).decode()))) for write in (rows_csv, points_csv))

    assert [(row["training_macs"], row["total_training_macs"]) for row in rows] == [
        ("1000", "1000"),
        ("200", "1200"),
        ("1000", "1000"),
        ("", ""),
    ]
    assert [(point["training_macs"], point["total_training_macs"]) for point in points] == [
        ("1000.0", "1000.0"),
        ("", ""),
    ]


def two_lines(known: bool = True) -> Comparison:
    """Return two lines of two sparsities; a round costs 1000 * density more than dense for l1, twice as much else."""
    plan = make_plan(sparsities=(0.5, 0.9), rounds=1)
    records = make_records(plan)
    for trial in plan.trials:
        first, last = trial.stages
        times = 1 if trial.name.startswith("l1") else 2
        records[first] = counted(records[first], 3000)
        if known or times == 1:
            records[last] = counted(records[last], times * round(1000 * (1 - trial.config["schedule"]["sparsity"])))
    return compare_trials(plan, records)


def test_the_figure_has_each_point_at_its_total_with_its_interval_and_dense() -> None:
    found = two_lines()
    (plot,) = figure_data.tradeoff(found, "training_macs")
    by_label = {series.label: series for series in plot.series}
    points = {(point.line, point.asked_sparsity): point.test for point in found.points}

    assert list(by_label) == ["random_unstructured", "l1_unstructured", "dense"]
    assert by_label["l1_unstructured"].x == (3100.0, 3500.0)
    assert by_label["random_unstructured"].x == (3200.0, 4000.0)
    assert by_label["dense"].x == (3000.0,)
    sparse = points["l1_unstructured", 0.9]
    assert sparse is not None
    assert (by_label["l1_unstructured"].low[0], by_label["l1_unstructured"].high[0]) == (sparse.low, sparse.high)
    assert figure_data.tradeoff(two_lines(known=False), "training_macs") == ()

    (axes,) = drawing.figure([plot], FIGURES["training_macs"].draw).axes
    ends = [tuple(100 * end for end in (sparse.low, sparse.high) if end is not None)]
    collections: list[Any] = [*axes.collections]
    segments = [segment for each in collections for segment in each.get_segments()]
    drawn = [tuple(segment[:, 1]) for segment in segments if segment[0, 0] == 3100]
    assert drawn == [pytest.approx(each) for each in ends]


@pytest.mark.slow
def test_totals_of_real_trainings_by_hand(tmp_path: Path) -> None:
    """A network of 4 x 8 + 8 x 2 = 48 weights, 60 examples, 3 epochs; forward once, backward twice."""
    plan = planned(
        small(),
        small("schedule.at=start"),
        small("schedule.at=start", "restart=rewind", "restart.step=1ep"),
        small("restart=rewind", "restart.step=1ep"),
    )
    found = compare_trials(plan, train(plan, Store(str(tmp_path))))
    whole, half = 3 * 48 * 60, 3 * 24 * 60

    assert {(row.training_macs, row.total_training_macs) for row in found.rows if not row.round} == {(3 * whole,) * 2}
    assert [(row.training_macs, row.total_training_macs) for row in found.rows if row.round] == [
        (half, 3 * whole + half),
        (3 * half, 3 * half),
        (2 * half, whole + 2 * half),
        (2 * half, 3 * whole + 2 * half),
    ]
