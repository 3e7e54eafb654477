"""Plain operators for torchvision beside another build of torch, where its compiled ones do not load.

torchvision's networks, and packages that import it, run with these. Import this module before torchvision.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
"""Schemas of the operators."""


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
        for name in ("boxes", "roi_align"):
            operators: Any = sys.modules[f"torchvision.ops.{name}"]
            operators._assert_has_ops, operators._has_ops = lambda: None, lambda: True


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
    for each in DECLARED:
        library.define(each)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    return library


def nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Return the indices of boxes that overlap no box with a higher score by more than the threshold."""
    import torch

    order = scores.argsort(descending=True, stable=True)
    corners = boxes[order]
    low = torch.maximum(corners[:, None, :2], corners[None, :, :2])
    high = torch.minimum(corners[:, None, 2:], corners[None, :, 2:])
    areas, both = (corners[:, 2:] - corners[:, :2]).prod(-1), (high - low).clamp(min=0).prod(-1)
    over = (both > iou_threshold * (areas[:, None] + areas[None] - both)).numpy()
    keep = torch.ones(len(order), dtype=torch.bool)
    left = keep.numpy()
    for index in range(len(order)):
        if left[index]:
            left[index + 1 :] &= ~over[index, index + 1 :]
    return order[keep]


def roi_align(
    values: Any,
    boxes: Any,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Any:
    """Return the mean of bilinear samples in each bin of each box.

    Bilinear weights are products of a weight of the row and one of the column. torchvision's own plain implementation
    is compiled for each dtype, and reads four entries for each sample.
    """
    import torch

    if sampling_ratio < 1:
        raise ValueError(f"sampling_ratio (={sampling_ratio}) must be at least 1; type 2, as torchvision's detectors.")
    edges = boxes[:, 1:] * spatial_scale - 0.5 * aligned
    lengths = (edges[:, 2:] - edges[:, :2]).clamp(min=-torch.inf if aligned else 1.0)
    weights = []
    for axis, bins, size in ((1, pooled_height, values.shape[2]), (0, pooled_width, values.shape[3])):
        steps = (torch.arange(bins * sampling_ratio, dtype=edges.dtype) + 0.5) / (bins * sampling_ratio)
        at = edges[:, axis, None] + lengths[:, axis, None] * steps
        inside = (at >= -1) & (at <= size)
        apart = (at.clamp(0, size - 1)[..., None] - torch.arange(size)).abs()
        own = (1 - apart).clamp(min=0) * inside[..., None]
        weights.append(own.unflatten(1, (bins, sampling_ratio)).mean(2))
    return torch.einsum("kyh,kchw,kxw->kcyx", weights[0], values[boxes[:, 0].long()], weights[1])


sys.meta_path.insert(0, _Finder)
