"""Results of sparse trainings: lines at equal cost, and the history of masks, as frames and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from factories import SIZES, make_plan, make_records, sweep_info
from matplotlib.figure import Figure
from small_trials import planned, small, train

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.results.equal_cost import COLUMNS, at_equal_cost
from orchestrator.results.frames import MASK_UPDATE_COLUMNS
from orchestrator.results.sweep_results import SweepResults
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.views.report.figures.layer_data import mask_history
from orchestrator.views.report.report_files import report

PLAN = make_plan(("rigl", "static"), (0.5, 0.9), (0, 1, 2), rounds=1)
COUNTS = {"steps": 1, "examples": 1, "forward": 0}
ENTRIES = sum(SIZES.values())


def results(plan: Plan, records: Mapping[str, StageRecord]) -> SweepResults:
    """Return a sweep whose store does not exist."""
    return SweepResults(Store("nowhere", read_only=True), SavedSweep(sweep_info(), plan, records))


def costing(costs: Mapping[tuple[str, float], int]) -> SweepResults:
    """Return a sweep with dense trainings of 1000 multiply-accumulates, and accuracies 0.9 - loss by seed.

    rigl loses 0.01, 0.02 and 0.03 by seed, static twice as much; at 0.9 both lose 0.1 more.

    Args:
        costs: method and sparsity -> multiply-accumulates of its round.
    """
    records = make_records(PLAN)
    for trial in PLAN.trials:
        method, sparsity, seed = (
            trial.config["method"]["name"],
            trial.config["schedule"]["sparsity"],
            trial.config["seed"],
        )
        loss = 0.01 * (1 + seed) * (1 if method == "rigl" else 2) + (0.1 if sparsity == 0.9 else 0.0)
        made = {trial.stages[0]: (1000, 0.9), trial.stages[1]: (costs[method, sparsity], 0.9 - loss)}
        for key, (macs, accuracy) in made.items():
            cost = {"sparse": {"steps": 1, "examples": 1, "forward": 0, "backward": macs}}
            after = {**records[key].after, "test/accuracy": accuracy}
            records[key] = replace(records[key], after=after, details={"training_macs": cost})
    return results(PLAN, records)


COSTS = {("rigl", 0.5): 500, ("rigl", 0.9): 100, ("static", 0.5): 400, ("static", 0.9): 90}


def lines(frame: Any, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of columns, line by line, with None for missing ones."""
    return [tuple(None if value != value else value for value in row) for row in frame[[*names]].to_numpy()]


def test_each_method_has_its_costliest_point_up_to_the_budget_at_each_sparsity() -> None:
    found = costing(COSTS).equal_cost(1450)

    assert list(found.columns) == list(COLUMNS)
    assert lines(found, "method", "requested_sparsity", "budget", "total_training_macs", "seeds") == [
        ("dense", None, 1450, 1000.0, "0 1 2"),
        ("rigl", 0.5, 1450, None, None),
        ("rigl", 0.9, 1450, 1100.0, "0 1 2"),
        ("static", 0.5, 1450, 1400.0, "0 1 2"),
        ("static", 0.9, 1450, 1090.0, "0 1 2"),
    ]
    assert lines(found, "test_mean")[2:] == [(pytest.approx(0.78),), (pytest.approx(0.86),), (pytest.approx(0.76),)]


def test_trainings_of_several_lengths_are_candidates_together() -> None:
    """RigL at 0.9 is trained for 100 and, on another line, for 400 multiply-accumulates; the budget decides."""
    sweep = costing({**COSTS, ("rigl", 0.5): 400})
    comparison = sweep.comparison()
    moved = [
        replace(point, line="rigl, longer", requested_sparsity=0.9)
        if point.method == "rigl" and point.requested_sparsity == 0.5
        else point
        for point in comparison.operating_points
    ]
    shown = (*comparison.dense, *moved)
    longer = SimpleNamespace(shown=shown, panels=comparison.panels, rows=comparison.rows)

    def chosen(budget: float) -> Any:
        return next(row["line"] for row in at_equal_cost(longer, budget) if row["method"] == "rigl")  # type: ignore[arg-type]

    assert chosen(1400) == "rigl, longer"
    assert chosen(1399) == "rigl"


def test_a_point_may_cost_the_whole_budget_and_no_more() -> None:
    sweep = costing(COSTS)

    assert lines(sweep.equal_cost(1500), "total_training_macs")[1] == (1500.0,)
    assert lines(sweep.equal_cost(1499), "total_training_macs")[1] == (None,)


def test_the_budget_is_that_of_the_dense_training_and_points_above_it_have_no_figures() -> None:
    found = costing({**COSTS, ("static", 0.9): 0}).equal_cost()

    assert lines(found, "method", "budget", "total_training_macs", "difference_mean") == [
        ("dense", 1000.0, 1000.0, 0.0),
        *[("rigl", 1000.0, None, None)] * 2,
        ("static", 1000.0, None, None),
        ("static", 1000.0, 1000.0, pytest.approx(-0.14)),
    ]


def test_a_dense_network_above_the_budget_is_still_compared_with_and_its_cost_is_told() -> None:
    sweep = costing(COSTS)
    records = {
        key: replace(record, details={"training_macs": {"sparse": {**COUNTS, "backward": 5000}}})
        if record.kind == "dense"
        else record
        for key, record in sweep.records.items()
    }
    found = results(PLAN, records).equal_cost(4000)

    assert lines(found, "total_training_macs", "difference_mean")[0] == (None, None)
    assert set(found["reference_training_macs"]) == {5000.0}


def test_methods_are_paired_by_seed_with_a_reference_at_the_same_sparsity() -> None:
    found = costing(COSTS).equal_cost(1500, reference="static").set_index(["method", "requested_sparsity"])

    # rigl - static by seed: 0.01, 0.02, 0.03; t(0.975, 2) * 0.01 / sqrt(3) = 0.0248414
    for sparsity in (0.5, 0.9):
        rigl = found.loc["rigl", sparsity]
        assert (rigl["difference_mean"], rigl["difference_std"]) == pytest.approx((0.02, 0.01))
        assert (rigl["difference_low"], rigl["difference_high"]) == pytest.approx((-0.0048414, 0.0448414), abs=1e-6)
        assert found.loc[("static", sparsity), "difference_mean"] == 0.0
    assert set(found["reference"]) == {"static"}


def test_only_seeds_of_both_lines_are_paired() -> None:
    sweep = costing(COSTS)
    (lost,) = (trial.stages[-1] for trial in PLAN.trials if trial.name == "static sparsity=0.5 seed=2")
    left = {key: record for key, record in sweep.records.items() if key != lost}
    found = results(PLAN, left).equal_cost(1500, reference="static").set_index(["method", "requested_sparsity"])
    rigl, static = found.loc["rigl", 0.5], found.loc["static", 0.5]

    assert (rigl["seeds"], static["seeds"]) == ("0 1 2", "0 1")
    assert rigl["difference_mean"] == pytest.approx((0.01 + 0.02) / 2)
    assert rigl["test_mean"] - static["test_mean"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": 0}, "`budget` (=0) must be a number of multiply-accumulates above 0"),
        ({"budget": "dense"}, "`budget` (='dense') must be a number"),
        ({"budget": float("nan")}, "`budget` (=nan) must be a number"),
        ({"reference": "statik"}, "`reference` (='statik') is not there; did you mean 'static'?"),
    ],
)
def test_a_wrong_budget_or_reference_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(OrchestratorError) as caught:
        costing(COSTS).equal_cost(**arguments)

    assert said in str(caught.value)


def test_older_records_have_no_cost_to_compare_at() -> None:
    found = results(PLAN, make_records(PLAN)).equal_cost()

    assert found["method"].tolist() == ["dense", "rigl", "rigl", "static", "static"]
    assert found["total_training_macs"].isna().all()
    with pytest.raises(
        OrchestratorError, match="finished rounds of two lines at unequal recorded multiply-accumulates"
    ):
        results(PLAN, make_records(PLAN)).plot.tradeoff("training_macs")


def test_the_metric_is_drawn_against_the_cost() -> None:
    axes = costing(COSTS).plot.tradeoff("training_macs", ax=Figure().add_subplot())
    found = {str(line.get_label()): line for line in axes.lines}

    assert axes.get_xlabel() == "multiply-accumulates of training, from initialisation"
    assert list(found["rigl"].get_xdata()) == [1100.0, 1500.0]
    np.testing.assert_allclose(list(found["rigl"].get_ydata()), [78.0, 88.0])
    assert list(found["dense"].get_xdata()) == [1000.0]


def update(step: int, kept: int, first: float, explored: float) -> dict[str, Any]:
    shares = {"first_overlap": first, "last_overlap": 1.0, "explored": explored}
    return {"step": step, "kept": kept, "dropped": 3, "grown": 2, **shares}


def changing(steps: Mapping[int, tuple[int, ...]]) -> SweepResults:
    """Return a sweep in which rigl's masks change at 0.9, by seed at these steps; the first share is 1 - step / 100."""
    records = make_records(PLAN)
    for trial in PLAN.trials:
        if trial.name.startswith("rigl sparsity=0.9"):
            seed, key = trial.config["seed"], trial.stages[-1]
            updates = [update(step, 1000 - step, 1 - step / 100, 0.2 + 0.1 * seed) for step in steps[seed]]
            records[key] = replace(records[key], details={"mask_updates": updates})
    return results(PLAN, records)


def test_each_change_of_masks_is_a_row() -> None:
    found = changing({0: (10, 20), 1: (10,), 2: ()}).frame(by="mask_update")

    assert set(MASK_UPDATE_COLUMNS) < set(found.columns)
    assert lines(found, "line", "seed", "round", "step", "kept", "dropped", "grown") == [
        ("rigl", 0, 1, 10, 990, 3, 2),
        ("rigl", 0, 1, 20, 980, 3, 2),
        ("rigl", 1, 1, 10, 990, 3, 2),
    ]
    assert found["sparsity"].tolist() == pytest.approx([1 - 990 / ENTRIES, 1 - 980 / ENTRIES, 1 - 990 / ENTRIES])
    assert found["first_overlap"].tolist() == pytest.approx([0.9, 0.8, 0.9])
    assert found["schedule.sparsity"].tolist() == [0.9] * 3
    assert len(results(PLAN, make_records(PLAN)).frame(by="mask_update")) == 0


def test_the_history_is_drawn_at_the_steps_of_all_seeds() -> None:
    sweep = changing({0: (10, 20, 30), 1: (10, 30), 2: (10, 20, 30)})
    (plot,) = mask_history(sweep.records, sweep.comparison())
    first, explored = plot.series

    assert [each.label for each in plot.series] == ["rigl, kept from the first masks", "rigl, explored"]
    assert first.x == explored.x == (10.0, 30.0)
    assert first.y == pytest.approx((0.9, 0.7))
    assert explored.y == pytest.approx((0.3, 0.3))
    axes = sweep.plot.mask_history(ax=Figure().add_subplot())
    np.testing.assert_allclose(list(axes.lines[0].get_ydata()), [90.0, 70.0])
    assert axes.lines[0].get_color() == axes.lines[1].get_color()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("optimizer steps of the training", "share of entries (%)")


def test_lines_whose_masks_stay_have_no_history() -> None:
    with pytest.raises(OrchestratorError, match="a finished round whose masks change within the training"):
        results(PLAN, make_records(PLAN)).plot.mask_history()
    with pytest.raises(OrchestratorError, match="a finished round whose masks change"):
        changing({0: (10,), 1: (10,), 2: ()}).plot.mask_history()


@pytest.mark.slow
def test_a_real_sparse_training_has_its_costs_and_history_in_the_report(tmp_path: Path) -> None:
    """RigL reads all gradients where its masks change: 24 of 48 weights in a step of 60 examples, and 48 for those."""
    own = ("finetune.steps=3", "finetune.epochs=null", "finetune.batch_size=60")
    rigl = small("method=rigl", "schedule.at=trained", "dynamics.every=2", "dynamics.until=1.0", *own)
    plan = planned(rigl, small("method=static", "schedule.at=trained", *own))
    records = train(plan, Store(str(tmp_path)))
    sweep = results(plan, {key: StageRecord.from_json(record.to_json()) for key, record in records.items()})
    costs = sweep.frame(by="round").query("round == 1").set_index("line")["training_macs"]
    updates = sweep.frame(by="mask_update")
    full = sum(record["sparse_forward"]["steps"] for record in _costs(records))

    assert costs["static"] == 3 * 60 * 3 * 24
    assert costs["rigl"] == 3 * 60 * 3 * 24 + full * 60 * 24
    assert full == len(updates) > 0
    assert updates["sparsity"].tolist() == [0.5] * len(updates)
    files = report(sweep_info(), plan, records, compare_trials(plan, records))
    page = files["comparison/report.html"].decode()
    assert ">training MACs</th>" in page
    assert "comparison/figures/mask_history.svg" in files
    assert "comparison/figures/training_macs.svg" in files


def _costs(records: Mapping[str, StageRecord]) -> list[dict[str, Any]]:
    found = [record.details["training_macs"] for record in records.values() if record.round]
    return [each for each in found if "sparse_forward" in each]
