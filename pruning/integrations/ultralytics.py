"""Masked training with the trainers of ultralytics, of the network that a `YOLO` holds, pruned or smaller."""

from __future__ import annotations

import copy
import warnings
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

NO_START = "needs masks to start from; prune the network first, or pass `masks`."
"""Words after a dynamics that has no masks."""
FEW_ZEROS = 0.01
"""Fraction of exact zeros that no network has without pruning."""


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
            that the network was pruned with, or of the training that is resumed; without any, all entries train, with a
            warning if some of them are zeros.
        dynamics: changes the masks during the training, such as `pruning.dynamics.gradual()`; None: they stay.
        generator: source of the dynamics' random draws.

    Returns:
        a subclass of the trainer that `yolo.train` would take.

    Raises:
        TypeError: `yolo` is no such object.
        ValueError: the network is fused, there are no masks for a dynamics, or a mask fits no parameter. The training
            raises it for other classes than the network's, for several devices, and for a resume with other masks or
            without its dynamics.
    """
    network: Any = getattr(yolo, "model", None)
    if not hasattr(network, "is_fused"):
        raise TypeError(
            f"`yolo` (a {type(yolo).__name__}) must be ultralytics' YOLO or RTDETR; pass YOLO('yolo11n.pt')."
        )
    if network.is_fused():
        raise ValueError(
            "The network is fused: yolo.val, predict and export fold its batch normalisation into convolutions, after "
            "which it is not trained. Load its file again with YOLO(...), and prune before you validate."
        )
    given = MaskSet(masks) if masks is not None else MaskSet.collect(network) or None
    masked = _Masked(_plain(network), given, dynamics, generator)
    if given is not None:
        Kept(copy.deepcopy(masked.network), given)  # refuses masks that do not fit, before the data is read
    elif dynamics is not None and not getattr(yolo, "ckpt_path", None):  # nothing that may be resumed
        raise ValueError(f"{dynamics} {NO_START}")
    base = yolo._smart_load("trainer")
    return type(f"Masked{base.__name__}", (_MaskedTrainer, base), {"masked": masked, "__module__": __name__})


def _plain(network: Any) -> Any:
    """Return a trainable copy without hooks of pruning and without the loss of an earlier training."""
    network = copy.deepcopy(network)
    remove_all(network)
    if getattr(network, "criterion", None) is not None:
        network.criterion = None  # it keeps the options of its own training
    return network.float().requires_grad_(True)


_Trainer: Any = object
"""Any trainer of ultralytics: the class for the YOLO at hand stands after `_MaskedTrainer` in the bases."""


class _MaskedTrainer(_Trainer):  # type: ignore[misc]
    """Overrides of ultralytics' trainers."""

    masked: ClassVar[_Masked]
    _kept: Kept | None = None
    _best: MaskSet | None = None
    _sparsity: float = 0.0
    """Sparsity at the end of the epoch before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.ddp:
            raise ValueError(
                f"`device` (={self.args.device}) must be one device: ultralytics trains on several in processes of its "
                "own, which masks do not reach."
            )
        if self.args.time and self.masked.dynamics is not None:
            raise ValueError(
                f"`time` (={self.args.time}) must not be set for {self.masked.dynamics}, which needs to know how many "
                "steps there are; pass `epochs`."
            )

    @property
    def masks(self) -> MaskSet | None:
        """The masks as they are now, and after the training those of `best.pt`; None if all entries train."""
        return self._kept.masks if self._kept else None

    def get_model(self, cfg: Any = None, weights: nn.Module | None = None, verbose: bool = True) -> nn.Module:
        """Return the network to train, with its masks, in place of one that is built from `cfg`."""
        network = _plain(weights) if self.resume and weights is not None else copy.deepcopy(self.masked.network)
        self._require_classes(network)
        masks = self._saved_masks(network) if self.resume else self.masked.masks or MaskSet({})
        if masks:
            self._kept = Kept(network, masks, self.masked.dynamics, self.masked.generator)
            _mask(network, masks)
        elif self.masked.dynamics is not None:
            raise ValueError(f"{self.masked.dynamics} {NO_START}")
        elif (zeros := _share_of_zeros(network)) > FEW_ZEROS:
            warnings.warn(
                f"{zeros:.0%} of the network's weights are zeros, but it has no masks, so that all of them train; pass "
                f"`masks`, such as pruning.MaskSet.load('.../weights/{MASKS_FILE}'), or prune it again",
                stacklevel=2,
            )
        masks.save(self.wdir / MASKS_FILE)
        return network

    def _require_classes(self, network: nn.Module) -> None:
        head: Any = network.model[-1]  # type: ignore[index]
        classes, wanted = head.linear.out_features if hasattr(head, "linear") else head.nc, self.data["nc"]
        if classes != wanted:
            merged = " with single_cls=True" if self.args.single_cls else ""
            raise ValueError(
                f"`data` (={self.args.data}){merged} has {wanted} classes, but the network predicts {classes}: train "
                "the dense network on this data first, with the same options of yolo.train, and prune the result."
            )

    def _saved_masks(self, network: nn.Module) -> MaskSet:
        """Return the masks of the training that is resumed, which are none if all entries train."""
        file = Path(self.args.resume).with_name(MASKS_FILE)
        if not file.exists():
            raise ValueError(
                f"{file} is missing, without which masks would be lost; resume from a last.pt beside it, or, if its "
                "training had no masks, without `trainer`."
            )
        saved = MaskSet.load(file)
        if self.masked.masks is not None:
            Kept(network, self.masked.masks).require_same(saved)
        return saved

    def _setup_train(self) -> None:
        super()._setup_train()
        if self._kept:
            self._kept.begin([self.optimizer], self._steps() if self._kept.moves else 0)

    def _steps(self) -> int:
        """Return the number of steps of the optimizer, by the trainer's rule of accumulation and warm-up."""
        batches, steps, last = len(self.train_loader), 0, -1
        warmup = self._get_warmup_iterations(batches)
        for number in range(batches * self.epochs):
            warm = bool(warmup) and number <= warmup
            between = np.interp(number, [0, warmup], [1, self.accumulate]).round() if warm else self.accumulate
            if number - last >= max(1, int(between)):
                steps, last = steps + 1, number
        return steps

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self._kept and self._kept.moves and self.ema:
            _mask(getattr(self.ema.ema, "student_model", self.ema.ema), self._kept.masks)

    def save_model(self) -> Any:
        """Save the state of the dynamics, named by its epoch, before the checkpoint of this epoch."""
        if not (self._kept and self._kept.moves):
            return super().save_model()
        file, sparsity = self.wdir / f"dynamics-{self.epoch}.pt", self._kept.masks.sparsity()
        if sparsity > self._sparsity:  # denser networks may do better, but best.pt must be as sparse as is asked for
            self.best_fitness = self.fitness
        self._sparsity = sparsity
        if self.best_fitness == self.fitness:
            self._best = self._kept.masks
        best = None if self._best is None else dict(self._best)
        torch.save({"dynamics": self._kept.state_dict(), "best": best}, file)
        saved = super().save_model()
        for earlier in set(self.wdir.glob("dynamics-*.pt")) - {file}:
            earlier.unlink()
        return saved

    def _load_checkpoint_state(self, ckpt: Mapping[str, Any]) -> None:
        super()._load_checkpoint_state(ckpt)
        kept = self._kept if self._kept and self._kept.moves else None
        if not kept and (saved := sorted(self.wdir.glob("dynamics-*.pt"))):
            raise ValueError(f"{saved[0]} is of a training whose masks changed; pass the same `dynamics` to resume it.")
        if kept:
            file = self.wdir / f"dynamics-{ckpt['epoch']}.pt"
            if not file.exists():
                raise ValueError(f"{file} is missing; resume from the last.pt that was saved with it.")
            state = torch.load(file, weights_only=True)
            kept.load_state_dict(state["dynamics"])
            self._sparsity = kept.masks.sparsity()
            self._best = None if state["best"] is None else MaskSet(state["best"])

    def _do_train(self) -> None:
        try:
            super()._do_train()
        finally:
            if self._kept:
                self._kept.end(self._best)
        if self._kept:
            self._kept.masks.save(self.wdir / MASKS_FILE)


def _share_of_zeros(network: nn.Module) -> float:
    """Return the fraction of the entries of all matrices and kernels that are exactly 0."""
    weights = [each for each in network.parameters() if each.ndim > 1]
    return sum(int((each == 0).sum()) for each in weights) / max(1, sum(each.numel() for each in weights))


def _mask(network: nn.Module, masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        mask_(network.get_parameter(name), mask.to(network.get_parameter(name).device))
