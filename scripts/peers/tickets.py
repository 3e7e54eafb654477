"""Lottery tickets as a plain script: train, prune the smallest 20% of each layer, rewind to the first weights, repeat.

The algorithm of Frankle & Carbin 2019 (arXiv 1803.03635) as a careful user of PyTorch writes it. Data, initialisation
and the order of the batches are the orchestrator's, so that both can find the same tickets; the loop is its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchestrator.core.seeding import derive
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.splits import Split


def tickets(seed: int, task: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return the masks of each level; `task` has data, model, levels, steps, batch, rate and eval_every."""
    splits = data_loading.load(task["data"])
    network = model_building.build(
        task["model"], input_shape=splits.input_shape, classes=splits.classes, seed=derive(seed, "0/init")
    )
    train, val, test = (_whole(split) for split in (splits.train, splits.val, splits.test))
    first = {name: value.clone() for name, value in network.state_dict().items()}
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    masks = {name: torch.ones_like(layer.weight) for name, layer in layers.items()}
    found = []
    for level in range(task["levels"] + 1):
        if level:
            for name, layer in layers.items():
                size = masks[name].numel()
                gone = round(size * (1 - 0.8**level)) - round(size * (1 - 0.8 ** (level - 1)))
                ranked = torch.where(masks[name].bool(), layer.weight.detach().abs(), torch.inf).flatten()
                masks[name].view(-1)[torch.argsort(ranked, stable=True)[:gone]] = 0
            found.append({name: mask.bool() for name, mask in masks.items()})
            network.load_state_dict(first)
        _fit(network, layers, masks, train, val, derive(derive(seed, "0/fit"), "order"), task)
        evaluate(network, test)
    return found


def _whole(split: Split) -> tuple[Tensor, Tensor]:
    images, labels = next(iter(split.batches(len(split), device=torch.device("cpu"))))
    return images, labels


def _fit(
    network: nn.Module,
    layers: dict[str, nn.Linear],
    masks: dict[str, Tensor],
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    seed: int,
    task: dict[str, Any],
) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=task["rate"], fused=True)
    generator = torch.Generator().manual_seed(seed)
    _apply(layers, masks)
    step = 0
    while step < task["steps"]:
        for chosen in torch.split(torch.randperm(len(train[1]), generator=generator), task["batch"]):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(train[0][chosen]), train[1][chosen])
            torch.autograd.backward(loss)
            for name, layer in layers.items():
                if layer.weight.grad is not None:
                    layer.weight.grad.mul_(masks[name])
            optimizer.step()
            _apply(layers, masks)
            step += 1
            if step % task["eval_every"] == 0:
                evaluate(network, val)
            if step == task["steps"]:
                return


@torch.no_grad()
def _apply(layers: dict[str, nn.Linear], masks: dict[str, Tensor]) -> None:
    for name, layer in layers.items():
        layer.weight.mul_(masks[name])


@torch.no_grad()
def evaluate(network: nn.Module, split: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return loss and accuracy on a split."""
    outputs = network(split[0])
    hits = (outputs.argmax(1) == split[1]).float().mean().item()
    return F.cross_entropy(outputs, split[1]).item(), hits


def main() -> None:
    """Find the tickets for each seed of a task in a file, and write them to the same folder."""
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    found = {seed: tickets(seed, task) for seed in task["seeds"]}
    torch.save(found, sys.argv[1] + ".pt")
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
