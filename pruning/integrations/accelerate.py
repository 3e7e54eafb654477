"""Masks kept in force in a loop that Accelerate prepares."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.holding.keeper import MaskKeeper
from pruning.integrations.masked_training import Kept


def keep_masks(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, masks: Mapping[str, Tensor]
) -> MaskKeeper:
    """Keep `model` under `masks` after each step of `optimizer`, until the keeper that is returned is released.

    What `accelerator.save_state` writes holds the masks; `load_state` refuses other ones.

        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        keeper = keep_masks(accelerator, model, optimizer, MaskSet.load("masks.npz"))
        ...
        keeper.release()

    Args:
        accelerator: what has prepared the model and the optimizer.
        model: has every parameter that `masks` name; prepared, or what it was before.
        optimizer: prepared.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; a `MaskSet`, say.

    Raises:
        ValueError: there are no masks, or one fits no parameter; it is named, and nothing is changed.
    """
    kept = Kept(model, masks)
    accelerator.register_for_checkpointing(kept)
    return kept.begin([optimizer])
