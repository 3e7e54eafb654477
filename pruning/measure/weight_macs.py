"""Multiply-accumulates of a forward pass by weight, from which those under any masks follow without another pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pruning.holding.parameter import unwrapped
from pruning.masks.mask_set import MaskSet
from pruning.measure.layers import Use
from pruning.measure.macs import counted


@dataclass(frozen=True)
class WeightMacs:
    """Multiply-accumulates of one forward pass, and how often each entry of each weight is applied in it.

    Args:
        total: multiply-accumulates of the dense network.
        uses: first name of a parameter -> its uses, in all modules that share it.
        first_names: further name of a shared parameter -> its first name.
    """

    total: int
    uses: Mapping[str, tuple[Use, ...]]
    first_names: Mapping[str, str] = field(default_factory=dict)

    def remaining(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the multiply-accumulates of unmasked weights, as a float64 tensor on the device of the masks.

            remaining = total - sum over masked entries of (applications of the entry)

        Products of two activations remain, even where pruning made one factor all 0.

        Args:
            masks: name -> bool tensor, True where an entry is kept; a shared parameter under any of its names.
        """
        found = torch.tensor(float(self.total), dtype=torch.float64)
        for name, mask in {self.first_names.get(name, name): mask for name, mask in masks.items()}.items():
            for use in self.uses.get(name, ()):
                part = mask[use.rows]
                found = found.to(mask.device) - use.times * (part.numel() - torch.count_nonzero(part)).double()
        return found


def weight_macs(model: nn.Module, example: Any) -> WeightMacs:
    """Count the multiply-accumulates of `model(example)` by weight; see `macs`.

    Args:
        model: any module; it runs once, and is not changed.
        example: input of the model, as for `macs`.
    """
    counter = counted(model, example, MaskSet({}))
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False)
    }
    uses: dict[str, list[Use]] = {}
    for name, own in counter.uses.items():
        uses.setdefault(names.get(name, name), []).extend(own)
    total = sum(layer.total for layer in counter.layers.values())
    shared = {name: own for name, own in names.items() if name != own}
    return WeightMacs(total, {name: tuple(own) for name, own in uses.items()}, shared)
