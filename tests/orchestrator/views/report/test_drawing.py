from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from factories import ACCURACY, DENSE_STEPS, ROUND_STEPS, SIZES, make_plan, make_records

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.views.report import drawing, figure_data

PLAN = make_plan(sparsities=(0.5, 0.75, 0.9))
RECORDS = make_records(PLAN)
FOUND = compare_trials(PLAN, RECORDS)


def test_the_tradeoff_is_accuracy_against_compression_with_dense_as_reference() -> None:
    (plot,) = figure_data.tradeoff(FOUND)

    assert plot.title == "cnn on digits"
    assert [series.label for series in plot.series] == ["random_unstructured", "l1_unstructured"]
    for series in plot.series:
        points = [point for point in FOUND.operating_points if point.line == series.label]
        assert series.x == tuple(point.compression for point in points)
        assert series.y == tuple(point.test.mean for point in points if point.test)
        assert series.low == tuple(point.test.low for point in points if point.test)
        assert list(series.x) == sorted(series.x)
    assert plot.reference == FOUND.dense[0].test


def test_points_without_an_estimate_are_left_out() -> None:
    key = PLAN.trials[0].stages[-1]
    broken = {**RECORDS, key: replace(RECORDS[key], after={"test/accuracy": float("nan")})}
    (plot,) = figure_data.tradeoff(compare_trials(PLAN, broken))

    assert [len(series.x) for series in plot.series] == [2, 3]


def test_fine_tuning_has_a_line_before_and_one_after() -> None:
    (plot,) = figure_data.fine_tuning(FOUND)

    assert [series.label for series in plot.series][:2] == ["random_unstructured, before", "random_unstructured, after"]
    before, after = plot.series[:2]
    assert before.x == after.x
    assert all(low < high for low, high in zip(before.y, after.y, strict=True))


def test_curves_go_over_the_whole_chain() -> None:
    (plot,) = figure_data.curves(PLAN, RECORDS, FOUND)

    assert [series.label for series in plot.series] == ["random_unstructured to 90.0%", "l1_unstructured to 90.0%"]
    assert plot.series[0].x == tuple(float(step) for step in range(25, DENSE_STEPS + 2 * ROUND_STEPS + 1, 25))
    assert plot.series[0].y[0] == pytest.approx(1 - 1 / 26)


def test_curves_of_unequal_length_are_averaged_where_both_are() -> None:
    key = PLAN.trials[0].stages[0]
    shorter = {**RECORDS, key: replace(RECORDS[key], curve=RECORDS[key].curve[:4])}
    (plot,) = figure_data.curves(PLAN, shorter, compare_trials(PLAN, shorter))

    assert plot.series[0].x[:5] == (25.0, 50.0, 75.0, 100.0, 325.0)


def test_the_heat_map_holds_each_tensors_sparsity() -> None:
    (matrix,) = figure_data.layer_sparsity(RECORDS, FOUND)

    assert matrix.columns == tuple(SIZES)
    assert matrix.rows[0] == "random_unstructured 50.0%"
    assert matrix.values[0] == pytest.approx([0.5] * 4, abs=0.01)
    assert len(matrix.rows) == 6


def test_a_heat_map_never_has_more_rows_than_can_be_read() -> None:
    plan = make_plan(sparsities=[i / 100 for i in range(1, 100)], seeds=(0,), rounds=1)
    records = make_records(plan)
    (matrix,) = figure_data.layer_sparsity(records, compare_trials(plan, records))

    assert len(matrix.rows) <= figure_data.HEAT_ROWS


def test_the_overlap_is_symmetric_and_asks_for_each_pair_once() -> None:
    asked = []

    def iou(a: str, b: str) -> float:
        asked.append((a, b))
        return 1.0 if a == b else 0.25

    (matrix,) = figure_data.overlap(FOUND, figure_data.overlapping(FOUND), iou)

    assert matrix.rows == matrix.columns
    assert len(matrix.rows) == 6
    assert matrix.rows[0] == "random_unstructured, seed 0"
    assert [matrix.values[i][i] for i in range(6)] == [1.0] * 6
    assert all(matrix.values[i][j] == matrix.values[j][i] for i in range(6) for j in range(6))
    assert len({frozenset(pair) for pair in asked}) == len(asked) == 21
    assert "90% sparse; by chance 0.05" in matrix.title


def test_cost_is_counted_from_the_initialisation() -> None:
    (plot,) = figure_data.cost(FOUND)

    assert set(plot.series[0].x) == {DENSE_STEPS + 2 * ROUND_STEPS}


@pytest.mark.parametrize("name", ["tradeoff", "fine_tuning", "cost"])
def test_drawing_is_deterministic_and_valid(name: str) -> None:
    data, draw = getattr(figure_data, name)(FOUND), getattr(drawing, name)

    first, second = drawing.render(lambda: draw(data)), drawing.render(lambda: draw(data))

    assert first["svg"] == second["svg"]
    assert first["png"][:8] == b"\x89PNG\r\n\x1a\n"
    ElementTree.fromstring(first["svg"])
    assert b"<dc:date>" not in first["svg"]


def test_matrices_and_empty_figures_are_drawn() -> None:
    matrix = figure_data.Matrix("m", ("a", "b"), ("x",), ((0.5,), (None,)))

    assert drawing.render(lambda: drawing.matrices([matrix, matrix], "sparsity"))["svg"]
    assert drawing.render(lambda: drawing.tradeoff([]))["svg"]
    assert drawing.render(lambda: drawing.matrices([], "sparsity"))["svg"]


def test_lines_differ_in_more_than_colour() -> None:
    series = tuple(figure_data.Series(f"m{i}", (1.0, 2.0), (0.9, 0.8)) for i in range(6))
    figure = drawing.tradeoff([figure_data.Plot("p", ACCURACY, series)])

    looks = [(line.get_marker(), str(line.get_linestyle())) for line in figure.axes[0].lines]
    assert len(set(looks)) == len(series)


def test_no_band_leaves_the_accuracies_there_are() -> None:
    series = figure_data.Series("m", (1.0, 2.0), (0.99, 0.01), low=(0.95, -0.02), high=(1.03, 0.04))
    figure = drawing.tradeoff([figure_data.Plot("p", ACCURACY, (series,), Estimate(0.99, 0.02, 0.94, 1.04, 3))])

    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0, 100)
    (dense,) = figure.axes[0].patches
    assert dense.get_bbox().y1 == 100


def test_what_is_no_fraction_is_drawn_on_its_own_scale_with_its_unit() -> None:
    series = figure_data.Series("m", (1.0, 2.0), (5.0, 150.0), low=(-4.0, 140.0), high=(14.0, 160.0))
    axes = drawing.tradeoff([figure_data.Plot("p", Metric("rmse", "m", "lower", 0.1), (series,))]).axes[0]

    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (-4, 160)
    assert axes.get_ylabel() == "test rmse (m)"


def test_a_name_is_drawn_as_it_is() -> None:
    series = figure_data.Series(r"$\frac{$", (1.0, 2.0), (0.9, 0.8))

    assert drawing.render(lambda: drawing.tradeoff([figure_data.Plot(r"$\frac{$", ACCURACY, (series,))]))["svg"]


def test_no_global_state_is_touched() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    drawing.render(lambda: drawing.tradeoff(figure_data.tradeoff(FOUND)))

    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("letters", [8, 60, 200])
def test_long_labels_leave_room_for_the_matrix(letters: int) -> None:
    names = tuple(f"{number} {'l1_unstructured, lr=0.1 ' * 9}"[:letters] for number in range(5))
    figure = drawing.matrices((figure_data.Matrix("title", names, names, ((0.5,) * 5,) * 5),), "IoU")
    figure.draw_without_rendering()  # warns where no room is left
    axes = figure.axes[0]
    box = axes.get_window_extent()
    assert box.width > 100
    assert box.height > 50
    assert all(label.get_window_extent().x0 >= 0 for label in axes.get_yticklabels())
    assert all(label.get_window_extent().y0 >= 0 for label in axes.get_xticklabels())
