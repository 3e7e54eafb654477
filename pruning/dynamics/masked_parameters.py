"""Checks of the parameters that a dynamics masks: they fit the network, and one optimizer trains them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.holding.parameter import place, pruned_names


def aliases_of(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, str]:
    """Return further name of a tied parameter -> its first name; check that masks fit.

    Raises:
        ValueError: a parameter is missing, has another shape, is pruned by hooks, or is tied to one with another mask.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, mask in masks.items():
        module, leaf = place(model, name, mask.shape)
        pruned = pruned_names(module)
        if {leaf, leaf.removesuffix("_orig")} & set(pruned):
            raise ValueError(
                f"`{name}` is pruned by hooks; take its masks by MaskSet.collect, and call remove_all first."
            )
        other = first.setdefault(id(module.get_parameter(leaf)), name)
        if other != name:
            if not torch.equal(mask != 0, masks[other] != 0):
                raise ValueError(f"`masks` of {other} and {name} must be equal, because the two share one parameter.")
            found[name] = other
    return found


def require_trained(optimizer: Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the optimizer lacks a masked parameter that is trained: another one would move it."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, mask in masks.items():
        module, leaf = place(model, name, mask.shape)
        parameter = module.get_parameter(leaf)
        if parameter.requires_grad and id(parameter) not in own:
            raise ValueError(
                f"`{name}` is masked, but is no parameter of `optimizer`; use one optimizer for all masks."
            )
