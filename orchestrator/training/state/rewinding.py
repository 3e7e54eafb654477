"""A training that goes on under masks from a step of the dense one: with its schedule, data order and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import StageMissing
from orchestrator.core.file_names import STATE, STATE_VALUES
from orchestrator.core.specs import RATES, REWIND, StageSpec
from orchestrator.core.work_order import StageStore, WorkOrder
from orchestrator.training.pruning_rounds import hold_rewound, masked
from orchestrator.training.stage_networks import MISFITS, Network, fitting, redrawn, stored
from orchestrator.training.state.train_state import NotPlain, TrainState, module_state, restore_module
from orchestrator.workloads.weight_files import plain_state
from pruning import MaskSet

_BEFORE: Mapping[str, Any] = {
    "losses": None,
    "best": -math.inf,
    "best_state": None,
    "best_extra": {},
    "stale": 0,
}
"""What a training has that has measured nothing yet."""


def state_of(store: StageStore, key: str) -> TrainState:
    """Return the state that a start of a training has ended with."""
    return TrainState(store.stages.tensors(key, STATE), store.stages.values(key, STATE_VALUES))


def furthest(store: StageStore, keys: Sequence[str]) -> TrainState | None:
    """Return the state of that start of a training which has come furthest; None where none can be read.

    It would only save work: what is damaged is done without, by the next.
    """
    found = store.finished(keys)
    for key in sorted(found, key=lambda key: found[key].steps, reverse=True):
        with suppress(StageMissing):
            return state_of(store, key)
    return None


def masks_of(model: nn.Module, masks: MaskSet) -> list[Tensor | None]:
    """Return the mask of each parameter of a plain model that is trained, in their order; None for one without."""
    return [masks.get(name) for name, parameter in model.named_parameters() if parameter.requires_grad]


def restart(network: Network, masks: MaskSet, spec: StageSpec, order: WorkOrder) -> None:
    """Give a network that was just pruned the weights that a round trains on from: its own, a step's, or new ones.

    Raises:
        LawBroken: weights to go back to did not come out as that step's.
    """
    key = spec.inputs.get(REWIND)
    if key is not None:
        saved, _ = stored(key, spec, order)
        state = _state_of(REWIND, spec, order.store)
        with fitting(key, STATE):
            restore_module(network.model, module_state(saved.model) if state is None else state.part("model"))
        masked(network.model, masks)
        hold_rewound(plain_state(network.model), plain_state(saved.model), masks)
    elif spec.typed.restart.weights == "reinit":
        restore_module(network.model, module_state(redrawn(network, spec, order)))
        masked(network.model, masks)


def onward(model: nn.Module, masks: Sequence[Tensor | None], spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the state of the dense training that a round trains on from; None for one that fine-tunes.

    Its schedule, scaler, generators and place in the data order are those of the step. What had been measured, and the
    weights that had been selected, were another network's, unless nothing is masked.

    Args:
        model: as it is to be trained, with the weights that it begins with
        masks: of each trained parameter, in their order
    """
    state = _state_of(RATES, spec, store)
    if state is None:
        return None
    with fitting(spec.inputs[RATES], STATE, (*MISFITS, NotPlain)):
        return _under(masks, state, model, spec)


def _under(masks: Sequence[Tensor | None], state: TrainState, model: nn.Module, spec: StageSpec) -> TrainState:
    """Return the state of the dense training as `onward` gives it."""
    parts = {name: state.part(name) for name in state.values} | {"model": module_state(model), "curve": []}
    same = spec.inputs.get(REWIND) == spec.inputs[RATES]
    if not same or any(mask is not None and not bool(mask.all()) for mask in masks):
        parts |= {**_BEFORE, "selected_step": parts["step"]}
    averages = parts["averages"] if same else None
    parts["averages"] = averages and [_masked(value, mask) for value, mask in zip(averages, masks, strict=True)]
    found = parts["optimizer"]["state"]
    kept = found["state"].items() if spec.typed.restart.optimizer == "restored" else ()
    found["state"] = {
        index: {name: _masked(value, masks[index]) for name, value in each.items()} for index, each in kept
    }
    return TrainState.of(parts)


def _state_of(role: str, spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the state of the dense training that is an input; a training function has none."""
    key = spec.inputs.get(role)
    return None if key is None or spec.training_config.get("_target_") else state_of(store, key)


def _masked(value: Any, mask: Tensor | None) -> Any:
    """Return what belongs to a parameter with zeros where that is masked; what has another shape, as it is."""
    if mask is None or not isinstance(value, Tensor) or value.shape != mask.shape:
        return value
    return torch.where(mask.to(value.device), value, torch.zeros_like(value))
