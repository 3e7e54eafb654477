"""Measure whether a shrunk network is as fast as the same architecture built at the smaller sizes.

    python scripts/benchmarks/bench_shrunk.py [--seconds 3] [--blocks 16] [--processor-time] [--json FILE]

ResNet-20 with half of every dependency group, an MLP 784-1000-1000-10 with a quarter of its units, and a small vision
transformer with half of its heads and of its MLPs, are pruned, shrunk, and timed in turns with
networks built at the smaller sizes, in one thread, by PyTorch and by ONNX Runtime (extra `export`). The bar is a ratio
of at most 1.03. The table also shows the speed-up over the whole network. Run nothing else meanwhile; the load average
is printed with the figures. On a busy machine, `--processor-time` counts only the time of this thread.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning
from orchestrator.compare.statistics import ratio
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.workloads.networks.classifiers import resnet20
from pruning.measure.latency import Call, Make, calling, compare_latency

HIGH = 1.03


class Block(nn.Module):
    """Block of multi-head attention and an MLP."""

    def __init__(self, width: int, heads: int, size: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.size, self.inside = heads, size, heads * size
        self.norm, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * heads * size),
            nn.Linear(heads * size, width),
        )
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Any:
        """Return tokens (batch, tokens, width)."""
        batch, tokens, _ = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, self.inside)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Vit(nn.Module):
    """Vision transformer for images (3, 32, 32) in patches of 4 by 4."""

    def __init__(self, heads: int = 6, hidden: int = 768, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 32, hidden) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Any:
        """Return a score for each of 10 classes."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.out(self.norm(self.blocks(tokens)).mean(1))


def mlp(hidden: int = 1000) -> nn.Module:
    """Return an MLP of two hidden layers."""
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@dataclass(frozen=True)
class Case:
    """Case: a network, its pruning, and the same architecture built at the smaller sizes."""

    name: str
    whole: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    sparsity: float
    shape: tuple[int, ...]


CASES = (
    Case("ResNet-20", lambda: resnet20((3, 32, 32), 10), lambda: resnet20((3, 32, 32), 10, width=8), 0.5, (3, 32, 32)),
    Case("MLP", mlp, lambda: mlp(250), 0.75, (784,)),
    Case("ViT", Vit, lambda: Vit(heads=3, hidden=384), 0.5, (3, 32, 32)),
)


@dataclass(frozen=True)
class Row:
    """Row of the table."""

    network: str
    runtime: str
    batch: int
    form: str
    ratio: float
    low: float
    high: float
    whole: float
    milliseconds: float

    def __str__(self) -> str:
        short = "" if self.ratio <= HIGH else "  SHORT"
        return (
            f"{self.network:<10} {self.runtime:<6} batch {self.batch:<3} {self.form:<7} {self.milliseconds:8.3f} ms  "
            f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]  whole / shrunk {self.whole:.2f}{short}"
        )


def rows(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the figures of a case at batches of 1 and 64."""
    torch.manual_seed(0)
    whole, small = case.whole().eval(), case.small().eval()
    masked, images = case.whole().eval(), torch.randn(64, *case.shape)
    pruning.prune(masked, "magnitude", sparsity=case.sparsity, unit="group", example=images[:2])
    shrunk = pruning.shrink(masked, images[:2])
    shapes = [[tuple(each.shape) for each in network.parameters()] for network in (shrunk, small)]
    if shapes[0] != shapes[1]:
        raise SystemExit(f"{case.name} is not what was to be left: {shapes}")
    settings: dict[str, Any] = {"blocks": args.blocks, "threads": 1}
    if args.processor_time:
        settings["clock"] = time.thread_time
    with TemporaryDirectory() as place:
        for runtime in ("eager", "onnx"):
            for batch in (1, 64):
                made = [
                    calling(network, images[:batch]) if runtime == "eager" else in_onnx(network, images, batch, place)
                    for network in (whole, shrunk, small)
                ]
                found = compare_latency(made[1], made[2], seconds=args.seconds, **settings)
                speedup = compare_latency(made[0], made[1], seconds=args.seconds / 4, **settings).ratio
                estimate = ratio(found.log_ratios)
                assert estimate is not None
                assert estimate.low is not None
                assert estimate.high is not None
                form, interval = str(shrunk.shrunk.form), (estimate.low, estimate.high)  # type: ignore[union-attr]
                yield Row(case.name, runtime, batch, form, found.ratio, *interval, speedup, 1000 * found.a)


def in_onnx(network: nn.Module, images: Tensor, batch: int, place: str) -> Make:
    """Return a function that makes a session of ONNX Runtime for a network, from the first images."""
    folder = Path(place, str(id(network)))
    if not folder.exists():
        CODECS["onnx"].write(network, (images[:2],), folder)

    def make() -> Call:
        return partial(CODECS["onnx"].load(folder, 1), copy.deepcopy((images[:batch],)))

    return make


def main() -> None:
    """Print the table; exit with status 1 if a ratio is above the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a measurement")
    parser.add_argument("--blocks", type=int, default=16, help="parts of a measurement")
    parser.add_argument(
        "--processor-time", action="store_true", help="measure processor time of this thread in place of wall time"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    found = []
    for case in CASES:
        for row in rows(case, args):
            print(row, flush=True)
            found.append(row)
    print(f"load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    sys.exit(not all(row.ratio <= HIGH for row in found))


if __name__ == "__main__":
    main()
