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
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageStore, WorkOrder
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


def initialised(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the dense stage before training, with random weights or the weights of a checkpoint."""
    network = _built(dense, spec, order)
    node, place = dense.typed.model, spec.location.get("model", {}).get("weights")
    if place is not None:
        initialise(network.model, place, node["weights"], node.get("reinitialise") or ())
    return network


def redrawn(network: Network, spec: StageSpec, order: WorkOrder) -> nn.Module:
    """Return a network like the one that round `spec` prunes, with random weights drawn for this round."""
    return _random((*order.lineage, *order.specs)[0], spec, order, network.data, f"{spec.round}/reinit")


def _built(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the stage `dense` with random weights."""
    loaded = data_loading.load(data_node(dense, spec), dense.fields.get("sources"))
    _require_same_data(loaded, dense, spec, order)
    return Network(_random(dense, spec, order, loaded, "0/init"), MaskSet({}), loaded)


def data_node(dense: StageSpec, spec: StageSpec) -> dict[str, Any]:
    """Return the configuration from which a stage's data set is loaded: its fields and the paths of its files."""
    return {**dense.typed.data, **spec.location.get("data", {})}


def _require_same_data(loaded: data_loading.Data, dense: StageSpec, spec: StageSpec, order: WorkOrder) -> None:
    """Raise `DataError` if an earlier stage that `spec` continues from had other data than those loaded here.

    Only records made with the same processor and releases are compared, because others may give the same data other
    bits.
    """
    keys = (*spec.inputs.values(), *spec.starts_from) if loaded.digest else ()
    here = deciding(order.device)
    for key, record in order.store.finished(keys).items():
        known = {name: record.environment.get(name) for name in here}
        if record.data_digest not in ("", loaded.digest) and known == here:
            raise DataError(
                f"{given('data', dense.typed.data)} must return the same data as for {record.kind} stage {key[:12]}, "
                "which this stage continues; seed its random draws, and list the files that it reads in `data.depends`."
            )


def _random(dense: StageSpec, spec: StageSpec, order: WorkOrder, loaded: data_loading.Data, purpose: str) -> nn.Module:
    seed = derive(dense.typed.seed, purpose)
    node = {**dense.typed.model, **spec.location.get("model", {})}
    model = model_building.build(node, input_shape=loaded.input_shape, classes=loaded.classes, seed=seed)
    return model.to(torch.device(order.device))


def restored(spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network that a stage continues from, restored from the store."""
    key = str(spec.parent)
    network, record = stored(key, spec, order)
    if KINDS[record.kind].prunes:
        network.masks = stored_masks(record, network.model, order.store)
    network.digest = record.weights_digest
    return network


def stored(key: str, spec: StageSpec, order: WorkOrder) -> tuple[Network, StageRecord]:
    """Return the network that stage `key` left in the store, and its record.

    Args:
        key: the stage to read.
        spec: the stage that needs the network.
        order: the work order of `spec`.

    Raises:
        StageMissing: the stage is missing or damaged
        StoreError: its weights belong to another network
    """
    record = order.store.finished([key]).get(key)
    if record is None:
        raise StageMissing(f"stage {key[:12]} is not in the store any more; run the sweep again.", key)
    tensors = order.store.stages.tensors(key, WEIGHTS)
    network = _built((*order.lineage, *order.specs)[0], spec, order)
    with fitting(key, WEIGHTS):
        load_state(network.model, tensors)
    return network, record


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
