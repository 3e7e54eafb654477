"""Check the interval of a measured speed-up, on two equal networks and on a planted slowdown.

    python scripts/benchmarks/bench_latency.py [--measurements 1000] [--seconds 1.5] [--planted 100]
                                                [--blocks 16] [--json FILE]

A small ResNet is measured against itself: the 95% interval should cover 1 in 93 to 97.5% of the measurements. Then the
ResNet is measured against itself with a pause of 5% of its time: the interval should lie below 1 in 95 of 100
measurements. Run nothing else meanwhile; the load average is printed with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from orchestrator.compare.statistics import Estimate, ratio
from pruning.measure.latency import Call, Make, calling, compare_latency

SLOWDOWN = 0.05


class Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        """Return the images plus the output of the convolutions."""
        return torch.relu(images + self.second(self.first(images)))


def small_resnet() -> nn.Module:
    """Return a network of four residual blocks."""
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def slower(make: Make, seconds: float) -> Make:
    """Return a function that calls the same network, then waits busily for `seconds`."""

    def made() -> Call:
        call = make()

        def wait() -> None:
            call()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass

        return wait

    return made


def measured(a: Make, b: Make, count: int, args: argparse.Namespace) -> tuple[list[Estimate], float]:
    """Measure the speed-up of b over a `count` times; return the speed-ups and the seconds of a measurement."""
    found, start = [], time.perf_counter()
    for _ in range(count):
        ratios = compare_latency(a, b, blocks=args.blocks, seconds=args.seconds, threads=1).log_ratios
        estimate = ratio(ratios)
        assert estimate is not None
        found.append(estimate)
    return found, (time.perf_counter() - start) / max(1, count)


def main() -> None:
    """Measure, print, and write the figures to the file of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=int, default=1000, help="number of measurements of equal networks")
    parser.add_argument("--planted", type=int, default=100, help="number of measurements of the planted slowdown")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of a measurement")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    equal = calling(small_resnet(), torch.randn(1, 3, 16, 16))
    own = compare_latency(equal, equal, seconds=args.seconds).a
    same, seconds = measured(equal, equal, args.measurements, args)
    planted, _ = measured(equal, slower(equal, SLOWDOWN * own), args.planted, args)
    covered = sum((each.low or 0) <= 1 <= (each.high or 0) for each in same)
    detected = sum((each.high or 1) < 1 for each in planted)
    width = statistics.median((each.high or 0) - (each.low or 0) for each in same) if same else 0.0
    print(f"two equal networks of {1e3 * own:.3f} ms, {seconds:.2f} s a measurement of {args.blocks} blocks")
    print(f"  1 lies in the 95% interval in {covered} of {len(same)}; its width is {100 * width:.2f}% (median)")
    print(f"a slowdown of {100 * SLOWDOWN:g}% is found in {detected} of {len(planted)}")
    print(f"load average {os.getloadavg()[0]:.2f}")
    if args.json:
        figures = {"covered": covered, "of": len(same), "width": width, "found": detected, "planted": len(planted)}
        args.json.write_text(json.dumps(figures | {"seconds": seconds, "load": os.getloadavg()[0]}) + "\n")


if __name__ == "__main__":
    main()
