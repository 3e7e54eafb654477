"""Check the first step of a training: parameters to train, and a loss that is one number with a gradient."""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from orchestrator.core.seeding import seeded
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import first_few
from orchestrator.training.preflight.misfits import Misfit
from orchestrator.training.stage_inputs import StageInputs
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.targets import given
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.batch import named_kind, tensors
from pruning.measure.macs import in_mode

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
