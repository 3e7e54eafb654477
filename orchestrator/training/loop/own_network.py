"""The network that a training function of the user's own trains: what is put back after it, and what is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.training.loop.steps import TrainingError
from orchestrator.training.loop.training_job import TrainingJob
from orchestrator.training.loop.training_loop import Diverged
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.team.ranks import Ranks
from orchestrator.workloads.targets import given
from pruning import MaskSet


def shapes_and_dtypes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each parameter and buffer."""
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Lend a network on a device; afterwards it has its own forward passes again, and trains the same parameters."""
    model.to(device)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    yield
    model.to(device)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trainable)  # the function may have frozen some
    for name, module in model.named_modules():  # a library may have wrapped some, for mixed precision
        if vars(module).pop("forward", None) is not None and forwards.get(name) is not None:
            module.forward = forwards[name]


def check_network(job: TrainingJob, before: Mapping[str, Any], masks: MaskSet) -> None:
    """Raise an error for a network that a training function must not leave.

    Args:
        job: the training.
        before: `shapes_and_dtypes` of its network before the training.
        masks: masks whose pruned entries must be 0.

    Raises:
        TrainingError: a parameter or buffer was added, removed or changed.
        Diverged: a value is infinite or NaN.
        LawBroken: a pruned weight is not 0.
    """
    where, config, model = job.where, job.config, job.model
    after = shapes_and_dtypes(model)
    if changed := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        raise TrainingError(
            f"{given(where, config)} must leave the names, shapes and dtypes of parameters and buffers unchanged, "
            f"but changed {changed[0]}; undo any wrapping or conversion before it returns."
        )
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not bool(parameter.isfinite().all()):
            raise Diverged(f"{name} is infinite or NaN after {given(where, config)}: training diverged.")
    for name, mask in masks.items():
        if name in parameters and bool((parameters[name].detach()[~mask.to(parameters[name].device)] != 0).any()):
            remedy = "call `context.attach(optimizer)` before the first step."
            if job.sparse is not None:
                remedy = "for weights of an earlier step, call `context.restore_masks` with the masks of that step."
            raise LawBroken(
                f"{given(where, config)} must keep pruned weights at 0, but those of {name} are not; {remedy}"
            )


def check_ranks(where: str, config: Mapping[str, Any], model: nn.Module, ranks: Ranks) -> None:
    """Raise `TrainingError` if a training function left the processes of a trial without their group or one network."""
    if not ranks.have_group:
        raise TrainingError(
            f"{given(where, config)} must leave torch's process group, but destroyed it; remove its call of "
            "`destroy_process_group`, or of a library that makes this call, as `accelerator.end_training()`."
        )
    if ranks.differ([*model.parameters()]):
        raise TrainingError(
            f"{given(where, config)} must leave the same weights on all processes of the trial, but did not; pass the "
            "batches through `context.wrap(model)`, and let all processes take equal steps."
        )
