"""Plain operators for torchvision beside another build of torch, where its compiled ones do not load.

torchvision's networks, and packages that import it, run with these. Import this module before torchvision.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")


class _Loader:
    """Loader that declares the operators, then loads torchvision as usual."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._usual.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        declared = _declared()
        self._usual.exec_module(module)
        module.plain_operators = declared  # type: ignore[attr-defined]  # the library ends with its object
        sys.modules["torchvision.ops.boxes"]._assert_has_ops = lambda: None  # type: ignore[attr-defined]


class _Finder(importlib.machinery.PathFinder):
    """Finder of torchvision alone."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and not _compiled_loads(spec):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


def _compiled_loads(spec: importlib.machinery.ModuleSpec) -> bool:
    """Return whether torchvision's compiled part loads with this build of torch."""
    import torch

    for folder in spec.submodule_search_locations or ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            try:
                torch.ops.load_library(f"{folder}/_C{suffix}")  # type: ignore[no-untyped-call]
            except OSError:
                continue
            return True
    return False


def _declared() -> Any:
    import torch

    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CPU")
    return library


def nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Return the indices of boxes that overlap no box with a higher score by more than the threshold."""
    import torch

    order = scores.argsort(descending=True, stable=True)
    corners = boxes[order]
    low = torch.maximum(corners[:, None, :2], corners[None, :, :2])
    high = torch.minimum(corners[:, None, 2:], corners[None, :, 2:])
    areas, both = (corners[:, 2:] - corners[:, :2]).prod(-1), (high - low).clamp(min=0).prod(-1)
    over = both > iou_threshold * (areas[:, None] + areas[None] - both)
    keep = torch.ones(len(order), dtype=torch.bool)
    for index in range(len(order)):
        if keep[index]:
            keep[index + 1 :] &= ~over[index, index + 1 :]
    return order[keep]


sys.meta_path.insert(0, _Finder)
