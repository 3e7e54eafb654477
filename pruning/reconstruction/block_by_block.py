"""Pruning of a network block by block: each block is pruned with the inputs that the pruned blocks before it give."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.catalogue.reconstructions import RECONSTRUCTIONS
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import in_mode
from pruning.reconstruction.block_order import Part, parts_of
from pruning.reconstruction.captured_calls import Batch, Call, HeldTensors, Link, captured, order_of_calls
from pruning.reconstruction.layer_problem import LayerProblem, Solution, Target
from pruning.reconstruction.layer_statistics import Collector, InputStatistics, rows_of_weight, weight_of_rows

Solve = Callable[[LayerProblem], Solution]


@dataclass(frozen=True)
class LayerReport:
    """Pruning of one layer.

    Args:
        block: name of the block.
        sparsity: fraction of the layer's entries that is 0.
        error: mean squared change of the outputs on calibration data, as a fraction of the outputs' mean square.
        rows: number of input vectors that the statistics have; 0 if no example reached the layer.
        seconds: time for choosing the mask and the weights.
    """

    block: str
    sparsity: float
    error: float
    rows: int
    seconds: float


@dataclass(frozen=True)
class Layerwise:
    """Result of `layerwise`.

    Args:
        masks: masks of the pruned weights.
        layers: name of a weight -> its report, in the order of the pruning.
    """

    masks: MaskSet
    layers: Mapping[str, LayerReport]


def layerwise(
    model: nn.Module,
    method: str | Solve,
    batches: Iterable[Batch],
    *,
    sparsity: float | Mapping[str, float] | None = None,
    n: int | None = None,
    m: int | None = None,
    blocks: str | Sequence[str] | None = None,
    parameters: Iterable[str] | None = None,
    masks: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    held_bytes: int | None = None,
    done: Layerwise | None = None,
    on_block: Callable[[Layerwise], object] = lambda _: None,
    **options: Any,
) -> Layerwise:
    """Prune a network block by block with calibration data, in place, and return its masks.

    The inputs of a block come from the blocks before it as they are pruned. One pass gives the statistics of all layers
    of a block; then each layer is pruned. The network stays plain, with zeros, and keeps its dtype and modes.

        result = pruning.layerwise(model, "sparsegpt", batches, sparsity=0.5)
        result = pruning.layerwise(model, "wanda", batches, n=2, m=4, blocks="model.layers")

    Args:
        model: plain network on the device of the computation.
        method: "sparsegpt", "alps", "wanda", "magnitude", or a function (LayerProblem) -> Solution.
        batches: calibration data; the network is called with each: a dict by keyword, a tuple or list by position.
            Positions where `attention_mask` of a dict is 0 do not count.
        sparsity: fraction of each layer's entries that is 0 in the end, or pattern for a weight's name -> fraction.
        n, m: keep n of each m consecutive inputs, in place of `sparsity`.
        blocks: names of blocks or lists of blocks, or patterns; None finds them; [] takes each layer by itself.
        parameters: names of weights or patterns; None: those of layers in blocks. Tied weights are left out.
        masks: masks so far; pruned entries stay pruned.
        dtype: dtype of statistics and weights while a layer is pruned, float32 or float64.
        held_bytes: bytes of activations in memory; more go to a temporary folder. None: all in memory.
        done: result of an interrupted call, as `on_block` received it, with the network restored to that state.
        on_block: called after each block with the result so far.
        options: options of the method, such as `damping`.

    Raises:
        ValueError: an argument breaks its rule, or the statistics of a layer are no numbers; the text names it.

    Source: Frantar & Alistarh 2023, arXiv 2301.00774 (the order).
    """
    solve = _solver(method, options)
    listed = list(batches)
    if not listed:
        raise ValueError("`batches` (=[]) must hold calibration data, such as [{'input_ids': tokens}].")
    parts = parts_of(model, blocks, parameters)
    weights = {name: layer for part in parts for name, layer in part.layers.items()}
    targets = {name: _target(name, layer, sparsity, n, m) for name, layer in weights.items()}
    run = _Run(model, solve, listed, targets, dict(masks or {}), dtype, held_bytes, done or Layerwise(MaskSet({}), {}))
    with in_mode(model, training=False), torch.no_grad():
        order, links = order_of_calls(model, parts, listed[0])
        for chain in _chains(order, links):
            run.prune_chain(chain, on_block)
    if unseen := [part.name for part in parts if part not in order]:
        warnings.warn(f"the network calls no {', '.join(unseen[:3])} on these batches: not pruned", stacklevel=2)
    return run.result


def _solver(method: str | Solve, options: Mapping[str, Any]) -> Solve:
    if callable(method):
        return partial(method, **options)
    if method not in RECONSTRUCTIONS:
        raise ValueError(f"`method` (={method!r}) must be one of {', '.join(RECONSTRUCTIONS)}, or a function.")
    row = RECONSTRUCTIONS[method]
    row.refuse(options)
    return partial(row.load(), **options)


def _target(
    name: str, layer: nn.Module, sparsity: float | Mapping[str, float] | None, n: int | None, m: int | None
) -> Target:
    """Return the target of a layer."""
    if (n is None) != (m is None) or (n is None) == (sparsity is None):
        raise ValueError(f"`sparsity` (={sparsity}), or `n` (={n}) and `m` (={m}), must be given; pass exactly one.")
    if n is not None and m is not None:
        width = rows_of_weight(layer, layer.weight).shape[-1]  # type: ignore[arg-type]
        if not 0 <= n <= m or m < 1 or width % m:
            raise ValueError(
                f"`m` (={m}) must divide the {width} inputs of {name!r}, with `n` (={n}) in [0, m]; leave the layer "
                "out of `parameters`."
            )
        return Target(n=n, m=m, sparsity=1 - n / m)
    given = sparsity
    if isinstance(sparsity, Mapping):
        given = next((each for pattern, each in sparsity.items() if fnmatchcase(name, pattern)), None)
        if given is None:
            raise ValueError(f"`sparsity` (of {len(sparsity)} patterns) must have a pattern for {name!r}.")
    if not isinstance(given, int | float) or not 0 <= given < 1:
        raise ValueError(f"`sparsity` (={given!r} for {name!r}) must lie in [0, 1): the fraction of entries that go.")
    return Target(float(given))


def _chains(order: Sequence[Part], links: Sequence[Link | None]) -> list[list[tuple[Part, Link | None]]]:
    """Return runs of parts in which each is linked to the one before."""
    found: list[list[tuple[Part, Link | None]]] = []
    for part, link in zip(order, links, strict=True):
        if link is None:
            found.append([])
        found[-1].append((part, link))
    return found


@dataclass
class _Run:
    model: nn.Module
    solve: Solve
    batches: list[Batch]
    targets: Mapping[str, Target]
    masks: dict[str, Tensor]
    dtype: torch.dtype
    held_bytes: int | None
    result: Layerwise

    def prune_chain(self, chain: list[tuple[Part, Link | None]], on_block: Callable[[Layerwise], object]) -> None:
        """Prune the parts of a chain that are not done, each with the inputs that the one before gives."""
        left = [each for each in chain if not set(each[0].layers) <= set(self.result.layers)]
        if not left:
            return
        held, calls = self._captured(left)
        for place, (part, _) in enumerate(left):
            collector = Collector(part.layers, self.dtype)
            with collector.collecting():
                for index in range(len(self.batches)):
                    self._run(part, calls[index][place], held, index, collector)
            self._prune_part(part, collector)
            if place + 1 < len(left) and (link := left[place + 1][1]) is not None:
                for index in range(len(self.batches)):
                    outputs = tree_leaves(self._run(part, calls[index][place], held, index))
                    held.put(index, {goal: outputs[source] for source, goal in link.leaves})
            on_block(self.result)
        held.close()

    def _captured(self, left: Sequence[tuple[Part, Link | None]]) -> tuple[HeldTensors, list[list[Call]]]:
        """Return for each batch the inputs of the first part, and the calls of all parts without linked inputs."""
        held, calls = HeldTensors(self.held_bytes), []
        parts = [part for part, _ in left]
        for index, batch in enumerate(self.batches):
            first, *others = captured(self.model, parts, batch, whole=len(parts) > 1)
            call, inputs = first.split()
            held.put(index, inputs)
            links = [link.goals if link else set[int]() for _, link in left[1:]]
            calls.append([call, *(each.split(goals)[0] for each, goals in zip(others, links, strict=True))])
        return held, calls

    def _run(self, part: Part, call: Call, held: HeldTensors, index: int, collector: Collector | None = None) -> Any:
        """Call a part with the held inputs of a batch; a collector reads the inputs of its layers."""
        device = next(part.module.parameters()).device
        if collector is not None:
            collector.counts = _counts(self.batches[index], device)
        args, kwargs = call.arguments(held.get(index, device))
        return part.module(*args, **kwargs)

    def _prune_part(self, part: Part, collector: Collector) -> None:
        masks, layers = dict(self.result.masks), dict(self.result.layers)
        for name, layer in part.layers.items():
            try:
                masks[name], layers[name] = self._prune_layer(part, name, layer, collector.found.get(name))
            except ValueError as error:
                raise ValueError(f"Pruning {name} of {part.name}: {error}") from error
        self.result = Layerwise(MaskSet(masks), layers)
        if unseen := [name for name in part.layers if not layers[name].rows]:
            warnings.warn(
                f"no example reaches {', '.join(unseen)}: pruned without statistics of their inputs", stacklevel=2
            )

    def _prune_layer(
        self, part: Part, name: str, layer: nn.Module, statistics: InputStatistics | None
    ) -> tuple[Tensor, LayerReport]:
        """Prune a layer in place; return its mask and its report."""
        begun = time.perf_counter()
        parameter: Any = layer.weight
        rows = rows_of_weight(layer, parameter.detach().to(self.dtype))
        before = self.masks.get(name)
        whole = torch.ones_like(parameter) if before is None else before.to(parameter)
        kept = rows_of_weight(layer, whole) != 0
        groups, _, width = rows.shape
        hessians = (statistics or InputStatistics(self.dtype)).hessian(width, groups, rows)
        if not bool(hessians.isfinite().all()):
            raise ValueError(
                "the statistics of its inputs are infinite or NaN; pass dtype=torch.float64, or check the data."
            )
        solved, errors, sizes, done = [], 0.0, 0.0, 0
        target = self.targets[name]
        for group in range(groups):
            own = target
            if target.m is None:  # groups round cumulatively, so that the layer's total is exact
                count = target.count((group + 1) * rows[0].numel()) - done
                own, done = Target(count / rows[0].numel()), done + count
            problem = LayerProblem(rows[group], hessians[group], kept[group], own)
            solved.append(self.solve(problem))
            errors, sizes = errors + problem.error(solved[-1].weight), sizes + problem.size
        mask = weight_of_rows(layer, torch.stack([each.kept for each in solved]), parameter.shape)
        found = weight_of_rows(layer, torch.stack([each.weight for each in solved]), parameter.shape)
        if not bool(found.isfinite().all()):
            raise ValueError("its new weights are infinite or NaN; pass a larger `damping`, or dtype=torch.float64.")
        parameter.copy_(found.masked_fill(~mask, 0))
        seen = 0 if statistics is None else statistics.rows
        left = float(torch.count_nonzero(mask)) / mask.numel()
        report = LayerReport(part.name, 1 - left, errors / sizes if sizes else 0.0, seen, time.perf_counter() - begun)
        return mask, report


def _counts(batch: Batch, device: torch.device) -> Tensor | None:
    """Return where the positions of a batch count, if it has a mask of padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.to(device) != 0 if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None
