"""Tables of a report that compare methods: the best against each other, the winner on each text, folded columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_plan, make_records

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.deployment_points import DeployedPoint
from orchestrator.compare.statistics import Estimate, paired_difference
from orchestrator.views.report import tables
from orchestrator.views.report.columns import COLUMNS, blocks, folded
from orchestrator.views.report.page import comparison_tables
from orchestrator.views.report.tables import method_pairs, pair_table

PLAN = make_plan(sparsities=(0.5, 0.9), rounds=1)
RECORDS = make_records(PLAN)


def with_plays(worse: str) -> Comparison:
    """Return the comparison with a second text on which a method is worse."""
    records = {
        key: replace(
            record,
            after={
                **record.after,
                "test_plays/accuracy": 0.5
                - 0.1 * (record.spec["fields"].get("method", {}).get("name") == worse)
                - 0.2 * bool(record.round),
            },
        )
        for key, record in RECORDS.items()
    }
    return compare_trials(PLAN, records)


def test_the_best_method_is_compared_with_each_other_by_seed() -> None:
    found = compare_trials(PLAN, RECORDS)
    (pair, _) = method_pairs(found)
    tests = {row.stage: row.test for row in found.rows}
    one, two = ({s: tests[k] for s, k in zip(p.seeds, p.stages, strict=True)} for p in (pair.best, pair.other))

    assert pair.best.best
    assert not pair.other.best
    assert pair.best.asked_sparsity == pair.other.asked_sparsity == 0.5
    assert pair.difference == paired_difference(one, two)
    text = "\n".join([*tables.notes(found), *pair_table(found)])
    assert f"at 50.00%: {pair.best.line} - {pair.other.line}: +" in text
    assert "says nothing about the best method" in text
    alone = make_plan(methods=("l1_unstructured",))
    assert not method_pairs(compare_trials(alone, make_records(alone)))


@pytest.mark.parametrize(("worse", "bold"), [("l1_unstructured", 0), ("random_unstructured", 2)])
def test_a_winner_on_one_text_is_not_the_winner(worse: str, bold: int) -> None:
    found = with_plays(worse)
    page = "\n".join(comparison_tables(found))

    assert (
        sum(point.best_on_all for point in found.points)
        == page.count("best") - page.count("best mean") - page.count("best method")
        == bold
    )
    assert sum(each.best for point in found.points for each in point.further) == 2
    assert ("the texts differ in the best method" in page) == (bold == 0)


def test_columns_that_are_equal_or_empty_leave_the_table() -> None:
    found = with_plays("l1_unstructured")
    ((_, points),) = tables.sections(found)
    ((_, columns, _),) = blocks(found, points, beside=True)
    shown, constant = folded(points, columns)
    names = [column.heading(points[0].metric) for column in shown]

    assert names[:2] == ["sparsity %", "test accuracy %"]
    assert "seeds" not in names
    assert not {"95% interval", "own", "work"} & {*names}, "they stand in the fold"
    assert ("seeds", "3") in [(column.name, text) for column, text in constant]
    assert names.index("plays accuracy %") < names.index("size"), "the second text stands beside the first"
    more, same = folded(points, COLUMNS[len(columns) - 2 :])
    assert "cost" not in [column.name for column in (*more, *(each for each, _ in same))], "it is the steps"
    assert "Equal in all rows: seeds: 3" in "".join(comparison_tables(found)).replace("\u00a0", " ")


def test_the_achieved_fraction_stands_beside_one_that_was_asked_of_channels() -> None:
    found = compare_trials(PLAN, RECORDS)
    points = tuple(replace(point, budget="channels", unit="channel", reached=0.375) for point in found.points)
    (_, columns, _), *_ = blocks(found, points)

    assert [column.name for column in columns][:3] == ["sparsity %", "asked", "reached %"]
    assert {columns[2].cell(point) for point in points} == {"37.50"}
    (_, plain, _), *_ = blocks(found, found.points)
    assert "reached %" not in [column.name for column in plain]


def test_formats_measured_against_unequal_dense_networks_say_so() -> None:
    found = compare_trials(PLAN, RECORDS)

    def deployed(name: str, *runtimes: str) -> DeployedPoint:
        return DeployedPoint(name, 1, "cpu", 1.0, 2.0, Estimate(1, 2.0), 8.0, 9.0, None, None, dense_runtimes=runtimes)

    points = tuple(replace(p, deployed=(deployed("shrink"), deployed("sparse", "onnx"))) for p in found.points)
    assert [*tables.speedup_note(replace(found, points=points))] == [
        "Measured speed-ups: shrink over dense in that format; sparse over dense in its fastest runtime here (onnx). "
        "Compare them only within a format."
    ]
    assert not [*tables.speedup_note(found)]
