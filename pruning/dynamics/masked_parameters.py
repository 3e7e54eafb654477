"""Checks of the parameters that a dynamics masks: they fit the network, and one optimizer trains them."""

from __future__ import annotations

from collections.abc import Mapping, MutableSet
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pruning.holding.parameter import place, pruned_names

_ATTACHED: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
"""Optimizer -> dynamics that are attached to it."""


def attached_to(optimizer: Optimizer) -> MutableSet[Any]:
    """Return the dynamics that are attached to an optimizer, to be changed in place."""
    return _ATTACHED.setdefault(optimizer, WeakSet())


def require_free(optimizer: Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a dynamics that is attached to the optimizer masks one of these parameters."""
    for other in attached_to(optimizer):
        taken = {id(other.parameter(name)): name for name in other.kept}
        for name, mask in masks.items():
            module, leaf = place(model, name, mask.shape)
            if id(module.get_parameter(leaf)) in taken:
                raise ValueError(f"`{name}` has masks of {other} already; call its release() first.")


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
