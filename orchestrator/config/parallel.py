"""Schema and rules of the config group `parallel`: the processes of a trial; no torch."""

from __future__ import annotations

from collections.abc import Mapping
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
