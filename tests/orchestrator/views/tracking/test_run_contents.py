from __future__ import annotations

from dataclasses import replace

import pytest
from factories import EPOCH, SIZES, finished, make_plan, make_record, make_records, sweep_info
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.events import StageEvent
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.specs import Plan
from orchestrator.views.tracking.run_contents import SweepView, logged_tag, mask_picture, points_of, trial_ids

PLAN = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,), rounds=3)
RECORDS = make_records(PLAN)
CHAIN = [RECORDS[key] for key in PLAN.trials[0].stages]


def view(known: int) -> SweepView:
    return SweepView(sweep_info(), PLAN, {record.key: record for record in CHAIN[:known]})


@pytest.mark.parametrize("held", range(5))
def test_only_what_a_run_lacks_is_written(held: int) -> None:
    content = view(4).content(0, logged_tag(CHAIN[:held]) if held else "")

    assert content is not None
    names = ("dense/test/accuracy", "rounds/test/accuracy", "test/accuracy")
    written = {(point.key, point.step) for point in content.points if point.key in names}
    rounds = {("rounds/test/accuracy", step) for step in (1, 2, 3)} | {("test/accuracy", 3)}
    assert written == {point for point in {("dense/test/accuracy", 0), *rounds} if point[1] >= held}
    assert sorted(content.masks) == [f"masks/round_{number}.npz" for number in range(max(held, 1), 4)]
    assert bool(content.params) == (held == 0)


@pytest.mark.parametrize("known", range(4))
def test_a_trial_without_its_pruned_network_has_no_figure_of_one(known: int) -> None:
    found = view(known)
    found.close("killed", {})
    content = found.content(0)

    assert content is not None
    named = {point.key for point in content.points if not point.key.startswith(("dense/", "rounds/", "curve/"))}
    assert named == set(), "MLflow would sort the trial, and average it, by another network's figures"


def test_a_finished_trial_has_its_difference_to_dense() -> None:
    content = view(4).content(0)

    assert content is not None
    (found,) = [point for point in content.points if point.key.startswith("difference/")]
    difference = CHAIN[3].after["test/accuracy"] - CHAIN[0].after["test/accuracy"]
    assert (found.key, found.value, found.step) == ("difference/test/accuracy", difference, 3)


def test_runs_written_under_earlier_names_are_written_anew() -> None:
    earlier = "4 " + digest(canonical_json([[r.key, r.started, r.weights_digest] for r in CHAIN]))[:16]
    content = view(4).content(0, earlier, "FINISHED")

    assert content is not None
    assert content.new_run


def test_a_curve_goes_on_where_the_earlier_stages_ended() -> None:
    whole, rest = view(4).content(0), view(4).content(0, logged_tag(CHAIN[:2]))

    assert whole is not None
    assert rest is not None
    assert set(rest.points) < set(whole.points)


def test_another_execution_of_a_stage_is_noticed() -> None:
    again = [replace(record, started=record.started + 1) for record in CHAIN]

    for held in (again[:2], [*CHAIN[:1], again[1]]):
        content = view(4).content(0, logged_tag(held))
        assert content is not None
        assert content.new_run
        assert content.points == getattr(view(4).content(0), "points", None), "the new run gets everything"


def test_a_run_that_holds_more_than_is_known_is_left_as_it_is() -> None:
    content = view(1).content(0, logged_tag(CHAIN[:3]))

    assert content is not None
    assert content.points == []
    assert "pruning.logged" not in content.tags


def test_a_round_waits_for_the_rounds_before_it() -> None:
    known = SweepView(sweep_info(), PLAN, {CHAIN[0].key: CHAIN[0]})
    known.take(finished(CHAIN[2]))

    assert known.chain(0) == CHAIN[:1]
    known.take(finished(CHAIN[1]))
    assert known.chain(0) == CHAIN[:3]


def test_what_is_current_needs_nothing() -> None:
    assert view(4).content(0, logged_tag(CHAIN), "FINISHED") is None
    assert view(4).content(0, logged_tag(CHAIN), "RUNNING") is not None
    assert view(4).content(0, logged_tag(CHAIN[:3]), "FINISHED") is not None


def test_identities_follow_name_and_stages_and_tell_twins_apart() -> None:
    info, trial = sweep_info(), PLAN.trials[0]
    one, twin = trial_ids(info, [trial, replace(trial, name="twin")])

    assert one != twin
    assert trial_ids(info, [replace(trial, name="renamed")]) == (one,)
    assert trial_ids(sweep_info("other"), [trial]) != (one,)


def test_points_of_strange_names_can_be_kept() -> None:
    record = replace(CHAIN[1], tensor_sparsity={"blocks['a'].weight": 0.5})

    assert "sparsity/blocks__a__.weight" in {point.key for point in points_of(record)}


def test_a_network_without_work_left_has_no_speedup() -> None:
    assert "macs/speedup" not in {point.key for point in points_of(replace(CHAIN[1], macs_remaining=0.0))}


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["started", "finished", "failed", "killed", "retried"]))))
def test_whatever_happens_a_view_says_something_sensible(steps: list[tuple[int, str]]) -> None:
    found = SweepView(sweep_info(), PLAN, {})
    for position, kind in steps:
        event = finished(CHAIN[position])
        if kind != "finished":
            event = StageEvent(kind, CHAIN[position].key, EPOCH)  # type: ignore[arg-type]
        found.take(event)
        content = found.content(0)
        assert content is not None
        assert (content.status == "FINISHED") == (len(found.chain(0)) == 4)
    found.close("killed", {})
    ended = found.content(0)
    assert ended is not None
    assert ended.status in ("FINISHED", "FAILED", "KILLED")


def test_the_mask_picture_has_a_cell_for_each_tensor_and_round() -> None:
    from xml.etree import ElementTree

    root = ElementTree.fromstring(mask_picture(CHAIN))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]

    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + (len(SIZES) + 1) * 3
    assert f"{100 * CHAIN[3].sparsity:.2f}" in texts
    assert "fc1.weight (8,192)" in texts
    assert {"round 1", "round 2", "round 3", "overall"} <= set(texts)


def test_a_plan_without_trials_has_a_parent() -> None:
    assert SweepView(sweep_info(), Plan({}, ()), {}).opening().params == {"sweep": "synthetic"}


def test_a_record_made_again_is_not_the_same() -> None:
    assert logged_tag([make_record(PLAN, CHAIN[0].key)]) == logged_tag(CHAIN[:1])
    assert logged_tag([make_record(PLAN, CHAIN[0].key, EPOCH + 1)]) != logged_tag(CHAIN[:1])


def test_names_and_commands_are_no_markup() -> None:
    info = replace(sweep_info("<img src=x>[a](javascript:b)"), command="python -m orchestrator 'name=\n<script>'")
    note = SweepView(info, PLAN, {}).opening().tags["mlflow.note.content"]

    assert "<img" not in note
    assert "[a](" not in note
    assert "\n    <script>" in note, "in a block of code nothing is markup"


def running(known: int, points: int) -> SweepView:
    """Return a view with a number of finished stages, and a number of points in the next stage's checkpoint."""
    found = view(known)
    assert found.reach(CHAIN[known].key, CHAIN[known].curve[:points]) == ((0,) if points else ())
    return found


@pytest.mark.parametrize("known", [0, 2])
def test_what_a_checkpoint_holds_of_a_curve_is_written_once(known: int) -> None:
    """A run gets three points of a running stage, then two more, then the rest with the stage: no point twice."""
    whole = view(known + 1).content(0)
    tag, seen = logged_tag(CHAIN[:known]), view(known).content(0)
    assert whole is not None
    assert seen is not None
    written = list(seen.points)
    for found in (running(known, 3), running(known, 5), view(known + 1)):
        content = found.content(0, tag, "RUNNING")
        assert content is not None
        assert not content.new_run
        written += content.points
        tag = content.tags["pruning.logged"]
        assert found.content(0, tag, "RUNNING") is None, "nothing is new"
    assert tag == logged_tag(CHAIN[: known + 1])
    assert len(written) == len(set(written))
    assert set(written) == set(whole.points)


def test_a_driver_that_has_not_looked_yet_leaves_the_points_of_a_stage_that_goes_on() -> None:
    tag = logged_tag(CHAIN[:1], CHAIN[1].curve[:3])

    assert view(1).content(0, tag, "RUNNING") is None
    assert view(1).content(0, tag, "KILLED").tags["pruning.logged"] == tag  # type: ignore[union-attr]
    assert len(running(1, 4).content(0, tag, "RUNNING").points) == 3  # type: ignore[union-attr]


def test_a_stage_that_began_anew_gets_another_run_once_it_has_as_many_points() -> None:
    tag = logged_tag(CHAIN[:1], [replace(point, time=point.time - 60) for point in CHAIN[1].curve[:3]])

    assert running(1, 2).content(0, tag, "RUNNING") is None
    for later in (running(1, 3), view(2)):
        content = later.content(0, tag, "RUNNING")
        assert content is not None
        assert content.new_run
        assert content.points[: len(view(1).content(0).points)] == view(1).content(0).points  # type: ignore[union-attr]


def test_a_run_that_holds_a_stage_keeps_its_curve_while_that_is_made_again() -> None:
    """Else the repeated stage's points would be written at every check, next to those that the run holds."""
    content = running(1, 3).content(0, logged_tag(CHAIN[:2]), "RUNNING")

    assert content is not None
    assert not content.new_run
    assert not content.points
