"""Masked training with the `Trainer` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from pruning.integrations.masked_training import Keeping
from pruning.masks.mask_set import MaskSet

DYNAMICS_FILE = "dynamics.pt"
"""File of a checkpoint with the state of a dynamics."""


class KeepMasks(Keeping, TrainerCallback):  # type: ignore[misc]
    """Callback that enforces masks on a model while a transformers `Trainer` trains it; the model is plain afterwards.

    Pruned entries are exactly 0 after each step of the optimizer, also with clipping, accumulation and mixed precision.
    Each checkpoint gets a file `masks.npz`; resuming from one in `output_dir` with other masks raises an error. With
    `dynamics`, it also gets their state, and a resumed training goes on from it.

        masks = MaskSet.load("masks.npz")
        trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[KeepMasks(model, masks)])
        trainer.train()

    Args:
        model: module whose parameters `masks` name: the trained model, or a part of it.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.
        dynamics: changes the masks during the training, such as `pruning.dynamics.rigl()`; None: they stay.
        generator: source of the dynamics' random draws.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        file, moving = _masks_file(args, state), _masks_file(args, state).with_name(DYNAMICS_FILE)
        if state.global_step and self._kept.moves:
            if not moving.exists():
                raise ValueError(f"{moving} is missing; resume from a checkpoint in `output_dir` that has it.")
            self._kept.load_state_dict(torch.load(moving, weights_only=True))
        elif state.global_step and file.exists():
            self._kept.require_same(MaskSet.load(file))
        self._kept.begin([others["optimizer"]], state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            file = _masks_file(args, state)
            self._kept.masks.save(file)
            if self._kept.moves:
                torch.save(self._kept.state_dict(), file.with_name(DYNAMICS_FILE))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        best = args.load_best_model_at_end and state.best_model_checkpoint  # its weights are in the model now
        self._kept.end(MaskSet.load(Path(best) / "masks.npz") if best and self._kept.moves else None)


def _masks_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "masks.npz"
