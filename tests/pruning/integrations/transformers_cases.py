"""A transformers trainer and a callback that watches it, in a separate file because the import takes a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import reference
import torch
import transformers

from pruning.integrations.transformers import KeepMasks as KeepMasks


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.pruned_after: list[bool] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.pruned_after.append(reference.is_pruned(others["model"]))


class InOrder(transformers.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(
    folder: Path,
    make: Callable[..., torch.optim.Optimizer],
    *callbacks: Any,
    model: torch.nn.Module,
    epochs: int = reference.EPOCHS,
) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=reference.BATCH,
        gradient_accumulation_steps=reference.ACCUMULATE,
        max_grad_norm=reference.CLIP,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = make(model.parameters())
    return InOrder(
        model,
        arguments,
        train_dataset=reference.Examples(),
        callbacks=list(callbacks),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )


class Best(transformers.TrainerCallback):  # type: ignore[misc]
    """Names a checkpoint as the best one, as an evaluation would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        state.best_model_checkpoint = str(self.folder)
