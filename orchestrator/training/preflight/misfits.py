"""What the preflight says of a stage that cannot run: which part is at fault, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import StageSpec
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.tasks.batch import kind, tensors
from pruning.catalogue.value_rules import is_int


class Misfit(OrchestratorError):
    """A stage that cannot run as it is configured."""


@dataclass(frozen=True)
class Tried:
    """What a stage had before it when it failed."""

    split: str
    """The split that was read last."""
    batch: Batch
    """A batch of that split."""
    train: Batch
    """A batch of the training split."""
    classes: int
    """The classes of the data."""
    positions: float
    """The most tokens that the network takes, as far as its configuration says so."""


def describe(batch: Batch) -> str:
    """Describe a batch as a step sees it."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return f"inputs {kind(batch[0])} and labels {kind(batch[1])}"
    return kind(batch)


def misfit(dense: StageSpec, spec: StageSpec, tried: Tried | None, error: BaseException) -> Misfit:
    """Return what to raise for an error in a place without a sentence of its own: in the user's code, or between parts.

    Args:
        dense: the stage that names model and data.
        spec: the stage that failed.
        tried: None where the stage could not be made.
    """
    said = f"{type(error).__name__}: {(' '.join(str(error).split()) or 'no more is said').rstrip('.')}"
    model, data, train = named(dense, "model"), named(dense, "data"), spec.training
    step = "could not be made"
    if tried is not None:
        found = _unequal(data, tried, said) or _odd_numbers(model, data, tried, said)
        if found or (found := _too_long(dense, tried, error)):
            return Misfit(found)
        said = _labels(tried, said) or said
        where = "" if tried.split == "train" else f"its {tried.split} split, "
        step = f"could not run on a batch of {where}{describe(tried.batch)}"
    return Misfit(
        f"`model` (={model}) with `data` (={data}) and `{train}` {step}: {said}; "
        f"change `model`, `data`, `prune` or `{train}` until they fit."
    )


def named(dense: StageSpec, part: str) -> str:
    """Return what `model` or `data` is called in messages."""
    node: Mapping[str, Any] = getattr(dense.typed, part)
    return str(node.get("kind") or node.get("_target_"))


def _unequal(data: str, tried: Tried, said: str) -> str | None:
    """Return what to say where the split that was read last has examples of another form than the training split."""
    if _forms(tried.batch) == _forms(tried.train):
        return None
    return (
        f"`data` (={data}) gives {describe(tried.batch)} in its {tried.split} split, and {describe(tried.train)} in "
        f"its train split: {said}; give all splits examples of one shape and dtype, or a `model` that takes both."
    )


def _forms(batch: Batch) -> list[tuple[Any, ...]]:
    return [(*tensor.shape[1:], tensor.dtype) for tensor in tensors(batch)]


def _odd_numbers(model: str, data: str, tried: Tried, said: str) -> str | None:
    """Return what to say where a network cannot compute with the numbers of its inputs."""
    if not re.search(r"\bdouble\b|must have the same dtype|type \(.*should be the same", said, re.I):
        return None
    batch = describe(tried.batch)
    odd = re.search(r"\b(float64|float16|bfloat16|uint8|int(8|16|32))\b", batch.partition(" and labels")[0])
    if odd is None:
        return None
    return f"`data` (={data}) gives {batch}, and `model` (={model}) cannot compute with {odd[1]}; return float32."


def _too_long(dense: StageSpec, tried: Tried, error: BaseException) -> str | None:
    """Return what to say where blocks of a text are longer than a network takes."""
    block, most = dense.typed.data.get("block"), tried.positions
    if not (isinstance(error, IndexError) and is_int(block) and block > most):
        return None
    ours = dense.typed.model.get("kind") == "huggingface"
    more = f"pass +model.overrides.max_position_embeddings={block}" if ours else "a `model` of more"
    return (
        f"`data.block` (={block}) must be at most the {most} positions that `model` (={named(dense, 'model')}) tells "
        f"apart; pass data.block={most}, or {more}."
    )


def _labels(tried: Tried, said: str) -> str | None:
    """Return what is wrong with a label, where torch's words say that one is."""
    label = re.search(r"Target (-?\d+) is out of bounds", said)
    if label is None:
        return None
    if label[1].startswith("-"):
        return f"a label is {label[1]}, and classes count from 0"
    return f"the network gives fewer outputs than the {tried.classes} classes of the data"
