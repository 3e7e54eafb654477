"""Masks kept in force by a training loop that says when, instead of by hooks that look for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        parameters = [module.get_parameter(leaf) for module, leaf in places]
        wanted: dict[nn.Parameter, Tensor] = {}
        for parameter, mask in zip(parameters, masks.values(), strict=True):
            wanted[parameter] = wanted[parameter] & (mask != 0) if parameter in wanted else mask != 0
        pruned = {parameter: _Mask(mask) for parameter, mask in wanted.items() if not mask.all()}
        standing = [(*where, pruned.get(parameter)) for where, parameter in zip(places, parameters, strict=True)]
        self._places = [_Place(module, leaf, mask) for module, leaf, mask in standing if mask is not None]
        self._masks: dict[nn.Parameter, _Mask] = {}
        self._masks_gradients = gradients == "masked"
        self._handles: list[RemovableHandle] = []
        self.enforce()

    def attach(self, optimizer: Optimizer) -> None:
        """Enforce the masks after each step of `optimizer`: momentum and weight decay move what has no gradient."""
        self._follow()
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._follow()))
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.enforce()))

    def enforce(self) -> None:
        """Set pruned entries to exactly 0, NaN and inf included, also in parameters that have replaced others.

        Raises:
            ValueError: a parameter is gone, or has another shape.
        """
        self._follow()
        for parameter, mask in self._masks.items():
            mask_(parameter, mask.entries)

    def release(self) -> None:
        """Leave the model plain, with zeros for what is pruned; nothing is enforced any more."""
        self.enforce()
        for handle in self._handles:
            handle.remove()
        for mask in self._masks.values():
            mask.let_go()
        self._handles.clear()
        self._places.clear()
        self._masks.clear()

    def _follow(self) -> None:
        """Find the parameters again: `load_state_dict(assign=True)` and conversions may replace them."""
        if any(place.module._parameters.get(place.leaf) is not place.parameter for place in self._places):
            before, self._masks = self._masks, {}
            for place in self._places:
                parameter = place.find()
                if parameter not in self._masks:
                    self._masks[parameter] = before.pop(parameter) if parameter in before else _Mask(place.mask.entries)
                elif (standing := self._masks[parameter]) is not place.mask:  # two parameters have become one
                    standing.entries = standing.entries * place.mask.entries.to(standing.entries)
                place.parameter, place.mask = parameter, self._masks[parameter]
            for mask in before.values():
                mask.let_go()
        for parameter, mask in self._masks.items():
            mask.fit(parameter, self._masks_gradients)


@dataclass(slots=True)
class _Mask:
    """The mask of one parameter: its entries, and the hook that masks gradients. It does not refer to the parameter."""

    entries: Tensor
    handle: RemovableHandle | None = None

    def fit(self, parameter: nn.Parameter, masks_gradients: bool) -> None:
        """Follow `parameter` to another dtype or device, and into training if it was frozen."""
        entries = self.entries
        if entries.dtype != parameter.dtype or entries.device != parameter.device:
            self.entries = torch.empty_like(parameter.detach()).copy_(entries)
        if not masks_gradients or not parameter.requires_grad:
            return
        hooks = parameter._post_accumulate_grad_hooks
        if self.handle is not None and hooks is not None and self.handle.id in hooks:
            parameter._post_accumulate_grad_hooks = hooks  # a swap of tensors leaves them unconnected
        else:  # a copy of a parameter has none
            self.handle = parameter.register_post_accumulate_grad_hook(self.mask_gradient)  # type: ignore[no-untyped-call]
            self.mask_gradient(parameter)

    def mask_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        mask = self.entries.to(gradient.device)
        if gradient.requires_grad:  # of a backward that can be differentiated again
            parameter.grad = masked(gradient, mask)
        else:
            mask_(gradient, mask)

    def let_go(self) -> None:
        if self.handle is not None:
            self.handle.remove()


@dataclass(slots=True)
class _Place:
    """Where a parameter stands, and which one stood there last."""

    module: nn.Module
    leaf: str
    mask: _Mask
    parameter: nn.Parameter | None = None

    def find(self) -> nn.Parameter:
        parameter, shape = self.module._parameters.get(self.leaf), tuple(self.mask.entries.shape)
        if parameter is None or parameter.shape != shape:
            now = "is gone" if parameter is None else f"has the shape {tuple(parameter.shape)} now"
            raise ValueError(
                f"`{self.leaf}` of {type(self.module).__name__} {now}, but is kept under a mask of shape {shape}; "
                "make a new MaskKeeper after such a change."
            )
        return parameter
