"""What a trial asks of a node, whether any node can give it, and how many trials run at once: arithmetic, no Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.config.cluster import Cluster
from orchestrator.execution.embedded_ray import address_of
from orchestrator.planning.hardware import lacks_gpu

Resources = Mapping[str, float]
"""Ray's names of resources -> amounts; memory in bytes."""

LOOK_AROUND = 2.0
"""Seconds between two looks at the nodes."""

PATIENCE = 60.0
"""Seconds without any node that can run a trial before the sweep is given up."""

AUTOSCALING_AHEAD = 32
"""Trials that wait openly, so that an autoscaler sees that nodes are missing."""

_KEYS = {"CPU": "cpus_per_trial", "GPU": "gpus_per_trial", "memory": "memory_per_trial"}


@dataclass(frozen=True)
class Node:
    """A node as Ray describes it."""

    id: str
    host: str
    alive: bool
    resources: Resources


class Watch:
    """Follows the nodes of a cluster as they join and leave.

    Args:
        cluster: of which `max_concurrent` and `autoscaling` are meant
        wanted: what one trial takes
        nodes: gives the nodes as they are now
        clock: seconds, monotonic
        died: says why no node will ever be there again, where that is known: then the nodes are not asked
    """

    def __init__(
        self,
        cluster: Cluster,
        wanted: Resources,
        nodes: Callable[[], Sequence[Node]],
        clock: Callable[[], float] = time.monotonic,
        died: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.capacity = 0
        """How many trials to have under way: twice those that fit, so that no worker waits for the next one."""
        self.dead: frozenset[str] = frozenset()
        """Ids of the nodes that were lost."""
        self.hopeless: str | None = None
        """Why no trial can run any more, once that has lasted."""
        self._cluster, self._wanted, self._nodes, self._clock = cluster, wanted, nodes, clock
        self._died = died
        self._due = self._fitted = clock()

    def look(self) -> bool:
        """Look at the nodes if it is time to; return whether it was."""
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
        fitting = slots(self._wanted, alive)
        if fitting or self._cluster.autoscaling:
            self._fitted = now
        elif now - self._fitted > PATIENCE:
            self.hopeless = refusal(self._wanted, alive)
        ahead = 2 * fitting + (AUTOSCALING_AHEAD if self._cluster.autoscaling else 0)
        self.capacity = min(ahead, self._cluster.max_concurrent or ahead)
        return True


def request(cluster: Cluster) -> dict[str, float]:
    """Return the resources that one trial takes."""
    wanted = {
        "CPU": cluster.cpus_per_trial,
        "GPU": cluster.gpus_per_trial,
        "memory": cluster.memory_bytes or 0,
        **cluster.resources,
    }
    if cluster.accelerator_type is not None:
        wanted[f"accelerator_type:{cluster.accelerator_type}"] = 0.001
    return {name: amount for name, amount in wanted.items() if amount}


def slots(wanted: Resources, nodes: Iterable[Resources]) -> int:
    """Return how many trials fit on the nodes at once."""
    return sum(_fits(wanted, node) for node in nodes)


def refusal(wanted: Resources, nodes: Sequence[Resources]) -> str | None:
    """Return why no node can ever run a trial, with the remedy; None if one can."""
    if any(_fits(wanted, node) for node in nodes):
        return None
    for name, amount in wanted.items():
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            return (
                f"`{_key(name)}` (={_amount(name, amount)}) must fit on one node, and the largest of {len(nodes)} has "
                f"{_amount(name, most)}; ask for less, or pass cluster.autoscaling=true where such nodes will join."
            )
    asked = ", ".join(f"{_key(name)}={_amount(name, amount)}" for name, amount in wanted.items())
    return (
        f"`cluster` ({asked}) must fit on one node, and none of {len(nodes)} has all of that together; ask for less, "
        "or pass cluster.autoscaling=true where such nodes will join."
    )


def beyond_this_machine(cluster: Cluster) -> str | None:
    """Return why this machine can never run a trial, None if it can or another machine may.

    A Ray of the sweep's own is checked for CPUs, a sweep in this process for a GPU.
    """
    if cluster.kind == "inline" and cluster.gpus_per_trial and (reason := lacks_gpu()):
        return (
            f"`cluster.gpus_per_trial` (={cluster.gpus_per_trial:g}) needs a GPU of this machine where cluster=inline, "
            f"and {reason}; pass cluster.gpus_per_trial=0 to train on the CPU, or run it where a GPU can be seen."
        )
    if cluster.kind == "inline" or cluster.autoscaling or not address_of(cluster).own:
        return None
    return refusal({"CPU": cluster.cpus_per_trial}, [{"CPU": float(cluster.num_cpus or os.cpu_count() or 1)}])


def cuda_device(assigned: Sequence[int | str], visible: str | None) -> str:
    """Return torch's name of the first GPU that Ray assigned, `cpu` if none.

    Args:
        assigned: the machine's ids of the GPUs of this task
        visible: CUDA_VISIBLE_DEVICES of this process; torch counts within it
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
