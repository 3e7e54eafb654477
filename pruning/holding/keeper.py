"""Masks kept in force by a training loop that says when, instead of by hooks that look for themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pruning.holding.masking import mask_, masked
from pruning.holding.parameter import place

Gradients: TypeAlias = Literal["masked", "dense"]


class MaskKeeper:
    """Keeps the parameters of a model under masks through a training, one after which the model is plain again.

    The model stays plain, and a step costs what a dense one does and two passes over the masks:

        gradient <- 0 where mask == 0           (as it is accumulated, so in a closure and before clipping too)
        parameter <- 0 where mask == 0          (`enforce`, after each step of an optimizer that is attached)

    An optimizer may couple entries (LBFGS, Muon, Adafactor): gradients of pruned entries would then move the others.

    Args:
        model: has every parameter that `masks` name, none of them held pruned, where the training will have it.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; a `MaskSet`, say.
        gradients: "masked", or "dense" for a method that looks at the gradients of what is pruned.

    Raises:
        ValueError: a parameter is missing or has another shape; it is named, and nothing is changed.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor], gradients: Gradients = "masked") -> None:
        if gradients not in get_args(Gradients):
            raise ValueError(f"`gradients` (={gradients!r}) must be one of 'masked' and 'dense'.")
        places = [place(model, name, mask.shape) for name, mask in masks.items()]
        wanted: dict[nn.Parameter, Tensor] = {}
        for (module, leaf), mask in zip(places, masks.values(), strict=True):
            parameter = module.get_parameter(leaf)
            wanted[parameter] = wanted[parameter] & (mask != 0) if parameter in wanted else mask != 0
        self._kept = [
            (parameter, torch.empty_like(parameter.detach()).copy_(mask))
            for parameter, mask in wanted.items()
            if not mask.all()
        ]
        self._handles: list[RemovableHandle] = []
        if gradients == "masked":
            for parameter, mask in self._kept:
                if parameter.requires_grad:
                    hook: Callable[[Tensor], None] = partial(_mask_gradient, mask=mask)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)
        self.enforce()

    def attach(self, optimizer: Optimizer) -> None:
        """Enforce the masks after each step of `optimizer`: momentum and weight decay move what has no gradient."""
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.enforce()))

    def enforce(self) -> None:
        """Set pruned entries to exactly 0, NaN and inf included."""
        for parameter, mask in self._kept:
            mask_(parameter, mask)

    def release(self) -> None:
        """Leave the model plain, with zeros for what is pruned; nothing is enforced any more."""
        self.enforce()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._kept.clear()


def _mask_gradient(parameter: Tensor, mask: Tensor) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.requires_grad:  # of a backward that can be differentiated again
        parameter.grad = masked(gradient, mask)
    else:
        mask_(gradient, mask)
