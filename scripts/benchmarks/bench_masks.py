"""Benchmark the pruning engine against torch.nn.utils.prune: ratios in one process, one thread, medians, interleaved.

    python scripts/benchmarks/bench_masks.py [--quick] [--only WORD] [--json FILE]

Each row runs torch and this engine in turns, on modules made before timing, and compares the medians of processor time,
which other processes disturb less than wall time. Bars are for 10M parameters unless a row says otherwise. Rows that
miss their bar are marked and listed again at the end; the exit status is always 0.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.nn import functional

import pruning
from pruning import MaskSet
from pruning.selection.random_subset import prune_random_
from pruning.selection.smallest import prune_smallest_
from scripts.benchmarks.ratios import Action, Case, Row, as_json, faster, interleaved, shown

AMOUNT = 0.9
SHAPES = {"10M": (4000, 2500), "1M": (1000, 1000), "235k": (300, 784), "30k": (100, 300)}
SMALLER = {"1M": 10.0, "235k": 8.0, "30k": 3.0}
"""Bars of whole methods for fewer than 10M parameters."""
CONV = {"10M": 1056, "1M": 334}
"""Number of parameters -> channels of a 3 x 3 convolution with that many parameters."""


def on_fresh(make: Callable[[], Any], act: Callable[[Any], object]) -> Case:
    """Return a case that times `act` on a newly made object each time."""
    return lambda: partial(act, make())


def at(size: str, bar: float) -> float | None:
    """Return `bar` for the size that it holds for."""
    return bar if size == "10M" else None


# --- time -------------------------------------------------------------------------------------------------------------


def linear(shape: tuple[int, int]) -> nn.Linear:
    """Return a layer with a normally distributed weight of `shape`."""
    module = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.normal_(module.weight)
    return module


def layers(size: str, count: int) -> nn.Sequential:
    """Return `count` layers that have `size` parameters together."""
    return nn.Sequential(*(linear((SHAPES[size][0] // count, SHAPES[size][1])) for _ in range(count)))


def call(package: Any, name: str, module: nn.Module, **arguments: Any) -> object:
    """Prune the weight of `module` by a function of `package`, or the weights of its children by global ranking."""
    if name == "global_unstructured":
        pairs = [(child, "weight") for child in module.children()]
        return package.global_unstructured(pairs, package.L1Unstructured, **arguments)
    return getattr(package, name)(module, "weight", **arguments)


def compared(what: str, make: Case, name: str, bar: float | None, repeats: int, **arguments: Any) -> Row:
    """Compare a functional helper of both packages on modules that `make` makes."""
    theirs, ours = (on_fresh(make, partial(call, package, name, **arguments)) for package in (torch_prune, pruning))
    return faster(what, theirs, ours, bar, repeats)


def whole_methods(size: str, repeats: int) -> Iterator[Row]:
    """Compare whole calls, on one layer of each size, and on twenty layers with global ranking."""
    for smaller in [size, *(each for each in SMALLER if each != size)]:
        for name, bar in (("l1_unstructured", 15.0), ("random_unstructured", 20.0)):
            often = repeats if smaller == "10M" else 5 * repeats
            make = partial(linear, SHAPES[smaller])
            yield compared(f"{name} {smaller}, 90%", make, name, SMALLER.get(smaller, bar), often, amount=AMOUNT)
    what, name = f"global_unstructured {size} in 20 tensors, 90%", "global_unstructured"
    yield compared(what, partial(layers, size, 20), name, at(size, 15.0), repeats, amount=AMOUNT)


def selection_alone(size: str, repeats: int) -> Iterator[Row]:
    """Compare kernels that rank or draw into an existing mask with torch's topk and index assignment."""
    weight = torch.randn(SHAPES[size])
    count = round(AMOUNT * weight.numel())
    make = partial(torch.ones, SHAPES[size])

    def topk(scores: Callable[[Tensor], Tensor], mask: Tensor) -> None:
        mask.view(-1)[torch.topk(scores(weight).view(-1), k=count, largest=False).indices] = 0

    for what, bar, scores, ours in (
        ("smallest", 40.0, torch.abs, lambda mask: prune_smallest_(mask, weight, count, magnitude=True)),
        ("random", 50.0, torch.rand_like, lambda mask: prune_random_(mask, count)),
    ):
        theirs = on_fresh(make, partial(topk, scores))
        yield faster(f"selection alone: {what} {size}, 90%", theirs, on_fresh(make, ours), at(size, bar), repeats)


def structured(size: str, repeats: int) -> Iterator[Row]:
    """Compare `ln_structured` on the weight of a convolution."""
    make = partial(nn.Conv2d, CONV[size], CONV[size], 3, bias=False)
    for dim in (0, 1):
        what = f"ln_structured conv {size}, n=2, dim={dim}, 50%"
        yield compared(what, make, "ln_structured", at(size, 1.5), repeats, amount=0.5, n=2, dim=dim)


def later_rounds(size: str, repeats: int) -> Iterator[Row]:
    """Compare pruning another 20% of the survivors at 99% sparsity."""

    def pruned(package: Any, name: str) -> nn.Module:
        module = linear(SHAPES[size])
        call(package, name, module, amount=0.99)
        return module

    for name in ("l1_unstructured", "random_unstructured"):
        theirs, ours = (
            on_fresh(partial(pruned, package, name), partial(call, package, name, amount=0.2))
            for package in (torch_prune, pruning)
        )
        yield faster(f"{name} {size}, 20% more at 99%", theirs, ours, at(size, 2.0), repeats)


# --- a step of training -----------------------------------------------------------------------------------------------


Hold: TypeAlias = Callable[[nn.Sequential], Callable[[torch.optim.Optimizer], object]]
"""Prunes a model and returns what is to be told the optimizer."""


def stepping(batch: int, steps: int, optimizer_type: Callable[..., torch.optim.Optimizer], hold: Hold) -> Action:
    """Return a function that trains LeNet-300-100, pruned by `hold`, for some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    images, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    attach = hold(model)
    optimizer = optimizer_type(model.parameters())
    attach(optimizer)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def by_hooks(package: Any, model: nn.Sequential) -> Callable[[torch.optim.Optimizer], object]:
    """Prune the layers of `model` by hooks, which need no optimizer."""
    for layer in list(model)[::2]:
        call(package, "l1_unstructured", layer, amount=AMOUNT)
    return lambda _: None


def by_keeper(gradients: Literal["masked", "dense"], model: nn.Sequential) -> Callable[[torch.optim.Optimizer], object]:
    """Prune the layers of `model`, and leave the model without masks."""
    by_hooks(pruning, model)
    masks = MaskSet.collect(model)
    for layer in list(model)[::2]:
        pruning.remove(layer, "weight")
    return pruning.MaskKeeper(model, masks, gradients).attach


def training_steps(size: str, repeats: int) -> Iterator[Row]:  # noqa: ARG001 - one signature for all groups
    """Forward, backward and optimizer at 90% sparsity against dense: a keeper, our hooks, and torch's."""
    steps = 20
    ways: dict[str, Hold] = {
        "dense": lambda _: lambda _: None,
        "keeper": partial(by_keeper, "dense"),  # as in a trial with these optimizers
        "keeper, gradients masked": partial(by_keeper, "masked"),
        "hooks": partial(by_hooks, pruning),
        "torch's": partial(by_hooks, torch_prune),
    }
    for name, optimizer_type, bars in (
        ("SGD momentum", partial(torch.optim.SGD, lr=0.01, momentum=0.9), {60: 1.08, 512: 1.02}),
        ("Adam", partial(torch.optim.Adam, lr=1e-3), {60: 1.12, 512: 1.02}),
    ):
        for batch, bar in bars.items():
            runs = {way: stepping(batch, steps, optimizer_type, hold) for way, hold in ways.items()}
            found = interleaved({way: partial(lambda run: run, run) for way, run in runs.items()}, 5 * repeats)
            milliseconds = {way: 1e3 * seconds / steps for way, seconds in found.items()}
            dense = milliseconds.pop("dense")
            for way, taken in milliseconds.items():
                what = f"step LeNet-300-100, batch {batch}, {name}: {way} over dense"
                yield Row(what, dense, taken, "ms", taken / dense, bar if way == "keeper" else None)


# --- bytes ------------------------------------------------------------------------------------------------------------


def stored_masks(size: str, repeats: int) -> Iterator[Row]:  # noqa: ARG001
    """Compare the size of a packed random mask with n H(p) bits."""
    entries = math.prod(SHAPES[size])
    for sparsity in (0.5, 0.9, 0.99):
        mask = prune_random_(torch.ones(SHAPES[size]), round(sparsity * entries))
        limit = -entries * (sparsity * math.log2(sparsity) + (1 - sparsity) * math.log2(1 - sparsity)) / 8
        held = len(MaskSet({"weight": mask}).to_bytes())
        what = f"stored mask {size}, {sparsity:.0%}, over its entropy"
        yield Row(what, limit / entries, held / entries, "B/par", held / limit, at(size, 1.05))


def status(key: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def peak_beyond_result(act: Action) -> int:
    """Return the peak memory of the process during `act` minus its memory afterwards, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    kept = act()
    gc.collect()
    beyond = status("VmHWM") - status("VmRSS")
    del kept
    return beyond


def memory(size: str, repeats: int) -> Iterator[Row]:
    """Measure peak memory beyond the result, and growth over more rounds."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        print("memory: not measured; it needs Linux's /proc/self/clear_refs", file=sys.stderr)
        return
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory returns to the system at once
    entries = math.prod(SHAPES[size])
    for name, count in (("l1_unstructured", 1), ("random_unstructured", 1), ("global_unstructured", 20)):
        peaks = []
        for package in (torch_prune, pruning):
            found = []
            for _ in range(repeats):
                model = layers(size, count)
                target = model[0] if count == 1 else model
                found.append(peak_beyond_result(partial(call, package, name, target, amount=AMOUNT)) / entries)
            peaks.append(statistics.median(found))
        theirs, ours = peaks
        yield Row(f"peak beyond the result: {name} {size}", theirs, ours, "B/par", ours, at(size, 0.5))
    theirs, ours = (growth(package, size) for package in (torch_prune, pruning))
    yield Row(f"held after round 8 beyond round 1: l1_unstructured {size}", theirs, ours, "B/par", ours, at(size, 0.1))


def growth(package: Any, size: str) -> float:
    """Return the growth of memory between one round and eight rounds, in bytes for each parameter."""
    module, held = linear(SHAPES[size]), []
    for _ in range(8):
        call(package, "l1_unstructured", module, amount=0.2)
        gc.collect()
        held.append(status("VmRSS") / math.prod(SHAPES[size]))
    return held[-1] - held[0]


GROUPS: tuple[Callable[[str, int], Iterator[Row]], ...] = (
    *(whole_methods, selection_alone, structured, later_rounds, training_steps, stored_masks, memory),
)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="at most 1M parameters, few repeats")
    parser.add_argument("--only", default="", help="only the groups whose name contains this word")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # otherwise garbage collection between the runs visits all imports, and empties the caches
    size, repeats = ("1M", 3) if options.quick else ("10M", 5)
    about = {"torch": torch.__version__, "platform": platform.platform(), "quick": options.quick}
    print(f"torch {torch.__version__}, {platform.platform()}, 1 thread, medians of {repeats} or more")
    groups = [group for group in GROUPS if options.only in group.__name__]
    rows = shown(row for group in groups for row in group(size, repeats))
    if options.json:
        options.json.write_text(as_json(about, rows))


if __name__ == "__main__":
    main()
