"""The masks of a model as one value: collect, compare, pack, store, and apply again.

`MaskSet` is imported when it is asked for, so that `pruning.masks.files` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pruning.masks.mask_set import MaskSet as MaskSet

__all__ = ["MaskSet"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pruning.masks.mask_set import MaskSet

    globals()[name] = MaskSet
    return MaskSet
