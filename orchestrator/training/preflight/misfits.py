"""Explain why a stage cannot run in the preflight: which part is at fault, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import StageSpec
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.targets import given
from orchestrator.workloads.tasks.batch import given_labels, kind, tensors
from pruning.catalogue.value_rules import is_int


class Misfit(OrchestratorError):
    """Stage that cannot run as it is configured."""


@dataclass(frozen=True)
class Tried:
    """Data that a stage was using when it failed."""

    split: str
    """The split that was read last."""
    batch: Batch
    """A batch of that split."""
    train: Batch
    """A batch of the training split."""
    classes: int
    """Number of classes in the data."""
    positions: float
    """Largest number of tokens that the network takes; infinite if its configuration does not say."""
    own: Mapping[str, object]
    """Network, task and loss of the user's own, by their names in messages."""


def describe(batch: Batch) -> str:
    """Describe the inputs and labels of a batch by shape and dtype."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return f"inputs {kind(batch[0])} and labels {kind(batch[1])}"
    return kind(batch)


def misfit(dense: StageSpec, spec: StageSpec, tried: Tried | None, error: BaseException) -> Misfit:
    """Return the error to raise when a stage fails without a message of its own: in the user's code or between parts.

    Args:
        dense: the stage that names model and data.
        spec: the stage that failed.
        tried: data in use at the failure; None if the stage could not be built.
        error: the cause.
    """
    said = f"{type(error).__name__}: {(' '.join(str(error).split()) or '(no message)').rstrip('.')}"
    model, data, train = named(dense, "model"), named(dense, "data"), spec.training
    step = "could not be built"
    if tried is not None:
        found = _different_split(data, tried, said) or _unusable_dtype(model, data, tried, said)
        if found or (found := _block_too_long(dense, tried, error)):
            return Misfit(found)
        where = "" if tried.split == "train" else f"its {tried.split} split, "
        step = f"could not run on a batch of {where}{describe(tried.batch)}"
        if (fault := _label_fault(tried, said)) is None and (parts := _own_parts(tried.own, error)):
            caller = f", which {parts[1]} called," if len(parts) > 1 else ""
            return Misfit(f"{parts[0]}{caller} {step}: {said}; fix it, or choose `data` that it takes.")
        said = fault or said
    return Misfit(
        f"`model` (={model}) with `data` (={data}) and `{train}` {step}: {said}; "
        f"change `model`, `data`, `prune` or `{train}` until they fit."
    )


def _own_parts(own: Mapping[str, object], error: BaseException) -> list[str]:
    """Return the names of the user's own parts that were running when `error` was raised, the innermost first."""
    frames = reversed([frame for frame, _ in walk_tb(error.__traceback__)])
    return [*dict.fromkeys(name for frame in frames for name, part in own.items() if _runs(part, frame))]


def _runs(part: object, frame: FrameType) -> bool:
    """Return whether a frame runs a method of `part` or of a module in it, or the function `part`."""
    holders = part.modules() if isinstance(part, nn.Module) else [part]
    function = part.func if isinstance(part, partial) else part
    caller = frame.f_locals.get("self", frame)
    return any(holder is caller for holder in holders) or getattr(function, "__code__", None) is frame.f_code


def labels_misfit(dense: StageSpec, batches: Mapping[str, Batch]) -> Misfit | None:
    """Return the error to raise if a split's labels have another dtype than those of the training split.

    Args:
        dense: the stage that names the data.
        batches: a batch of each split.
    """
    labels = {name: found for name, batch in batches.items() if (found := given_labels(batch)) is not None}
    for name, found in labels.items():
        train = labels.get("train", found)
        if found.ndim == train.ndim and found.dtype != train.dtype:  # with another shape, they may be probabilities
            here, there = (str(each.dtype).removeprefix("torch.") for each in (train, found))
            return Misfit(
                f"{given('data', dense.typed.data)} gives labels of {here} in its train split and {there} in its "
                f"{name} split; give all splits labels of one dtype."
            )
    return None


def named(dense: StageSpec, part: str) -> str:
    """Return the name of `model` or `data` for messages."""
    node: Mapping[str, Any] = getattr(dense.typed, part)
    return str(node.get("kind") or node.get("_target_"))


def _different_split(data: str, tried: Tried, said: str) -> str | None:
    """Return a message if the examples of the split read last differ in shape or dtype from the training split's."""
    if _shapes_and_dtypes(tried.batch) == _shapes_and_dtypes(tried.train):
        return None
    return (
        f"`data` (={data}) gives {describe(tried.batch)} in its {tried.split} split, and {describe(tried.train)} in "
        f"its train split: {said}; give all splits examples of one shape and dtype, or use a `model` that takes both."
    )


def _shapes_and_dtypes(batch: Batch) -> list[tuple[Any, ...]]:
    return [(*tensor.shape[1:], tensor.dtype) for tensor in tensors(batch)]


def _unusable_dtype(model: str, data: str, tried: Tried, said: str) -> str | None:
    """Return a message if the network cannot compute with the dtype of its inputs."""
    if not re.search(r"\bdouble\b|must have the same dtype|type \(.*should be the same", said, re.I):
        return None
    batch = describe(tried.batch)
    odd = re.search(r"\b(float64|float16|bfloat16|uint8|int(8|16|32))\b", batch.partition(" and labels")[0])
    if odd is None:
        return None
    return f"`data` (={data}) gives {batch}, and `model` (={model}) cannot compute with {odd[1]}; return float32."


def _block_too_long(dense: StageSpec, tried: Tried, error: BaseException) -> str | None:
    """Return a message if a block of text has more tokens than the network takes."""
    block, most = dense.typed.data.get("block"), tried.positions
    if not (isinstance(error, IndexError) and is_int(block) and block > most):
        return None
    ours = dense.typed.model.get("kind") == "huggingface"
    more = f"pass +model.overrides.max_position_embeddings={block}" if ours else "use a `model` with more"
    return (
        f"`data.block` (={block}) must be at most {most}, the number of positions of `model` "
        f"(={named(dense, 'model')}); pass data.block={most}, or {more}."
    )


def _label_fault(tried: Tried, said: str) -> str | None:
    """Return the fault of a label if torch's error is about one."""
    label = re.search(r"Target (-?\d+) is out of bounds", said)
    if label is None:
        return None
    if label[1].startswith("-"):
        return f"a label is {label[1]}, but classes are numbered from 0"
    return f"the network has fewer outputs than the data have classes ({tried.classes})"
