"""Check the first step of a training, and explain why a stage cannot run: the part at fault, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder
from orchestrator.planning.number_formats import first_few
from orchestrator.training.stage_record import StageInputs
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.targets import given
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.batch import given_labels, kind, named_kind, targets_of, tensors
from pruning.measure.macs import in_mode


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
    own: Mapping[str, object]
    """Network, task and loss of the user's own, by their names in messages."""


def describe(batch: Batch) -> str:
    """Describe the inputs and labels of a batch by shape and dtype."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return f"inputs {kind(batch[0])} and labels {kind(batch[1])}"
    return kind(batch)


def misfit(stage: StageOrder, tried: Tried | None, error: BaseException) -> Misfit:
    """Return the error to raise when a stage fails without a message of its own: in the user's code or between parts.

    Args:
        stage: the stage that failed.
        tried: data in use at the failure; None if the stage could not be built.
        error: the cause.
    """
    said = f"{type(error).__name__}: {(' '.join(str(error).split()) or '(no message)').rstrip('.')}"
    dense, train = stage.dense, stage.spec.training
    model, data = named(dense, "model"), named(dense, "data")
    step = "could not be built"
    if tried is not None:
        if found := _different_split(data, tried, said) or _unusable_dtype(model, data, tried, said):
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


def _label_fault(tried: Tried, said: str) -> str | None:
    """Return the fault of a label if torch's error is about one."""
    boxed = [int(each["labels"].max()) for each in targets_of(tried.batch) if len(each["labels"])]
    if boxed and re.search(r"out of (bounds|range)", said):
        return f"{said}; labels of the batch go up to {max(boxed)}, so a network needs {max(boxed) + 1} classes or more"
    label = re.search(r"Target (-?\d+) is out of bounds", said)
    if label is None:
        return None
    if label[1].startswith("-"):
        return f"a label is {label[1]}, but classes are numbered from 0"
    return f"the network has fewer outputs than the data have classes ({tried.classes})"


DIVIDED = 1e-3
"""Largest difference between the loss of a batch and that of its parts, relative to the loss."""


def require_trainable(stage: StageInputs, model: str) -> None:
    """Raise `Misfit` if the network has no parameter to train; `model` names the network in the message."""
    parameters = [*stage.model.parameters()]
    if any(each.requires_grad for each in parameters):
        return
    found = "`requires_grad` is False for all; set it to True for those to train" if parameters else "it has none"
    remedy = "" if parameters else "; keep layers in attributes or an nn.ModuleList, not in a list or a dict"
    raise Misfit(f"{model} must have parameters to train, but {found}{remedy}.")


def require_loss(stage: StageInputs, batch: Batch, model: str) -> None:
    """Raise `Misfit` for a first loss that no step can be taken with, and for outputs with NaN before any training.

    A pruned network may give NaN here where a trained one does not, so outputs are checked in dense stages alone.

    Args:
        stage: the stage, before its training.
        batch: a few training examples.
        model: name of the network in messages.
    """
    loss, outputs = _first_loss(stage, batch)
    node = stage.config["loss"]
    said = given("task", stage.spec.typed.task) if node is None else given(f"{stage.spec.training}.loss", node)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise Misfit(
            f"{said} must give a loss that is one number, the mean over the batch, not {named_kind(loss)}; return a "
            "tensor of one number, as by losses.mean()."
        )
    if not loss.requires_grad:
        blamed = said if any(each.requires_grad for each in outputs) else model
        raise Misfit(
            f"{blamed} gives a result without a gradient, so no step can train the network; remove detach(), item(), "
            "numpy() or torch.no_grad() from its code."
        )
    if not KINDS[stage.spec.kind].prunes and not bool(loss.isfinite()):
        odd = [value for each in outputs for value in each[each.isnan() | each.isposinf()].tolist()]
        if odd:  # -inf may exclude a class
            raise Misfit(
                f"{model} must give finite outputs, but gives {odd[0]} on a first batch, before any training; fix its "
                "`forward` or its initial weights."
            )


def require_all_reached(stage: StageInputs, batch: Batch, model: str) -> None:
    """Raise `Misfit` if the loss reaches a trained parameter in no step, as several processes exchange all gradients.

    Args:
        stage: the dense stage of a trial of several processes, before its training.
        batch: a few training examples.
        model: name of the network in messages.
    """
    named = {name: each for name, each in stage.model.named_parameters() if each.requires_grad}
    with seeded(0, stage.device), in_mode(stage.model, training=True):
        found = torch.autograd.grad(stage.task.loss(stage.model, batch), [*named.values()], allow_unused=True)
    unreached = [name for name, gradient in zip(named, found, strict=True) if gradient is None]
    if unreached:
        raise Misfit(
            f"{model} has parameters that its loss does not depend on ({first_few(unreached, 3)}), and the processes "
            "of a trial exchange the gradients of all; set their `requires_grad` to False, or pass parallel=none."
        )


def require_shares(stage: StageInputs, batch: Batch, model: str) -> None:
    """Raise `Misfit` if the loss of a batch does not follow from those of the processes' shares of it.

    Each process computes the loss of its share, and the losses are averaged by what `size` of the task counts. Nothing
    is checked for a batch that holds more than tensors of one row for each example.

    Args:
        stage: the dense stage of a trial of several processes, before its training.
        batch: a few training examples.
        model: name of the network in messages.
    """
    count, leaves = forms.size(batch), tree_leaves(batch)
    if count < 2 or not all(isinstance(each, Tensor) and each.ndim and len(each) == count for each in leaves):
        return
    halves = [_examples(batch, 0, count // 2), _examples(batch, count // 2, count)]
    weights = [stage.task.size(half) for half in halves]
    with seeded(0, stage.device), in_mode(stage.model, training=False), torch.no_grad():
        whole, *parts = (float(stage.task.loss(stage.model, each)) for each in (batch, *halves))
    together = sum(part * weight for part, weight in zip(parts, weights, strict=True) if weight) / max(1, sum(weights))
    if abs(whole - together) > DIVIDED * abs(whole):
        node = stage.config["loss"]
        said = given("task", stage.spec.typed.task) if node is None else given(f"{stage.spec.training}.loss", node)
        raise Misfit(
            f"{said} must be a mean over examples, as each process of a trial computes the loss of its share, but it "
            f"is {whole:.4g} for a batch, and {together:.4g} for the mean over two halves of it; pass parallel=none, "
            "or a loss without weights of classes and without a choice of examples."
        )
    _require_norms(stage, batch, model)


def _require_norms(stage: StageInputs, batch: Batch, model: str) -> None:
    """Raise `Misfit` if BatchNorm cannot normalise a share of one example, and there is such a share."""
    config, parallel = stage.config, stage.spec.typed.parallel
    last = 0 if config["drop_last"] or not isinstance(stage.data.train, Sized) else len(stage.data.train)
    size, last = config["batch_size"], last % config["batch_size"]
    short = next((each for each in (size, last) if 0 < each < 2 * parallel.processes), 0)
    if not short or parallel.sync_batch_norm:
        return
    try:
        with seeded(0, stage.device), in_mode(stage.model, training=True), torch.no_grad():
            stage.task.loss(stage.model, _examples(batch, 0, 1))
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise Misfit(
                f"{model} normalises by the statistics of a process's examples, and of a batch of {short} some of the "
                f"{parallel.processes} processes get one example; pass train.drop_last=true for short last batches, "
                "parallel.sync_batch_norm=true, or another batch_size."
            ) from error


def _examples(batch: Batch, begin: int, end: int) -> Batch:
    """Return some examples of a batch of tensors."""
    return tree_map(lambda each: each[begin:end], batch)


def _first_loss(stage: StageInputs, batch: Batch) -> tuple[object, list[Tensor]]:
    """Return the loss on a batch, and the floating-point outputs that the network gave for it."""
    outputs: list[Tensor] = []
    handle = stage.model.register_forward_hook(lambda _module, _inputs, answer: outputs.extend(tensors(answer)))
    try:
        with seeded(0, stage.device), in_mode(stage.model, training=True):
            loss = stage.task.loss(stage.model, batch)
    finally:
        handle.remove()
    return loss, [each for each in outputs if each.is_floating_point()]
