"""Where trials run and what each of them takes: the schema of the config group `cluster`, and its rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("ray", "inline")
PLACEMENTS = ("spread", "pack")
ON_ERROR = ("continue", "stop")

LEAST = 0.0001
"""Ray's smallest share of a resource."""
MOST_THREADS = 1024

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_OWN_KEYS = {"CPU": "cpus_per_trial", "GPU": "gpus_per_trial", "memory": "memory_per_trial"}


@dataclass
class Cluster:
    """What a sweep may use. A trial takes the same resources at each of its stages."""

    kind: str = "ray"
    """`ray`, or `inline`: in this process, one stage at a time, for debugging."""
    address: str | None = None
    """null: a Ray of the sweep's own unless RAY_ADDRESS names one; `auto`: the one on this machine; or `host:port`."""
    cpus_per_trial: float = 1.0
    gpus_per_trial: float = 0.0
    """A fraction shares a GPU between trials; above 1 it must be whole."""
    memory_per_trial: int | str | None = None
    """Bytes, or text such as `2GB` or `512MiB`; Ray places by it and does not enforce it."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of the Ray nodes."""
    accelerator_type: str | None = None
    """Ray's name of a GPU model, such as `A100`."""
    placement: str = "spread"
    """`spread` over the nodes, or `pack` onto few of them."""
    max_concurrent: int | None = None
    """At most so many trials at once."""
    threads: int | None = None
    """Intra-op threads of a trial; null: `cpus_per_trial`, at least 1. Results depend on it."""
    retries: int = 2
    """Further attempts after a worker, its memory or its node was lost; other errors are never retried."""
    backoff: float = 1.0
    """Seconds before the first retry, doubled before each further one."""
    on_error: str = "continue"
    """After a failed trial `continue` with the others, or `stop` the sweep."""
    autoscaling: bool = False
    """Wait for nodes that the cluster does not have yet."""
    num_cpus: int | None = None
    """CPUs that a Ray of the sweep's own declares; null: those of the machine."""
    dashboard: bool = False
    """Start Ray's dashboard with a Ray of the sweep's own, on the loopback interface."""

    @property
    def thread_count(self) -> int:
        """Intra-op threads of a trial."""
        return self.threads or max(1, int(self.cpus_per_trial))

    @property
    def memory_bytes(self) -> int | None:
        """`memory_per_trial` in bytes."""
        return None if self.memory_per_trial is None else to_bytes(self.memory_per_trial)


def to_bytes(amount: int | str) -> int:
    """Return a number of bytes written as an int or as text with a unit: `2GB` = 2e9, `2GiB` = 2^31.

    Raises:
        ValueError: the text is no such number
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", str(amount).strip().upper())
    if found is None:
        raise ValueError(f"{amount!r} is not a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def validate(cluster: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each rule that a plain `cluster` configuration breaks."""
    return [*_choices(cluster), *_resources(cluster), *_limits(cluster), *_address(cluster["address"])]


def _choices(cluster: Mapping[str, Any]) -> Iterator[str]:
    for name, choices in (("kind", KINDS), ("placement", PLACEMENTS), ("on_error", ON_ERROR)):
        if cluster[name] not in choices:
            yield f"`cluster.{name}` (={cluster[name]}) must be one of {', '.join(choices)}."


def _resources(cluster: Mapping[str, Any]) -> Iterator[str]:
    cpus, gpus, memory = (cluster[f"{name}_per_trial"] for name in ("cpus", "gpus", "memory"))
    if not (math.isfinite(cpus) and cpus >= LEAST):
        yield f"`cluster.cpus_per_trial` (={cpus:g}) must be above 0, at least {LEAST}; pass 0.5 for two on a CPU."
    if not (math.isfinite(gpus) and (gpus == 0 or gpus >= LEAST)):
        yield f"`cluster.gpus_per_trial` (={gpus:g}) must not be negative, nor below {LEAST}; pass 0 to train on CPUs."
    elif gpus > 1 and gpus != int(gpus):
        yield (
            f"`cluster.gpus_per_trial` (={gpus:g}) must be whole above 1; pass {math.ceil(gpus)}, or a fraction "
            "below 1 to share a GPU between trials."
        )
    if cluster["accelerator_type"] is not None and not gpus:
        yield (
            f"`cluster.accelerator_type` (={cluster['accelerator_type']}) needs a GPU, and `cluster.gpus_per_trial` is "
            "0; pass cluster.gpus_per_trial=1."
        )
    try:
        if memory is not None and to_bytes(memory) <= 0:
            yield f"`cluster.memory_per_trial` (={memory}) must be above 0; pass null to ask for none."
    except ValueError:
        yield f"`cluster.memory_per_trial` (={memory}) must be bytes or text with a unit; pass 2GB or 512MiB."
    for name, amount in cluster["resources"].items():
        if name in _OWN_KEYS:
            yield f"`cluster.resources` must not hold {name}; pass cluster.{_OWN_KEYS[name]}={amount:g}."
        elif not (math.isfinite(amount) and amount >= LEAST):
            yield f"`cluster.resources.{name}` (={amount:g}) must be above 0, at least {LEAST}; leave it out for none."


def _limits(cluster: Mapping[str, Any]) -> Iterator[str]:
    for name, meaning in (
        ("max_concurrent", "run as many trials at once as fit"),
        ("threads", "take cpus_per_trial"),
        ("num_cpus", "declare the machine's"),
    ):
        if cluster[name] is not None and cluster[name] < 1:
            yield f"`cluster.{name}` (={cluster[name]}) must be at least 1; pass null to {meaning}."
    threads = cluster["threads"] or cluster["cpus_per_trial"]
    if MOST_THREADS < threads < math.inf:
        yield (
            f"`cluster.threads` (={threads:g}, by default `cpus_per_trial`) must be at most {MOST_THREADS}; pass the "
            "number of cores that a trial can use."
        )
    if cluster["retries"] < 0:
        yield f"`cluster.retries` (={cluster['retries']}) must be at least 0; pass 0 to give up at the first loss."
    if not (math.isfinite(cluster["backoff"]) and cluster["backoff"] >= 0):
        yield f"`cluster.backoff` (={cluster['backoff']}) must be seconds, at least 0; pass 0 to retry at once."


def _address(address: str | None) -> Iterator[str]:
    if address is None or address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        yield (
            f"`cluster.address` (={address}) must not be a Ray Client address: a lost connection would end the sweep, "
            "and every result would make a detour; run the command on a node of the cluster with cluster=auto, or "
            "submit it with `ray job submit`."
        )
    elif not (found := re.fullmatch(r"(?:[^\s/:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)) or int(found[1]) > 65535:
        yield f"`cluster.address` (={address}) must be auto, local or host:port; pass null for a Ray of its own."
