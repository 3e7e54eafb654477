"""The masked network that a trial left in the store, as it is to be exported, and batches to hold it to."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from orchestrator.config.sources import targets
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import quoted
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import WorkOrder
from orchestrator.deploy.formats.format import ExportError, call_values, called_with, cut
from orchestrator.execution.own_modules import hold_planned
from orchestrator.export.trial_choice import Choice
from orchestrator.planning import pinned_content
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.training.stage_networks import stored, stored_masks
from orchestrator.workloads.data_loading import Data, load
from orchestrator.workloads.model_building import build
from pruning.graph.tracing import Example

BATCH, BATCHES = 16, 4
"""Of the test split, by which an export is held to the outputs of the masked network."""


@dataclass(frozen=True)
class Kept:
    """A trial's network with its zeros, in evaluation, its masks, its data, and the record and spec of its stage."""

    model: nn.Module
    masks: pruning.MaskSet
    data: Data
    record: StageRecord
    spec: StageSpec

    def inputs(self) -> list[Example]:
        """Return what the network is called with for some batches of the test split, and for one example alone.

        Raises:
            ExportError: the split has one example
        """
        batches: Iterator[Any] = islice(self.data.test.batches(BATCH, device=torch.device("cpu")), BATCHES)
        found = [called_with(self.model, batch) for batch in batches]
        if len(call_values(found[0])[0]) < 2:
            raise ExportError("`data` must have 2 examples to test on or more, to see that batches may be of any size.")
        return [*found, cut(found[0], 1)]


def kept(store: Store, sweep: SavedSweep, choice: Choice, *, run_own_code: bool, measured: bool = False) -> Kept:
    """Return what a trial left.

    Args:
        measured: whether the network is to be measured, by its task.

    Raises:
        ExportError: it takes code of the user's own, which is not to be run; or weights or data are not there
        OrchestratorError: that code, or the data, are not what the sweep was planned with
    """
    spec = sweep.plan.stages[choice.stage]
    lineage = sweep.plan.lineage(choice.stage)
    chain, dense, record = (*lineage, spec), (lineage[0] if lineage else spec), sweep.records[choice.stage]
    config = dict(choice.trial.config)
    _hold_whole(config, dense, spec if measured else None)
    own = _own_code(chain, ("model", "data", "task") if measured else ("model", "data"), run_own_code)
    if own:
        sys.path[:0] = [""] if "" not in sys.path else []
        hold_planned(chain, remedy=None)
    if WEIGHTS not in record.files:
        raise ExportError(
            f"`--trial` (={choice.trial.name!r}) has no weights in the store any more; run the sweep again."
        )
    config["model"] = {**config["model"], "weights": None}  # what it began with is not needed
    try:
        pinned_content.look_again()
        pinned, location = pinned_content.pinned(config)
    except pinned_content.Misplaced as error:
        raise ExportError(f"what the sweep read does not lie where it did: it {error}") from None
    held = {"model": dense.typed.model.get("path"), "data": dense.typed.data.get("root")}
    if held != {"model": pinned["model"].get("path"), "data": pinned["data"].get("root")}:
        raise ExportError("`model.path` or `data.root` of the sweep holds something else now; put back what it was.")
    spec = replace(spec, location=location)
    _hold_size(dense, location, store.stages.tensors(choice.stage, WEIGHTS))
    network, _ = stored(choice.stage, spec, WorkOrder((spec,), store, lineage=lineage))
    masks = network.masks
    if KINDS[record.kind].prunes:
        masks = stored_masks(record, network.model, store)
    return Kept(network.model.eval(), masks, network.data, record, spec)


def _hold_whole(config: Mapping[str, Any], dense: StageSpec, measured: StageSpec | None) -> None:
    """Raise ExportError where a saved sweep lacks what its network is built by, or what it is measured by."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("model", config), ("data", config)]
    parts += [(part, dense.fields) for part in ("model", "data", "seed")]
    if measured is not None:
        training = measured.fields.get(measured.training, {})
        parts += [("task", measured.fields), ("seed", measured.fields), ("eval_batch_size", training)]
    if lacking := [part for part, held in parts if part not in held]:
        raise ExportError(f"the saved sweep is damaged: it lacks `{lacking[0]}`; take it from where it was made.")


def _own_code(chain: Sequence[StageSpec], parts: Sequence[str], may_run: bool) -> bool:
    """Say whether parts of a sweep name code, at any depth of any stage; raise ExportError where that may not run."""
    own = {part: name for spec in chain for part in parts for name in targets([spec.fields.get(part)])}
    if own and not may_run:
        named = " and ".join(f"`{part}._target_` (={quoted(name)[1:-1]})" for part, name in own.items())
        raise ExportError(
            f"{named} of the sweep {'is' if len(own) == 1 else 'are'} code that would be run to rebuild the network; "
            "pass --run-own-code (in Python run_own_code=True) if you trust the store."
        )
    return bool(own)


def _hold_size(dense: StageSpec, location: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise ExportError where the plan of a store makes a network larger than its weights: it would fill the memory."""
    model, held = dense.typed.model, sum(each.numel() for each in weights.values())
    if not model.get("kind"):
        return  # code of the user's own, which is called once
    found = load({**dense.typed.data, **location.get("data", {})}, dense.fields.get("sources"))
    try:
        with torch.device("meta"):
            planned = build(
                {**model, **location.get("model", {})}, input_shape=found.input_shape, classes=found.classes, seed=0
            )
    except OrchestratorError:
        return  # it needs numbers as it is built, or cannot be built, which is told next
    size = sum(each.numel() for each in planned.state_dict().values() if isinstance(each, Tensor))
    if size > held:
        raise ExportError(
            f"`model` of the saved sweep has {size:,} entries, and its weights have {held:,}: the store is damaged, or "
            "another release made it."
        )
