"""Masks kept in force by a training loop that says when, instead of by hooks that look for themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruning.masking import mask_
from pruning.masks import MaskSet, place


class MaskKeeper:
    """Keeps the parameters of a model under masks through a training, one after which the model is plain again.

    The model stays plain, and a step costs what a dense one does and a pass over the masks:

        parameter <- 0 where mask == 0          (`enforce`: after each step of the optimizer)
        gradient <- 0 where mask == 0           (`mask_gradients`: before gradients are clipped by norm)

    Args:
        model: has every parameter that `masks` name, none of them held pruned, where the training will have it.
        masks: True where the entry is kept.

    Raises:
        ValueError: a parameter is missing or has another shape; it is named, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: MaskSet) -> None:
        places = [place(model, name, mask.shape) for name, mask in masks.items()]
        wanted: dict[nn.Parameter, Tensor] = {}
        for (module, leaf), mask in zip(places, masks.values(), strict=True):
            parameter = module.get_parameter(leaf)
            wanted[parameter] = wanted[parameter] & mask if parameter in wanted else mask
        self._kept = [
            (parameter, torch.empty_like(parameter.detach()).copy_(mask))
            for parameter, mask in wanted.items()
            if not mask.all()
        ]
        self.enforce()

    def enforce(self) -> None:
        """Set pruned entries to exactly 0, NaN and inf included."""
        for parameter, mask in self._kept:
            mask_(parameter, mask)

    def mask_gradients(self) -> None:
        """Set the gradients of pruned entries to 0."""
        for parameter, mask in self._kept:
            if parameter.grad is not None:
                mask_(parameter.grad, mask)

    def release(self) -> None:
        """Leave the model plain, with zeros for what is pruned; the masks are not enforced any more."""
        self.enforce()
        self._kept.clear()
