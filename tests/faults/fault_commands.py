"""Real sweeps in processes of their own, to kill, interrupt and start again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.store.store import Store

SWEEP = (
    *("-m", "schedule.sparsity=0.5,0.9", "schedule.rounds=2", "seed=0,1", "method=random_unstructured", "model=mlp"),
    *("model.hidden=[32]", "train.epochs=2", "finetune.epochs=1", "name=faulty"),
    *("train.optimizer._target_=noted.SGD", "finetune.optimizer._target_=noted.SGD"),
)
"""4 trials of 3 stages: two dense trainings and eight rounds, each a fraction of a second."""


class Command:
    """Running `python -m orchestrator ...`, or another module, in `folder` and in its own session.

    An environment variable marks all its processes, so that they can be found. `limit` is the size in bytes of the
    largest file that it may write.
    """

    def __init__(
        self, folder: Path, *arguments: str, module: str = "orchestrator", limit: int | None = None, **environment: str
    ) -> None:
        folder.mkdir(exist_ok=True)
        here = Path(__file__).parent
        import_path = [str(here.parent / "without_figures"), str(here), os.environ.get("PYTHONPATH", "")]
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._said = [folder.parent / f"{self.mark}.{name}" for name in ("out", "err")]
        with open(self._said[0], "wb") as out, open(self._said[1], "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=folder,
                env={
                    **os.environ,
                    "HOME": str(folder.parent),
                    "OMP_NUM_THREADS": "1",
                    "COLUMNS": "150",
                    "FAULTS_MARK": self.mark,
                    "NOTES": str(folder / "notes"),
                    "PYTHONPATH": os.pathsep.join(filter(None, import_path)),
                    **environment,
                },
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=partial(_as_from_a_terminal, limit),
            )

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._said[0].read_text()

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._said[1].read_text()

    def wait(self, timeout: float = 120) -> int:
        """Wait until the command ends; return its exit status."""
        return self.process.wait(timeout)

    def until(self, holds: Callable[[], Any], timeout: float = 90) -> Any:
        """Wait until a function returns a true value while the command runs; return the value."""
        deadline = time.monotonic() + timeout
        while not (found := holds()):
            assert self.process.poll() is None, self.stdout + self.stderr
            if time.monotonic() > deadline:
                raise TimeoutError("it never came")
            time.sleep(0.02)
        return found

    def until_stages(self, number: int) -> None:
        """Wait until `number` stages are finished."""
        self.until(lambda: finished_stages(self.folder) >= number)

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the driver, or to its whole process group as a terminal does."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def processes(self, *names: str) -> list[int]:
        """Return the live processes except the driver; with `names`, those whose command line holds one of them."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != self.process.pid:
                try:
                    marked = f"FAULTS_MARK={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                    line = (folder / "cmdline").read_text()
                except OSError:
                    continue
                if marked and line and (not names or any(name in line for name in names)):
                    found.append(int(folder.name))
        return found

    def leaves_nothing(self, within: float = 10.0) -> None:
        """Assert that no process of the command is alive."""
        deadline = time.monotonic() + within
        while left := self.processes():
            commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:150] for pid in left]
            assert time.monotonic() < deadline, f"orphans: {commands}"
            time.sleep(0.1)


def trainings(*folders: Path) -> int:
    """Return how many stages the commands in these folders have begun to train."""
    return sum(len((folder / "notes").read_text().split()) for folder in folders if (folder / "notes").exists())


def finished_stages(folder: Path) -> int:
    """Return the number of finished stages in the store of `folder`."""
    stages = folder / "store" / "stages"
    return len(list(stages.iterdir())) if stages.is_dir() else 0


def plan_of(folder: Path) -> Plan:
    """Return the plan of the only sweep in `folder`."""
    store = Store(str(folder / "store"))
    (name,) = store.sweeps()
    return Plan.from_json(store.load_sweep(name)["plan"])


def records_of(folder: Path) -> dict[str, StageRecord]:
    """Return the records of the finished stages of the only sweep in `folder`."""
    return Store(str(folder / "store")).finished(plan_of(folder).stages)


def results_of(folder: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return the parts of every stage that must be bit-equal: its result, and its file of masks."""
    store = Store(str(folder / "store"))
    return {
        key: (record.result(), store.read(key, "masks.npz") if record.kind == "round" else b"")
        for key, record in records_of(folder).items()
    }


def _as_from_a_terminal(limit: int | None) -> None:
    """Restore signals that `nohup` or a background shell lets children ignore, and limit the size of files."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
