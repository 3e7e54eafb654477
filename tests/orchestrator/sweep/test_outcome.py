from __future__ import annotations

import pytest
from factories import make_plan, make_records

from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.records import Reached
from orchestrator.core.redact import shown
from orchestrator.sweep.outcome import Outcome, behind

PLAN = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,), rounds=1)
DENSE, ROUND = PLAN.stages
RECORDS = make_records(PLAN)
BEHIND = behind(["name-1"], {"uri": "store", "options": {}}, uri=None, experiment="pruning")


@pytest.mark.parametrize(
    ("missing", "interrupted", "view", "status"),
    [
        (False, False, BEHIND, 3),
        (True, False, BEHIND, 1),
        (True, False, "", 1),
        (True, True, BEHIND, 130),
        (False, False, "", None),
    ],
)
def test_one_exit_status_and_what_completes_the_view_last(
    missing: bool, interrupted: bool, view: str, status: int | None
) -> None:
    records = {DENSE: RECORDS[DENSE]} if missing else RECORDS
    error = Outcome(PLAN, dict(records), interrupted=interrupted, behind=view).incomplete()

    assert (error and error.exit_status) == status
    if view:
        assert str(error).splitlines()[-1].strip() == "python -m orchestrator.sync name-1"


def test_an_interrupt_says_how_far_its_stages_had_come() -> None:
    reached = {DENSE: Reached(True, 40), ROUND: Reached(False, 7), "f" * 64: Reached(True, 0)}
    told = str(Outcome(PLAN, {}, interrupted=True, reached=reached).incomplete())

    assert told == (
        "Interrupted; what finished is kept, and a checkpoint of 2 stages (at block 7, step 40): the same command runs "
        "the rest."
    )
    assert "kept: the same" in str(Outcome(PLAN, {}, interrupted=True).incomplete())


def test_what_failed_before_an_interrupt_is_told_all_the_same() -> None:
    outcome = Outcome(PLAN, {}, interrupted=True)
    outcome.take(StageEvent("failed", DENSE, 0.0, failure=Failure("the loss is nan", repeats=True)))
    first, second, third = str(outcome.incomplete()).splitlines()

    assert (first, second[-17:]) == ("Before the interrupt failed:", ": the loss is nan")
    assert third.endswith("runs the rest, except stages that would fail again (retry_failed=true runs them, too).")


def test_what_an_interrupt_came_too_late_for_is_finished() -> None:
    outcome = Outcome(PLAN, {DENSE: RECORDS[DENSE]})
    assert not outcome.settled
    outcome.take(StageEvent("killed", ROUND, 0.0, failure=Failure("interrupted")))
    assert not outcome.settled
    outcome.take(StageEvent("finished", ROUND, 0.0, RECORDS[ROUND]))
    assert outcome.settled
    assert outcome.status == "finished"


def test_the_command_repeats_what_differs_from_the_defaults_but_no_secret() -> None:
    store = {"uri": "s3://bucket/a b", "options": {"endpoint_url": "http://host:1", "secret": "hunter2"}}
    text = behind(["one-1", "two-2"], store, uri="http://me:hunter2@host", experiment="mine", kind="mlflow")

    assert shown(text).splitlines()[-1].strip() == (  # like every message
        "python -m orchestrator.sync one-1 two-2 --store 's3://bucket/a b' --option endpoint_url=http://host:1 "
        "--option secret=*** --uri http://me:***@host --experiment mine"
    )
