"""Output of a process that leaves at once."""

from __future__ import annotations

import subprocess
import sys

LEAVING_WITH_A_LISTENER = """
import subprocess, sys, threading, time
from orchestrator.execution import interrupts

child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
ended = threading.Event()

def listen():
    child.stdout.read()
    ended.set()
    raise ConnectionResetError("lost the connection to the child")

threading.Thread(target=listen, daemon=True).start()
kill = interrupts._kill_descendants
interrupts._kill_descendants = lambda: (kill(), ended.wait(10), time.sleep(0.3))
interrupts.leave(saying="Interrupted.")
"""


def test_threads_that_lose_their_processes_print_nothing() -> None:
    """Ray's threads report each lost connection, sometimes with a traceback, between the kill and the exit."""
    ended = subprocess.run([sys.executable, "-c", LEAVING_WITH_A_LISTENER], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 130
    assert ended.stderr.strip() == "Interrupted."
    assert not ended.stdout
