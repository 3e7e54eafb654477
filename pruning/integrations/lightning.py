"""Masked training with a Lightning `Trainer`."""

from __future__ import annotations

from typing import Any

from pruning.integrations.masked_training import Keeping

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback


class KeepMasks(Keeping, Callback):  # type: ignore[misc]
    """Callback that enforces masks on a model while a Lightning `Trainer` fits it; the model is plain afterwards.

    Pruned entries are exactly 0 after each step of each of its optimizers, also with clipping, accumulation and mixed
    precision. A checkpoint contains the masks; resuming from it with other masks raises an error. With `dynamics`, it
    contains their state, and a resumed training goes on from it.

        masks = MaskSet.load("masks.npz")
        trainer = Trainer(callbacks=[KeepMasks(module.network, masks)])
        trainer.fit(module)

    Args:
        model: module whose parameters `masks` name: the LightningModule, or a network in it.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.
        dynamics: changes the masks during the training, such as `pruning.dynamics.rigl()`; None: they stay.
        generator: source of the dynamics' random draws.

    Raises:
        ValueError: there are no masks, or one fits no parameter; the message names it, and nothing is changed.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        length = trainer.estimated_stepping_batches if self._kept.moves else 0
        if length == float("inf"):
            raise ValueError(
                "`max_epochs` (=-1) must be a number, or `max_steps`, so that masks change at their places."
            )
        self._kept.begin(trainer.optimizers, int(length))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._kept.end()

    def state_dict(self) -> dict[str, Any]:
        return self._kept.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept.load_state_dict(state_dict)
