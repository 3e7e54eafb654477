"""Rewinding: continue the dense training from a step under masks, with its schedule, data order and optimizer."""

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
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder, StageStore
from orchestrator.training.pruning_rounds import hold_rewound, masked
from orchestrator.training.stage_networks import MISFITS, Network, fitting, redrawn, stored
from orchestrator.training.state.train_state import NotPlain, TrainState, module_state, restore_module
from orchestrator.workloads.weight_files import plain_state
from pruning import MaskSet

_UNMEASURED: Mapping[str, Any] = {
    "losses": None,
    "best": -math.inf,
    "best_state": None,
    "best_extra": {},
    "stale": 0,
}
"""State values of a training before its first evaluation."""
_OWN: Mapping[str, Any] = {"cost": {}, "dynamics": None, "best_masks": None}
"""State values of a round's own training before its first step."""


def state_of(store: StageStore, key: str) -> TrainState:
    """Return the final state of a start stage, which trains up to a step."""
    return TrainState(store.stages.tensors(key, STATE), store.stages.values(key, STATE_VALUES))


def furthest(store: StageStore, keys: Sequence[str], started_from: str) -> tuple[TrainState | None, float]:
    """Return the state of the stage with the most steps, and the seconds that the stage that continues counts with it.

    The state is None if none can be read. It only saves work, so one of other weights is left out, and a damaged one is
    skipped for the next. A round counts the seconds of its parts; a dense training doesn't count those of its starts.

    Args:
        store: the store
        keys: stages that end at a place of the same training
        started_from: digest of the weights that the training starts from
    """
    found = {key: record for key, record in store.finished(keys).items() if record.started_from == started_from}
    for key in sorted(found, key=lambda key: found[key].steps, reverse=True):
        with suppress(StageMissing):
            return state_of(store, key), found[key].seconds if KINDS[found[key].kind].part else 0.0
    return None, 0.0


def restart(network: Network, masks: MaskSet, stage: StageOrder) -> None:
    """Set the weights from which a round trains: its own, or those of the row of `restart.weights`."""
    row = stage.spec.typed.restart.weights_row
    if not row.keeps:
        row.load()(network, masks, stage)
        masked(network.model, masks)


def rewind(network: Network, masks: MaskSet, stage: StageOrder) -> None:
    """Set the weights of a step of the dense training.

    Raises:
        LawBroken: the rewound weights differ from those of the step.
    """
    key = stage.spec.inputs[REWIND]
    saved, _ = stored(key, stage)
    state = _input_state(REWIND, stage.spec, stage.store)
    with fitting(key, STATE):
        restore_module(network.model, module_state(saved.model) if state is None else state.part("model"))
    masked(network.model, masks)
    hold_rewound(plain_state(network.model), plain_state(saved.model), masks)


def redraw(network: Network, _masks: MaskSet, stage: StageOrder) -> None:
    """Set new random weights."""
    restore_module(network.model, module_state(redrawn(network, stage)))


def onward(model: nn.Module, masks: Sequence[Tensor | None], spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the state of the dense training that a round continues; None for a round that fine-tunes.

    Schedule, scaler, generators and place in the data order are those of the step. Measurements and selected weights
    are dropped, because they belong to another network; they stay if nothing is masked, now or within the training, and
    the weights are that step's.

    Args:
        model: the network to train, with its first weights
        masks: masks of the trained parameters, in their order
        spec: the round
        store: the store with the stages of the dense training
    """
    state = _input_state(RATES, spec, store)
    if state is None:
        return None
    with fitting(spec.inputs[RATES], STATE, (*MISFITS, NotPlain)):
        return _masked_state(masks, state, model, spec)


def _masked_state(masks: Sequence[Tensor | None], state: TrainState, model: nn.Module, spec: StageSpec) -> TrainState:
    """Return the state of the dense training as `onward` describes it."""
    parts = {name: state.part(name) for name in state.values} | {"model": module_state(model), "curve": [], **_OWN}
    same = spec.inputs.get(REWIND) == spec.inputs[RATES]
    if not same or spec.typed.changes_masks or any(mask is not None and not bool(mask.all()) for mask in masks):
        parts |= {**_UNMEASURED, "selected_step": parts["step"]}
    averages = parts["averages"] if same else None
    parts["averages"] = averages and [_masked(value, mask) for value, mask in zip(averages, masks, strict=True)]
    found = parts["optimizer"]["state"]
    kept = found["state"].items() if spec.typed.restart.optimizer == "restored" else ()
    found["state"] = {
        index: {name: _masked(value, masks[index]) for name, value in each.items()} for index, each in kept
    }
    if len(groups := found["param_groups"]) == 1:  # a small network may have fewer parameters
        found["param_groups"] = [{**groups[0], "params": [*range(len(masks))]}]
    return TrainState.of(parts)


def _input_state(role: str, spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the dense training's state in the input `role`; None without that input or for a training function."""
    key = spec.inputs.get(role)
    return None if key is None or spec.training_config.get("_target_") else state_of(store, key)


def _masked(value: Any, mask: Tensor | None) -> Any:
    """Return a parameter's value with zeros where the parameter is masked; a value of another shape stays unchanged."""
    if mask is None or not isinstance(value, Tensor) or value.shape != mask.shape:
        return value
    return torch.where(mask.to(value.device), value, torch.zeros_like(value))
