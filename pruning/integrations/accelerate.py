"""Masked training in a loop that Accelerate prepares."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.dynamics.changing_masks import Dynamics
from pruning.integrations.masked_training import Kept
from pruning.masks.keeper import MaskKeeper


def keep_masks(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor]
) -> MaskKeeper:
    """Enforce `masks` on `model` after each step of `optimizer`, until the returned keeper is released.

    `accelerator.save_state` saves the masks too; `load_state` refuses a state with other masks.

        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        keeper = keep_masks(accelerator, model, optimizer, MaskSet.load("masks.npz"))
        ...
        keeper.release()

    Args:
        accelerator: accelerator that prepared the model and the optimizer.
        model: has every parameter that `masks` name; the prepared model, or the model before `prepare`.
        optimizer: the prepared optimizer.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.

    Returns:
        the keeper that enforces the masks.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """
    kept = Kept(model, masks)
    accelerator.register_for_checkpointing(kept)
    return kept.begin([optimizer])


def change_masks(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    masks: Mapping[str, Tensor],
    dynamics: Dynamics,
    *,
    length: int,
    generator: torch.Generator | None = None,
) -> Dynamics:
    """Attach a dynamics to a prepared optimizer; it changes the masks until `release`.

    `accelerator.save_state` saves its state too, and after `load_state` the training goes on from it.

    Args:
        accelerator, model, optimizer, masks: see `keep_masks`.
        dynamics: for example `pruning.dynamics.rigl()`.
        length: number of steps of the optimizer in the whole training.
        generator: source of random draws; None: torch's default generator.

    Returns:
        the dynamics.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """
    kept = Kept(model, masks, dynamics, generator)
    accelerator.register_for_checkpointing(kept)
    kept.begin([optimizer], length)
    return dynamics
