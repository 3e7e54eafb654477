"""Multiply-accumulates of a forward pass by weight, from which those under any masks follow without another pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pruning.masks.mask_set import MaskSet
from pruning.measure.layers import Use
from pruning.measure.macs import counted


@dataclass(frozen=True)
class WeightMacs:
    """Multiply-accumulates of one forward pass, and how often each entry of each weight is applied in it.

    Args:
        total: multiply-accumulates of the dense network.
        uses: name of a parameter -> its uses.
    """

    total: int
    uses: Mapping[str, tuple[Use, ...]]

    def remaining(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the multiply-accumulates of unmasked weights, as a float64 tensor on the device of the masks.

            remaining = total - sum over masked entries of (applications of the entry)

        Products of two activations remain, even where pruning made one factor all 0.

        Args:
            masks: name -> bool tensor, True where an entry is kept; a shared parameter under each of its names.
        """
        found = torch.tensor(float(self.total), dtype=torch.float64)
        for name, mask in masks.items():
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
    return WeightMacs(
        sum(layer.total for layer in counter.layers.values()),
        {name: tuple(uses) for name, uses in counter.uses.items()},
    )
