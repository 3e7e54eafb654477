"""Processes that check one network each, with a limit of processor time for each part and a limit of memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAITS = 10
"""Times the limit that a part may take on a busy machine."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process: seconds of the processor for each part, which do not depend on other work, and gigabytes."""

    seconds: float
    gigabytes: float

    def apply(self) -> None:
        """Limit the memory of this process and lower its priority; for a child, before it runs."""
        size = int(self.gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        os.nice(5)


def checked(name: str, parts: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Run the parts on a network, and return part -> its outcome, under "build" that of the building.

    A part that takes too long or ends the process is recorded, and those after it run in a new process.
    """
    found: dict[str, Any] = {}
    left = list(parts)
    while left:
        for outcome in _outcomes(name, left, limits):
            found[outcome.pop("part")] = outcome
        left = [part for part in left if part not in found and found["build"]["verdict"] == "right"]
    return found


def _outcomes(name: str, parts: Sequence[str], limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of one process; the last may be that of a part which ended the process."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "scripts.zoo.parts", name, str(write), *parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
            pass_fds=(write,),
            preexec_fn=limits.apply,
            start_new_session=True,
        )
        os.close(write)
        try:
            yield from _lines(read, parts, limits, partial(_used, child.pid), lambda: why_it_ended(child, printed))
        finally:
            os.close(read)
            child.kill()
            child.wait()


def _lines(
    read: int,
    parts: Sequence[str],
    limits: Limits,
    used: Callable[[], float],
    why: Callable[[], tuple[str, str]],
) -> Iterator[dict[str, Any]]:
    waiting = ["build", *parts]
    pending = b""
    while waiting:
        allowed = limits.seconds * (2 if waiting[0] == "build" else 1)
        end, late = used() + allowed, time.monotonic() + WAITS * allowed
        while b"\n" not in pending:
            ready, _, _ = select.select([read], [], [], min(1.0, allowed))
            if not ready and used() < end and time.monotonic() < late:
                continue
            if not ready:
                yield {"part": waiting[0], "verdict": "slow", "said": f"took more than {allowed:g} s"}
                return
            chunk = os.read(read, 65536)
            if not chunk:
                verdict, said = why()
                yield {"part": waiting[0], "verdict": verdict, "said": said}
                return
            pending += chunk
        line, _, pending = pending.partition(b"\n")
        outcome = json.loads(line)
        waiting.remove(outcome["part"])
        built = outcome["part"] != "build" or outcome["verdict"] == "right"
        yield outcome
        if not built:
            return


def _used(process: int) -> float:
    """Return the processor time of a process and its threads in seconds; 0.0 after its end."""
    try:
        user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def why_it_ended(child: subprocess.Popen[bytes], printed: Any) -> tuple[str, str]:
    """Return the verdict and the sentence of a process that ended in the middle of a part."""
    child.wait()
    printed.seek(0)
    lines = printed.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else ""
    if "bad_alloc" in last or "MemoryError" in last or "allocate" in last:
        return "too large", "needs more memory than the limit"
    if child.returncode == -signal.SIGKILL:
        return "too large", "the system ended the process, as it does if memory runs out"
    return "traceback", f"the process ended with status {child.returncode}: {last}"[:300]
