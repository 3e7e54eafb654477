"""The network that a stage works on: as it is initialised, or as another stage left it in the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from orchestrator.core.errors import DataError, StageMissing, StoreError
from orchestrator.core.file_names import MASKS, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.seeding import derive
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageStore, WorkOrder
from orchestrator.training.stage_environment import deciding
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.targets import given
from orchestrator.workloads.weight_files import initialise, load_state
from pruning import MaskSet
from pruning.holding.parameter import place


@dataclass
class Network:
    """A network on its device, its masks so far, its data, and the digest of its state as it was last committed."""

    model: nn.Module
    masks: MaskSet
    data: data_loading.Data
    digest: str = ""


def initialised(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the stage `dense` as its training begins: random, or a checkpoint's."""
    network = _built(dense, spec, order)
    node, place = dense.typed.model, spec.location.get("model", {}).get("weights")
    if place is not None:
        initialise(network.model, place, node["weights"], node.get("reinitialise") or ())
    return network


def redrawn(network: Network, spec: StageSpec, order: WorkOrder) -> nn.Module:
    """Return a network like the one that the round `spec` prunes, with random weights of that round's own."""
    return _random((*order.lineage, *order.specs)[0], spec, order, network.data, f"{spec.round}/reinit")


def _built(dense: StageSpec, spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network of the stage `dense` with random weights."""
    loaded = data_loading.load(data_node(dense, spec), dense.fields.get("sources"))
    _require_same(loaded, dense, spec, order)
    return Network(_random(dense, spec, order, loaded, "0/init"), MaskSet({}), loaded)


def data_node(dense: StageSpec, spec: StageSpec) -> dict[str, Any]:
    """Return what the data set of a stage is loaded by: its fields, and where its files lie."""
    return {**dense.typed.data, **spec.location.get("data", {})}


def _require_same(loaded: data_loading.Data, dense: StageSpec, spec: StageSpec, order: WorkOrder) -> None:
    """Raise `DataError` where stages that `spec` goes on from had other data than are loaded here.

    Another processor, or another release, may compute other bits of the same data: such records are not compared.
    """
    keys = (*spec.inputs.values(), *spec.starts_from) if loaded.digest else ()
    here = deciding(order.device)
    for key, record in order.store.finished(keys).items():
        known = {name: record.environment.get(name) for name in here}
        if record.data_digest not in ("", loaded.digest) and known == here:
            raise DataError(
                f"{given('data', dense.typed.data)} gives other data here than {record.kind} stage {key[:12]} had, "
                "from which this one goes on; seed what it draws, and name the files that it reads in `data.depends`."
            )


def _random(dense: StageSpec, spec: StageSpec, order: WorkOrder, loaded: data_loading.Data, purpose: str) -> nn.Module:
    seed = derive(dense.typed.seed, purpose)
    node = {**dense.typed.model, **spec.location.get("model", {})}
    model = model_building.build(node, input_shape=loaded.input_shape, classes=loaded.classes, seed=seed)
    return model.to(torch.device(order.device))


def restored(spec: StageSpec, order: WorkOrder) -> Network:
    """Return the network that a stage goes on from, as the store has it."""
    key = str(spec.parent)
    network, record = stored(key, spec, order)
    if KINDS[record.kind].prunes:
        network.masks = stored_masks(record, network.model, order.store)
    network.digest = record.weights_digest
    return network


def stored(key: str, spec: StageSpec, order: WorkOrder) -> tuple[Network, StageRecord]:
    """Return the network that the stage `key` left in the store, on the way to `spec`, and its record.

    Raises:
        StageMissing: the stage is not there, or damaged
        StoreError: its weights are those of another network
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
        StageMissing: they are not there, or damaged
        StoreError: they are those of another network, or not those that the record names
    """
    found = store.stages.masks(record.key)
    with fitting(record.key, MASKS):
        for name, mask in found.items():
            place(model, name, mask.shape)
        masks = MaskSet({name: torch.from_numpy(mask) for name, mask in found.items()})
        if masks.digest() != record.mask_digest:
            raise ValueError("their digest is not the one in the record")
    return masks


MISFITS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
"""Errors from values of a file that are of another kind or size than those that stages write."""


@contextmanager
def fitting(key: str, name: str, kinds: tuple[type[Exception], ...] = MISFITS) -> Iterator[None]:
    """Raise StoreError for a file of a stage that does not fit the network or the training.

    The stage is not set aside: a package that builds the network may have changed.
    """
    try:
        yield
    except kinds as error:
        raise StoreError(
            f"{name} of stage {key[:12]} does not fit what its plan builds: {str(error).rstrip('.')}; use the packages "
            "that made the store, or train anew with another `store.uri`."
        ) from None
