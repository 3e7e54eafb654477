"""Drivers that share a store: stages of another driver wait, its finished stages are taken, the rest is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fakes import chain, plan_of, record_of, stage

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Attempt, Worker, WorkOrder
from orchestrator.execution.dispatch import LOOK_AGAIN, Dispatcher


@dataclass
class Shared:
    """A store with claims; `others` are those of another driver. Tests set the clock."""

    durable: dict[str, StageRecord] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    ours: set[str] = field(default_factory=set)
    now: float = 0.0
    away: bool = False

    def dispatcher(self, plan: Plan) -> Dispatcher:
        return Dispatcher(plan, Cluster(backoff=0.0), self.finished, lambda: self.now, self)

    def finished(self, keys: Iterable[str]) -> Mapping[str, StageRecord]:
        return {key: self.durable[key] for key in keys if key in self.durable}

    def acquire(self, key: str) -> bool:
        if self.away:
            raise OrchestratorError("the store is away")
        if key not in self.others:
            self.ours.add(key)
        return key not in self.others

    def release(self, key: str) -> None:
        self.ours.discard(key)

    def finish(self, spec: StageSpec) -> None:
        """Finish a stage as the other driver."""
        self.durable[spec.key] = record(spec)
        self.others.discard(spec.key)


def record(spec: StageSpec) -> StageRecord:
    return record_of(spec, WorkOrder((spec,), Worker(None)))  # type: ignore[arg-type]


def begin(dispatcher: Dispatcher) -> Attempt:
    attempt = dispatcher.next()
    assert attempt is not None
    return attempt


def test_a_segment_of_which_another_holds_a_stage_is_put_off_and_the_next_one_goes() -> None:
    stages, other = chain("a", {}, {}), chain("b", {})
    shared = Shared(others={stages[1].key})
    dispatcher = shared.dispatcher(plan_of(stages, other))

    attempt = begin(dispatcher)
    assert attempt.specs == tuple(other)
    assert shared.ours == {other[0].key}, "what could be had of the first is given back"
    assert dispatcher.next() is None
    assert dispatcher.delay() == LOOK_AGAIN


def test_what_another_finishes_is_taken_and_what_it_leaves_is_done() -> None:
    stages = chain("a", {}, {}, {})
    shared = Shared(others={spec.key for spec in stages})
    dispatcher = shared.dispatcher(plan_of(stages))
    assert dispatcher.next() is None
    shared.finish(stages[0])
    shared.now += LOOK_AGAIN
    assert dispatcher.next() is None
    assert [(event.kind, event.key) for event in dispatcher.news()] == [("finished", stages[0].key)]
    assert dispatcher.news() == []
    shared.others.clear()  # the other driver died
    shared.now += LOOK_AGAIN
    attempt = begin(dispatcher)
    assert attempt.specs == tuple(stages[1:])


def test_a_segment_that_another_finished_whole_is_never_begun_and_its_children_are() -> None:
    root = stage("root")
    plan = plan_of([root, stage("one", root)], [root, stage("two", root)])
    shared = Shared()
    shared.finish(root)
    dispatcher = shared.dispatcher(plan)

    attempt = begin(dispatcher)
    assert attempt.specs[0].parent == root.key
    assert [event.key for event in dispatcher.news()] == [root.key]


def test_claims_are_given_back_stage_by_stage_and_after_a_failure() -> None:
    stages = chain("a", {}, {}, {})
    shared = Shared()
    dispatcher = shared.dispatcher(plan_of(stages))
    attempt = begin(dispatcher)
    assert shared.ours == {spec.key for spec in stages}
    dispatcher.take(attempt, record(stages[0]))
    assert shared.ours == {spec.key for spec in stages[1:]}
    dispatcher.take(attempt, Failure("ValueError: boom"))
    assert shared.ours == set()


def test_a_store_that_is_away_does_not_keep_work_waiting() -> None:
    dispatcher = Shared(away=True).dispatcher(plan_of(chain("a", {})))
    assert dispatcher.next() is not None, "the attempt itself will say what is wrong"


def test_a_stage_whose_weights_were_dropped_is_repeated_where_work_starts_from_it() -> None:
    stages = chain("a", {}, {}, {})
    shared = Shared()
    for spec in stages[:2]:
        shared.durable[spec.key] = replace(record(spec), files={})
    dispatcher = shared.dispatcher(plan_of(stages))
    attempt = begin(dispatcher)
    assert attempt.specs == tuple(stages), "both, as neither can be gone on from"

    shared.durable[stages[1].key] = record(stages[1])
    events = dispatcher.take(attempt, Failure("the worker died", transient=True))
    assert [event.kind for event in events] == ["finished", "finished", "retried"]
    assert attempt.left == (stages[2].key,)


def test_a_failure_that_awaits_every_trial_stops_the_sweep() -> None:
    plan = plan_of(chain("a", {}), chain("b", {}))
    dispatcher = Shared().dispatcher(plan)
    attempt = begin(dispatcher)
    events = dispatcher.take(attempt, Failure("the disk is full", fatal=True))

    assert [event.kind for event in events] == ["failed", "killed"]
    assert dispatcher.done
