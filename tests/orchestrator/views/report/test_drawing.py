from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from factories import ACCURACY, DENSE_STEPS, ROUND_STEPS, SIZES, make_plan, make_records
from matplotlib.figure import Figure
from sampling import sampled

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.round_columns import scoring_steps
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.views.report import report_files
from orchestrator.views.report.figures import drawing, figure_data, layer_data
from orchestrator.views.report.figures.figure_table import FIGURES, Source

PLAN = make_plan(sparsities=(0.5, 0.75, 0.9))
RECORDS = make_records(PLAN)
FOUND = compare_trials(PLAN, RECORDS)
COSTLIER = compare_trials(
    PLAN,
    {
        key: replace(r, steps=r.steps + 50 * ("l1" in r.spec["fields"].get("method", {}).get("name", "")))
        for key, r in RECORDS.items()
    },
)
"""Comparison in which one method trains longer."""


def drawn(name: str, found: Sequence[drawing.Drawn]) -> Figure:
    return drawing.figure(found, FIGURES[name].draw)


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

    assert [series.label for series in plot.series] == ["random_unstructured to 90.01%", "l1_unstructured to 90.01%"]
    first, second = DENSE_STEPS, DENSE_STEPS + ROUND_STEPS
    steps = sorted([*range(25, second + ROUND_STEPS + 1, 25), first, second])
    series = plot.series[0]
    assert series.x == tuple(map(float, steps)), "a round begins at the step at which the stage before it ended"
    assert series.y[0] == pytest.approx(1 - 1 / 26)
    assert series.marks is not None
    assert [series.x[index] for index in series.marks] == [first, second]
    seeds = [trial.stages for trial in PLAN.trials if trial.name.startswith("random_unstructured sparsity=0.9")]
    for index, number in zip(series.marks, (1, 2), strict=True):
        pruned = [RECORDS[stages[number]].before["val/accuracy"] for stages in seeds]
        assert series.y[index] == pytest.approx(sum(pruned) / 3), "the drop by pruning, before a step has trained it"


def test_a_round_of_which_nothing_is_known_once_pruned_is_marked_at_its_first_point() -> None:
    blind = {key: replace(record, before={}) for key, record in RECORDS.items()}
    series = figure_data.curves(PLAN, blind, compare_trials(PLAN, blind))[0].series[0]

    assert series.marks is not None
    assert [series.x[index] for index in series.marks] == [DENSE_STEPS + 25, DENSE_STEPS + ROUND_STEPS + 25]


def test_curves_of_unequal_length_are_averaged_where_both_are() -> None:
    key = PLAN.trials[0].stages[0]
    shorter = {**RECORDS, key: replace(RECORDS[key], curve=RECORDS[key].curve[:4])}
    (plot,) = figure_data.curves(PLAN, shorter, compare_trials(PLAN, shorter))

    assert plot.series[0].x[:5] == (25.0, 50.0, 75.0, 100.0, 300.0)


def test_the_heat_map_holds_each_tensors_sparsity() -> None:
    (matrix,) = layer_data.layer_sparsity(RECORDS, FOUND)

    assert matrix.columns == tuple(SIZES)
    assert matrix.rows[0] == "random_unstructured 50.00%"
    assert matrix.values[0] == pytest.approx([0.5] * 4, abs=0.01)
    assert len(matrix.rows) == 6


def test_a_heat_map_never_has_more_rows_than_can_be_read() -> None:
    plan = make_plan(sparsities=[i / 100 for i in range(1, 100)], seeds=(0,), rounds=1)
    records = make_records(plan)
    (matrix,) = layer_data.layer_sparsity(records, compare_trials(plan, records))

    assert len(matrix.rows) <= layer_data.HEAT_ROWS


def test_the_overlap_is_of_methods_with_one_seed_and_of_a_method_with_two() -> None:
    asked = []

    def shared(a: str, b: str) -> tuple[float, float]:
        asked.append((a, b))
        first, second = (RECORDS[key] for key in (a, b))
        methods = {str(each.spec["fields"]["method"]["name"]) for each in (first, second)}
        same_seed = first.spec["fields"]["seed"] == second.spec["fields"]["seed"]
        assert same_seed == (len(methods) == 2)
        return (0.25, 0.1) if same_seed else (0.75, 0.2)

    (matrix,) = layer_data.overlap(FOUND, layer_data.overlapping(FOUND), shared)

    assert matrix.rows == matrix.columns == ("random_unstructured", "l1_unstructured")
    assert matrix.values == ((0.75, 0.25), (0.25, 0.75))
    assert [*map(list, matrix.chance)] == [pytest.approx([0.2, 0.1]), pytest.approx([0.1, 0.2])]
    assert len({frozenset(pair) for pair in asked}) == len(asked) == 3 + 3 + 3
    assert "90% sparse" in matrix.title


def test_masks_share_what_both_keep_and_by_chance_what_their_layers_densities_give() -> None:
    one = {"a": np.array([1, 1, 0, 0], bool), "b": np.array([1, 0], bool)}
    other = {"a": np.array([1, 0, 0, 0], bool), "b": np.array([1, 1], bool)}

    assert layer_data._shared(one, other) == (2 / 3, (2 * 1 / 4 + 1 * 2 / 2) / 3)
    assert layer_data._shared(one, one) == (1.0, (2 * 2 / 4 + 1 * 1 / 2) / 3)
    assert layer_data._shared(one, {"a": one["a"]}) is None


def test_densities_are_of_all_that_were_asked_for_the_same_whatever_that_came_to() -> None:
    reached = {"random_unstructured": 0.496, "l1_unstructured": 0.489}
    asked = replace(
        FOUND,
        points=tuple(
            replace(point, sparsity=reached[point.line], unit="group", budget="channels") for point in FOUND.points
        ),
    )
    (profile,) = layer_data.densities(RECORDS, asked)

    assert profile.title == "cnn on digits, asked: 90% of channels (unit=group)"
    assert [series.label for series in profile.series] == ["random_unstructured", "l1_unstructured"]


def test_densities_are_those_of_each_method_at_the_sparsity_that_most_were_asked_for() -> None:
    (profile,) = layer_data.densities(RECORDS, FOUND)

    assert profile.layers == tuple(SIZES)
    assert profile.title == "cnn on digits, 90% sparse"
    assert [series.label for series in profile.series] == ["random_unstructured", "l1_unstructured"]
    assert profile.series[0].y == pytest.approx([0.1] * 4, abs=0.01)
    assert drawing.render(lambda: drawing.figure([profile], drawing.densities))["svg"]


def test_a_report_shows_densities_only_where_layers_or_methods_differ() -> None:
    def shown(first: float) -> int:
        records = {
            key: replace(each, tensor_sparsity={**each.tensor_sparsity, "conv1.weight": first})
            for key, each in RECORDS.items()
        }
        return len(layer_data.densities(records, compare_trials(PLAN, records), compared=True))

    assert (shown(0.895), shown(0.5)) == (0, 1)


@pytest.mark.parametrize("least", [0.0, 0.001, 0.5])
def test_marks_at_the_ends_of_the_densities_are_drawn_whole(least: float) -> None:
    profile = layer_data.Profile("cnn on digits", ("a", "b"), (figure_data.Series("l1", (0.0, 1.0), (least, 1.0)),))
    figure = drawing.figure([profile], drawing.densities)
    figure.draw_without_rendering()

    (axes,) = figure.axes
    radius = axes.lines[0].get_markersize() / 2 * figure.dpi / 72
    for x, y in axes.transData.transform(axes.lines[0].get_xydata()):
        assert axes.bbox.y0 + radius <= y <= axes.bbox.y1 - radius, (x, y)


def test_brackets_in_a_matrix_are_explained_beside_its_colours() -> None:
    matrix = layer_data.Matrix("cnn on digits", ("a",), ("a",), ((0.5,),), ((0.25,),))

    assert drawn("overlap", [matrix]).axes[1].get_ylabel() == "kept by both\n(in brackets: by chance)"
    assert drawn("layers", [replace(matrix, chance=())]).axes[1].get_ylabel() == "sparsity"


def test_densities_far_apart_have_plain_numbers_at_their_axis() -> None:
    profile = layer_data.Profile("p", ("a", "b"), (figure_data.Series("m", (0.0, 1.0), (0.002, 0.9)),) * 2)
    figure = drawing.figure([profile], drawing.densities)
    figure.draw_without_rendering()

    assert "10" in (said := [label.get_text() for label in figure.axes[0].get_yticklabels()])
    assert not any("$" in text for text in said)


@pytest.mark.slow
def test_what_one_method_cannot_show_is_not_drawn() -> None:
    plan = make_plan(methods=("l1_unstructured",))
    records = make_records(plan)
    found = compare_trials(plan, records)

    assert figure_data.tradeoff(found, "cost") == layer_data.densities(records, found, compared=True) == ()
    assert layer_data.overlapping(found) == ()
    figures = report_files.draw(plan, records, found, lambda key, name: b"not asked for")
    assert figures.keys() == {"tradeoff", "fine_tuning", "curves", "layers"}


def test_a_long_legend_stands_beside_the_axes() -> None:
    series = tuple(figure_data.Series(f"method_{i}, its learning rate", (1.0, 2.0), (0.9, 0.8)) for i in range(40))
    figure = drawn("tradeoff", [figure_data.Plot("p", ACCURACY, series)])
    figure.draw_without_rendering()  # warns if there is no room left
    legend, axes = figure.axes[0].get_legend().get_window_extent(), figure.axes[0].get_window_extent()

    assert legend.x0 >= axes.x1
    assert legend.x1 <= figure.bbox.x1
    assert legend.y0 >= figure.bbox.y0
    assert axes.width > 300


def test_cost_is_counted_from_the_initialisation() -> None:
    (plot,) = figure_data.tradeoff(COSTLIER, "cost")

    assert set(plot.series[0].x) == {DENSE_STEPS + 2 * ROUND_STEPS}
    assert figure_data.tradeoff(FOUND, "cost") == (), "points of one cost say nothing about cost"


def test_a_run_without_training_has_no_figure_of_training() -> None:
    records = {
        key: replace(record, steps=0, curve=(), before={k: v for k, v in record.after.items() if "val" in k})
        for key, record in RECORDS.items()
    }
    found = compare_trials(PLAN, records)

    assert report_files.draw(PLAN, records, found, None).keys() == {"tradeoff", "layers"}


def test_more_layers_than_can_be_read_are_shown_by_block_and_by_role() -> None:
    names = [f"model.layers.{block}.{role}.weight" for block in range(21) for role in ("attn.q_proj", "up_proj")]
    sparsity = {name: 0.2 if "attn" in name else 0.8 for name in names}
    sizes = {name: 10 if "attn" in name else 30 for name in names}
    records = {key: replace(each, tensor_sparsity=sparsity, tensor_sizes=sizes) for key, each in RECORDS.items()}
    found = compare_trials(PLAN, records)

    by_block, by_role = layer_data.layer_sparsity(records, found, grouped=True)
    assert by_block.columns == tuple(f"model.layers.{block}" for block in range(21))
    assert by_block.values[0] == pytest.approx([(0.2 * 10 + 0.8 * 30) / 40] * 21), "entries weigh the same, not tensors"
    assert (by_role.columns, by_role.values[0]) == (("attn.q_proj", "up_proj"), pytest.approx((0.2, 0.8)))
    assert [len(each.layers) for each in layer_data.densities(records, found, grouped=True)] == [21, 2]
    assert len(layer_data.layer_sparsity(records, found)[0].columns) == 42, "in Python all layers are drawn"
    assert layer_data.groupings([f"fc{i}.weight" for i in range(41)]).keys() == {""}, "no grouping joins them"


def test_each_text_has_its_own_tradeoff() -> None:
    records = {key: replace(each, after={**each.after, "test_plays/accuracy": 0.25}) for key, each in RECORDS.items()}
    found = compare_trials(PLAN, records)

    (plot,) = figure_data.tradeoff(found, text="plays")
    assert plot.title == "cnn on digits: plays"
    assert plot.reference is not None
    assert {plot.reference.mean, *plot.series[0].y} == {0.25}


def test_cost_counts_what_scores_read_in_steps() -> None:
    def with_scoring(key: str, **scoring: int) -> float:
        spec = PLAN.stages[key]
        train = {**spec.fields["finetune"], "accumulate": 2}
        spec = replace(spec, fields={**spec.fields, "finetune": train, "score": {"batch_size": 100}})
        return scoring_steps(spec, replace(RECORDS[key], details={"scoring": scoring}))

    key = PLAN.trials[0].stages[1]  # a step reads 2 x 64 examples
    assert with_scoring(key, examples=256, passes=3, rescorings=1) == 2.0, "a pass over each of three batches"
    assert with_scoring(key, examples=256, passes=6, rescorings=1) == 4.0, "each is passed twice"
    assert with_scoring(key, examples=640, passes=0, rescorings=10) == 5.0, "without a loss"
    assert with_scoring(key, examples=0, passes=0, rescorings=1) == 0.0


@sampled(2)
@pytest.mark.parametrize("name", ["tradeoff", "fine_tuning", "cost"])
def test_drawing_is_deterministic_and_valid(name: str) -> None:
    data = FIGURES[name].data(Source(PLAN, {}, COSTLIER))

    first, second = (drawing.render(lambda: drawn(name, data)) for _ in range(2))

    assert first["svg"] == second["svg"]
    assert first["png"][:8] == b"\x89PNG\r\n\x1a\n"
    ElementTree.fromstring(first["svg"])
    assert b"<dc:date>" not in first["svg"]


def test_matrices_and_empty_figures_are_drawn() -> None:
    matrix = layer_data.Matrix("m", ("a", "b"), ("x",), ((0.5,), (None,)))

    assert drawing.render(lambda: drawn("layers", [matrix, matrix]))["svg"]
    assert drawing.render(lambda: drawn("tradeoff", []))["svg"]
    assert drawing.render(lambda: drawn("layers", []))["svg"]


def test_lines_differ_in_more_than_colour() -> None:
    series = tuple(figure_data.Series(f"m{i}", (1.0, 2.0), (0.9, 0.8)) for i in range(6))
    figure = drawn("tradeoff", [figure_data.Plot("p", ACCURACY, series)])

    looks = [(line.get_marker(), str(line.get_linestyle())) for line in figure.axes[0].lines]
    assert len(set(looks)) == len(series)


def test_no_band_leaves_the_accuracies_there_are() -> None:
    series = figure_data.Series("m", (1.0, 2.0), (0.99, 0.01), low=(0.95, -0.02), high=(1.03, 0.04))
    figure = drawn("tradeoff", [figure_data.Plot("p", ACCURACY, (series,), Estimate(0.99, 0.02, 0.94, 1.04, 3))])

    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0, 100)
    (dense,) = figure.axes[0].patches
    assert dense.get_bbox().y1 == 100


def test_what_is_no_fraction_is_drawn_on_its_own_scale_with_its_unit() -> None:
    series = figure_data.Series("m", (1.0, 2.0), (5.0, 150.0), low=(-4.0, 140.0), high=(14.0, 160.0))
    axes = drawn("tradeoff", [figure_data.Plot("p", Metric("rmse", "m", "lower", 0.1), (series,))]).axes[0]

    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (-4, 160)
    assert axes.get_ylabel() == "test rmse (m)"


def test_a_name_is_drawn_as_it_is() -> None:
    series = figure_data.Series(r"$\frac{$", (1.0, 2.0), (0.9, 0.8))

    assert drawing.render(lambda: drawn("tradeoff", [figure_data.Plot(r"$\frac{$", ACCURACY, (series,))]))["svg"]


def test_no_global_state_is_touched() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    drawing.render(lambda: drawn("tradeoff", figure_data.tradeoff(FOUND)))

    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("letters", [8, 60, 200])
def test_long_labels_leave_room_for_the_matrix(letters: int) -> None:
    names = tuple(f"{number} {'l1_unstructured, lr=0.1 ' * 9}"[:letters] for number in range(5))
    figure = drawn("layers", (layer_data.Matrix("title", names, names, ((0.5,) * 5,) * 5),))
    figure.draw_without_rendering()  # warns if there is no room left
    axes = figure.axes[0]
    box = axes.get_window_extent()
    assert box.width > 100
    assert box.height > 50
    assert all(label.get_window_extent().x0 >= 0 for label in axes.get_yticklabels())
    assert all(label.get_window_extent().y0 >= 0 for label in axes.get_xticklabels())
