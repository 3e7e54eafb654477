"""Placement of trials: resources, slots, refusals and devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.config.cluster import Cluster
from orchestrator.execution.on_ray import embedded_ray
from orchestrator.execution.placement import (
    AUTOSCALING_AHEAD,
    LOOK_AROUND,
    PATIENCE,
    Node,
    Watch,
    beyond_this_machine,
    cuda_device,
    refusal,
    request,
    slots,
)
from orchestrator.planning import pace

SMALL = {"CPU": 4.0, "memory": 8e9}
BIG = {"CPU": 16.0, "GPU": 2.0, "memory": 64e9, "accelerator_type:A100": 1.0}


def test_more_cpus_than_this_machine_has_are_refused_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = beyond_this_machine(Cluster(cpus_per_trial=3, num_cpus=2))

    assert said is not None
    assert said.startswith("`cluster.cpus_per_trial` (=3) must fit on one node, and the largest of 1 has 2")
    elsewhere = ({"address": "head:6379"}, {"kind": "inline"}, {"autoscaling": True}, {"num_cpus": 3})
    assert not any(beyond_this_machine(Cluster(**{"cpus_per_trial": 3, "num_cpus": 2, **each})) for each in elsewhere)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert beyond_this_machine(Cluster(cpus_per_trial=3, num_cpus=2)) is None


def test_a_sweep_in_this_process_is_refused_a_gpu_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pace, "DEVICE_FILES", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.setattr(pace, "gpu_models", lambda: ())
    asked = Cluster(kind="inline", gpus_per_trial=1)
    said = beyond_this_machine(asked)

    assert said is not None
    assert said.startswith("`cluster.gpus_per_trial` (=1) needs a GPU on this machine with cluster=inline, and this ")
    assert "pass cluster.gpus_per_trial=0" in said
    assert beyond_this_machine(Cluster(kind="inline")) is None
    (tmp_path / "nvidiactl").touch()
    assert beyond_this_machine(asked) is not None
    (tmp_path / "nvidia0").touch()
    assert beyond_this_machine(asked) is None
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert f"CUDA_VISIBLE_DEVICES (={hidden!r}) hides all GPUs" in str(beyond_this_machine(asked))


def test_a_request_names_only_what_is_asked() -> None:
    assert request(Cluster()) == {"CPU": 1.0}
    asked = Cluster(
        cpus_per_trial=2, gpus_per_trial=0.5, memory_per_trial="1GB", accelerator_type="A100", resources={"x": 1.0}
    )
    assert request(asked) == {"CPU": 2, "GPU": 0.5, "memory": 10**9, "x": 1.0, "accelerator_type:A100": 0.001}


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (Cluster(), 20),
        (Cluster(cpus_per_trial=3), 1 + 5),
        (Cluster(cpus_per_trial=0.1), 200),
        (Cluster(gpus_per_trial=0.25), 8),
        (Cluster(gpus_per_trial=0.3), 6),
        (Cluster(memory_per_trial="5GB"), 1 + 12),
        (Cluster(resources={"unicorn": 1.0}), 0),
    ],
)
def test_slots_are_counted_node_by_node(cluster: Cluster, expected: int) -> None:
    assert slots(request(cluster), [SMALL, BIG]) == expected


def test_a_request_that_one_node_meets_is_not_refused() -> None:
    assert refusal(request(Cluster(gpus_per_trial=2, accelerator_type="A100")), [SMALL, BIG]) is None


def test_the_refusal_names_argument_value_rule_and_remedy() -> None:
    said = refusal(request(Cluster(cpus_per_trial=20)), [SMALL, BIG])
    assert said is not None
    assert said.startswith("`cluster.cpus_per_trial` (=20) must fit on one node, and the largest of 2 has 16;")
    assert "cluster.autoscaling=true" in said


def test_what_only_two_nodes_together_could_give_is_refused() -> None:
    said = refusal(request(Cluster(cpus_per_trial=12, gpus_per_trial=1)), [{"CPU": 16.0}, {"CPU": 8.0, "GPU": 1.0}])
    assert said is not None
    assert "none of 2 has all of these resources" in said
    assert "cluster.cpus_per_trial=12, cluster.gpus_per_trial=1" in said


def test_processes_that_only_several_nodes_hold_are_sent_to_them() -> None:
    wanted, nodes = request(Cluster(cpus_per_trial=2, placement="pack")), [{"CPU": 1.0}, {"CPU": 1.0}]
    said = refusal(wanted, nodes, together=2)

    assert said is not None
    assert said.startswith("`cluster.cpus_per_trial` (=2) must fit on one node, and the largest of 2 has 1; pass ")
    assert "cluster.placement=spread" in said
    assert "cluster.placement" not in str(refusal(wanted, nodes[:1], together=2))
    assert refusal(wanted, nodes, processes=2, together=2) is None


@pytest.mark.parametrize(
    ("assigned", "visible", "expected"),
    [
        ([], "0,1", "cpu"),
        ([1], None, "cuda:1"),
        (["3"], "2,3", "cuda:1"),
        (["3"], "3", "cuda:0"),
        ([2, 1], "", "cuda:1"),
        (["3", "2"], "2,3", "cuda:0"),
        (["GPU-b"], "GPU-a, GPU-b", "cuda:1"),
    ],
)
def test_the_device_is_counted_within_what_the_process_sees(
    assigned: list[int | str], visible: str | None, expected: str
) -> None:
    assert cuda_device(assigned, visible) == expected


def test_the_watch_follows_nodes_that_join_and_leave() -> None:
    nodes = [Node("a", "host", True, SMALL)]
    now = [0.0]
    watch = Watch(Cluster(), request(Cluster()), lambda: nodes, lambda: now[0])
    assert watch.look()
    assert watch.capacity == 8
    nodes = [Node("a", "host", False, SMALL), Node("b", "host", True, BIG)]
    assert not watch.look(), "the nodes are not asked for at every event"
    now[0] += LOOK_AROUND
    assert watch.look()
    assert (watch.capacity, sorted(watch.dead)) == (32, ["a"])


def test_a_cluster_without_a_fitting_node_is_given_up_after_a_while() -> None:
    nodes = [Node("a", "host", True, SMALL)]
    now = [0.0]
    watch = Watch(Cluster(), request(Cluster()), lambda: nodes, lambda: now[0])
    watch.look()
    nodes = [Node("a", "host", False, SMALL)]
    now[0] += PATIENCE
    watch.look()
    assert watch.capacity == 0
    assert watch.hopeless is None
    now[0] += LOOK_AROUND
    watch.look()
    assert watch.hopeless is not None


def test_max_concurrent_bounds_what_is_handed_out_and_autoscaling_shows_demand() -> None:
    capped, scaling = Cluster(max_concurrent=3), Cluster(autoscaling=True, gpus_per_trial=1)
    nodes = [Node("a", "host", True, SMALL)]
    watches = [Watch(cluster, request(cluster), lambda: nodes) for cluster in (capped, scaling)]
    assert all(watch.look() for watch in watches)
    assert [watch.capacity for watch in watches] == [3, AUTOSCALING_AHEAD]


def test_the_death_of_a_ray_of_our_own_is_told_as_that_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = [("log_monitor", SimpleNamespace(returncode=0))]
    node = SimpleNamespace(dead_processes=lambda: dead)
    monkeypatch.setattr("ray._private.worker._global_node", node)
    now = [0.0]
    watch = Watch(
        Cluster(), request(Cluster()), lambda: [Node("a", "host", True, SMALL)], lambda: now[0], embedded_ray.death
    )
    watch.look()
    assert watch.capacity == 8, "nothing runs in that process"
    dead.append(("raylet", SimpleNamespace(returncode=-9)))
    now[0] += LOOK_AROUND
    watch.look()
    assert watch.capacity == 0
    assert watch.hopeless is not None
    assert watch.hopeless.startswith("the sweep's own Ray has died: its raylet was killed by SIGKILL")
    assert watch.hopeless.endswith("run the same command again to start another Ray and run the rest.")


@pytest.mark.parametrize(("status", "how"), [(-40, "was killed by signal 40"), (3, "ended with status 3")])
def test_how_a_process_ended_is_told_where_that_has_no_name(
    monkeypatch: pytest.MonkeyPatch, status: int, how: str
) -> None:
    node = SimpleNamespace(dead_processes=lambda: [("raylet", SimpleNamespace(returncode=status))])
    monkeypatch.setattr("ray._private.worker._global_node", node)

    assert f"its raylet {how}, " in str(embedded_ray.death())
