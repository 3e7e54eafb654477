"""Processes of a trial in a configuration: their number, what they share, what is refused, and what is in the key."""

from __future__ import annotations

import pytest
from small_trials import composed, planned, small

from orchestrator.config.parallel import processes
from orchestrator.config.schema import ConfigError
from orchestrator.execution.placement import refusal, share_of, slots
from orchestrator.planning.preview import preview
from orchestrator.trial.rules import violations

DDP = ("parallel=ddp", "parallel.processes=2", "cluster.cpus_per_trial=2")


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ((), 1),
        (("parallel=ddp",), 1),
        (DDP, 2),
        (("parallel=ddp", "cluster.gpus_per_trial=4"), 4),
        (("parallel=ddp", "parallel.processes=2", "cluster.gpus_per_trial=2"), 2),
    ],
)
def test_a_trial_has_a_process_for_each_gpu(overrides: tuple[str, ...], count: int) -> None:
    config = composed(*overrides)

    assert processes(config) == count
    assert not [*violations(config)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.gpus_per_trial=4",), "must be at most 1 for a trial of one process; pass parallel=ddp"),
        (("parallel.processes=2",), "needs parallel=ddp: one process trains by default"),
        (("parallel.sync_batch_norm=true",), "`parallel.sync_batch_norm` (=true) needs parallel=ddp"),
        (DDP[:2], "`parallel.processes` (=2) must be at most 1, the CPUs of a trial; pass cluster.cpus_per_trial=2"),
        ((*DDP, "cluster.gpus_per_trial=3"), "must be 2, a whole GPU for each of `parallel.processes`"),
        ((*DDP, "cluster=inline"), "runs trials in this process, and `parallel.processes` (=2) asks for more"),
        ((*DDP, "train.batch_size=1"), "`train.batch_size` (=1) must be at least 2, an example for each"),
        ((*DDP, "finetune.compile=true"), "`finetune.compile` (=true) works with one process"),
    ],
)
def test_what_processes_cannot_share_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match="nothing was started") as refused:
        planned(composed(*overrides))

    assert said in str(refused.value)


def test_processes_are_in_the_key_and_one_process_changes_none() -> None:
    keys = [planned(small(*each)).trials[0].stages for each in ((), ("parallel=ddp",), DDP, (*DDP, "seed=0"))]

    assert keys[0] == keys[1], "one process is as ever"
    assert not {*keys[1]} & {*keys[2]}
    assert keys[2] == keys[3]


def test_each_process_has_its_part_of_the_threads_and_the_preview_says_so() -> None:
    plan = planned(small(*DDP, "cluster.cpus_per_trial=6"))

    assert {spec.typed.threads for spec in plan.stages.values() if spec.kind == "dense"} == {3}
    assert "each      6 CPU for 2 processes, threads: 3" in preview("sweep", plan, ())


def test_the_preview_says_how_many_trials_run_at_once() -> None:
    for cpus, said in ((6, "3 trials"), (3, "1 trial"), (1, "0 trials")):
        plan = planned(small(*DDP, f"cluster.num_cpus={cpus}"))
        assert f"; {said} at once on this machine\n" in preview("sweep", plan, ())
    assert "at once" not in preview("sweep", planned(small(*DDP, "cluster.address=10.0.0.1:6379")), ())


def test_trials_may_span_nodes_if_they_are_spread() -> None:
    wanted, nodes = {"CPU": 8.0, "GPU": 4.0}, [{"CPU": 8.0, "GPU": 2.0}] * 3

    assert share_of(wanted, 4) == {"CPU": 2.0, "GPU": 1.0}
    assert slots(wanted, nodes) == 0
    assert slots(wanted, nodes, processes=4) == 1
    assert refusal(wanted, nodes, processes=4) is None
    assert "must fit on one node" in str(refusal(wanted, nodes))
    said = str(refusal({"CPU": 8.0, "GPU": 8.0}, nodes, processes=8))
    assert "`parallel.processes` (=8, which share cluster.cpus_per_trial=8, cluster.gpus_per_trial=8)" in said
    assert "6 of them fit on 3 nodes" in said
