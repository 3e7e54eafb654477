"""Masks kept in force by a training loop that says when, instead of by hooks that look for themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruning.across_modules import prune_by_masks
from pruning.engines import EngineName, check_engine
from pruning.functional import remove
from pruning.masking import mask_
from pruning.masks import MaskSet, place


class MaskKeeper:
    """Keeps the parameters of a model under masks through a training, one after which the model is plain again.

    With engine "inplace" the model stays plain, and a step costs what a dense one does and one pass over the masks:

        parameter <- 0 where mask == 0          (`enforce`: after each step of the optimizer)
        gradient <- 0 where mask == 0           (`mask_gradients`: before gradients are clipped by norm)

    With engine "reparam" the hooks of `pruning.engines` do both, and what is pruned neither weighs in the optimizer's
    state nor in a norm.

    Args:
        model: has every parameter that `masks` name, none of them held pruned, where the training will have it.
        masks: True where the entry is kept.
        engine: "inplace" or "reparam", see `pruning.engines`.

    Raises:
        ValueError: a parameter is missing or has another shape; it is named, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: MaskSet, engine: EngineName = "inplace") -> None:
        check_engine(engine)
        places = [place(model, name, mask.shape) for name, mask in masks.items()]
        wanted: dict[nn.Parameter, Tensor] = {}
        for (module, leaf), mask in zip(places, masks.values(), strict=True):
            parameter = module.get_parameter(leaf)
            wanted[parameter] = wanted[parameter] & mask if parameter in wanted else mask
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._hooked: dict[tuple[nn.Module, str], Tensor] = {}
        if engine == "reparam":
            for module in model.modules():  # also where another module has the same parameter
                found = {name: wanted[value] for name, value in module._parameters.items() if value in wanted}
                self._hooked |= {(module, name): mask for name, mask in found.items()}
            prune_by_masks(self._hooked, engine)
        else:
            for parameter, mask in wanted.items():
                if not mask.all():
                    self._kept.append((parameter, torch.empty_like(parameter.detach()).copy_(mask)))
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
        for module, leaf in self._hooked:
            remove(module, leaf)
        self._hooked.clear()
