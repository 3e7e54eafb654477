#!/usr/bin/env python3
"""Compare the start of a trial of several processes on a warm Ray with that of `torchrun`, in one interleaved run.

    python scripts/benchmarks/bench_rank_startup.py [--processes 2] [--repeats 5]

torchrun: from the start of the command until the first step of a hand-written DistributedDataParallel loop is done.
Ours: from the hand-over of a plan of one trial of the same network until its first step is done, to a Ray that has just
started, and to one whose workers have run a trial before, as they have within a sweep. Printed: medians, and the ratios
with their ranges.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hydra import compose, initialize_config_dir

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.cluster import Cluster
from orchestrator.config.compose import plain
from orchestrator.core.specs import Job
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from orchestrator.planning.plan import make_plan
from orchestrator.store.store import Store
from scripts.benchmarks.bench_startup import MODEL

BAR = 1.3
BY_HAND = """
import torch
import torch.distributed as dist
from timed import Timed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(Timed())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    inputs, labels = torch.randn(32, 64), torch.randint(10, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def first_step(notes: Path, begun: float) -> float:
    """Return the seconds from `begun` until all processes had done their first step, and empty the notes."""
    lines = [line.split("\t") for line in notes.read_text().splitlines()]
    notes.write_text("")
    return max(float(when) for when, what in lines if what == "first step done") - begun


def by_hand(processes: int, folder: Path) -> float:
    """Return the seconds that torchrun takes to the first step."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "by_hand.py"]
    begun = time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return first_step(folder / "notes", begun)


def ours(processes: int, seed: int, executor: RayExecutor, notes: Path) -> float:
    """Return the seconds from the hand-over of a trial to its first step."""
    given = [f"seed={seed}", "parallel=ddp", f"parallel.processes={processes}", f"cluster.cpus_per_trial={processes}"]
    config = plain(compose("config", [*given, "model=mlp", "train.epochs=1", "schedule.at=trained"]))
    plan = make_plan([Job((), config | {"model": {"_target_": "timed.Timed", "name": "timed"}})])
    begun = time.time()
    for event in executor.run(plan):
        if event.failure is not None:
            raise SystemExit(str(event.failure))
    return first_step(notes, begun)


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    hydra_options.register()
    with tempfile.TemporaryDirectory(prefix="start") as name, initialize_config_dir(str(CONF), version_base="1.3"):
        folder, notes = Path(name), Path(name, "notes")
        (folder / "timed.py").write_text(MODEL)
        (folder / "by_hand.py").write_text(BY_HAND)
        root = str(Path(__file__).resolve().parents[2])
        os.environ |= {"NOTES": str(notes), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([name, root])}
        sys.path.insert(0, name)
        cluster, count = Cluster(cpus_per_trial=given.processes), given.processes
        found = []
        for seed in range(given.repeats):
            with RayExecutor(cluster, Store(str(folder / "store")), processes=count) as executor:
                new, again = (ours(count, 2 * seed + each, executor, notes) for each in (0, 1))
            found.append((by_hand(count, folder), new, again))
    hand, *own = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"{count} processes: torchrun {hand:.2f} s to the first step")
    for place, (what, median) in enumerate(zip(("a new Ray", "workers that ran a trial"), own, strict=True), start=1):
        ratios = sorted(each[place] / each[0] for each in found)
        print(f"{what}: {median:.2f} s, ratio {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    print(f"bar {BAR}")


if __name__ == "__main__":
    main()
