"""Mask keeper: enforces masks on a plain model when the training loop or an optimizer step asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pruning.holding.parameter import check_masks, outside_inference_mode, place
from pruning.holding.reparam import mask_, masked
from pruning.mixtures.survivors import route_among_survivors

Gradients: TypeAlias = Literal["masked", "dense"]


class MaskKeeper:
    """Keep the pruned entries of a model at 0 during training.

    The model stays plain, without hooks of `torch.nn.utils.prune`. A step makes two more passes over the masks than a
    dense step:

        gradient <- 0 where mask == 0           (on accumulation: before clipping, and also in a closure)
        parameter <- 0 where mask == 0          (`enforce`, after each step of an attached optimizer)

    Mixtures whose experts are masked as wholes, with their rows of the router, route among the others.

    Gradients are masked because some optimizers (LBFGS, Muon, Adafactor) couple entries: an unmasked gradient of a
    pruned entry would change other entries.

    Args:
        model: network with every parameter that `masks` names; no hook prunes these parameters, and the network is
            already on the device of the training.
        masks: name of a parameter -> tensor of its shape, nonzero where the entry is kept; for example a `MaskSet`.
        gradients: "masked"; or "dense" for a method that reads the gradients of pruned entries.

    Raises:
        ValueError: a parameter is missing, has another shape or holds no floats; the message names it, and nothing is
            changed.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor], gradients: Gradients = "masked") -> None:
        if gradients not in get_args(Gradients):
            raise ValueError(f"`gradients` (={gradients!r}) must be 'masked' or 'dense'.")
        check_masks(masks)
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
        route_among_survivors(model, masks)

    def attach(self, optimizer: Optimizer) -> None:
        """Enforce the masks after each step of `optimizer`: momentum can move entries without a gradient."""
        self.follow()
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.follow()))
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self.enforce()))

    def enforce(self) -> None:
        """Set pruned entries to exactly 0, NaN and inf included, also in parameters that replaced earlier ones.

        Raises:
            ValueError: a parameter is missing or has another shape.
        """
        self.follow()
        for parameter, mask in self._masks.items():
            mask_(parameter, mask.entries)

    def release(self) -> None:
        """Set pruned entries to 0 and stop enforcing the masks."""
        self.enforce()
        self.stop()

    def stop(self) -> None:
        """Stop enforcing the masks, and leave the parameters as they are."""
        for handle in self._handles:
            handle.remove()
        for mask in self._masks.values():
            mask.remove_hook()
        self._handles.clear()
        self._places.clear()
        self._masks.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which is attached to no optimizer: optimizers are copied without hooks."""
        if self._handles:
            warnings.warn(
                "This MaskKeeper is attached to an optimizer, but its copy to none, because optimizers are copied "
                "without hooks: the copied network trains without masks until copy.attach(optimizer).",
                stacklevel=2,
            )
        return {**vars(self), "_handles": []}

    def follow(self) -> None:
        """Find the current parameters: `load_state_dict(assign=True)` and conversions may replace them."""
        if any(place.module._parameters.get(place.leaf) is not place.parameter for place in self._places):
            before, self._masks = self._masks, {}
            for place in self._places:
                parameter = place.find()
                if parameter not in self._masks:
                    self._masks[parameter] = before.pop(parameter) if parameter in before else _Mask(place.mask.entries)
                elif (standing := self._masks[parameter]) is not place.mask:  # two parameters were tied meanwhile
                    standing.entries = standing.entries * place.mask.entries.to(standing.entries)
                place.parameter, place.mask = parameter, self._masks[parameter]
            for mask in before.values():
                mask.remove_hook()
        for parameter, mask in self._masks.items():
            mask.fit(parameter, self._masks_gradients)


@dataclass(slots=True)
class _Mask:
    """Mask of one parameter: its entries, and the hook that masks gradients; holds no reference to the parameter."""

    entries: Tensor
    handle: RemovableHandle | None = None

    def fit(self, parameter: nn.Parameter, masks_gradients: bool) -> None:
        """Convert the mask to the parameter's dtype and device.

        If gradients are masked, hook the gradient of a trained parameter, also if it was frozen before.
        """
        entries = self.entries
        if entries.dtype != parameter.dtype or entries.device != parameter.device or entries.is_inference():
            with outside_inference_mode():
                self.entries = torch.empty_like(parameter.detach()).copy_(entries)
        if not masks_gradients or not parameter.requires_grad:
            return
        hooks = parameter._post_accumulate_grad_hooks
        if self.handle is not None and hooks is not None and self.handle.id in hooks:
            parameter._post_accumulate_grad_hooks = hooks  # swapping tensors disconnects the hooks from autograd
        else:  # a copied parameter has no hooks
            self.handle = parameter.register_post_accumulate_grad_hook(self.mask_gradient)  # type: ignore[no-untyped-call]
            self.mask_gradient(parameter)

    def mask_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        mask = self.entries.to(gradient.device)
        if gradient.requires_grad:  # create_graph=True: the gradient must stay differentiable
            parameter.grad = masked(gradient, mask)
        else:
            mask_(gradient, mask)

    def remove_hook(self) -> None:
        if self.handle is not None:
            self.handle.remove()


@dataclass(slots=True)
class _Place:
    """Module and name of a masked parameter, and the parameter that was last found there."""

    module: nn.Module
    leaf: str
    mask: _Mask
    parameter: nn.Parameter | None = None

    def find(self) -> nn.Parameter:
        parameter, shape = self.module._parameters.get(self.leaf), tuple(self.mask.entries.shape)
        if parameter is None or parameter.shape != shape:
            now = "is missing" if parameter is None else f"now has shape {tuple(parameter.shape)}"
            raise ValueError(
                f"`{self.leaf}` of {type(self.module).__name__} {now}; it must have the shape of its mask, {shape}: "
                "make a new MaskKeeper after a change of the model."
            )
        return parameter
