"""Prune one round, at once or block by block, and check the result: counts, nesting, zeros, and rewound weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.records import BLOCKS
from orchestrator.core.seeding import derive
from orchestrator.core.specs import PruneFields
from orchestrator.training.scoring.examples import ScoringData, count
from orchestrator.training.scoring.ranking import SPLIT, Read, Round, Scoring, engine_refusal, example_of, rank
from orchestrator.training.state.train_state import TrainState, as_bytes, as_tensor
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.model_building import Prunable, prunable
from orchestrator.workloads.tasks.batch import arguments
from pruning import MaskSet
from pruning.engine.scoring import spared_weights, without_spared
from pruning.reconstruction.block_by_block import Layerwise
from pruning.reconstruction.block_order import parts_of
from pruning.reconstruction.solving import LayerReport
from pruning.selection.selection_groups import Groups


class Enough(Exception):
    """Raised after a block by a rehearsal: the other blocks stay as they are."""


@dataclass
class Blocks:
    """Blocks that a round has pruned so far, and what happens after each.

    Args:
        done: the blocks pruned so far; None before the first.
        total: number of blocks of the network; 0 before the pruning begins.
        after: called after each block.
        replay: as in `pruning.layerwise`; a rehearsal of one block needs no comparison of all of them.
    """

    done: Layerwise | None = None
    total: int = 0
    after: Callable[[Blocks], object] = field(default=lambda _: None)
    replay: bool = True

    @property
    def number(self) -> int:
        """Number of blocks pruned so far."""
        return 0 if self.done is None else len({report.block for report in self.done.layers.values()})

    def state(self, model: nn.Module) -> TrainState:
        """Return the pruned blocks as a state for a checkpoint: masks, weights, and reports of layers."""
        assert self.done is not None
        weights = {name: model.get_parameter(name).detach() for name in self.done.layers}
        reports = {name: _plain(report) | {"seconds": report.seconds} for name, report in self.done.layers.items()}
        held = {"masks": as_tensor(self.done.masks.to_bytes()), "weights": weights, "layers": reports}
        return TrainState.of({"step": self.number, BLOCKS: held})

    def restore(self, model: nn.Module, state: TrainState) -> None:
        """Put the pruned blocks of a checkpoint into a network.

        Raises:
            ValueError: the state is another network's.
        """
        try:
            held = state.part(BLOCKS)
            masks = MaskSet.from_bytes(as_bytes(held["masks"]), model)
            layers = {name: _reported(report) for name, report in held["layers"].items()}
            with torch.no_grad():
                for name, weight in held["weights"].items():
                    model.get_parameter(name).copy_(weight)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ValueError(f"it has no valid state of pruned blocks: {error!r}") from error
        self.done = Layerwise(masks, layers)


def prune_layers(
    model: nn.Module, chosen: Sequence[Prunable], asked: Round, parent: MaskSet, read: Read, blocks: Blocks
) -> tuple[MaskSet, Scoring]:
    """Prune a plain model block by block on top of the masks so far; return the new masks and the scoring costs.

    The model is left plain. `blocks` holds the blocks pruned so far, from which an interrupted round goes on.

    Raises:
        OrchestratorError: a block cannot be pruned; the text names the layer.
    """
    fields, choices, names = asked.fields, asked.choices, [each.name for each in chosen]
    device = getattr(chosen[0].module, chosen[0].parameter).device
    seed = derive(fields.seed, f"{fields.round}/score")
    batches = ScoringData(getattr(read.data, SPLIT), fields.score, seed, device).batches(1) or []

    def note(done: Layerwise) -> None:
        blocks.done = done
        blocks.after(blocks)

    try:
        blocks.total = len(parts_of(model, None, names))
        with warnings.catch_warnings(record=True) as caught, suppress(Enough):
            warnings.simplefilter("always", UserWarning)
            pruning.layerwise(
                model,
                choices.score.kind,
                [_call(model, batch) for batch in batches],
                **_target(asked),
                parameters=names,
                masks={name: mask for name, mask in parent.items() if name in names},
                done=blocks.done,
                replay=blocks.replay,
                on_block=note,
                calibrate_all_experts=fields.score.calibrate_all_experts,
                **choices.score.options,
            )
    except (ValueError, TypeError) as error:
        raise engine_refusal(asked, error) from error
    done = blocks.done or Layerwise(MaskSet({}), {})
    whole = {each.name: torch.ones_like(getattr(each.module, each.parameter), dtype=torch.bool) for each in chosen}
    masks = MaskSet({name: done.masks.get(name, parent.get(name, whole[name])) for name in names})
    cut = asked.cut(chosen, names)
    said = [cut.limits, *(str(each.message) for each in caught)]
    details = {
        "unit": choices.unit.kind,
        "units": dict(cut.sizes),
        "removed": MaskSet(cut.alive(masks)).sparsity(),
        "score": asked.named,
        "examples": sum(map(count, batches)),
        "passes": 0,
        "rescorings": 1,
        "split": SPLIT,
        "layers": {name: _plain(report) for name, report in done.layers.items()},
    } | ({"limits": ". ".join(filter(None, said))} if any(said) else {})
    return masks, Scoring(details, {"scoring": 0.0, "selection": sum(each.seconds for each in done.layers.values())})


def _call(model: nn.Module, batch: Any) -> Any:
    """Return what the network is called with for a batch: a dict by keyword, or a tuple by position."""
    given, named = arguments(model, batch, labels=False)
    return named or given


def _target(asked: Round) -> dict[str, Any]:
    scope, unit = asked.choices.scope, asked.choices.unit
    size = {"size": unit.inputs, "outputs": unit.outputs}
    if scope.kind == "window":
        return {"n": scope.n, "m": scope.m}
    if scope.allocation == "given":
        return {"sparsity": {name: 1 - density for name, density in scope.densities.items()}} | size
    return {"sparsity": asked.fields.target} | size


def _plain(report: LayerReport) -> dict[str, Any]:
    """Return a layer's report in JSON types, without its seconds, which are no part of a result."""
    error = None if math.isnan(report.error) else report.error
    own = {"block": report.block, "sparsity": report.sparsity, "error": error, "rows": report.rows}
    told = {"tokens": [*report.tokens], "padded": report.padded}
    return own | {name: value for name, value in told.items() if value}


def _reported(plain: Mapping[str, Any]) -> LayerReport:
    return LayerReport(**{**plain, "error": math.nan if plain["error"] is None else plain["error"]})


class LawBroken(OrchestratorError):
    """Result that must not be reported because it differs from what the configuration requests."""

    repeats = True


class Overflow(LawBroken):
    """Pruned network whose loss is infinite or NaN."""


def prune_round(
    model: nn.Module, asked: Round, parent: MaskSet, read: Read, blocks: Blocks | None = None
) -> tuple[MaskSet, Scoring]:
    """Prune a plain model by a round's method on top of the masks so far; return the new masks and the scoring costs.

    A score ranks by the round's choices. A method class gets a count: for a target sparsity s and the default
    allocation, a tensor of n units with z already masked loses round(s n) - z more. A structured class counts channels;
    in a global scope one count covers the entries of all tensors. A raw amount goes to the class unchanged. If the
    control is shuffle, the masks are shuffled. In the sequential order, `blocks` notes each pruned block. The model is
    left plain, with zeros where the masks are 0.
    """
    chosen = chosen_weights(model, asked, read.data).weights
    if asked.choices.schedule.order == "sequential":
        return prune_layers(model, chosen, asked, parent, read, blocks or Blocks())
    masks, scoring = rank(model, chosen, asked, parent, read)
    pruning.remove_all(model)
    return masks, scoring


@dataclass(frozen=True)
class Chosen:
    """Weights that a round prunes, and the sentences that name those whose channels may be outputs of the network."""

    weights: list[Prunable]
    doubt: tuple[str, ...]


def chosen_weights(model: nn.Module, asked: Round, known: Data) -> Chosen:
    """Return the parameters that a round prunes: what `prune` selects, without what the method spares unless named."""
    chosen, named = prunable(model, asked.fields.prune), asked.fields.prune.include
    example = example_of(model, known) if asked.choices.unit.kind == "channel" else None
    spared, doubt = spared_weights(model, asked.choices, example)
    try:
        left = without_spared([each.name for each in chosen], spared - {*named}, asked.choices)
    except ValueError as error:
        raise engine_refusal(asked, error) from error
    told = (doubt,) if doubt and named == PruneFields.include else ()
    return Chosen([each for each in chosen if each.name in left], told)


def masked(model: nn.Module, masks: MaskSet) -> None:
    """Set the masked entries of a plain model to zero."""
    masks.apply(model)
    pruning.remove_all(model)


def sizes(chosen: Sequence[Prunable], asked: Round) -> dict[str, int]:
    """Return the number of units that a count can take from each tensor, or from all tensors for a global scope."""
    found = asked.cut(chosen, [each.name for each in chosen]).sizes
    return {"all prunable parameters": sum(found.values())} if asked.choices.scope.kind == "global" else dict(found)


def hold_finite(metrics: Mapping[str, float], where: str, blame: Callable[[str], None]) -> None:
    """Raise `LawBroken` if the loss of the pruned network is not finite, because nothing can be compared with it.

    Args:
        metrics: metrics before fine-tuning.
        where: the training's place in the configuration, for errors.
        blame: raises an error that begins with its argument if the data are at fault.
    """
    if not math.isfinite(metrics["loss"]):
        said = f"the loss of the pruned network is {metrics['loss']} before any fine-tuning"
        blame(said)
        raise Overflow(
            f"{said}: its activations overflow; pass {where}.precision=fp32, or use a method that leaves the layers "
            "balanced."
        )


def details(
    chosen: Sequence[Prunable],
    asked: Round,
    parent: MaskSet,
    masks: MaskSet,
    weights: Mapping[str, Tensor],
    scoring: Mapping[str, Any] = MappingProxyType({}),
    *,
    at_target: bool = True,
) -> dict[str, Any]:
    """Check a round; return the details for its record.

    Dead tensors are those whose masks are all 0, so that nothing passes through. The residual stream of a transformer
    goes around a removed layer, so units of a transformer leave none.

    Args:
        chosen: the parameters that are pruned.
        asked: the round.
        parent: the masks before the round.
        masks: the masks after the round.
        weights: name -> values after the round.
        scoring: details that `rank` returns: `units` by tensor, and the fraction `removed` of all units, or of the
            budget for dependency groups.
        at_target: whether the masks must have the target sparsity of the round.

    Raises:
        LawBroken: masks are not nested, a pruned weight is not zero, or the achieved sparsity differs from the target
            by more than rounding to whole units allows.
    """
    if len(parent) and asked.choices.dynamics.row.nested and not asked.shuffles and not masks.nested_in(parent):
        raise LawBroken("masks are not nested: an entry that an earlier round pruned is 1 again.")
    for name, mask in masks.items():
        weight = weights[name]
        if bool(((weight != 0) & ~mask.to(weight.device)).any()):
            raise LawBroken(f"pruned weights are not zero: {name} has other values where its mask is 0.")
    if at_target and asked.fields.target is not None and (said := _off_target(chosen, asked, masks, scoring)):
        raise LawBroken(said)
    dead = [] if asked.choices.unit.of_transformer else [name for name, mask in masks.items() if not bool(mask.any())]
    return {"dead_tensors": dead, "rounding": rounding(chosen, asked, scoring), "scoring": scoring}


def _off_target(chosen: Sequence[Prunable], asked: Round, masks: MaskSet, scoring: Mapping[str, Any]) -> str | None:
    """Return a message if the masks miss the target sparsity of the round; None if they reach it."""
    target = float(asked.fields.target or 0.0)
    if asked.spans:
        gap, budget = target - scoring["removed"], asked.choices.scope.budget
        said = f"is below the requested {target:.6f} of the {budget}"
        if asked.counts_experts:
            gap = abs(gap) - rounding(chosen, asked, scoring)
            said = f"is not the requested {target:.6f} of the experts, rounded to whole ones"
        return f"achieved sparsity {scoring['removed']:.6f} {said}." if gap > 1e-6 else None
    groups = asked.cut(chosen, scoring.get("units") or [*masks])
    total, kept = sum(groups.sizes.values()), sum(int(alive.sum()) for alive in groups.alive(masks).values())
    if abs(total - kept - target * total) <= _slack(groups) + 1e-6 * total:
        return None
    remedy = (
        f"; {asked.fields.method.said('method')} must prune exactly the number that it gets as `amount`"
        if asked.choices.select
        else ""
    )
    return (
        f"achieved sparsity {1 - kept / total:.6f} is not the requested {target:.6f}: {kept} of {total} units of kind "
        f"{groups.unit.kind} are left, and rounding allows only {_slack(groups):g} more or fewer{remedy}."
    )


def rounding(chosen: Sequence[Prunable], asked: Round, scoring: Mapping[str, Any]) -> float:
    """Return how far rounding to whole units may keep `removed` from the target, as a fraction of all units."""
    if asked.fields.target is None:
        return 0.0
    if "step" in scoring:
        return float(scoring["step"]) * (0.5 if asked.counts_experts else 1)
    groups = asked.cut(chosen, scoring.get("units") or [each.name for each in chosen])
    return _slack(groups) / max(1, sum(groups.sizes.values()))


def _slack(groups: Groups) -> float:
    """Return the number of units, in total, by which rounding may keep a round from its target."""
    scope = groups.scope
    if scope.kind == "row":
        return float(sum(layout.units // max(1, layout.pool) for layout in groups))
    return 0.5 * (len(groups.sizes) if scope.kind == "layer" and scope.allocation == "each" else 1)


def hold_rewound(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor], masks: MaskSet) -> None:
    """Raise `LawBroken` unless kept weights have exactly the bytes that were saved and masked weights are 0.

    Args:
        weights: name -> values after rewinding.
        saved: name -> values at the step to rewind to.
        masks: masks of the round; a tensor without one is kept whole.
    """
    for name, tensor in saved.items():
        kept = masks.get(name, torch.ones((), dtype=torch.bool)).to(tensor.device).expand(tensor.shape)
        if _bytes(weights[name][kept]) != _bytes(tensor[kept]) or bool(weights[name][~kept].any()):
            raise LawBroken(
                f"rewound weights differ from the weights of the step to rewind to: {name} has other bytes where its "
                "mask is 1, or is not zero where its mask is 0."
            )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1, 1).view(torch.uint8).numpy().tobytes()
