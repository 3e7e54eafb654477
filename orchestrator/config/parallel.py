"""Schema and rules of the config group `parallel`: the processes of a trial; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.key_rules import key
from pruning.catalogue.rows import Rule, at_least, one_of

MOST_PROCESSES = 4096
_FLAG = Rule(lambda value: isinstance(value, bool), "be true or false")


@dataclass
class Parallel:
    """Processes of a trial, which train one network together; `cluster.*_per_trial` is divided among them."""

    kind: str = key("none", one_of("none", "ddp"))
    """`none`: one process; `ddp`: each process takes a share of every batch, and all hold the whole network."""
    processes: int | None = key(None, at_least(1).or_null("; pass null for one for each GPU of the trial"))
    """Number of processes; null: one for each GPU of the trial, else one. Results depend on it."""
    sync_batch_norm: bool = key(False, _FLAG)
    """Normalise by the examples of all processes; otherwise each has its own statistics, and rank 0's are kept."""


def processes(config: Mapping[str, Any]) -> int:
    """Return the number of processes of a trial's training."""
    parallel = config["parallel"]
    if parallel["kind"] == "none":
        return 1
    return int(parallel["processes"] or max(1, config["cluster"]["gpus_per_trial"]))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the processes of a trial break."""
    parallel, cluster, count = config["parallel"], config["cluster"], processes(config)
    gpus, cpus = cluster["gpus_per_trial"], cluster["cpus_per_trial"]
    if parallel["kind"] == "none":
        yield from _for_one(parallel, gpus)
        return
    if count > MOST_PROCESSES:
        yield f"`parallel.processes` (={count}) must be at most {MOST_PROCESSES}; pass the GPUs of a trial, or null."
    if gpus and gpus != count:
        yield (
            f"`cluster.gpus_per_trial` (={gpus:g}) must be {count}, a whole GPU for each of `parallel.processes`; pass "
            f"cluster.gpus_per_trial={count}, or parallel.processes=null."
        )
    if not gpus and count > max(1, cpus):
        yield (
            f"`parallel.processes` (={count}) must be at most {cpus:g}, the CPUs of a trial; pass "
            f"cluster.cpus_per_trial={count}, or fewer processes."
        )
    if count > 1 and cluster["kind"] == "inline":
        yield (
            f"`cluster.kind` (=inline) runs trials in this process, and `parallel.processes` (={count}) asks for more; "
            "pass cluster=local, or parallel=none."
        )
    for name in ("train", "finetune"):
        yield from _training_violations(name, config[name], count)


def _for_one(parallel: Mapping[str, Any], gpus: float) -> Iterator[str]:
    if parallel["sync_batch_norm"]:
        yield (
            "`parallel.sync_batch_norm` (=true) needs parallel=ddp: one process normalises by all examples anyway; "
            "pass parallel=ddp, or leave it out."
        )
    if (parallel["processes"] or 1) > 1:
        yield (
            f"`parallel.processes` (={parallel['processes']}) needs parallel=ddp: one process trains by default; pass "
            "parallel=ddp, and to compare numbers of processes parallel=ddp parallel.processes=1,2."
        )
    if gpus > 1:
        yield (
            f"`cluster.gpus_per_trial` (={gpus:g}) must be at most 1 for a trial of one process; pass parallel=ddp, "
            "with a process for each GPU, or cluster.gpus_per_trial=1."
        )


def _training_violations(name: str, training: Mapping[str, Any], count: int) -> Iterator[str]:
    if training["batch_size"] < count and (training["epochs"] or training["steps"]):
        yield (
            f"`{name}.batch_size` (={training['batch_size']}) must be at least {count}, an example for each of "
            f"`parallel.processes`; pass {name}.batch_size={count}, or fewer processes."
        )
    if training["compile"] and count > 1:
        yield f"`{name}.compile` (=true) works with one process; pass {name}.compile=false, or parallel=none."
