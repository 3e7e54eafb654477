"""One suite for both executors, then what only Ray can do. All tests share one embedded Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from factories import ACCURACY
from fakes import DirectoryStore, chain, plan_of, record_of, run_script, stage

from orchestrator.config import sources
from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Passed, Worker, WorkOrder
from orchestrator.execution.dispatch import INTERRUPTED
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.on_ray.embedded_ray import ClusterError
from orchestrator.execution.on_ray.ray_executor import RayExecutor, executor_of
from orchestrator.execution.on_ray.ray_tasks import Tasks

Make = Callable[..., RayExecutor | InlineExecutor]


@pytest.fixture(scope="session")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of custom modules, on the import path of every worker."""
    folder = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="session")
def embedded_ray(tmp_path_factory: pytest.TempPathFactory, own_code: Path) -> Iterator[Path]:
    """Ray with 2 CPUs and 2 pretended GPUs for all tests; its HOME must stay empty."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 2, "basket": 3}')
        owner = RayExecutor(Cluster(num_cpus=2), DirectoryStore(home), work=run_script)
        starter = threading.Thread(target=owner.start)  # Ray must outlive the thread that asked for it
        starter.start()
        starter.join()
        yield home
        owner.close()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    root = tmp_path / "store"
    root.mkdir()
    return DirectoryStore(root)


@pytest.fixture(params=["inline", "ray"])
def make(request: pytest.FixtureRequest, store: DirectoryStore, tmp_path: Path) -> Make:
    if request.param == "ray":
        request.getfixturevalue("embedded_ray")

    def build(**cluster: Any) -> RayExecutor | InlineExecutor:
        settings = Cluster(kind=request.param, **{"backoff": 0.05, **cluster})
        return executor_of(settings)(settings, store, work=run_script, logs=tmp_path / "logs")

    return build


@pytest.fixture
def make_ray(embedded_ray: Path, store: DirectoryStore, tmp_path: Path) -> Make:
    def build(**cluster: Any) -> RayExecutor:
        return RayExecutor(Cluster(**{"backoff": 0.05, **cluster}), store, work=run_script, logs=tmp_path / "logs")

    return build


def kinds(events: list[StageEvent], plan: Plan) -> list[tuple[str, str, int]]:
    """Return kind, stage name and attempt of each event."""
    return [(event.kind, plan.stages[event.key].fields["name"], event.attempt) for event in events]


def of_kind(events: list[StageEvent], plan: Plan, kind: str) -> list[str]:
    return [plan.stages[event.key].fields["name"] for event in events if event.kind == kind]


def test_every_stage_runs_once_parents_first(make: Make, store: DirectoryStore) -> None:
    root = stage("root")
    branches = [[root, *_rounds(root, f"branch{index}", 2)] for index in range(4)]
    plan = plan_of(*branches, chain("lone", {}, {}))
    events = list(make().run(plan))
    finished = [event.key for event in events if event.kind == "finished"]
    assert sorted(finished) == sorted(plan.stages)
    assert all(store.starts(key) == 1 for key in plan.stages)
    seen: set[str] = set()
    for event in events:
        parent = plan.stages[event.key].parent
        assert event.kind in ("started", "finished")
        assert parent is None or parent in seen
        if event.kind == "finished":
            assert event.record is not None
            seen.add(event.key)


def test_points_of_a_stage_that_takes_a_while_are_told(make: Make) -> None:
    told = list[tuple[Any, ...]]()
    executor = make()
    executor.watch = lambda *point: told.append(point)
    long = 2.5 if isinstance(executor, RayExecutor) else 0.1
    plan = plan_of(chain("quick", {"tell": 7, "sleep": 0.01}), chain("long", {"tell": 9, "sleep": long}))
    events = list(executor.run(plan))

    assert of_kind(events, plan, "finished") == ["quick-0", "long-0"]
    key = next(key for key, spec in plan.stages.items() if spec.fields["name"] == "long-0")
    assert (key, CurvePoint(9, 0.5, 0.0, {"val/accuracy": 0.25}), ACCURACY) in told
    if isinstance(executor, RayExecutor):
        assert {seen for seen, *_ in told} == {key}, "a short stage sends none"
        assert len(told) <= 3, "and a long one no more than one a second"


def test_records_come_through_bit_equal(make: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {}, {}))
    records = {event.key: event.record for event in make().run(plan) if event.record is not None}
    for key, spec in plan.stages.items():
        expected = record_of(spec, WorkOrder((spec,), Worker(store)))
        assert records[key].result() == expected.result() == store.finished([key])[key].result()


def test_a_parent_outside_of_the_plan_is_in_the_store(make: Make, store: DirectoryStore) -> None:
    stages = chain("a", {}, {}, {})
    store.commit(record_of(stages[0], WorkOrder((), Worker(store))), {})
    plan = plan_of(stages).without({stages[0].key})
    assert of_kind(list(make().run(plan)), plan, "finished") == ["a-1", "a-2"]


def test_a_failure_fails_what_depends_on_it_once_and_nothing_else(make: Make, store: DirectoryStore) -> None:
    root = stage("root")
    broken = stage("broken", root, fail="no such layer")
    below = [[root, broken, child, stage(f"grand{child.fields['name']}", child)] for child in _fan(broken, 3)]
    plan = plan_of(*below, [root, stage("good", root)], chain("other", {}, {}))
    events = list(make().run(plan))
    failed = [event for event in events if event.kind == "failed"]
    assert len(failed) == len({event.key for event in failed}) == 1 + 3 + 3
    assert sorted(of_kind(events, plan, "finished")) == ["good", "other-0", "other-1", "root"]
    for event in failed:
        assert event.failure is not None
        assert "ValueError: no such layer" in event.failure.message
        assert "in _obey" in event.failure.traceback
        assert event.failure.host
        assert "in _obey" in Path(event.failure.log).read_text(), "the traceback is in the log, inline too"
        assert ("not run" in event.failure.message) == (event.key != broken.key)
    assert store.starts(broken.key) == 1, "a deterministic error is not retried"


def test_sys_exit_in_the_work_is_a_failure_of_its_stage(make: Make) -> None:
    plan = plan_of(chain("a", {"exit": True}), chain("b", {}))
    events = list(make().run(plan))
    assert of_kind(events, plan, "failed") == ["a-0"]
    assert of_kind(events, plan, "finished") == ["b-0"]


def test_a_transient_error_is_retried_from_the_last_durable_stage(make: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {"lose": 2}, {}))
    assert kinds(list(make().run(plan)), plan) == [
        ("started", "a-0", 1),
        ("finished", "a-0", 1),
        ("started", "a-1", 1),
        ("retried", "a-1", 2),
        ("started", "a-1", 2),
        ("retried", "a-1", 3),
        ("started", "a-1", 3),
        ("finished", "a-1", 3),
        ("started", "a-2", 1),
        ("finished", "a-2", 1),
    ]
    assert [store.starts(key) for key in plan.stages] == [1, 3, 1]


def test_retries_have_a_limit(make: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {"lose": 9}, {}))
    events = list(make(retries=1).run(plan))
    assert of_kind(events, plan, "failed") == ["a-1", "a-2"]
    assert of_kind(events, plan, "retried") == ["a-1"]
    assert store.starts(list(plan.stages)[1]) == 2


def test_on_error_stop_kills_what_is_left(make: Make) -> None:
    plan = plan_of(chain("a", {"fail": "stop here"}, {}, {}), *(chain(f"b{i}", {"sleep": 0.1}, {}) for i in range(8)))
    events = list(make(on_error="stop").run(plan))
    assert of_kind(events, plan, "failed") == ["a-0", "a-1", "a-2"]
    ended = [event.key for event in events if event.kind in ("finished", "failed", "killed")]
    assert sorted(ended) == sorted(plan.stages)
    assert len(of_kind(events, plan, "finished")) <= 9
    killed = [event.failure.message for event in events if event.kind == "killed" and event.failure is not None]
    assert any("stop here" in message for message in killed)


def test_cancelling_ends_running_stages_at_a_batch_and_kills_the_rest(make: Make, store: DirectoryStore) -> None:
    plan = plan_of(*(chain(f"t{i}", {"sleep": 0.05}, {"sleep": 20.0}, {}) for i in range(5)))
    executor = make()
    events: list[StageEvent] = []
    asked = 0.0
    for event in executor.run(plan):
        events.append(event)
        if not asked and event.kind == "started" and event.key in {trial.stages[1] for trial in plan.trials}:
            threading.Timer(0.2, executor.cancel).start()
            asked = time.monotonic()
    assert time.monotonic() - asked < 3.0
    ended = [event.key for event in events if event.kind in ("finished", "killed")]
    assert sorted(ended) == sorted(plan.stages)
    finished = {event.key for event in events if event.kind == "finished"}
    assert finished == set(store.finished(plan.stages))
    assert {event.failure for event in events if event.kind == "killed"} == {INTERRUPTED}


def test_cancelled_before_it_runs_nothing_runs(make: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {}))
    executor = make()
    executor.cancel()
    assert kinds(list(executor.run(plan)), plan) == [("killed", "a-0", 1), ("killed", "a-1", 1)]
    assert store.starts(next(iter(plan.stages))) == 0


def test_trials_run_on_the_cpu_with_pinned_threads(make: Make) -> None:
    plan = plan_of(chain("a", {}))
    (record,) = [event.record for event in make(threads=3).run(plan) if event.record is not None]
    assert record.device == "cpu"
    assert record.environment["threads"] == "3"
    assert record.environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("kind", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_work_that_gives_too_little_or_the_wrong_record_is_a_failure(
    kind: str, request: pytest.FixtureRequest, store: DirectoryStore, tmp_path: Path
) -> None:
    if kind == "ray":
        request.getfixturevalue("embedded_ray")
    plan = plan_of(chain("a", {}, {}))
    for work in (silent, confused):
        cluster = Cluster(kind=kind)
        executor = executor_of(cluster)(cluster, store, work=work, logs=tmp_path)
        events = list(executor.run(plan))
        assert of_kind(events, plan, "failed") == ["a-0", "a-1"]
        assert events[1].failure is not None
        assert "record" in events[1].failure.message


def silent(order: WorkOrder) -> Iterator[StageRecord]:
    """Run no stage, and yield no record."""
    yield from ()


def confused(order: WorkOrder) -> Iterator[StageRecord]:
    """Yield the record of another stage."""
    yield record_of(stage("unheard of"), order)


def test_what_a_node_lacks_is_said_before_anything_runs(make: Make, tmp_path: Path) -> None:
    make().on_every_node(partial(see, tmp_path))
    with pytest.raises(OrchestratorError, match=r"does not see .*/nowhere"):
        make().on_every_node(partial(see, tmp_path / "nowhere"))


def see(path: Path) -> None:
    """Check of a node."""
    if not path.exists():
        raise OrchestratorError(f"this node does not see {path}")


@pytest.mark.slow
def test_what_a_node_lacks_when_it_begins_fails_the_trial(make_ray: Make, tmp_path: Path) -> None:
    needed, plan = tmp_path / "needed", plan_of(chain("a", {}, {}))
    needed.touch()
    executor = make_ray()
    executor.on_every_node(partial(see, needed))
    needed.unlink()
    events = list(executor.run(plan))

    assert of_kind(events, plan, "failed") == ["a-0", "a-1"]
    said = [event.failure.message for event in events if event.kind == "failed" and event.failure]  # Ray may try again
    assert said[0] == f"this node does not see {needed}"


def own_plan(code: Path, module: str, value: int) -> Plan:
    """Return a plan that was made while VALUE in the custom `module` was `value`."""
    (code / f"{module}.py").write_text(f"VALUE = {value}\n")
    sources.look_again()
    fields = {"script": {"import": module}, "sources": sources.fingerprint({"model": {"_target_": f"{module}.VALUE"}})}
    return plan_of(*([StageSpec("dense", {**fields, "name": f"{value} {index}"})] for index in range(4)))


def test_a_source_that_was_edited_after_the_planning_is_refused(make: Make, own_code: Path) -> None:
    plan = own_plan(own_code, "edited_meanwhile", 1)
    (own_code / "edited_meanwhile.py").write_text("VALUE = 22\n")
    failures = [event.failure.message for event in make().run(plan) if event.failure]

    assert len(failures) == 4
    assert all("`edited_meanwhile` is not what the sweep was planned with" in message for message in failures)


@pytest.mark.slow
def test_a_process_that_imported_an_older_source_does_not_work_with_it(
    make: Make, own_code: Path, request: pytest.FixtureRequest
) -> None:
    module = f"own_{request.node.callspec.params['make']}"
    for value in (1, 22, 333):
        plan = own_plan(own_code, module, value)
        events = list(make(retries=0).run(plan))
        if module == "own_ray" or value == 1:
            assert sorted(kinds(events, plan)) == sorted(
                (kind, trial.name, 1) for kind in ("started", "finished") for trial in plan.trials
            ), "a fresh process is not another attempt"
            assert {event.record.environment["imported"] for event in events if event.record} == {str(value)}
        else:
            failures = {event.failure.message for event in events if event.failure}
            assert len(failures) == 1
            assert "edited after this process had imported it" in failures.pop()


# Ray only


def test_a_killed_worker_costs_one_attempt(make_ray: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {"die": 1}, {}), chain("b", {}, {}))
    events = list(make_ray().run(plan))
    assert sorted(of_kind(events, plan, "finished")) == ["a-0", "a-1", "a-2", "b-0", "b-1"]
    (retried,) = [event for event in events if event.kind == "retried"]
    assert retried.failure is not None
    assert "the worker process died" in retried.failure.message
    assert Path(retried.failure.log).read_text() == "stage a-0 attempt 1\nstage a-1 attempt 1\n"
    assert [store.starts(trial) for trial in plan.trials[0].stages] == [1, 2, 1]


@pytest.mark.slow
def test_what_a_lost_worker_had_committed_is_not_repeated(make_ray: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("a", {}, {"die_committed": True}, {}))
    events = list(make_ray().run(plan))
    assert of_kind(events, plan, "finished") == ["a-0", "a-1", "a-2"]
    assert [store.starts(key) for key in plan.stages] == [1, 1, 1]


def test_a_failure_says_where_its_log_is(make_ray: Make, capfd: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(chain("a", {"fail": "boom"}))
    (failed,) = [event.failure for event in make_ray().run(plan) if event.kind == "failed"]
    assert failed is not None
    assert "about to fail" in Path(failed.log).read_text()
    assert "about to fail" not in "".join(capfd.readouterr()), "workers do not write to the driver's terminal"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"cpus_per_trial": 64.0}, "`cluster.cpus_per_trial` (=64) must fit on one node, and the largest of 1 has 2"),
        ({"gpus_per_trial": 4.0}, "`cluster.gpus_per_trial` (=4) must fit on one node, and the largest of 1 has 2"),
        ({"memory_per_trial": "9TB"}, "`cluster.memory_per_trial` (=9e+03GB)"),
        ({"resources": {"unicorn": 1.0}}, "`cluster.resources.unicorn` (=1)"),
        ({"gpus_per_trial": 1.0, "accelerator_type": "Z9"}, "`cluster.accelerator_type` (=Z9)"),
    ],
)
def test_what_no_node_can_give_is_refused_at_once(make_ray: Make, cluster: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError) as refused:
        make_ray(**cluster).start()
    assert said in str(refused.value)
    assert "cluster.autoscaling=true" in str(refused.value)


@pytest.mark.slow
def test_gpus_are_those_that_ray_assigned(make_ray: Make) -> None:
    plan = plan_of(*(chain(f"t{index}", {"sleep": 0.3}) for index in range(4)))
    records = [event.record for event in make_ray(gpus_per_trial=1).run(plan) if event.record is not None]
    assert {record.device for record in records} == {"cuda:0", "cuda:1"}


def test_max_concurrent_is_kept(make_ray: Make) -> None:
    plan = plan_of(*(chain(f"t{index}", {"sleep": 0.1}) for index in range(4)))
    running = most = 0
    for event in make_ray(max_concurrent=1).run(plan):
        running += {"started": 1, "finished": -1}.get(event.kind, 0)
        most = max(most, running)
    assert most == 1


@pytest.mark.slow
def test_a_retry_that_is_due_and_finds_no_slot_is_waited_for_quietly(
    make_ray: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, receive = [], Tasks.receive
    monkeypatch.setattr(Tasks, "receive", lambda tasks, timeout: looks.append(timeout) or receive(tasks, timeout))
    plan = plan_of(chain("a", {"lose": 1}), chain("b", {"sleep": 1.0}))
    events = list(make_ray(max_concurrent=1).run(plan))
    assert sorted(of_kind(events, plan, "finished")) == ["a-0", "b-0"]
    assert len(looks) < 40, "the driver spun"


@pytest.mark.slow
def test_work_that_never_looks_is_ended_by_force(make_ray: Make) -> None:
    plan = plan_of(chain("a", {"hang": True}))
    executor = make_ray()
    begun = 0.0
    for event in executor.run(plan):
        if event.kind == "started":
            threading.Timer(0.3, executor.cancel).start()
            begun = time.monotonic()
    assert event.kind == "killed"
    assert 2.0 < time.monotonic() - begun < 6.0


def test_a_task_that_has_given_all_its_stages_ends_by_itself(make_ray: Make, store: DirectoryStore) -> None:
    # Ray aborts the driver if a task ends at the moment it is cancelled, in one of 300 sweeps.
    plan = plan_of(chain("a", {}, {"linger": 0.3}))
    assert of_kind(list(make_ray().run(plan)), plan, "finished") == ["a-0", "a-1"]
    assert (store.root / "lingered").exists()


def test_nothing_is_written_to_the_home_directory(embedded_ray: Path) -> None:
    assert not (embedded_ray / ".ray").exists()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1:1"])
def test_a_cluster_that_cannot_be_joined_is_said(address: str, store: DirectoryStore) -> None:
    executor = RayExecutor(Cluster(address=address), store, work=run_script)
    with pytest.raises(ClusterError, match=r"must not be a Ray Client address|names no Ray cluster"):
        executor.start()


def _rounds(parent: Any, name: str, count: int) -> list[Any]:
    found: list[Any] = []
    for index in range(count):
        found.append(stage(f"{name}-{index}", found[-1] if found else parent))
    return found


def _fan(parent: Any, count: int) -> list[Any]:
    return [stage(f"child{index}", parent) for index in range(count)]


def try_script(order: WorkOrder) -> Iterator[Passed]:
    """Pass or fail, as the script of the last stage says."""
    list(run_script(order) if "fail" in order.specs[-1].fields["script"] else ())
    yield Passed((("exclude", order.specs[-1].fields["name"]),))


def test_a_preflight_tells_of_each_what_came_of_it(make: Make, store: DirectoryStore) -> None:
    root = stage("root")
    stages = [(root,), (root, stage("good", root)), (stage("bad", fail="does not fit"),), (root, stage("other", root))]
    found = dict(make().preflight(stages, try_script))

    assert {index: found[index] for index in (0, 1, 3)} == {
        0: Passed((("exclude", "root"),)),
        1: Passed((("exclude", "good"),)),
        3: Passed((("exclude", "other"),)),
    }
    assert isinstance(found[2], Failure)
    assert found[2].message == "ValueError: does not fit"
    assert not store.finished([root.key])


@pytest.mark.slow
def test_a_preflight_whose_worker_dies_may_pass_by_itself(make_ray: Make) -> None:
    ((index, found),) = make_ray().preflight([(stage("killed", die=1, fail="not reached"),)], try_script)

    assert index == 0
    assert isinstance(found, Failure)
    assert found.transient


@pytest.mark.slow
def test_a_stage_that_hangs_is_ended_by_force(make_ray: Make, store: DirectoryStore) -> None:
    plan = plan_of(chain("stuck", {"hang": True}), chain("quick", {}, {}))
    begun = time.monotonic()
    events = list(make_ray(stage_timeout=0.5, grace=0.5, retries=0).run(plan))

    assert time.monotonic() - begun < 20
    (failed,) = (event for event in events if event.kind == "failed")
    assert plan.stages[failed.key].fields["name"] == "stuck-0"
    assert "longer than `cluster.stage_timeout`" in str(failed.failure)
    assert sorted(of_kind(events, plan, "finished")) == ["quick-0", "quick-1"]
