#!/usr/bin/env python3
"""Measure the time until the first trial trains, and compare it with a bare start of torch and Ray.

    python scripts/benchmarks/bench_startup.py [--repeats 5] [--json FILE]

Both run in turns, so that other load affects both equally: `python -c "import torch, ray; ray.init()"`, and a sweep
that starts Ray in an empty directory, with MLflow on SQLite, until its first training step is done. Medians, in
seconds from the start of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 1.3
BARE = "import time, torch, ray; imported = time.time(); ray.init(); print('at', imported, time.time())"
MODEL = """
import os, time
from torch import nn

class Timed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        note("network built")
        self.passes = 0

    def forward(self, inputs):
        if self.training and self.passes < 2:
            note(("first batch", "first step done")[self.passes])
            self.passes += 1
        return super().forward(inputs)

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        print(time.time(), what, sep="\\t", file=file)
"""


def bare(folder: Path) -> dict[str, float]:
    """Run the bare start; return the time of each milestone."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", BARE], cwd=folder, env=_environment(folder), capture_output=True, text=True, check=True
    )
    imported, ready = (float(each) - began for each in done.stdout.rsplit("at", 1)[1].split()[:2])
    return {"torch and ray imported": imported, "ray.init returned": ready, "command ended": time.time() - began}


def sweep(folder: Path) -> dict[str, float]:
    """Run a sweep to its first training step; return the time of each milestone."""
    notes = folder / "notes"
    (folder / "timed.py").write_text(MODEL)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "timed.yaml").write_text("_target_: timed.Timed\n")
    command = [sys.executable, "-m", "orchestrator", "--config-dir=conf", "model=timed", "train.epochs=2"]
    reached: dict[str, float] = {}
    began = time.time()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(folder) | {"NOTES": str(notes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Sweep "):
                reached["planned"] = time.time() - began
            elif "  started  " in line:
                reached.setdefault("first stage seen to start", time.time() - began)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    for line in notes.read_text().splitlines():
        when, what = line.split("\t")
        reached.setdefault(what, float(when) - began)
    reached["command ended"] = time.time() - began
    return reached


def main() -> None:
    """Measure in turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"bare": [], "sweep": []}
    for _ in range(given.repeats):
        for name, measure in (("bare", bare), ("sweep", sweep)):
            with tempfile.TemporaryDirectory(prefix="start") as folder:
                found[name].append(measure(Path(folder)))
    medians = {name: _medians(each) for name, each in found.items()}
    for name, each in medians.items():
        print(name)
        for what, seconds in each.items():
            print(f"  {seconds:6.2f}  {what}")
    step = medians["sweep"]["first step done"]
    for what in ("ray.init returned", "command ended"):
        print(f"first step / bare, {what}: {step / medians['bare'][what]:.2f} (bar {BAR})")
    if given.json is not None:
        given.json.write_text(json.dumps(medians, indent=2))


def _medians(each: list[dict[str, float]]) -> dict[str, float]:
    medians = {what: statistics.median(one[what] for one in each) for what in each[0]}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment with a separate home: a bare `ray.init()` writes to the home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    return {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


if __name__ == "__main__":
    main()
