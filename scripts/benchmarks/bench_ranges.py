"""Compare ways to choose the range of inputs in 8 bits, and measure the accuracy that rounding costs at 90% zeros.

    python scripts/benchmarks/bench_ranges.py [--seeds 5] [--networks LeNet-5 ...] [--data data] [--json FILE]

Each network is trained on MNIST (6,000 images) or on scikit-learn's digits enlarged to 16x16, pruned to 90% by
magnitude in blocks of four inputs (a first convolution that reads one channel stays dense), and fine-tuned. Then every
layer that reads several inputs rounds them and its weights to bytes, by the equations of `pruning.kernels.byte_kernels`
in float32: kernels are not timed, so no figure depends on the machine's speed. The ranges come from 256 training
images, and once more with one of them multiplied by 10:

- `minmax`: the least and the largest value, as `pruning.to_sparse` has it;
- `p99.99` and `p99.9`: what leaves out so many values, half at each end;
- `mse`: the part of the min-max range with the least squared error of the rounded values.

A line has a network's error of outputs (root mean square, relative, on the test images) and its accuracy less that of
the masked float32 network, in points: mean and extremes over seeds. `to_sparse` is the network that
`pruning.to_sparse(int8=True)` returns on this machine, whose layers run in 8 bits where that is faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning
from orchestrator.workloads.data_sets import named
from orchestrator.workloads.networks.classifiers import lenet5, lenet_300_100, resnet20
from pruning.kernels.byte_kernels import rounded
from scripts.benchmarks.bench_shrunk import Vit

SPARSITY, TRAINED, CALIBRATING, TESTED, BATCH = 0.9, 6_000, 256, 2_000, 64
OUTLIER = 10
PIECES = [part / 40 for part in range(8, 41)]
"""Parts of the min-max range among which `mse` chooses."""
SAMPLE = 200_000
"""Values of a layer's inputs from which `mse` and percentiles are computed."""

Range = tuple[float, float]


class Encoder(nn.Module):
    """Transformer on the 16 patches of an image of 16x16 pixels, which is repeated in three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = Vit(heads=3, hidden=384, width=96, depth=3)
        self.vit.places = nn.Parameter(torch.zeros(1, 16, 96))

    def forward(self, images: Tensor) -> Any:
        """Return a score for each of 10 classes."""
        return self.vit(images.expand(-1, 3, -1, -1))


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], str, int]] = {
    "LeNet-300-100": (lambda: lenet_300_100((1, 28, 28), 10), "mnist", 10),
    "LeNet-5": (lambda: lenet5((1, 16, 16), 10), "digits", 10),
    "ResNet-20": (lambda: resnet20((1, 16, 16), 10), "digits", 6),
    "transformer": (Encoder, "digits", 10),
}
"""Name -> the network, its data set, and its epochs before and after pruning, each."""


def minmax(values: Tensor) -> Range:
    """Return the range of all values."""
    return min(0.0, float(values.min())), max(0.0, float(values.max()))


def percentile(values: Tensor, part: float) -> Range:
    """Return the range that holds a part of the values, with as many left out at each end."""
    out = round(values.numel() * (1 - part) / 2)
    ordered = values.flatten().sort().values
    return min(0.0, float(ordered[out])), max(0.0, float(ordered[-1 - out]))


def least_error(values: Tensor) -> Range:
    """Return the part of the min-max range with the least squared error of rounded values."""
    low, high = minmax(values)
    step = max(1, values.numel() // SAMPLE)
    some = values.flatten()[::step]
    return min(
        ((low * part, high * part) for part in PIECES),
        key=lambda each: float((in_bytes(some, each) - some).double().square().sum()),
    )


RANGES: Mapping[str, Callable[[Tensor], Range]] = {
    "minmax": minmax,
    "p99.99": lambda values: percentile(values, 0.9999),
    "p99.9": lambda values: percentile(values, 0.999),
    "mse": least_error,
}


def in_bytes(x: Tensor, given: Range) -> Tensor:
    """Return values rounded to the 256 values of a range."""
    low, high = given
    scale = (high - low) / 255 or 1.0
    zero = round(-low / scale)
    return ((x * (1 / scale)).round() + zero).clamp(0, 255).sub(zero) * scale


def layers_of(network: nn.Module) -> list[nn.Module]:
    """Return the layers that kernels of bytes take: several inputs at a place, and not in groups of one channel."""
    return [each for each in network.modules() if isinstance(each, nn.Linear | nn.Conv2d) and each.weight.shape[1] > 1]


@contextmanager
def hooked(network: nn.Module, hook: Callable[[nn.Module, Tensor], Tensor | None]) -> Iterator[None]:
    """Call a hook with each layer and its input."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, given: hook(layer, given[0])) for layer in layers_of(network)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def inputs_of(network: nn.Module, images: Tensor) -> dict[nn.Module, Tensor]:
    """Return each layer's inputs for some images."""
    found: dict[nn.Module, Tensor] = {}
    with torch.no_grad(), hooked(network, lambda layer, x: found.update({layer: x.clone()})):
        network(images)
    return found


def outputs_in_bytes(network: nn.Module, ranges: Mapping[nn.Module, Range], images: Tensor) -> Tensor:
    """Return outputs with the inputs and weights of all layers rounded; weights are put back afterwards."""
    kept: dict[Any, Tensor] = {layer: torch.as_tensor(layer.weight).detach() for layer in ranges}
    for layer, weight in kept.items():
        whole, scales = rounded(weight)
        layer.weight.data = whole * scales.view(-1, *[1] * (weight.ndim - 1))
    with hooked(network, lambda layer, x: in_bytes(x, ranges[layer])):
        found = outputs(network, images)
    for layer, weight in kept.items():
        layer.weight.data = weight
    return found


def outputs(network: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """Return a network's outputs, in batches."""
    with torch.no_grad():
        return torch.cat([network(each) for each in torch.split(images, 500)])


def train(network: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float, draw: torch.Generator) -> None:
    """Train with Adam and a rate that falls along a half cosine; pruned entries stay zero."""
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=draw)[: len(images) // BATCH * BATCH]
        for batch in torch.split(order, BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(network(images[batch]), labels[batch]))
            optimizer.step()
            schedule.step()
    network.eval()


def data_of(name: str, root: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, and test images and labels."""
    if name == "digits":
        splits = named.digits()
        train, test = (
            (images.repeat_interleave(2, -1).repeat_interleave(2, -2), labels)
            for images, labels in (splits["train"], splits["test"])
        )
        return *train, *test
    splits = named.mnist(root=root)
    return *_first(splits["train"], TRAINED), *_first(splits["test"], TESTED)


def _first(split: Any, count: int) -> tuple[Tensor, Tensor]:
    images, labels = next(iter(split.batches(count, device=torch.device("cpu"))))
    return images, labels


def figures(name: str, seed: int, root: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of a network and a seed: one line for each range, with and without an outlier."""
    build, data, epochs = NETWORKS[name]
    images, labels, test, test_labels = data_of(data, root)
    torch.manual_seed(seed)
    network, draw = build(), torch.Generator().manual_seed(seed)
    train(network, images, labels, epochs, 1e-3, draw)
    dense = accuracy(outputs(network, test), test_labels)
    several = [f"{path}.weight" for path, module in network.named_modules() if module in layers_of(network)]
    pruning.prune(network, "magnitude", sparsity=SPARSITY, unit="block", parameters=several)
    train(network, images, labels, epochs, 1e-3, draw)
    pruning.remove_all(network)
    exact = outputs(network, test)
    masked = accuracy(exact, test_labels)
    common = {"network": name, "seed": seed, "dense": dense, "masked": masked}
    plain = images[:CALIBRATING]
    spoilt = torch.cat([plain[:-1], plain[-1:] * OUTLIER])
    for outlier, given in ((False, plain), (True, spoilt)):
        held = inputs_of(network, given)
        for ranges, of in RANGES.items():
            made = {layer: of(values) for layer, values in held.items()}
            found = outputs_in_bytes(network, made, test)
            yield common | {"ranges": ranges, "outlier": outlier} | against(found, exact, test_labels, masked)
    sparse = pruning.to_sparse(copy.deepcopy(network), plain[:32], int8=True, batches=list(torch.split(plain, 32)))
    yield (
        common | {"ranges": "to_sparse", "outlier": False} | against(outputs(sparse, test), exact, test_labels, masked)
    )


def against(found: Tensor, exact: Tensor, labels: Tensor, masked: float) -> dict[str, float]:
    """Return the error of outputs, and the points of accuracy above those of the masked network."""
    return {"error": float((found - exact).norm() / exact.norm()), "points": 100 * (accuracy(found, labels) - masked)}


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the fraction of images whose class is right."""
    return float((logits.argmax(1) == labels).float().mean())


def line(rows: list[dict[str, Any]]) -> str:
    """Return the line of one network and one range over all seeds."""
    first, points = rows[0], [row["points"] for row in rows]
    error = statistics.fmean(row["error"] for row in rows)
    dense, masked = (100 * statistics.fmean(row[each] for row in rows) for each in ("dense", "masked"))
    return (
        f"{first['network']:<14} {first['ranges']:<10} {'outlier' if first['outlier'] else '':<8} error {error:7.2%}  "
        f"points {statistics.fmean(points):+.2f} [{min(points):+.2f}, {max(points):+.2f}]  "
        f"(dense {dense:.2f}%, masked {masked:.2f}%, {len(rows)} seeds)"
    )


def main() -> None:
    """Print a line for each network and range."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="networks to measure")
    parser.add_argument("--data", default="data", help="folder of the data sets, which are downloaded if missing")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name in args.networks:
        begun = time.time()
        for seed in range(args.seeds):
            found += figures(name, seed, args.data)
        own = [row for row in found if row["network"] == name]
        for ranges, outlier in dict.fromkeys((row["ranges"], row["outlier"]) for row in own):
            print(line([row for row in own if (row["ranges"], row["outlier"]) == (ranges, outlier)]), flush=True)
        print(f"{name}: {time.time() - begun:.0f} s", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
