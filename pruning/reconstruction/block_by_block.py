"""Pruning of a network block by block: each block is pruned with the inputs that the pruned blocks before it give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.catalogue.reconstructions import RECONSTRUCTIONS
from pruning.catalogue.rows import is_int
from pruning.choices.axes import Scope, blocks_of
from pruning.graph.tracing import without_key_caches
from pruning.holding.parameter import check_masks, check_prunable, hooked
from pruning.layouts import WeightLayout, has_plain_forward, required_layout
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import eagerly, in_mode
from pruning.measure.matrix_weights import Considered, considered, shortened
from pruning.measure.report import unreached
from pruning.mixtures.routing import eager_experts, without_tokens
from pruning.reconstruction.block_calls import Batch, BlockCalls, call_model
from pruning.reconstruction.block_order import Part, is_layer, parts_of, weight_of
from pruning.reconstruction.expert_statistics import ExpertCollector, passes_of
from pruning.reconstruction.layer_problem import Collector, Target
from pruning.reconstruction.solving import Found, LayerReport, Solve, Solving
from pruning.reconstruction.streamed_weights import StreamedWeights
from pruning.refused import RefusedValue
from pruning.selection.selection_groups import groups_of


@dataclass(frozen=True)
class Layerwise:
    """Result of `layerwise`.

    Args:
        masks: masks of the pruned weights.
        layers: name of a weight -> its report, in the order of the pruning.
    """

    masks: MaskSet
    layers: Mapping[str, LayerReport] = field(repr=False)


def layerwise(  # twenty parameters: one call prunes a network from files to files, and each has a default but three
    model: nn.Module,
    method: str | Solve,
    batches: Iterable[Batch],
    *,
    sparsity: float | Mapping[str, float] | None = None,
    n: int | None = None,
    m: int | None = None,
    size: int = 1,
    outputs: int = 1,
    blocks: str | Sequence[str] | None = None,
    parameters: Iterable[str] | None = None,
    masks: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    offload: str | Path | None = None,
    output: str | Path | None = None,
    replay: bool = True,
    activation_bytes: int | None = None,
    statistics_bytes: int | None = None,
    calibrate_all_experts: bool = False,
    done: Layerwise | None = None,
    on_block: Callable[[Layerwise], object] = lambda _: None,
    **options: Any,
) -> Layerwise:
    """Prune a network block by block with calibration data, in place, and return its masks.

    For each block in the order of their calls, its inputs in a pass of the network as it is by then give the statistics
    of the block's layers; then each layer is pruned. Where this gives equal bits, a block is called with the outputs of
    the pruned block before it, without a pass of the network. The network stays plain, with zeros, and keeps its dtype
    and modes.

    Each matrix of stacked experts is a layer of its own: its statistics are those of the tokens that the router sends
    to its expert, not weighted by the router. Meanwhile, experts of transformers run in their eager implementation.

        result = pruning.layerwise(model, "sparsegpt", batches, sparsity=0.5)
        result = pruning.layerwise(model, "wanda", batches, n=2, m=4, blocks="model.layers")

    Args:
        model: plain network on the device of the computation.
        method: "sparsegpt", "alps", "wanda", "magnitude", or a function (LayerProblem) -> Solution; or "least_squares",
            which refits the survivors of `masks` in a network whose weights are still dense.
        batches: calibration data; the network is called with each: a dict by keyword, a tuple or list by position.
            Positions where `attention_mask` of a dict is 0 do not count.
        sparsity: fraction of each layer's entries that is 0 in the end, or pattern for a weight's name -> fraction.
        n, m: keep n of each m consecutive inputs, in place of `sparsity`; in a convolution, at one kernel position.
        size, outputs: prune whole blocks of `size` consecutive inputs of `outputs` consecutive outputs, as
            `unit="block"` of `prune`; `sparsity` is a fraction of the blocks then. A function of your own finds them in
            `target.size` and `target.outputs`.
        blocks: names of blocks or lists of blocks, or patterns; None finds them; [] takes each layer by itself.
        parameters: names of weights or patterns; None: those of layers in blocks, without the head of a language model
            where the method's paper leaves it dense. Tied weights are left out.
        masks: masks so far; pruned entries stay pruned.
        dtype: dtype of statistics and weights while a layer is pruned, float32 or float64.
        offload: safetensors file or directory, also in shards, whose weights are read one block at a time; the network
            may be on the meta device, with values in its buffers. Blocks are on the meta device afterwards.
        output: directory for the weights of the pruned network, with `offload`: a file for each block, and an index.
        replay: call single blocks where the first and the last batch of each form give the bits of whole passes. False:
            whole passes for each block, for networks in which values decide which blocks are called.
        activation_bytes: bytes of activations that stay in memory; others go to temporary files. None: all stay.
        statistics_bytes: bytes of the statistics of experts, of which each has (inputs, inputs) for each matrix; where
            those of a block need more, the block is called again for each further group of experts, to equal bits.
            None: one call for all.
        calibrate_all_experts: every token counts for every expert, for networks in which some get few tokens. Each
            expert then multiplies all tokens: statistics of E experts, k for each token, cost about E / k times more.
        done: result of an interrupted call, as `on_block` received it, with the network restored to that state.
        on_block: called after each block with the result so far.
        options: options of the method, such as `damping`.

    Raises:
        ValueError: an argument breaks its rule, or the statistics of a layer are no numbers; the text names it.

    Source: Frantar & Alistarh 2023, arXiv 2301.00774 (the order).
    """
    check_masks({} if masks is None else masks)
    for name, limit in (("activation_bytes", activation_bytes), ("statistics_bytes", statistics_bytes)):
        if limit is not None and (not is_int(limit) or limit < 0):
            raise ValueError(f"`{name}` (={limit!r}) must be a number of bytes, such as 2**30, or None for no limit.")
    solve, listed = _solver(method, options), _listed(batches)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`dtype` (={dtype}) must be torch.float32 or torch.float64.")
    with_head = callable(method) or not RECONSTRUCTIONS[method].keeps_head
    parts = parts_of(model, blocks, parameters, with_head=with_head)
    weights = {name: layer for part in parts for name, layer in part.layers.items()}
    for name, layer in weights.items():
        check_prunable(name, weight_of(name, layer), reader="layerwise pruning")
    targets = _targets(method, weights, sparsity, n, m, masks, Target(size=size, outputs=outputs))
    before = _checked_masks(weights, masks or {})
    reads_data = callable(method) or RECONSTRUCTIONS[method].reads_data
    has_stacks = not all(map(is_layer, weights.values()))
    if calibrate_all_experts and not has_stacks:
        raise ValueError(
            "`calibrate_all_experts` (=True) needs stacked experts among the weights to prune; leave it out."
        )
    so_far = done or Layerwise(MaskSet({}), {})
    run = _BlockwiseRun(
        *(solve, targets, before, dtype, so_far, reads_data),
        calibrate_all_experts=calibrate_all_experts,
        statistics_bytes=statistics_bytes,
    )
    run.require_done(weights)
    run.streamed = _streamed(model, parts, listed, offload, output, run.done_blocks(parts))
    loaded = run.streamed.streaming(parts) if run.streamed else nullcontext()
    eager = eager_experts(model) if has_stacks else nullcontext()
    with in_mode(model, training=False), torch.no_grad(), eagerly(), without_key_caches(model), eager, loaded:
        order = _order(model, parts, listed)
        with closing(BlockCalls(model, order, listed, replay, activation_bytes)) as calls:
            for index, part in enumerate(order):
                if part.name not in run.done_blocks(parts):
                    run.prune_part(part, partial(calls.of, index))
                    on_block(run.result)
    if unseen := [part.name for part in parts if part not in order]:
        warnings.warn(_not_called(unseen, considered(model, run.result.masks)), stacklevel=2)
    for said in _limits(run.result.layers):
        warnings.warn(said, stacklevel=2)
    if run.streamed is None and not all(map(has_plain_forward, filter(is_layer, weights.values()))):
        example = tuple(listed[0]) if isinstance(listed[0], list) else listed[0]
        if said := unreached(model, example, run.result.masks):
            warnings.warn(said, stacklevel=2)
    return run.result


def _not_called(names: Sequence[str], left: Considered) -> str:
    """Return which parts no batch calls, and the share of the network that stays dense with them."""
    return (
        f"no batch calls {shortened(names)}: not pruned; {1 - left.share:.0%} of the network's matrix "
        "weights stay dense; give batches that call them, or prune them with pruning.prune, which needs no calls"
    )


ALL_TOKENS = ", or calibrate_all_experts=True, in a sweep score.calibrate_all_experts=true"


def _limits(layers: Mapping[str, LayerReport]) -> Iterator[str]:
    """Yield a sentence on layers without examples, on experts without tokens, and on padding that counts."""
    if unseen := [name for name, each in layers.items() if not each.rows]:
        yield (
            f"no example reaches {', '.join(unseen[:6])}{f' and {len(unseen) - 6} more' if unseen[6:] else ''}, or "
            "their weights multiply no input of a call of the layer: pruned by magnitude, without statistics of inputs"
        )
    tokens = {name: dict(enumerate(each.tokens)) for name, each in layers.items() if each.rows}
    if said := without_tokens(tokens, "pruned by magnitude", ALL_TOKENS):
        yield said
    if padded := [name for name, each in layers.items() if each.padded]:
        yield (
            f"`attention_mask` (with padding) does not apply to layers in lists that hold no blocks, such as "
            f"{padded[0]}, which get (vectors, inputs) in an unknown order: their padding counts; pass batches without "
            "padding."
        )


def _streamed(
    model: nn.Module,
    parts: Sequence[Part],
    batches: Sequence[Batch],
    offload: str | Path | None,
    output: str | Path | None,
    done: Collection[str],
) -> StreamedWeights | None:
    """Return the weights as files, on the device of the batches; None: the network's own weights."""
    if (offload is None) != (output is None):
        raise ValueError(f"`offload` (={offload}) and `output` (={output}) must be given together; pass both.")
    if offload is None or output is None:
        if meta := next((name for name, each in model.named_parameters() if each.is_meta), None):
            raise ValueError(
                f"`model` (with {meta!r} on the meta device) must have values; pass `offload` and `output`."
            )
        return None
    tensors = [leaf for leaf in tree_leaves(list(batches)) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return StreamedWeights(model, parts, offload, output, device, done)


def _listed(batches: Iterable[Batch]) -> list[Batch]:
    if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
        raise TypeError(f"`batches` (a {type(batches).__name__}) must be a list of batches; pass [batch].")
    found = list(batches)
    if not found:
        raise ValueError("`batches` (=[]) must hold calibration data, such as [{'input_ids': tokens}].")
    return found


def _order(model: nn.Module, parts: Sequence[Part], batches: Sequence[Batch]) -> list[Part]:
    """Return the parts in the order of their first calls; batches are run until all parts were called."""
    called: list[Part] = []

    def note(part: Part) -> Callable[..., None]:
        return lambda *_: None if part in called else called.append(part)

    with hooked(part.module.register_forward_pre_hook(note(part)) for part in parts):
        for batch in batches:
            if len(called) < len(parts):
                call_model(model, batch)
    return called


def _solver(method: str | Solve, options: Mapping[str, Any]) -> Solve:
    if callable(method):
        return partial(method, **options)
    if not isinstance(method, str) or method not in RECONSTRUCTIONS:
        raise RefusedValue("method", method).because(f"must be one of {', '.join(RECONSTRUCTIONS)}, or a function.")
    row = RECONSTRUCTIONS[method]
    row.refuse(options)
    return partial(row.load(), **options)


def _targets(
    method: str | Solve,
    layers: Mapping[str, nn.Module],
    sparsity: float | Mapping[str, float] | None,
    n: int | None,
    m: int | None,
    masks: Mapping[str, Tensor] | None,
    unit: Target,
) -> dict[str, Target]:
    """Return name of a weight -> its target, which is no entry for a method that only updates survivors."""
    if isinstance(method, str) and not RECONSTRUCTIONS[method].chooses:
        if not masks or sparsity is not None or n is not None:
            raise ValueError(
                f"method={method!r} only updates the survivors of masks; pass `masks`, and neither `sparsity` nor `n`."
            )
        return {name: Target() for name in layers}
    if (n is None) != (m is None):
        raise ValueError(f"`n` (={n}) and `m` (={m}) must be given together: n of each m weights are kept.")
    if (n is None) == (sparsity is None):
        raise ValueError(f"`sparsity` (={sparsity}), or `n` (={n}) and `m` (={m}), must be given; pass exactly one.")
    for name, value in (("size", unit.size), ("outputs", unit.outputs)):
        if not is_int(value) or value < 1 or (n is not None and value > 1):
            raise ValueError(
                f"`{name}` (={value!r}) must be an integer of at least 1, the side of a block, and 1 where `n` and `m` "
                "are given: n of each m are single entries."
            )
    if n is not None and m is not None:
        return {name: _window(name, layer, n, m) for name, layer in layers.items()}
    found = _sparsities(list(layers), sparsity if isinstance(sparsity, Mapping) else {"*": sparsity})
    return {name: replace(unit, sparsity=target.sparsity) for name, target in found.items()}


def _sparsities(layers: Sequence[str], patterns: Mapping[str, Any]) -> dict[str, Target]:
    """Return name of a weight -> the target of the first pattern that fits."""
    used: set[str] = set()
    found = {}
    for name in layers:
        pattern = next((each for each in patterns if fnmatchcase(name, each)), None)
        if pattern is None:
            raise ValueError(f"`sparsity` (of {len(patterns)} patterns) must have a pattern for {name!r}.")
        given = patterns[pattern]
        if not isinstance(given, Real) or not 0 <= float(given) < 1:
            raise ValueError(
                f"`sparsity` (={given!r} for {name!r}) must lie in [0, 1): the fraction of entries that go."
            )
        used.add(pattern)
        found[name] = Target(float(given))
    if unused := [pattern for pattern in patterns if pattern not in used]:
        fits = any(fnmatchcase(name, unused[0]) for name in layers)
        why = "an earlier pattern names its weights; put it first." if fits else "no weight has this name."
        raise ValueError(f"`sparsity` (with {unused[0]!r}) must hold patterns for weights; {why}")
    return found


def _window(name: str, layer: nn.Module, n: int, m: int) -> Target:
    layout = layout_of_weight(name, layer)
    width = layout.unfolded(weight_of(name, layer).shape)[layout.by_position[-1]]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (n, m))
    if not whole or not 0 <= n <= m or m < 1 or width % m:
        raise ValueError(
            f"`m` (={m}) must divide the {width} inputs of {name!r}, with `n` (={n}) in [0, m]; leave the layer out of "
            "`parameters`."
        )
    return Target(n=n, m=m, sparsity=1 - n / m)


def _checked_masks(layers: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> bool mask; raise ValueError for a mask that fits no weight."""
    for name, mask in masks.items():
        layer = layers.get(name)
        if layer is None or weight_of(name, layer).shape != mask.shape or bool(mask.isnan().any()):
            raise ValueError(
                f"`masks` (with {name!r}, {tuple(mask.shape)}) must fit weights that are pruned, and hold numbers; "
                f"such as {next(iter(layers))}."
            )
    return {name: mask != 0 for name, mask in masks.items()}


@dataclass
class _BlockwiseRun:
    """Pruning of a network, part by part."""

    solve: Solve
    targets: Mapping[str, Target]
    masks: Mapping[str, Tensor]
    dtype: torch.dtype
    result: Layerwise
    reads_data: bool = True
    calibrate_all_experts: bool = False
    statistics_bytes: int | None = None
    streamed: StreamedWeights | None = None

    def require_done(self, layers: Mapping[str, nn.Module]) -> None:
        """Raise ValueError unless the result to continue from belongs to this network and to these targets."""
        for name, report in self.result.layers.items():
            mask, layer = self.result.masks[name], layers.get(name)
            weight = None if layer is None else weight_of(name, layer).detach()
            if weight is None or mask.shape != weight.shape or _is_any(weight, ~mask):
                raise ValueError(f"`done` (with {name!r}) must belong to this network, with its pruned weights.")
            if self._has_another_target(name, layer, mask):  # type: ignore[arg-type]
                raise ValueError(
                    f"`done` (with {name!r} at {report.sparsity:.4f}) must be of the same `sparsity` "
                    f"(={self.targets[name].sparsity:g})."
                )

    def _has_another_target(self, name: str, layer: nn.Module, mask: Tensor) -> bool:
        """Return whether a layer was pruned to another target: fewer units, or more than `masks` explains."""
        target, layout = self.targets[name], layout_of_weight(name, layer)
        scope = Scope("row") if target.m is None or target.n is None else Scope("window", n=target.n, m=target.m)
        cut = groups_of({name: mask.shape}, blocks_of(target.size, target.outputs), scope, {name: layout})
        alive = cut.alive({name: mask})[name].view(-1, cut.parts[0].pool)
        if target.n is not None and bool((alive.sum(dim=1) > target.n).any()):
            return True
        slack, sparsity = target.size / max(1, layout.row_entries(mask.shape)), 1 - float(alive.float().mean())
        earlier = 1.0 if name in self.masks else target.sparsity
        return not target.sparsity - slack <= sparsity <= max(earlier, target.sparsity) + slack

    def done_blocks(self, parts: Sequence[Part]) -> set[str]:
        """Return the names of the parts whose layers are all pruned."""
        return {part.name for part in parts if part.layers.keys() <= self.result.layers.keys()}

    def prune_part(self, part: Part, calls: Callable[[], Iterable[tuple[Batch, Callable[[], object]]]]) -> None:
        """Collect the statistics of a part's layers, and prune them.

        Args:
            part: the part.
            calls: returns for each batch a function that calls the part.
        """
        stacks = {name: layer for name, layer in part.layers.items() if not is_layer(layer)}
        passes = passes_of(stacks, self.dtype, self.statistics_bytes)
        solving = {name: self._begun(name, layer) for name, layer in part.layers.items()}
        masks, layers = self.result.masks, dict(self.result.layers)
        for number, wanted in enumerate(passes):
            called = {} if number else part.layers.keys() - stacks.keys()
            found = self._statistics(part, called, ExpertCollector(stacks, wanted, self.dtype), calls())
            if self.streamed:
                self.streamed.require(part)
            for name in part.layers:
                weight, is_last = weight_of(name, part.layers[name]), number == len(passes) - 1
                try:
                    with torch.autocast(weight.device.type, enabled=False):
                        if name in found:
                            solving[name].solve(weight, found.pop(name), self.dtype)
                        if is_last:
                            mask, layers[name] = solving.pop(name).write(weight, part.name)
                            masks = masks.extended({name: mask})
                except ValueError as error:
                    raise ValueError(f"Pruning {name} of {part.name}: {error}") from error
        torch.clear_autocast_cache()  # it holds copies of the weights before their pruning
        if self.streamed:
            self.streamed.save(part)
        self.result = Layerwise(masks, layers)

    def _begun(self, name: str, layer: nn.Module) -> Solving:
        shape = weight_of(name, layer).shape
        before = self.masks.get(name, torch.ones((), dtype=torch.bool).expand(shape))
        return Solving(self.solve, layout_of_weight(name, layer), before, self.targets[name], self.reads_data)

    def _statistics(
        self,
        part: Part,
        called: Collection[str],
        experts: ExpertCollector,
        calls: Iterable[tuple[Batch, Callable[[], object]]],
    ) -> dict[str, Found]:
        """Return name of a weight -> statistics of its inputs, from one pass of the batches.

        Args:
            part: the part.
            called: weights of the layers, without stacks of experts.
            experts: collector of the experts' statistics.
            calls: for each batch, a function that calls the part.
        """
        layers = {name: part.layers[name] for name in part.layers if name in called}
        collector = Collector(layers, self.dtype, in_lists=part.in_lists)
        experts.all_tokens = self.calibrate_all_experts
        for batch, call in calls:
            collector.counts = experts.counts = _counts(batch, next(part.module.parameters()).device)
            with collector.collecting(), experts.collecting():
                call()
        return {**collector.found, **experts.found}


def layout_of_weight(name: str, layer: nn.Module) -> WeightLayout:
    """Return the layout of a weight by its qualified name and its module."""
    return required_layout(layer, name.rpartition(".")[2])


def _is_any(weight: Tensor, where: Tensor) -> bool:
    """Return whether a weight has values other than 0 somewhere; False on the meta device."""
    return not weight.is_meta and bool(weight[where.to(weight.device)].any())


def _counts(batch: Batch, device: torch.device) -> Tensor | None:
    """Return where the positions of a batch count, if it has a mask of padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
        return None
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "`batches` (with an `attention_mask` of other values) must hold 1 for tokens and 0 for padding."
        )
    return (mask if device.type == "meta" else mask.to(device)) != 0
