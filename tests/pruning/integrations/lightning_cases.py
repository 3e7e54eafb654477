"""A Lightning module and trainer, in a separate file because importing Lightning takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import reference
import torch
from pytorch_lightning import Callback as Callback
from torch.utils.data import DataLoader

from pruning.integrations.lightning import KeepMasks as KeepMasks


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = reference.Network()
        self.make_optimizer = make_optimizer
        self.pruned_after: list[bool] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.network.parameters())

    def on_train_batch_end(self, *_: object) -> None:
        self.pruned_after.append(reference.is_pruned(self.network))


def trainer(folder: Path, *callbacks: Any, epochs: int = reference.EPOCHS) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=reference.ACCUMULATE,
        gradient_clip_val=reference.CLIP,
        callbacks=list(callbacks),
        default_root_dir=folder,
        **dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
    )


def batches() -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(reference.Examples(), batch_size=reference.BATCH)
