"""Pruning of the output projection of `nn.MultiheadAttention`, whose forward, and so its hooks, never run.

Attention reads `out_proj.weight` directly (pytorch#69353), so the pruned value is computed when it is read.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize


class LiveOutProj(NonDynamicallyQuantizableLinear):
    """Output projection whose pruned parameters are computed from `name_orig` and `name_mask` when they are read."""

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        for hook in self.__dict__.get("_forward_pre_hooks", {}).values():
            reparam = getattr(hook, "_reparam", None)
            if reparam is not None and reparam.name == name:
                value: Tensor = reparam.read(self)
                return value
        return super().__getattr__(name)


def make_live(module: nn.Module) -> None:
    """Compute the pruned parameters of an attention's output projection at each read; other modules do not change."""
    kind: type = type(module)
    if kind is NonDynamicallyQuantizableLinear:
        module.__class__ = LiveOutProj
    elif kind.__bases__ == (NonDynamicallyQuantizableLinear,) and parametrize.is_parametrized(module):
        # torch made this class for the module, and restores the base class when the parametrization is removed.
        kind.__bases__ = (LiveOutProj,)


def make_plain(module: nn.Module) -> None:
    """Undo `make_live` if no pruned parameter is left.

    The class of a parametrized module stays, because copies of the module may share it.
    """
    if type(module) is LiveOutProj and not any(
        getattr(hook, "_reparam", None) is not None for hook in module._forward_pre_hooks.values()
    ):
        cast(nn.Module, module).__class__ = NonDynamicallyQuantizableLinear
