"""Where trials run and what each of them takes: the schema of the config group `cluster`, and its rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.key_rules import key
from pruning.catalogue.value_rules import Rule, at_least, one_of

LEAST = 0.0001
"""Ray's smallest share of a resource."""
LEAST_MEMORY = 10**6
"""Bytes; a smaller number lacks its unit, as 2 does for 2GB."""
MOST_THREADS = 1024

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SHARE = Rule(lambda cpus: LEAST <= cpus < math.inf, f"be above 0, at least {LEAST}; pass 0.5 for two on a CPU")
_GPUS = Rule(
    lambda gpus: gpus == 0 or LEAST <= gpus <= 1,
    f"be 0, or from {LEAST} to 1: a trial uses one GPU; pass 1, or 0 to train on CPUs",
)
_SECONDS = Rule(lambda seconds: 0 < seconds < math.inf, "be above 0 seconds; pass 86400 for a day")
_OWN_KEYS = {"CPU": "cpus_per_trial", "GPU": "gpus_per_trial", "memory": "memory_per_trial"}


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


def is_memory(value: int | str | None) -> bool:
    """Whether it is a number of bytes above 0, or null."""
    try:
        return value is None or to_bytes(value) > 0
    except ValueError:
        return False


_MEMORY = Rule(
    lambda value: is_memory(value) and (value is None or to_bytes(value) >= LEAST_MEMORY),
    "be at least 1MB, in bytes or as text with a unit; pass 2GB or 512MiB, or null to ask for none",
)


@dataclass
class Cluster:
    """What a sweep may use. A trial takes the same resources at each of its stages."""

    kind: str = key("ray", one_of("ray", "inline"))
    """`ray`, or `inline`: in this process, one stage at a time, for debugging."""
    address: str | None = None
    """null: a Ray of the sweep's own unless RAY_ADDRESS names one; `auto`: the one on this machine; or `host:port`."""
    cpus_per_trial: float = key(1.0, _SHARE)
    """CPUs that each running stage takes of the cluster; a fraction shares one."""
    gpus_per_trial: float = key(0.0, _GPUS)
    """A fraction shares a GPU between trials."""
    memory_per_trial: int | str | None = key(None, _MEMORY)
    """Bytes, or text such as `2GB` or `512MiB`; Ray places by it and does not enforce it."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of the Ray nodes."""
    accelerator_type: str | None = None
    """Ray's name of a GPU model, such as `A100`."""
    placement: str = key("spread", one_of("spread", "pack"))
    """`spread` over the nodes, or `pack` onto few of them."""
    max_concurrent: int | None = key(None, at_least(1).or_null("; pass null to run as many trials at once as fit"))
    """At most so many trials at once."""
    threads: int | None = key(None, at_least(1).or_null("; pass null to take cpus_per_trial"))
    """Intra-op threads of a trial; null: `cpus_per_trial`, at least 1. Results depend on it."""
    retries: int = key(2, at_least(0, "; pass 0 to give up at the first loss"))
    """Further attempts after a worker, its memory or its node was lost; other errors are never retried."""
    stage_timeout: float | None = key(None, _SECONDS.or_null("; pass null to wait for ever"))
    """Seconds that an attempt at a stage may take: one that hangs is ended, and tried again as after a loss."""
    backoff: float = key(1.0, at_least(0, " seconds; pass 0 to retry at once"))
    """Seconds before the first retry, doubled before each further one."""
    grace: float = key(5.0, at_least(0, " seconds; pass 30 where Slurm's KillWait is that long"))
    """Seconds that running stages have to end, and to write a checkpoint, once the sweep is interrupted."""
    on_error: str = key("continue", one_of("continue", "stop"))
    """After a failed trial `continue` with the others, or `stop` the sweep."""
    autoscaling: bool = False
    """Wait for nodes that the cluster does not have yet."""
    num_cpus: int | None = key(None, at_least(1).or_null("; pass null to declare the machine's"))
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

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the kind of GPU, custom resources, threads and the address."""
        gpus, model = values["gpus_per_trial"], values["accelerator_type"]
        if model is not None and not gpus:
            yield (
                f"`{where}.accelerator_type` (={model}) needs a GPU, and `{where}.gpus_per_trial` is 0; pass "
                f"{where}.gpus_per_trial=1."
            )
        for name, amount in values["resources"].items():
            if name in _OWN_KEYS:
                yield f"`{where}.resources` must not hold {name}; pass {where}.{_OWN_KEYS[name]}={amount:g}."
            elif not LEAST <= amount < math.inf:
                yield (
                    f"`{where}.resources.{name}` (={amount:g}) must be above 0, at least {LEAST}; leave it out for "
                    "none."
                )
        if MOST_THREADS < (threads := values["threads"] or values["cpus_per_trial"]) < math.inf:
            yield (
                f"`{where}.threads` (={threads:g}, by default `cpus_per_trial`) must be at most {MOST_THREADS}; pass "
                "the number of cores that a trial can use."
            )
        yield from _address(values["address"])


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
