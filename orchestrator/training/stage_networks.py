"""Networks of stages: built and initialised, or restored from another stage in the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import DataError, StageMissing, StoreError
from orchestrator.core.file_names import MASKS, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.seeding import derive
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder, StageStore
from orchestrator.training.state.checkpointing import deciding
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.networks.initial_weights import initialise
from orchestrator.workloads.targets import given
from orchestrator.workloads.weight_files import load_state
from pruning import MaskSet
from pruning.holding.parameter import place


@dataclass
class Network:
    """Network on its device, with its masks so far, its data, and the digest of its last committed state."""

    model: nn.Module
    masks: MaskSet
    data: data_loading.Data
    digest: str = ""


def initialised(stage: StageOrder) -> Network:
    """Return the network of the dense stage before training, with random weights or the weights of a checkpoint."""
    network = _built(stage)
    node, place = stage.dense.typed.model, stage.spec.location.get("model", {}).get("weights")
    if place is not None:
        initialise(network.model, place, node["weights"], node.get("reinitialise") or ())
    return network


def redrawn(network: Network, stage: StageOrder) -> nn.Module:
    """Return a network like the one that a round prunes, with random weights drawn for this round."""
    return _random(stage, network.data, f"{stage.spec.round}/reinit")


def _built(stage: StageOrder) -> Network:
    """Return the network of the dense stage with random weights."""
    loaded = data_loading.load(data_node(stage), stage.dense.fields.get("sources"))
    _require_same_data(loaded, stage)
    return Network(_random(stage, loaded, "0/init"), MaskSet({}), loaded)


def data_node(stage: StageOrder) -> dict[str, Any]:
    """Return the configuration from which a stage's data set is loaded: its fields and the paths of its files."""
    return {**stage.dense.typed.data, **stage.spec.location.get("data", {})}


def _require_same_data(loaded: data_loading.Data, stage: StageOrder) -> None:
    """Raise `DataError` if an earlier stage that this one continues from had other data than those loaded here.

    Only records made with the same processor and releases are compared, because others may give the same data other
    bits.
    """
    keys = (*stage.spec.inputs.values(), *stage.spec.starts_from) if loaded.digest else ()
    here = deciding(stage.worker.device)
    for key, record in stage.store.finished(keys).items():
        known = {name: record.environment.get(name) for name in here}
        if record.data_digest not in ("", loaded.digest) and known == here:
            raise DataError(
                f"{given('data', stage.dense.typed.data)} must return the same data as for {record.kind} stage "
                f"{key[:12]}, which this stage continues; seed its random draws, and list the files that it reads in "
                "`data.depends`."
            )


def _random(stage: StageOrder, loaded: data_loading.Data, purpose: str) -> nn.Module:
    seed = derive(stage.dense.typed.seed, purpose)
    node = {**stage.dense.typed.model, **stage.spec.location.get("model", {})}
    model = model_building.build(node, input_shape=loaded.input_shape, classes=loaded.classes, seed=seed)
    return model.to(torch.device(stage.worker.device))


def restored(key: str, stage: StageOrder) -> Network:
    """Return the network of stage `key` with its masks, restored from the store for another stage."""
    network, record = stored(key, stage)
    if KINDS[record.kind].prunes:
        network.masks = stored_masks(record, network.model, stage.store)
    network.digest = record.weights_digest
    return network


def stored(key: str, stage: StageOrder) -> tuple[Network, StageRecord]:
    """Return the network that stage `key` left in the store, and its record.

    Args:
        key: the stage to read.
        stage: the stage that needs the network.

    Raises:
        StageMissing: the stage is missing or damaged
        StoreError: its weights belong to another network
    """
    record = finished(key, stage)
    tensors = stage.store.stages.tensors(key, WEIGHTS)
    network = _built(stage)
    with fitting(key, WEIGHTS):
        load_state(network.model, tensors)
    return network, record


def finished(key: str, stage: StageOrder) -> StageRecord:
    """Return the record of stage `key`; raise `StageMissing` if the store no longer has it."""
    record = stage.store.finished([key]).get(key)
    if record is None:
        raise StageMissing(f"stage {key[:12]} is not in the store any more; run the sweep again.", key)
    return record


def stored_masks(record: StageRecord, model: nn.Module, store: StageStore) -> MaskSet:
    """Return the masks that a round left in the store.

    Raises:
        StageMissing: the masks are missing or damaged
        StoreError: the masks belong to another network, or differ from those that the record names
    """
    found = store.stages.masks(record.key)
    with fitting(record.key, MASKS):
        for name, mask in found.items():
            place(model, name, mask.shape)
        masks = MaskSet({name: torch.from_numpy(mask) for name, mask in found.items()})
        if masks.digest() != record.mask_digest:
            raise ValueError("their digest is not the one in the record")
    return masks


def masks_of(model: nn.Module, masks: MaskSet) -> list[Tensor | None]:
    """Return the mask of each trained parameter of a plain model, in their order; None for a parameter without one."""
    by_parameter = {id(model.get_parameter(name)): mask for name, mask in masks.items()}  # also under a tied name
    return [by_parameter.get(id(parameter)) for parameter in model.parameters() if parameter.requires_grad]


MISFITS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Errors raised when a file holds values of another type or size than stages write."""


@contextmanager
def fitting(key: str, name: str, kinds: tuple[type[Exception], ...] = MISFITS) -> Iterator[None]:
    """Convert errors of the types `kinds` to StoreError: a stage's file does not fit the network or the training.

    The stage is not set aside, because the cause may be a changed package that builds the network.

    Args:
        key: key of the stage
        name: name of the file
        kinds: errors to convert
    """
    try:
        yield
    except kinds as error:
        raise StoreError(
            f"{name} of stage {key[:12]} does not fit what its plan builds: {str(error).rstrip('.')}; install the "
            "packages that made the store, or train again with another `store.uri`."
        ) from None
