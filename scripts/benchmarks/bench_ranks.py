#!/usr/bin/env python3
"""Compare a training by several processes with a hand-written DistributedDataParallel loop, in one interleaved run.

    python scripts/benchmarks/bench_ranks.py [--processes 2] [--steps 120] [--repeats 5] [--network cnn|resnet20]

Both train the same network on the same batches of random images, as processes on this machine with gloo. The seconds
of a step are the difference of a long and a short training, divided by the difference of their steps, so that neither
start nor end counts. Printed: the median of each, and the median ratio with its range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.core.work_order import Seat
from orchestrator.training.loop.training_job import TrainingJob
from orchestrator.training.loop.training_loop import fit
from orchestrator.training.team.ranks import Ranks, joined
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.networks.classifiers import cnn, resnet20
from orchestrator.workloads.splits import TensorSplit
from orchestrator.workloads.tasks.classification import Classification

CPU, BATCH, EXAMPLES = torch.device("cpu"), 128, 4096


def images(count: int) -> TensorSplit:
    """Return random images of ten classes."""
    draws = torch.Generator().manual_seed(0)
    return TensorSplit(torch.randn(count, 1, 28, 28, generator=draws), torch.randint(10, (count,), generator=draws))


def network(name: str) -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return cnn((1, 28, 28), 10) if name == "cnn" else resnet20((1, 28, 28), 10)


def by_hand(name: str, steps: int, data: TensorSplit, ranks: Ranks) -> float:
    """Return the seconds of a plain loop."""
    model = DistributedDataParallel(network(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order, step = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)), 0
    begun = time.perf_counter()
    while step < steps:
        for chosen in torch.split(order, BATCH):
            inputs, labels = data.take(chosen.tensor_split(ranks.size)[ranks.rank])
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            step += 1
            if step == steps:
                break
    return time.perf_counter() - begun


def ours(name: str, steps: int, data: Data, ranks: Ranks) -> float:
    """Return the seconds of the built-in loop."""
    optimizer = {"_target_": "torch.optim.SGD", "lr": 0.01, "momentum": 0.9}
    config = {"steps": steps, "epochs": None, "batch_size": BATCH, "optimizer": optimizer, "eval_every": steps}
    begun = time.perf_counter()
    task = Classification()
    fit(TrainingJob(model=network(name), data=data, task=task, config=config, seed=0, device=CPU, ranks=ranks))
    return time.perf_counter() - begun


def measure(rank: int, port: int, given: argparse.Namespace, found: Any) -> None:
    """Time both loops in turn, in one of the processes."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    train, few = images(EXAMPLES), images(8)
    data = Data(train, few, few, (1, 28, 28), 10)
    with joined(Seat(rank, given.processes, port=port), store, CPU) as ranks:
        for _ in range(given.repeats):
            pair = []
            for loop, split in ((by_hand, train), (ours, data)):
                times = []
                for steps in (given.steps // 6, given.steps):
                    dist.barrier()
                    times.append(loop(given.network, steps, split, ranks))  # type: ignore[arg-type]
                pair.append((times[1] - times[0]) / (given.steps - given.steps // 6))
            if rank == 0:
                found.append(pair)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--network", choices=["cnn", "resnet20"], default="cnn")
    given = parser.parse_args()
    leader = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # outlives every rank that waits on it
    with torch.multiprocessing.Manager() as manager:
        found = manager.list()
        spawn(measure, (leader.port, given, found), nprocs=given.processes)  # type: ignore[no-untyped-call]
        pairs = [*found]
    hand, own = (1000 * statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = sorted(mine / theirs for theirs, mine in pairs)
    print(f"{given.network}, {given.processes} processes: by hand {hand:.2f} ms a step, built-in loop {own:.2f} ms")
    print(f"ratio {statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]")


if __name__ == "__main__":
    main()
