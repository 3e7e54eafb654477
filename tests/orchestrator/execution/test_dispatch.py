"""Dispatcher: the events of each outcome, without processes and without waiting."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pytest
from fakes import chain, plan_of, record_of, stage

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.records import NOWHERE, Reached, StageRecord
from orchestrator.core.specs import DENSE, NETWORK, Plan, StageSpec
from orchestrator.core.work_order import Attempt, Worker, WorkOrder
from orchestrator.execution.dispatch import Dispatcher

LOST = Failure("the worker died", transient=True)
BROKEN = Failure("ValueError: boom")


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def nothing(keys: Iterable[str]) -> Mapping[str, StageRecord]:
    return {}


def record(spec: StageSpec) -> StageRecord:
    return record_of(spec, WorkOrder((spec,), Worker(None)))  # type: ignore[arg-type]


def summary(events: list[StageEvent], plan: Plan) -> list[str]:
    return [f"{event.kind} {plan.stages[event.key].fields['name']} {event.attempt}" for event in events]


def take(dispatcher: Dispatcher) -> Attempt:
    attempt = dispatcher.next()
    assert attempt is not None
    return attempt


def test_the_longest_chain_of_stages_goes_first() -> None:
    root = stage("root")
    deep = [root, stage("deep-1", root)]
    deep.append(stage("deep-2", deep[-1]))
    plan = plan_of(chain("a", {}, {}), deep, [root, stage("flat", root)], chain("b", {}, {}))
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    order = [take(dispatcher) for _ in range(3)]
    assert [attempt.specs[0].fields["name"] for attempt in order] == ["root", "a-0", "b-0"]
    assert dispatcher.next() is None
    dispatcher.take(order[0], record(root))
    assert take(dispatcher).specs[0].fields["name"] == "deep-1"


def test_retries_wait_twice_as_long_each_time_and_end() -> None:
    clock = Clock()
    plan = plan_of(chain("a", {}))
    dispatcher = Dispatcher(plan, Cluster(retries=3, backoff=2.0), nothing, clock)
    waits = []
    for _ in range(3):
        events = dispatcher.take(take(dispatcher), LOST)
        assert summary(events, plan)[0].startswith("retried")
        waits.append(dispatcher.delay())
        assert dispatcher.next() is None
        clock.now += dispatcher.delay()
    assert waits == [2.0, 4.0, 8.0]
    assert summary(dispatcher.take(take(dispatcher), LOST), plan) == ["failed a-0 4"]
    assert dispatcher.done


def test_each_stage_has_retries_of_its_own_and_the_last_failure_names_them() -> None:
    first, second = chain("a", {}, {})
    plan = plan_of([first, second])
    dispatcher = Dispatcher(plan, Cluster(retries=1, backoff=0.0), nothing)
    dispatcher.take(take(dispatcher), LOST)
    attempt = take(dispatcher)
    told = dispatcher.take(attempt, record(first)) + dispatcher.take(attempt, LOST)
    assert summary(told, plan) == ["finished a-0 2", "started a-1 1", "retried a-1 2"]

    (failed,) = dispatcher.take(take(dispatcher), LOST)
    assert failed.failure is not None
    assert failed.failure.message == "the worker died (attempt 2, and `cluster.retries` is 1)"


def test_a_sweep_that_stops_itself_says_so_of_what_was_running() -> None:
    plan = plan_of(chain("a", {}), chain("b", {}), chain("c", {}))
    dispatcher = Dispatcher(plan, Cluster(on_error="stop"), nothing)
    broken, running = take(dispatcher), take(dispatcher)
    told = [*dispatcher.take(broken, BROKEN), *dispatcher.ended(running)]
    assert summary(told, plan) == ["failed a-0 1", "killed c-0 1", "killed b-0 1"]
    assert {event.failure.message for event in told[1:] if event.failure} == {
        "the sweep stopped (cluster.on_error=stop): ValueError: boom"
    }


def test_once_a_sweep_stops_no_retry_is_due() -> None:
    clock = Clock()
    dispatcher = Dispatcher(plan_of(chain("a", {}), chain("b", {})), Cluster(), nothing, clock)
    dispatcher.take(take(dispatcher), LOST)
    running = take(dispatcher)
    dispatcher.stop()
    clock.now += 100
    assert dispatcher.delay() == float("inf"), "who waits for the running stage need not look again and again"
    dispatcher.ended(running)
    assert dispatcher.done


def test_what_the_store_has_after_a_loss_is_finished_and_not_repeated() -> None:
    stages = chain("a", {}, {}, {}, {})
    plan = plan_of(stages)
    durable = {spec.key: record(spec) for spec in (stages[1], stages[3])}
    dispatcher = Dispatcher(plan, Cluster(backoff=0.0), lambda keys: {k: durable[k] for k in keys if k in durable})
    attempt = take(dispatcher)
    dispatcher.take(attempt, record(stages[0]))
    assert summary(dispatcher.take(attempt, LOST), plan) == ["finished a-1 1", "retried a-2 2"]
    assert take(dispatcher).left == (stages[2].key, stages[3].key)


def test_a_loss_after_the_last_commit_needs_no_retry() -> None:
    (spec,) = stages = chain("a", {})
    child = stage("child", spec)
    plan = plan_of([*stages, child], [*stages, stage("other", spec)])
    dispatcher = Dispatcher(plan, Cluster(), lambda keys: {spec.key: record(spec)})
    assert summary(dispatcher.take(take(dispatcher), LOST), plan) == ["finished a-0 1"]
    assert take(dispatcher).specs == (child,)


def test_a_store_that_is_away_does_not_stop_a_retry() -> None:
    def away(keys: Iterable[str]) -> Mapping[str, StageRecord]:
        raise OrchestratorError("the store is away")

    plan = plan_of(chain("a", {}))
    dispatcher = Dispatcher(plan, Cluster(), away)
    assert summary(dispatcher.take(take(dispatcher), LOST), plan) == ["retried a-0 2"]


def test_a_failure_fails_all_below_with_its_cause() -> None:
    root = stage("root")
    middle = stage("middle", root)
    plan = plan_of(*([root, middle, leaf, stage(f"under {leaf.fields['name']}", leaf)] for leaf in _leaves(middle)))
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    events = dispatcher.take(take(dispatcher), BROKEN)
    assert sorted(summary(events, plan)) == sorted(f"failed {spec.fields['name']} 1" for spec in plan.stages.values())
    assert [event.key for event in events[:2]] == [root.key, middle.key]
    assert {event.failure.message for event in events[1:] if event.failure} == {
        f"not run, as stage {root.key[:12]} failed: ValueError: boom"
    }
    assert dispatcher.done


def test_news_of_an_attempt_that_was_given_up_is_ignored() -> None:
    stages = chain("a", {})
    dispatcher = Dispatcher(plan_of(stages), Cluster(backoff=0.0), nothing)
    first = take(dispatcher)
    dispatcher.take(first, LOST)
    second = take(dispatcher)
    assert dispatcher.take(first, record(stages[0])) == dispatcher.take(first, LOST) == dispatcher.ended(first) == []
    assert len(dispatcher.take(second, record(stages[0]))) == 1


def test_stopping_lets_running_stages_speak_and_hands_out_nothing() -> None:
    first, second = chain("a", {}, {}), chain("b", {})
    plan = plan_of(first, second)
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    attempt = take(dispatcher)
    assert summary(dispatcher.stop(), plan) == ["killed b-0 1"]
    assert dispatcher.next() is None
    assert summary(dispatcher.take(attempt, record(first[0])), plan) == ["finished a-0 1"]
    assert summary(dispatcher.take(attempt, LOST), plan) == ["killed a-1 1"]
    assert dispatcher.done


def test_every_stage_ends_exactly_once_whatever_happens() -> None:
    """Check random forests with random outcomes: each stage ends once, finished, failed or killed, after its parent."""
    for seed in range(300):
        draw = random.Random(seed)
        plan = _forest(draw)
        dispatcher = Dispatcher(
            plan, Cluster(retries=1, backoff=0.0, on_error=draw.choice(["continue", "stop"])), nothing
        )
        running: list[Attempt] = []
        ends: dict[str, str] = {}
        while not dispatcher.done:
            events: list[StageEvent] = []
            if draw.random() < 0.02:
                events += dispatcher.stop()
            while not dispatcher.stopping and len(running) < 3 and (attempt := dispatcher.next()):
                running.append(attempt)
                events += dispatcher.began(attempt, 0.0)
            if running:
                attempt = draw.choice(running)
                outcome = draw.choices([record(attempt.specs[attempt.done]), LOST, BROKEN, None], [8, 1, 1, 0.3])[0]
                events += dispatcher.ended(attempt) if outcome is None else dispatcher.take(attempt, outcome)
                if not isinstance(outcome, StageRecord) or not attempt.left:
                    running.remove(attempt)
            for event in events:
                parent = plan.stages[event.key].parent
                assert event.key not in ends
                if event.kind in ("started", "finished"):
                    assert parent is None or ends[parent] == "finished"
                if event.kind in ("finished", "failed", "killed"):
                    ends[event.key] = event.kind
                    if parent is not None and ends.get(parent) == "failed":
                        assert event.kind in ("failed", "killed")
        assert ends.keys() == plan.stages.keys()


@pytest.mark.slow
def test_ten_thousand_trials_cost_the_same_each() -> None:
    """Check that an event costs O(1): a plan of 20,000 stages under one root takes seconds."""
    root = stage("root")
    plan = plan_of(*([root, stage(f"trial{index}", root)] for index in range(10_000)))
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    finished = 0
    while (attempt := dispatcher.next()) is not None:
        finished += len(dispatcher.take(attempt, record(attempt.specs[0])))
    assert finished == 10_001
    assert dispatcher.done


def _forest(draw: random.Random) -> Plan:
    specs: list[StageSpec] = []
    for index in range(draw.randint(1, 15)):
        parent = draw.choice([None, *specs])
        specs.append(stage(f"s{index}", parent))
    return Plan({spec.key: spec for spec in specs}, ())


def _leaves(parent: StageSpec) -> list[StageSpec]:
    return [stage(f"leaf{index}", parent) for index in range(3)]


def test_a_stage_of_several_inputs_waits_for_all_of_them() -> None:
    one, other = stage("one"), stage("other")
    joint = StageSpec("round", {"name": "joint", "script": {}, "round": 1}, {NETWORK: one.key, "teacher": other.key})
    after = stage("after", joint)
    plan = Plan({spec.key: spec for spec in (one, other, joint, after)}, ())
    assert sorted(map(len, plan.segments())) == [1, 1, 2]
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    first, second = take(dispatcher), take(dispatcher)
    assert {first.specs[0].key, second.specs[0].key} == {one.key, other.key}

    for attempt in (first, second):
        assert dispatcher.next() is None
        dispatcher.take(attempt, record(attempt.specs[0]))

    last = take(dispatcher)
    assert last.specs == (joint, after)
    assert last.lineage == (one,)


def test_an_attempt_that_left_a_further_checkpoint_costs_no_retry() -> None:
    """Lose a stage at block 9, step 4 and step 4: two attempts advanced, so two more use up the two retries."""
    places = Reached(False, 9), *[Reached(True, 4)] * 3
    plan, clock, left = plan_of(chain("a", {})), Clock(), iter(places)
    dispatcher = Dispatcher(plan, Cluster(retries=1, backoff=8.0), nothing, clock=clock, reached=lambda _: next(left))
    delays, goes_on_from = [], []
    for number in (1, 2, 3, 4):
        attempt = take(dispatcher)
        assert attempt.number == number
        events = dispatcher.take(attempt, LOST)
        if number < 4:
            assert [event.kind for event in events] == ["retried"]
            delays.append(dispatcher.delay())
            goes_on_from.append(events[0].reached)
            clock.now += delays[-1]
    assert delays == [8.0, 8.0, 8.0]
    assert goes_on_from == [*places[:3]]
    assert [event.kind for event in events] == ["failed"]


def test_what_a_checkpoint_spares_ends_with_its_stage() -> None:
    specs = chain("a", {}, {})
    plan = plan_of(specs)
    dispatcher = Dispatcher(plan, Cluster(retries=0, backoff=0.0), nothing, reached=lambda _: Reached(True, 5))
    first = take(dispatcher)
    dispatcher.take(first, LOST)
    second = take(dispatcher)
    dispatcher.take(second, record(specs[0]))
    assert (second.spared, second.reached) == (0, NOWHERE)
    dispatcher.take(second, LOST)
    third = take(dispatcher)
    assert [event.kind for event in dispatcher.take(third, LOST)] == ["failed"]


def test_where_the_store_is_away_no_attempt_is_spared() -> None:
    def away(_: str) -> Reached:
        raise OrchestratorError("the store is away")

    dispatcher = Dispatcher(plan_of(chain("a", {})), Cluster(retries=0), nothing, reached=away)
    assert [event.kind for event in dispatcher.take(take(dispatcher), LOST)] == ["failed"]


def test_what_runs_alone_comes_one_after_another_when_all_else_has_ended() -> None:
    (dense, last), other = chain("a", {}, {}), chain("b", {})
    plan = plan_of([dense, last], other)
    measured = [
        StageSpec("measure", {"name": name, "script": {}}, {NETWORK: dense.key}) for name in ("first", "second")
    ]
    plan = replace(plan, stages={**plan.stages, **{spec.key: spec for spec in measured}})
    dispatcher = Dispatcher(plan, Cluster(retries=1, backoff=0.0), nothing)

    order = []
    running = [take(dispatcher), take(dispatcher)]
    assert dispatcher.next() is None
    while running:
        attempt = running.pop(0)
        name = attempt.specs[0].fields["name"]
        order.append(name)
        lost = name == "b-0" and attempt.number == 1  # the retry comes before any measurement
        dispatcher.take(attempt, LOST if lost else record(attempt.specs[0]))
        while (following := dispatcher.next()) is not None:
            running.append(following)
        if any(each.specs[0].kind == "measure" for each in running):
            assert len(running) == 1
    assert order == ["a-0", "b-0", "a-1", "b-0", "first", "second"]
    assert dispatcher.done


def test_what_runs_alone_does_not_wait_for_what_cannot_run() -> None:
    (dense, last), (other,) = chain("a", {}, {}), chain("b", {})
    measured = StageSpec("measure", {"name": "measured", "script": {}}, {NETWORK: other.key})
    plan = plan_of([dense, last], [other])
    plan = replace(plan, stages={**plan.stages, measured.key: measured})
    dispatcher = Dispatcher(plan, Cluster(), nothing)

    first, second = take(dispatcher), take(dispatcher)
    dispatcher.take(first, BROKEN)
    assert dispatcher.next() is None
    dispatcher.take(second, record(second.specs[0]))

    assert take(dispatcher).specs[0].fields["name"] == "measured"


def test_what_needs_two_stages_that_both_failed_is_told_once() -> None:
    (one,), (other,) = chain("a", {}), chain("b", {})
    fields = {"name": "measured", "script": {}}
    measured = StageSpec("measure", fields, {NETWORK: one.key, DENSE: other.key})
    plan = plan_of([one], [other])
    plan = replace(plan, stages={**plan.stages, measured.key: measured})
    dispatcher = Dispatcher(plan, Cluster(), nothing)

    first, second = take(dispatcher), take(dispatcher)
    assert summary(dispatcher.take(first, BROKEN), plan) == ["failed a-0 1", "failed measured 1"]
    assert summary(dispatcher.take(second, BROKEN), plan) == ["failed b-0 1"]
    assert dispatcher.done


def test_a_record_shares_the_fields_of_its_planned_stage() -> None:
    (spec,) = chain("a", {})
    plan = plan_of([spec])
    dispatcher = Dispatcher(plan, Cluster(), nothing)
    arrived = pickle.loads(pickle.dumps(record(spec)))

    (event,) = dispatcher.take(take(dispatcher), arrived)

    assert event.record == arrived
    assert event.record is not None
    assert event.record.spec["fields"]["script"] is spec.fields["script"]


def test_a_record_of_another_spec_keeps_its_own() -> None:
    (spec,) = chain("a", {})
    other = replace(record(spec), spec={**spec.to_json(), "starts_from": ["0" * 64]})

    assert other.sharing(spec) is other
