"""Costs of pruning layer by layer: memory, operations, and a rough time before any stage has finished. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.specs import Plan
from orchestrator.planning.expert_counts import Experts, experts_of
from orchestrator.planning.network_files import weight_shapes
from orchestrator.planning.number_formats import byte_size, counted, duration, whole_number
from orchestrator.planning.plan import device_kind, threads

PACE = 5e10
"""Operations of one processor core in a second, in float32."""
VALUE = 4
"""Bytes of a weight or an activation in a sweep."""
IN_A_BLOCK = re.compile(r"(?:^|\.)(\d+)\..*(?:weight|experts\.\w+_proj)$")


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the linear layers in the blocks of a network.

    Args:
        blocks: number of blocks.
        width: hidden size d, the least inputs of a layer.
        widest: largest number of inputs of a layer, n.
        weights: weights P of all blocks.
        multiplied: weights U of all blocks that a token is multiplied by: in a mixture those of its own experts.
        squares: sum of the squared inputs of all layers, each times the fraction of tokens that count for it.
    """

    blocks: int
    width: int
    widest: int
    weights: int
    multiplied: float
    squares: float


def block_sizes(shapes: Mapping[str, tuple[int, ...]], experts: Experts, *, all_tokens: bool) -> BlockSizes | None:
    """Return the sizes of the blocks in a weight file; None if the file has no blocks.

    Args:
        shapes: name -> (outputs, inputs), or for stacked experts (experts, outputs, inputs); those that are no `weight`
            lie transposed.
        experts: experts of a mixture.
        all_tokens: whether every token counts for every expert, in one of the three passes.
    """
    found, of_tokens = [], experts.used / experts.count
    for name, shape in shapes.items():
        of_experts = experts.count > 1 and experts.holds(name, shape)
        if (match := IN_A_BLOCK.search(name)) and len(shape) in (2, 2 + of_experts):
            inputs = shape[-1] if name.endswith("weight") else shape[-2]
            squares = inputs**2 * math.prod(shape[:-2]) * (of_tokens if of_experts and not all_tokens else 1)
            times = of_tokens + all_tokens / 3 if of_experts else 1
            found.append((match[1], inputs, math.prod(shape), math.prod(shape) * times, squares))
    if not found:
        return None
    numbers, widths, weights, multiplied, squared = zip(*found, strict=True)
    return BlockSizes(len({*numbers}), min(widths), max(widths), sum(weights), sum(multiplied), sum(squared))


def peak_memory(sizes: BlockSizes, tokens: int, value: int) -> dict[str, float]:
    """Return the bytes of each part of pruning a network block by block.

    statistics and solving 30 n^2, one block v P / L, masks P, activations v T d

    Args:
        sizes: L blocks of P weights, with layers of at most n inputs, and hidden size d.
        tokens: calibration tokens T.
        value: bytes v of a weight and of an activation.
    """
    return {
        "statistics and solving": 30.0 * sizes.widest**2,
        "one block": value * sizes.weights / sizes.blocks,
        "masks": float(sizes.weights),
        "activations": float(value * tokens * sizes.width),
    }


def operations(sizes: BlockSizes, tokens: int) -> float:
    """Return the operations of the passes and the statistics: 6 U T + 2 T (sum of n^2 over layers).

    Args:
        sizes: blocks of which a token is multiplied by U weights, with layers of n inputs.
        tokens: calibration tokens T.
    """
    return 6.0 * sizes.multiplied * tokens + 2.0 * tokens * sizes.squares


def layerwise_costs(plan: Plan, finished: Collection[str], *, rough: bool) -> Iterator[str]:
    """Yield the memory, and if `rough` the time, of stages that prune layer by layer; equal lines once.

    A sweep holds the whole network in float32, so one block is part of the network.

    Args:
        plan: plan of the sweep.
        finished: stages that need not run.
        rough: whether stages without an estimate are left.
    """
    told: dict[str, None] = {}
    for trial in plan.trials:
        left = [plan.stages[key] for key in trial.stages if key in plan.stages and key not in finished]
        data, examples = trial.config["data"], trial.config["score"].get("examples")
        if data.get("kind") != "text" or not examples or not any(s.fields.get("order") == "sequential" for s in left):
            continue
        shapes, experts = weight_shapes(trial.config["model"]), experts_of(trial.config["model"]) or Experts(1, 1)
        sizes = block_sizes(shapes, experts, all_tokens=trial.config["score"]["calibrate_all_experts"])
        if sizes is not None:
            told |= dict.fromkeys(_told(sizes, shapes, examples * data["block"], trial.config, rough))
    yield from told


def _told(
    sizes: BlockSizes, shapes: Mapping[str, tuple[int, ...]], tokens: int, config: Mapping[str, Any], rough: bool
) -> Iterator[str]:
    parts = peak_memory(sizes, tokens, VALUE) | {"network": float(VALUE * sum(map(math.prod, shapes.values())))}
    del parts["one block"]
    each = ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items())
    yield f"memory of a stage about {byte_size(sum(parts.values()))}: {each}; evaluation is not counted"
    if rough and device_kind(config) == "cpu":
        cores = threads(config)
        seconds = operations(sizes, tokens) / (PACE * cores)
        where = f"{whole_number(tokens)} tokens on {counted(cores, 'core')}"
        yield f"roughly {duration(seconds)} for passes with {where}; solving and evaluation are not counted"
