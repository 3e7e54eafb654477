"""Masked training with the trainers of ultralytics, of the network that a `YOLO` holds, pruned or smaller."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pruning.dynamics.changing_masks import Dynamics
from pruning.holding.reparam import mask_
from pruning.integrations.masked_training import Kept
from pruning.masks.mask_set import MaskSet
from pruning.methods.functions import remove_all

MASKS_FILE = "masks.npz"
"""File beside `last.pt` with the masks of the start, and after the training with those of `best.pt`."""


@dataclass(frozen=True)
class _Masked:
    """Network of a training, its masks (None: those of the network or of the checkpoint), and what changes them."""

    network: nn.Module
    masks: MaskSet | None
    dynamics: Dynamics | None
    generator: torch.Generator | None


def masked_trainer(
    yolo: Any,
    masks: Mapping[str, Tensor] | None = None,
    dynamics: Dynamics | None = None,
    generator: torch.Generator | None = None,
) -> type:
    """Make a trainer for `YOLO.train` that trains the network of `yolo` as it is, and holds masks in it.

    ultralytics' own trainers build the network anew from its yaml file, at its full size, and copy the weights that
    fit. This one trains a copy of `yolo.model`: a pruned one with its masks, a smaller one of `pruning.shrink` as it
    is. All else is ultralytics' own: data, optimizer, averaged weights, checkpoints, validation.

        yolo = YOLO("best.pt")
        pruning.prune(yolo.model, "magnitude", sparsity=0.3, unit="group", example=images)
        yolo.train(trainer=masked_trainer(yolo), data="data.yaml", epochs=10)
        yolo.model = pruning.shrink(yolo.model, images)

    Pruned entries are exactly 0 after each step of the optimizer, in the averaged weights, and in `last.pt` and
    `best.pt`. The directory of the checkpoints gets a file `masks.npz`, which a resumed training needs:

        yolo = YOLO("runs/detect/train/weights/last.pt")
        yolo.train(trainer=masked_trainer(yolo), resume=True)

    ultralytics saves its averaged weights in half precision only, so a resumed training does not give the bits of one
    without interruption, with masks as without.

    Args:
        yolo: ultralytics' `YOLO`, `RTDETR` or the like, whose network has the classes of the data.
        masks: name of a parameter of `yolo.model` -> tensor of its shape, nonzero where the entry is kept; None: those
            that the network was pruned with, or of the training that is resumed; without any, all entries train.
        dynamics: changes the masks during the training, such as `pruning.dynamics.gradual()`; None: they stay.
        generator: source of the dynamics' random draws.

    Returns:
        a subclass of the trainer that `yolo.train` would take.

    Raises:
        ValueError: the network is fused, there are no masks for a dynamics, or a mask fits no parameter. The training
            raises it for other classes than the network's, for several devices, and for a resume with other masks.
    """
    network = yolo.model
    if network.is_fused():
        raise ValueError(
            "The network is fused: yolo.val, predict and export fold its batch normalisation into convolutions, after "
            "which it is not trained. Load its file again with YOLO(...), and prune before you validate."
        )
    given = MaskSet(masks) if masks is not None else MaskSet.collect(network) or None
    parts = (_Masked(_plain(network), given, dynamics, generator),)
    if given is not None:
        Kept(copy.deepcopy(parts[0].network), given)  # refuses masks that do not fit, before the data is read
    elif dynamics is not None and not getattr(yolo, "ckpt_path", None):
        raise ValueError(f"{dynamics} needs masks to start from; prune the network first, or pass `masks`.")
    base = yolo._smart_load("trainer")
    return type(f"Masked{base.__name__}", (_MaskedTrainer, base), {"masked": parts[0], "__module__": __name__})


def _plain(network: Any) -> Any:
    """Return a trainable copy without hooks of pruning and without the loss of an earlier training."""
    network = copy.deepcopy(network)
    remove_all(network)
    if getattr(network, "criterion", None) is not None:
        network.criterion = None  # it keeps the options of its own training
    return network.float().requires_grad_(True)


class _MaskedTrainer:
    """Overrides of ultralytics' trainers, which stand after it in the bases."""

    masked: ClassVar[_Masked]
    _kept: Kept | None = None
    _best: MaskSet | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own: Any = self
        if own.ddp:
            raise ValueError(
                f"`device` (={own.args.device}) must be one device: ultralytics trains on several in processes of its "
                "own, which masks do not reach."
            )
        if own.args.time and self.masked.dynamics is not None:
            raise ValueError(
                f"`time` (={own.args.time}) must not be set for {self.masked.dynamics}, which needs to know the number "
                "of steps; pass `epochs`."
            )

    @property
    def masks(self) -> MaskSet | None:
        """The masks as they are now, and after the training those of `best.pt`; None if all entries train."""
        return self._kept.masks if self._kept else None

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return the network to train, with its masks, in place of one that is built from `cfg`."""
        own: Any = self
        network = _plain(weights) if own.resume and weights is not None else copy.deepcopy(self.masked.network)
        _require_classes(network, own.data["nc"], own.args.data)
        masks = self._masks_of_the_start(network)
        if masks is not None:
            self._kept = Kept(network, masks, self.masked.dynamics, self.masked.generator)
            _mask(network, masks)
            masks.save(own.wdir / MASKS_FILE)
        return network

    def _masks_of_the_start(self, network: nn.Module) -> MaskSet | None:
        own: Any = self
        if not own.resume:
            return self.masked.masks
        file = Path(own.args.resume).with_name(MASKS_FILE)
        if not file.exists():
            return self.masked.masks
        saved = MaskSet.load(file)
        if self.masked.masks is not None:
            Kept(network, self.masked.masks).require_same(saved)
        return saved

    def _setup_train(self) -> None:
        super()._setup_train()  # type: ignore[misc]
        own: Any = self
        if self._kept:
            self._kept.begin([own.optimizer], self._steps() if self._kept.moves else 0)

    def _steps(self) -> int:
        """Return the number of steps of the optimizer, by the trainer's rule of accumulation and warm-up."""
        own: Any = self
        batches, steps, last = len(own.train_loader), 0, -1
        warmup = own._get_warmup_iterations(batches)
        for number in range(batches * own.epochs):
            warm = bool(warmup) and number <= warmup
            between = np.interp(number, [0, warmup], [1, own.accumulate]).round() if warm else own.accumulate
            if number - last >= max(1, int(between)):
                steps, last = steps + 1, number
        return steps

    def optimizer_step(self) -> None:
        super().optimizer_step()  # type: ignore[misc]
        own: Any = self
        if self._kept and self._kept.moves and own.ema:
            _mask(getattr(own.ema.ema, "student_model", own.ema.ema), self._kept.masks)

    def save_model(self) -> Any:
        """Save the state of the dynamics, named by its epoch, before the checkpoint of this epoch."""
        own: Any = self
        if not (self._kept and self._kept.moves):
            return super().save_model()  # type: ignore[misc]
        file = own.wdir / f"dynamics-{own.epoch}.pt"
        torch.save(self._kept.state_dict(), file)
        if own.best_fitness == own.fitness:
            self._best = self._kept.masks
        saved = super().save_model()  # type: ignore[misc]
        for earlier in set(own.wdir.glob("dynamics-*.pt")) - {file}:
            earlier.unlink()
        return saved

    def _load_checkpoint_state(self, ckpt: Mapping[str, Any]) -> None:
        super()._load_checkpoint_state(ckpt)  # type: ignore[misc]
        own: Any = self
        if self._kept and self._kept.moves:
            file = own.wdir / f"dynamics-{ckpt['epoch']}.pt"
            if not file.exists():
                raise ValueError(f"{file} is missing; resume from the last.pt that was saved with it.")
            self._kept.load_state_dict(torch.load(file, weights_only=True))

    def _do_train(self) -> None:
        own: Any = self
        try:
            super()._do_train()  # type: ignore[misc]
        finally:
            if self._kept:
                self._kept.end(self._best)
        if self._kept:
            self._kept.masks.save(own.wdir / MASKS_FILE)


def _require_classes(network: nn.Module, wanted: int, data: Any) -> None:
    head: Any = network.model[-1]  # type: ignore[index]
    classes = head.linear.out_features if hasattr(head, "linear") else head.nc
    if classes != wanted:
        raise ValueError(
            f"`data` (={data}) has {wanted} classes, but the network predicts {classes}: train the dense network on "
            "this data first, with yolo.train(data=...), and prune the result."
        )


def _mask(network: nn.Module, masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        mask_(network.get_parameter(name), mask.to(network.get_parameter(name).device))
