"""Placement of trials: the resources of a trial, whether a node has them, and how many trials run at once. No Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.cluster import Cluster
from orchestrator.execution.on_ray.embedded_ray import address_of
from orchestrator.planning.number_formats import counted
from orchestrator.planning.pace import lacks_gpu

Resources = Mapping[str, float]
"""Ray's names of resources -> amounts; memory in bytes."""

LOOK_AROUND = 2.0
"""Seconds between two queries of the nodes."""

PATIENCE = 60.0
"""Seconds without any node that can run a trial after which the sweep gives up."""

AUTOSCALING_AHEAD = 32
"""Number of additional trials to submit, so that an autoscaler sees that nodes are missing."""

_KEYS = {"CPU": "cpus_per_trial", "GPU": "gpus_per_trial", "memory": "memory_per_trial"}


@dataclass(frozen=True)
class Node:
    """A node as Ray describes it."""

    id: str
    host: str
    alive: bool
    resources: Resources


class Watch:
    """Watches the nodes of a cluster as they join and leave.

    Args:
        cluster: gives `max_concurrent` and `autoscaling`
        wanted: resources that one trial takes
        nodes: returns the current nodes
        clock: returns monotonic seconds
        died: returns why the whole cluster is lost for ever, or None; if it is lost, `nodes` is not called
        processes: number of a trial's processes that may be on several nodes
    """

    def __init__(
        self,
        cluster: Cluster,
        wanted: Resources,
        nodes: Callable[[], Sequence[Node]],
        clock: Callable[[], float] = time.monotonic,
        died: Callable[[], str | None] = lambda: None,
        processes: int = 1,
    ) -> None:
        self.capacity = 0
        """Number of trials to submit: twice as many as fit, so that no worker waits for the next one."""
        self.dead: frozenset[str] = frozenset()
        """Ids of lost nodes."""
        self.hopeless: str | None = None
        """Why no trial can run any more: the cluster died, or no node has fitted for PATIENCE seconds; else None."""
        self._cluster, self._wanted, self._nodes, self._clock = cluster, wanted, nodes, clock
        self._died, self._processes = died, processes
        self._due = self._fitted = clock()

    def look(self) -> bool:
        """Query the nodes if the last query is LOOK_AROUND seconds ago; return whether they were queried."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + LOOK_AROUND
        if died := self._died():
            self.hopeless, self.capacity = died, 0
            return True
        nodes = self._nodes()
        alive = [node.resources for node in nodes if node.alive]
        self.dead = frozenset(node.id for node in nodes if not node.alive)
        fitting = slots(self._wanted, alive, self._processes)
        if fitting or self._cluster.autoscaling:
            self._fitted = now
        elif now - self._fitted > PATIENCE:
            self.hopeless = refusal(self._wanted, alive, self._processes)
        ahead = 2 * fitting + (AUTOSCALING_AHEAD if self._cluster.autoscaling else 0)
        self.capacity = min(ahead, self._cluster.max_concurrent or ahead)
        return True


def request(cluster: Cluster) -> dict[str, float]:
    """Return the resources that one trial takes, without those of amount 0."""
    wanted = {
        "CPU": cluster.cpus_per_trial,
        "GPU": cluster.gpus_per_trial,
        "memory": cluster.memory_bytes or 0,
        **cluster.resources,
    }
    if cluster.accelerator_type is not None:
        wanted[f"accelerator_type:{cluster.accelerator_type}"] = 0.001
    return {name: amount for name, amount in wanted.items() if amount}


def slots(wanted: Resources, nodes: Iterable[Resources], processes: int = 1) -> int:
    """Return how many trials fit on the nodes at once; the `processes` of a trial may be on several nodes."""
    if processes == 1:
        return sum(_fits(wanted, node) for node in nodes)
    return sum(_fits(share_of(wanted, processes), node) for node in nodes) // processes


def share_of(wanted: Resources, processes: int) -> dict[str, float]:
    """Return the resources of each of a trial's processes."""
    return {name: amount / processes for name, amount in wanted.items()}


def refusal(wanted: Resources, nodes: Sequence[Resources], processes: int = 1, together: int = 1) -> str | None:
    """Return why no node can ever run a trial, with the remedy; None if one can.

    Args:
        wanted: resources of a trial
        nodes: resources of each node
        processes: number of the trial's processes that may be on several nodes
        together: number of the trial's processes, also if they must be on one node
    """
    if slots(wanted, nodes, processes):
        return None
    asked = ", ".join(f"{_key(name)}={_amount(name, amount)}" for name, amount in wanted.items())
    if processes > 1:
        fitting = slots(share_of(wanted, processes), nodes)
        return (
            f"`parallel.processes` (={processes}, which share {asked}) must fit on the nodes together, and {fitting} "
            f"of them fit on {counted(len(nodes), 'node')}; ask for less, or pass cluster.autoscaling=true if nodes "
            "will join."
        )
    remedy = "ask for less, or pass cluster.autoscaling=true if such nodes will join."
    if slots(wanted, nodes, together):
        remedy = "pass cluster.placement=spread, which may place the processes of a trial on several nodes."
    for name, amount in wanted.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            return (
                f"`{_key(name)}` (={_amount(name, amount)}) must fit on one node, and the largest of {len(nodes)} has "
                f"{_amount(name, most)}; {remedy}"
            )
    return f"`cluster` ({asked}) must fit on one node, and none of {len(nodes)} has all of these resources; {remedy}"


def beyond_this_machine(cluster: Cluster) -> str | None:
    """Return why this machine can never run a trial; None if it can, or if another machine may run it.

    For a Ray of the sweep's own the CPUs are checked, and for cluster=inline the GPU.
    """
    if cluster.kind == "inline" and cluster.gpus_per_trial and (reason := lacks_gpu()):
        return (
            f"`cluster.gpus_per_trial` (={cluster.gpus_per_trial:g}) needs a GPU on this machine with cluster=inline, "
            f"and {reason}; pass cluster.gpus_per_trial=0 to train on the CPU, or run the command on a machine with a "
            "visible GPU."
        )
    if cluster.kind == "inline" or cluster.autoscaling or not address_of(cluster).own:
        return None
    return refusal({"CPU": cluster.cpus_per_trial}, [{"CPU": float(cluster.num_cpus or os.cpu_count() or 1)}])


def cuda_device(assigned: Sequence[int | str], visible: str | None) -> str:
    """Return torch's name of the first GPU that Ray assigned to this task; `cpu` if there is none.

    Args:
        assigned: ids of the assigned GPUs, as the machine numbers them
        visible: CUDA_VISIBLE_DEVICES of this process; torch numbers the GPUs listed there from 0
    """
    if not assigned:
        return "cpu"
    if not visible:
        return f"cuda:{min(int(gpu) for gpu in assigned)}"
    order = [name.strip() for name in visible.split(",")]
    return f"cuda:{min(order.index(str(gpu)) for gpu in assigned)}"


def _fits(wanted: Resources, node: Resources) -> int:
    return min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items())


def _key(resource: str) -> str:
    if resource.startswith("accelerator_type:"):
        return "cluster.accelerator_type"
    return f"cluster.{_KEYS[resource]}" if resource in _KEYS else f"cluster.resources.{resource}"


def _amount(resource: str, amount: float) -> str:
    if resource.startswith("accelerator_type:"):
        return resource.partition(":")[2] if amount else "none"
    return f"{amount / 1e9:.3g}GB" if resource == "memory" else f"{amount:g}"
