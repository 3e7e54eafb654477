"""Masked training with the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from pruning.integrations.masked_training import Kept
from pruning.masks.mask_set import MaskSet


class KeepMasks(TrainerCallback):  # type: ignore[misc]
    """Callback that enforces masks on a model while a transformers `Trainer` trains it; the model is plain afterwards.

    Pruned entries are exactly 0 after each step of the optimizer, also with clipping, accumulation and mixed precision.
    Each checkpoint gets a file `masks.npz`; resuming from one in `output_dir` with other masks raises an error.

        masks = MaskSet.load("masks.npz")
        trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[KeepMasks(model, masks)])
        trainer.train()

    Args:
        model: module whose parameters `masks` name: the trained model, or a part of it.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
        self._kept = Kept(model, masks)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        file = _masks_file(args, state)
        if state.global_step and file.exists():
            self._kept.require_same(MaskSet.load(file))
        self._kept.begin([others["optimizer"]])

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self._kept.masks.save(_masks_file(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._kept.end()


def _masks_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "masks.npz"
