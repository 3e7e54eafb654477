"""Benchmark masks that change within a training: steps against those of a keeper, updates against a global pruning.

    python scripts/benchmarks/bench_dynamics.py [--quick] [--json FILE]

A step trains the built-in cnn on batches of 128 images, by SGD with momentum, between two updates. An update changes
the masks of 1e7 entries, and is compared with one global magnitude pruning of them by `pruning.plan`. Both are timed in
turns, in one process on one thread. Rows that miss their bar are marked; the exit status is always 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import pruning
from orchestrator.workloads import model_building
from pruning import MaskKeeper
from pruning.choices.axes import Schedule, Scope
from pruning.choices.combining import Choices
from scripts.benchmarks.ratios import Action, Row, as_json, interleaved, shown

NEVER = 10**9
"""Steps between two updates, so that no step updates."""
STEPS: dict[str, tuple[Callable[[], pruning.dynamics.Dynamics], float]] = {
    "static": (pruning.dynamics.static, 1.1),
    "gradual": (partial(pruning.dynamics.gradual, 0.9, every=NEVER, begin=0.5), 1.1),
    "set": (partial(pruning.dynamics.set, every=NEVER), 1.1),
    "rigl": (partial(pruning.dynamics.rigl, every=NEVER, begin=0.5), 1.1),
    "sr_ste": (pruning.dynamics.sr_ste, 1.3),
    "ste": (pruning.dynamics.ste, 1.3),
    "movement": (partial(pruning.dynamics.movement, 0.9, every=NEVER, begin=0.5), 1.3),
    "soft_movement": (pruning.dynamics.soft_movement, 1.3),
}
UPDATES: dict[str, Callable[[], pruning.dynamics.Dynamics]] = {
    "gradual": partial(pruning.dynamics.gradual, 0.9, every=1, until=2, scope="global"),
    "set": partial(pruning.dynamics.set, every=1),
    "rigl": partial(pruning.dynamics.rigl, every=1, until=1.0),
    "movement": partial(pruning.dynamics.movement, 0.9, every=1, until=2, scope="global"),
}


def network() -> nn.Module:
    """Return the built-in cnn."""
    node = {"kind": "cnn", "input_shape": None, "classes": None}
    return model_building.build(node, input_shape=(1, 28, 28), classes=10, seed=0)


def masks(model: nn.Module, sparsity: float) -> pruning.MaskSet:
    """Return random masks of all weights but those of the first layer, whose inputs no window divides."""
    names = [name for name, each in model.named_parameters() if each.ndim > 1 and each[0].numel() > 9]
    return pruning.dynamics.random_masks(model, sparsity, allocation="uniform", parameters=names)


def step_row(name: str, repeats: int, quick: bool) -> Row:
    """Return the row of a step between two updates."""
    make, bar = STEPS[name]
    images, labels = torch.randn(16 if quick else 128, 1, 28, 28), torch.arange(16 if quick else 128) % 10

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()

    def kept() -> Action:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        MaskKeeper(model, masks(model, 0.5)).attach(optimizer)
        return partial(step, model, optimizer)

    def changed() -> Action:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        make().attach(model, masks(model, 0.5), optimizer, length=NEVER)
        return partial(step, model, optimizer)

    keeper, dynamics = kept(), changed()
    found = interleaved({"theirs": lambda: keeper, "ours": lambda: dynamics}, repeats)
    times = 1e3 * found["theirs"], 1e3 * found["ours"]
    return Row(f"step of {name} against the keeper's", *times, "ms", times[1] / times[0], bar)


def update_row(name: str, repeats: int, quick: bool) -> Row:
    """Return the row of an update of many entries."""
    size = 400 if quick else 1825

    def layers() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(3)))
        for each in model.parameters():
            each.grad = torch.randn_like(each)
        return model

    def whole() -> Action:
        choices = Choices(scope=Scope("global"), schedule=Schedule(0.5))
        return partial(pruning.plan, layers(), choices)

    def update() -> Action:
        model, dynamics = layers(), UPDATES[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer.step()
        full = {name: torch.ones_like(each) for name, each in model.named_parameters()}
        sparse = full if name in ("gradual", "movement") else masks(model, 0.5)
        dynamics.attach(model, sparse, optimizer, length=10, hooks=False)
        if name == "rigl":
            return dynamics.before
        dynamics.step = 1
        for each in getattr(dynamics, "scores", {}).values():  # equal before a training, which empties whole layers
            each.normal_()
        return partial(_changing, dynamics)

    found = interleaved({"theirs": whole, "ours": update}, repeats)
    times = 1e3 * found["theirs"], 1e3 * found["ours"]
    return Row(f"update of {name} against a global pruning", *times, "ms", times[1] / times[0], 2.5)


def _changing(dynamics: pruning.dynamics.Dynamics) -> None:
    with torch.no_grad():
        dynamics.after_step()


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about: dict[str, Any] = {"torch": torch.__version__, "quick": options.quick}
    rows = [partial(step_row, name, 3 if options.quick else 60, options.quick) for name in STEPS]
    rows += [partial(update_row, name, 1 if options.quick else 9, options.quick) for name in UPDATES]
    found = shown(row() for row in rows)
    if options.json:
        options.json.write_text(as_json(about, found))


if __name__ == "__main__":
    main()
