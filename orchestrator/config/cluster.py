"""Schema and rules of the config group `cluster`: where trials run, the resources of each, and submitted jobs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.key_rules import key
from orchestrator.config.tracking_uri import DEFAULT_URI, resolve_uri, sqlite_path
from orchestrator.core.redact import redact
from pruning.catalogue.rows import Rule, at_least, one_of

LEAST = 0.0001
"""Ray's smallest share of a resource."""
LEAST_MEMORY = 10**6
"""Minimum memory in bytes; a smaller number lacks its unit, like 2 for 2GB."""
MOST_THREADS = 1024

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SHARE = Rule(
    lambda cpus: LEAST <= cpus < math.inf, f"be finite and at least {LEAST}; pass 0.5 to run two trials on a CPU"
)
_GPUS = Rule(
    lambda gpus: gpus == 0 or LEAST <= gpus <= 1 or (gpus > 1 and gpus == int(gpus)),
    f"be 0, a share in [{LEAST}, 1], or a whole number of GPUs; pass 1, or 0 to train on CPUs",
)
_SECONDS = Rule(lambda seconds: 0 < seconds < math.inf, "be above 0 seconds; pass 86400 for a day")
_OWN_KEYS = {"CPU": "cpus_per_trial", "GPU": "gpus_per_trial", "memory": "memory_per_trial"}


def to_bytes(amount: int | str) -> int:
    """Convert an int, or text with a unit, to a number of bytes: `2GB` = 2e9, `2GiB` = 2^31.

    Raises:
        ValueError: the text is not a number of bytes
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", str(amount).strip().upper())
    if found is None:
        raise ValueError(f"{amount!r} is not a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def is_memory(value: int | str | None) -> bool:
    """Whether a value is a number of bytes above 0, or null."""
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
    """Resources of a sweep. Every stage of a trial takes the same resources."""

    kind: str = key("ray", one_of("ray", "inline"))
    """`ray`, or `inline`: in this process, one stage at a time, for debugging."""
    address: str | None = None
    """null: start Ray for the sweep, unless RAY_ADDRESS names a cluster; `auto`: the cluster of this machine; or
    `host:port`."""
    cpus_per_trial: float = key(1.0, _SHARE)
    """CPUs of each running stage, for all its processes; a fraction shares a CPU."""
    gpus_per_trial: float = key(0.0, _GPUS)
    """GPUs of each running stage, for all its processes; a fraction shares a GPU between trials."""
    memory_per_trial: int | str | None = key(None, _MEMORY)
    """Bytes, or text such as `2GB` or `512MiB`; Ray uses it for placement and does not enforce it."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of Ray nodes that each running stage takes."""
    accelerator_type: str | None = None
    """Ray's name for a GPU model, such as `A100`."""
    placement: str = key("spread", one_of("spread", "pack"))
    """`spread` stages over all nodes, or `pack` them onto few nodes. The processes of a trial may `spread` over several
    nodes, or are on one with `pack`."""
    max_concurrent: int | None = key(None, at_least(1).or_null("; pass null to run as many trials at once as fit"))
    """Maximum number of trials that run at once."""
    threads: int | None = key(None, at_least(1).or_null("; pass null to take cpus_per_trial"))
    """Intra-op threads of each process of a trial; null: its CPUs, at least 1. Results depend on it."""
    retries: int = key(2, at_least(0, "; pass 0 to give up at the first loss"))
    """Retries after the loss of a worker, its memory or its node; other errors are never retried."""
    stage_timeout: float | None = key(None, _SECONDS.or_null("; pass null to wait for ever"))
    """Seconds that an attempt at a stage may take; after that it is ended and retried, as after a loss."""
    backoff: float = key(1.0, at_least(0, " seconds; pass 0 to retry at once"))
    """Seconds before the first retry; doubled before each further retry."""
    grace: float = key(5.0, at_least(0, " seconds; pass 30 where Slurm's KillWait is that long"))
    """Seconds for running stages to write a checkpoint and end after an interrupt."""
    on_error: str = key("continue", one_of("continue", "stop"))
    """After a failed trial, `continue` with the others or `stop` the sweep."""
    autoscaling: bool = False
    """Wait for nodes that the cluster can still add."""
    num_cpus: int | None = key(None, at_least(1).or_null("; pass null to declare the machine's"))
    """Number of CPUs when the sweep starts Ray itself; null: all CPUs of the machine."""
    dashboard: bool = False
    """Start Ray's dashboard on the loopback interface, when the sweep starts Ray itself."""

    @property
    def thread_count(self) -> int:
        """Intra-op threads of a trial of one process."""
        return self.threads_of(1)

    def threads_of(self, processes: int) -> int:
        """Return the intra-op threads of each of a trial's processes."""
        return self.threads or max(1, int(self.cpus_per_trial / processes))

    @property
    def memory_bytes(self) -> int | None:
        """`memory_per_trial` in bytes."""
        return None if self.memory_per_trial is None else to_bytes(self.memory_per_trial)

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the broken rules of the GPU model, custom resources, threads and the address."""
        gpus, model = values["gpus_per_trial"], values["accelerator_type"]
        if model is not None and not gpus:
            yield (
                f"`{where}.accelerator_type` (={model}) needs a GPU, but `{where}.gpus_per_trial` is 0; pass "
                f"{where}.gpus_per_trial=1."
            )
        for name, amount in values["resources"].items():
            if not isinstance(amount, int | float):  # what Hydra refused to take over
                yield f"`{where}.resources.{name}` (={amount}) must be a number; pass +{where}.resources.{name}=1."
            elif name in _OWN_KEYS:
                yield f"`{where}.resources` must not hold {name}; pass {where}.{_OWN_KEYS[name]}={amount:g}."
            elif not LEAST <= amount < math.inf:
                yield (
                    f"`{where}.resources.{name}` (={amount:g}) must be finite and at least {LEAST}; leave it out to "
                    "request none."
                )
        if MOST_THREADS < (threads := values["threads"] or values["cpus_per_trial"]) < math.inf:
            yield (
                f"`{where}.threads` (={threads:g}, by default `cpus_per_trial`) must be at most {MOST_THREADS}; pass "
                "the number of cores for a trial."
            )
        yield from _address(values["address"])


def _address(address: str | None) -> Iterator[str]:
    if address is None or address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        yield (
            f"`cluster.address` (={address}) must not be a Ray Client address: a lost connection would end the sweep, "
            "and every result would travel through the client; run the command on a node of the cluster with "
            "cluster=auto, or submit it with `ray job submit`."
        )
    elif not (found := re.fullmatch(r"(?:[^\s/:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)) or int(found[1]) > 65535:
        yield f"`cluster.address` (={address}) must be auto, local or host:port; pass null to start Ray for the sweep."


JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for a submitted job."""


STOP_SECONDS = 2.0
"""Seconds for stages to end after `ray job stop`, which allows three seconds in all."""


def grace(seconds: float) -> float:
    """Return the seconds for stages to end: `seconds`, but at most `STOP_SECONDS` in a submitted job."""
    return min(seconds, STOP_SECONDS) if JOB_CONFIG in os.environ else seconds


def in_temporary_copy() -> bool:
    """Whether this process is a submitted job whose working directory is a temporary copy by Ray."""
    try:
        runtime_env = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    except ValueError:
        return False
    return bool(runtime_env.get("working_dir"))


def submission_violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each path of a plain configuration that would be lost with the working directory."""
    if not in_temporary_copy():
        return
    uri, tracking = str(config["store"]["uri"]), config["tracking"]
    if "://" not in uri and _is_here(Path(uri).expanduser()):
        yield (
            f"`store.uri` (={uri}) lies in the working directory, which is a temporary copy for a submitted job: "
            "every result would be lost; pass store.uri=s3://bucket/prefix, or the absolute path of a "
            "directory that every node mounts."
        )
    database = sqlite_path(resolve_uri(tracking["uri"])) if tracking["kind"] == "mlflow" else None
    if database is not None and _is_here(database):
        yield (
            f"`tracking.uri` (={redact(tracking['uri'] or DEFAULT_URI)}) lies in the working directory, which is a "
            "temporary copy for a submitted job: the view would be lost; pass the address of an MLflow server, "
            "sqlite:////absolute/path/mlflow.db, or tracking=none."
        )


def _is_here(path: Path) -> bool:
    return path.absolute().resolve().is_relative_to(Path.cwd().resolve())
