"""The masked network of a trial, loaded from the store for an export, and inputs to check its outputs with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import pruning
from orchestrator.catalogue.models import STORED_MODEL_TYPES
from orchestrator.config.config_groups import GROUPS, violations_of
from orchestrator.config.sources import targets
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import canonical_json, quoted
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import HIDDEN
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder, Worker
from orchestrator.deploy.checked_writing import Masked
from orchestrator.deploy.formats.format import ExportError
from orchestrator.execution.own_modules import hold_planned
from orchestrator.export.stock_classes import is_stock
from orchestrator.export.trial_choice import ChosenTrial
from orchestrator.planning import file_places, pinned_content
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.training.stage_networks import stored, stored_masks
from orchestrator.workloads.data_loading import load
from orchestrator.workloads.model_building import build


@dataclass(frozen=True, kw_only=True)
class StoredNetwork(Masked):
    """A trial's masked network in evaluation mode, with its masks and the record of its stage."""

    masks: pruning.MaskSet
    record: StageRecord


def kept(
    store: Store, sweep: SavedSweep, choice: ChosenTrial, *, run_own_code: bool, measured: bool = False
) -> StoredNetwork:
    """Load the network of a trial.

    Args:
        store: the store of the sweep.
        sweep: the saved sweep.
        choice: the trial, and its stage to load.
        run_own_code: allow code that the sweep names by `_target_` to run.
        measured: whether the caller measures the network's metrics, for which its task is checked, too.

    Raises:
        ExportError: the network needs code that is not allowed to run, or weights or data are missing
        OrchestratorError: the code or the data have changed since the sweep was planned
    """
    spec = sweep.plan.stages[choice.stage]
    lineage = sweep.plan.lineage(choice.stage)
    chain, dense, record = (*lineage, spec), (lineage[0] if lineage else spec), sweep.records[choice.stage]
    config = dict(choice.trial.config)
    _refuse_incomplete(config, dense, spec if measured else None)
    parts = ("model", "data", "task") if measured else ("model", "data")
    own = _own_code(chain, parts, run_own_code)
    _refuse_other_fields(choice.stage, sweep)
    if not run_own_code:
        _refuse_unlisted(chain, parts)
    if own:
        sys.path[:0] = [""] if "" not in sys.path else []
        hold_planned(chain, remedy=None)
    if WEIGHTS not in record.files:
        raise ExportError(
            f"`--trial` (={choice.trial.name!r}) no longer has weights in the store; run the sweep again."
        )
    config["model"] = pinned_content.without_weights(config["model"])
    try:
        pinned_content.look_again()
        pinned, location = pinned_content.pinned({**config, "task": {}})  # no file of a task is read
    except file_places.Misplaced as error:
        raise ExportError(f"a file that the sweep read is missing or cannot be read: it {error}") from None
    except KeyError as error:
        raise ExportError(
            f"the saved sweep is damaged: it lacks {error}; copy it again from its first store."
        ) from None
    held = {"model": dense.typed.model.get("path"), "data": dense.typed.data.get("root")}
    if held != {"model": pinned["model"].get("path"), "data": pinned["data"].get("root")}:
        raise ExportError("`model.path` or `data.root` of the sweep has other contents now; restore the old contents.")
    if not run_own_code:
        location = _held_back(dense, location)
        _refuse_unknown_type(dense, location)
    spec = replace(spec, location=location)
    _refuse_larger_model(dense, location, store.stages.tensors(choice.stage, WEIGHTS))
    network, _ = stored(choice.stage, StageOrder(spec, Worker(store), lineage))
    masks = network.masks
    if KINDS[record.kind].prunes:
        masks = stored_masks(record, network.model, store)
    sizes = {size for measured, _ in latencies(sweep, choice) for size in measured.typed.measure.batch_sizes}
    return StoredNetwork(network.model.eval(), network.data, spec, tuple(sorted(sizes)), masks=masks, record=record)


def latencies(sweep: SavedSweep, choice: ChosenTrial) -> Iterator[tuple[StageSpec, StageRecord]]:
    """Yield the finished latency measurements of a trial's network."""
    for key, record in sweep.records.items():
        if KINDS[record.kind].times and choice.stage in {spec.key for spec in sweep.plan.lineage(key)}:
            yield sweep.plan.stages[key], record


def _refuse_incomplete(config: Mapping[str, Any], dense: StageSpec, measured: StageSpec | None) -> None:
    """Raise ExportError if a saved sweep lacks settings that building or measuring its network needs."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("model", config), ("data", config)]
    parts += [(part, dense.fields) for part in ("model", "data", "seed")]
    if measured is not None:
        training = measured.fields.get(measured.training, {})
        parts += [("task", measured.fields), ("seed", measured.fields), ("eval_batch_size", training)]
    if lacking := [part for part, held in parts if part not in held]:
        raise ExportError(f"the saved sweep is damaged: it lacks `{lacking[0]}`; copy it again from its first store.")


def _own_code(chain: Sequence[StageSpec], parts: Sequence[str], may_run: bool) -> bool:
    """Return whether parts of any stage name code by `_target_`; raise ExportError if such code may not run.

    A stock class of a library as `model` needs no permission.
    """
    nodes = [(part, spec.fields.get(part)) for spec in chain for part in parts]
    own = {part: name for part, node in nodes if not _is_stock(part, node) for name in targets([node])}
    if own and not may_run:
        named = " and ".join(f"`{part}._target_` (={quoted(name)[1:-1]})" for part, name in own.items())
        raise ExportError(
            f"{named} of the sweep {'is' if len(own) == 1 else 'are'} code that must run to rebuild the network; "
            "pass --run-own-code (in Python run_own_code=True) if you trust the store."
        )
    return bool(own)


def _is_stock(part: str, node: Any) -> bool:
    return part == "model" and is_stock(node)


def _refuse_other_fields(key: str | None, sweep: SavedSweep) -> None:
    """Raise ExportError if the fields of a stage, or of a stage before it, are not those that its key is made from.

    A secret among the fields was hidden when the sweep was saved; the key of such a stage cannot be checked.
    """
    while key is not None:
        spec = sweep.plan.stages[key]
        if spec.key != key and HIDDEN not in canonical_json(spec.fields):
            raise ExportError(
                f"the saved sweep is damaged: stage {key[:12]} has other fields than those that its key is made from; "
                "copy it again from its first store."
            )
        key = spec.parent


def _refuse_unlisted(chain: Sequence[StageSpec], parts: Sequence[str]) -> None:
    """Raise ExportError if a saved sweep's component has an option that a store may not choose: see `Option.stored`."""
    for part, node in ((part, spec.fields[part]) for spec in chain for part in parts if spec.fields.get(part)):
        if _is_stock(part, node):
            continue
        group = GROUPS[part]
        row = group.rows.get(str(node.get("kind")))
        if row is None:
            raise ExportError(f"`{part}.kind` (={quoted(node.get('kind'))}) of the saved sweep is no built-in {part}.")
        for sentence in violations_of(part, node):
            raise ExportError(f"the saved sweep is damaged: {sentence}")
        options = {option.name: option for option in group.options(row)}
        for key, value in node.items():
            option = options.get(key)
            if option is None:
                _refuse_choice(part, key, value, f"be left out: {row.name} has no such option")
            elif option.stored and value != option.default and not option.stored.holds(value):
                _refuse_choice(part, key, value, option.stored.text)


def _refuse_choice(part: str, key: str, value: object, rule: str) -> NoReturn:
    raise ExportError(
        f"`{part}.{key}` (={quoted(value)}) of the saved sweep must {rule}, as a store is input; pass "
        "--run-own-code (in Python run_own_code=True) if you trust the store."
    )


def _held_back(dense: StageSpec, location: Mapping[str, Any]) -> dict[str, Any]:
    """Return the places of files, with the values of options that a store never chooses, as in `Row.when_stored`."""
    kinds = {part: dense.fields[part].get("kind") for part in ("model", "data")}
    fixed = {part: GROUPS[part].rows[kind].when_stored for part, kind in kinds.items() if kind}
    return {**location, **{part: {**location.get(part, {}), **each} for part, each in fixed.items() if each}}


def _refuse_unknown_type(dense: StageSpec, location: Mapping[str, Any]) -> None:
    """Raise ExportError if transformers builds a network from more than the numbers in its configuration."""
    path = str(location.get("model", {}).get("path"))
    if not pinned_content.from_transformers(dense.typed.model) or path.endswith(file_places.GGUF):
        return
    try:
        found = json.loads(Path(path, "config.json").read_bytes())
        kind = found.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ExportError(f"`model.path` (={path}) has no readable config.json ({error}); restore it.") from None
    if kind not in STORED_MODEL_TYPES or not all(map(_is_value, found.values())):
        _refuse_choice("model", "path", path, f"hold a plain configuration of one of {', '.join(STORED_MODEL_TYPES)}")


def _is_value(value: object) -> bool:
    """Whether a value of a config.json holds no further configuration, whose networks could be any."""
    return not (isinstance(value, Mapping) and "model_type" in value)


def _refuse_larger_model(dense: StageSpec, location: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise ExportError if a sweep's model is larger than its stored weights: a forged plan could fill the memory."""
    model, held = dense.typed.model, sum(each.numel() for each in weights.values())
    if not model.get("kind") and not is_stock(model):
        return  # the user's own code, which the user has allowed to run
    found = load({**dense.typed.data, **location.get("data", {})}, dense.fields.get("sources"))
    try:
        with torch.device("meta"):
            planned = build(
                {**model, **location.get("model", {})}, input_shape=found.input_shape, classes=found.classes, seed=0
            )
    except OrchestratorError:
        return  # the model needs real tensors to be built, or cannot be built, which loading it will report
    size = sum(each.numel() for each in planned.state_dict().values() if isinstance(each, Tensor))
    if size > held:
        raise ExportError(
            f"`model` of the saved sweep has {size:,} entries, and its weights have {held:,}: the store is damaged, or "
            "another release made it."
        )
