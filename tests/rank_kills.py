"""Sweeps of one trial of two processes, of which any process, the driver or a node is killed at some moment."""

from __future__ import annotations

import atexit
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sessions import kill, processes_in

from orchestrator.core.records import StageRecord
from orchestrator.store.store import Store

if TYPE_CHECKING:
    from nodes import Nodes

ROOT = Path(__file__).parents[1]
WORDS = (
    *("parallel=ddp", "parallel.processes=2", "cluster.cpus_per_trial=2", "tracking=none", "schedule=one_shot"),
    *("model=mlp", "model.hidden=[16]", "model.dropout=0.1", "train.checkpoint_minutes=0.01", "finetune.epochs=5"),
    "train.epochs=40",
)
"""A trial of two stages, whose dense training takes some seconds."""
BACKOFF = 6.0
"""Seconds between a loss and the next attempt: processes that are found in this time are of the lost one."""
RANKS = {"rank 0": ("ray::segment",), "rank 1": ("ray::rank 1",), "all ranks": ("ray::segment", "ray::rank 1")}
"""Processes by the name of a kill -> beginnings of their titles."""
SILENT = ("silent node of rank 1",)
"""Nodes whose processes stop but do not end, as after a lost link: no connection to them breaks."""
NODES = ("node of rank 0", "node of rank 1", *SILENT)
LIMITS = {"driver": 10.0, **dict.fromkeys(RANKS, 10.0), **dict.fromkeys(NODES, 20.0)}
"""Kill -> seconds within which no process of the trial may be left, and the driver must have noticed."""


@dataclass(frozen=True)
class Loss:
    """Measurements of a kill, in seconds after it."""

    kind: str
    moment: float
    """Seconds after both ranks began."""
    left: float
    """When no process of the trial was left."""
    noticed: float | None
    """When the driver told the loss; None if it was killed."""
    node: int | None = None
    """Number of the node that was killed."""

    @property
    def late(self) -> bool:
        """Whether the kill broke its limit."""
        return max(self.left, self.noticed or 0.0) > LIMITS[self.kind]


class Trial:
    """A sweep of one trial in a folder, on a Ray of its own or on the nodes of a cluster.

    Args:
        folder: working directory, which holds the store
        cluster: the nodes, which have one CPU each; None for a Ray of the sweep's own
    """

    def __init__(self, folder: Path, cluster: Nodes | None = None) -> None:
        self.folder, self._cluster = folder, cluster
        self._environment = dict(os.environ) if cluster is None else cluster.environment
        paths = [str(ROOT / "tests" / "without_figures"), str(ROOT)]
        self._environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        folder.mkdir(exist_ok=True)

    def start(self, *more: str) -> Trial:
        """Start the command, or start it again."""
        joined = () if self._cluster is None else (f"cluster.address={self._cluster.address}",)
        command = [sys.executable, "-m", "orchestrator", *WORDS, *joined, *more]
        with (self.folder / "out.txt").open("ab") as output:
            self.driver = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                start_new_session=True,
                stdout=output,
                stderr=output,
            )
        atexit.register(self.driver.kill)  # does nothing to a driver that was waited for
        return self

    @property
    def output(self) -> str:
        """Output of all commands so far."""
        return (self.folder / "out.txt").read_text()

    @property
    def retries(self) -> int:
        """Number of attempts that the commands have told as lost."""
        return self.output.count("  retried  ")

    @property
    def sessions(self) -> Sequence[int]:
        """Sessions that hold the processes of the trial."""
        return [self.driver.pid] if self._cluster is None else [*self._cluster.sessions.values()]

    def processes(self, what: str = "all ranks") -> list[int]:
        """Return the processes of some ranks that work now."""
        return processes_in(self.sessions, *RANKS[what])

    def node_of(self, rank: str) -> int:
        """Return the number of the node that holds a rank."""
        assert self._cluster is not None
        (number,) = [
            number for number, session in self._cluster.sessions.items() if processes_in([session], *RANKS[rank])
        ]
        return number

    def wait(self, limit: float = 300) -> int:
        """Wait until the command ends; return its exit status."""
        return self.driver.wait(limit)

    def until(self, holds: Callable[[], Any], limit: float = 120) -> float:
        """Wait until a condition holds, or the limit has passed; return the seconds."""
        begun = time.monotonic()
        while not holds() and time.monotonic() - begun < limit:
            time.sleep(0.02)
        return time.monotonic() - begun

    def until_ranks(self) -> None:
        """Wait until both ranks have begun, in any order."""
        begun = ("rank 0", "rank 1")
        self.until(lambda: all(map(self.processes, begun)) or self.driver.poll() is not None)
        assert self.driver.poll() is None, self.output

    def lose(self, kind: str, moment: float) -> Loss | None:
        """Kill something `moment` seconds after the trial began; None if all was finished before.

        A killed node is left dead, and a killed driver is not started again.
        """
        self.until_ranks()
        time.sleep(moment)
        before, ranks = self.retries, self.processes()
        if not ranks or len(self.results()) == 2:
            return None
        begun, node = time.monotonic(), self._kill(kind)
        noticed = left = None
        silent = self._cluster.sessions[node] if kind in SILENT else None
        titles = () if kind == "driver" and self._cluster is None else RANKS["all ranks"]
        sessions = [session for session in self.sessions if session != silent]
        while (noticed is None or left is None) and (now := time.monotonic() - begun) < 30:
            if left is None and not processes_in(sessions, *titles):
                left = now
            if kind == "driver" or (noticed is None and self.retries > before):
                noticed = now
            time.sleep(0.02)
        if kind in SILENT:
            self._cluster.kill(node)
        return Loss(kind, moment, left or 99.0, None if kind == "driver" else noticed or 99.0, node)

    def rejoin(self, node: int) -> None:
        """Start a killed node again."""
        assert self._cluster is not None
        self._cluster.join(node)

    def _kill(self, kind: str) -> int | None:
        """Kill something; return the number of a killed node."""
        if kind in NODES:
            assert self._cluster is not None
            node = self.node_of(kind.rpartition("node of ")[2])
            (self._cluster.silence if kind in SILENT else self._cluster.kill)(node)
            return node
        if kind == "driver":
            self.driver.kill()
            self.driver.wait()
        else:
            kill(self.sessions, *RANKS[kind])
        return None

    def results(self) -> dict[str, Any]:
        """Return results and weights of the finished stages."""
        store = Store(str(self.folder / "store"))
        records: dict[str, StageRecord] = dict(store.finished(store.stages.known()))
        return {key: [record.result(), store.read(key, "weights.safetensors")] for key, record in records.items()}


def quiet(trial: Trial) -> float:
    """Run a sweep without losses; return the seconds for which its rank 1 works."""
    trial.start().until_ranks()
    span = trial.until(lambda: not trial.processes("rank 1"))
    assert trial.wait() == 0, trial.output
    return span


def disturbed(trial: Trial, kinds: Sequence[str], span: float, draws: random.Random) -> list[Loss]:
    """Run a sweep to its end, with losses one after another; none if the trial is finished before its moment.

    Args:
        trial: the sweep
        kinds: what is killed
        span: the moments are drawn uniformly from so many seconds after both ranks began
        draws: generator of the moments
    """
    losses, options = [], (f"cluster.backoff={BACKOFF}", "cluster.retries=9")
    trial.start(*options)
    for kind in kinds:
        loss = trial.lose(kind, draws.uniform(0.0, span))
        if loss is None:
            break
        losses.append(loss)
        if kind == "driver":
            trial.start(*options)
        elif loss.node is not None:
            trial.rejoin(loss.node)
    trial.wait()
    return losses
