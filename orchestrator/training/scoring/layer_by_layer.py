"""Prune one round in the sequential order: block by block, with calibration data from the training split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import pruning
from orchestrator.core.records import BLOCKS
from orchestrator.core.seeding import derive
from orchestrator.training.scoring.examples import ScoringData, count
from orchestrator.training.scoring.ranking import SPLIT, Read, Round, Scoring, engine_refusal
from orchestrator.training.state.train_state import TrainState, as_bytes, as_tensor
from orchestrator.workloads.model_building import Prunable
from orchestrator.workloads.tasks.batch import arguments
from pruning import MaskSet
from pruning.reconstruction.block_by_block import LayerReport, Layerwise
from pruning.reconstruction.block_order import parts_of


class Enough(Exception):
    """Raised after a block by a rehearsal: the other blocks stay as they are."""


@dataclass
class Blocks:
    """Blocks that a round has pruned so far, and what happens after each.

    Args:
        done: the blocks pruned so far; None before the first.
        total: number of blocks of the network; 0 before the pruning begins.
        after: called after each block.
    """

    done: Layerwise | None = None
    total: int = 0
    after: Callable[[Blocks], object] = field(default=lambda _: None)

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
        pruning.layerwise(
            model,
            str(choices.score.kind),
            [_call(model, batch) for batch in batches],
            **_target(asked),
            parameters=names,
            masks={name: mask for name, mask in parent.items() if name in names},
            done=blocks.done,
            on_block=note,
            **choices.score.options,
        )
    except Enough:
        pass
    except (ValueError, TypeError) as error:
        raise engine_refusal(asked, error) from error
    done = blocks.done or Layerwise(MaskSet({}), {})
    whole = {each.name: torch.ones_like(getattr(each.module, each.parameter), dtype=torch.bool) for each in chosen}
    masks = MaskSet({name: done.masks.get(name, parent.get(name, whole[name])) for name in names})
    details = {
        "unit": choices.unit.kind,
        "units": {name: mask.numel() for name, mask in whole.items()},
        "removed": masks.sparsity(),
        "score": asked.named,
        "examples": sum(map(count, batches)),
        "passes": 0,
        "rescorings": 1,
        "split": SPLIT,
        "layers": {name: _plain(report) for name, report in done.layers.items()},
    }
    return masks, Scoring(details, {"scoring": 0.0, "selection": sum(each.seconds for each in done.layers.values())})


def _call(model: nn.Module, batch: Any) -> Any:
    """Return what the network is called with for a batch: a dict by keyword, or a tuple by position."""
    given, named = arguments(model, batch, labels=False)
    return named or given


def _target(asked: Round) -> dict[str, Any]:
    scope = asked.choices.scope
    if scope.kind == "window":
        return {"n": scope.n, "m": scope.m}
    if scope.allocation == "given":
        return {"sparsity": {name: 1 - density for name, density in scope.densities.items()}}
    return {"sparsity": asked.fields.target}


def _plain(report: LayerReport) -> dict[str, Any]:
    """Return a layer's report in JSON types, without its seconds, which are no part of a result."""
    error = None if math.isnan(report.error) else report.error
    return {"block": report.block, "sparsity": report.sparsity, "error": error, "rows": report.rows}


def _reported(plain: Mapping[str, Any]) -> LayerReport:
    return LayerReport(**{**plain, "error": math.nan if plain["error"] is None else plain["error"]})
