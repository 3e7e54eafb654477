"""Kept labels: those that the outputs depend on, and those that tensors need to keep a regular shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pruning.graph.label_flow import Flow
from pruning.graph.labels import FIXED, Fields, Labels, Site
from pruning.graph.operations import described

REGULAR = "it keeps heads or groups of one size"


@dataclass(frozen=True)
class Decision:
    """Labels of a network that are kept.

    Args:
        labels: all labels of the network.
        kept: bool, shape (labels,): whether a root is kept; read at roots only.
        reasons: root -> why it is kept.
    """

    labels: Labels
    kept: Tensor
    reasons: Mapping[int, str]

    def keeps(self, labels: Tensor) -> Tensor:
        """Return whether each label is kept; bool, the shape of `labels`."""
        return self.kept[self.labels.roots(labels)]

    def mask(self, fields: Fields) -> Tensor | None:
        """Return where all labels of a tensor are kept; None without fields.

        The result is bool and broadcasts to the tensor: it has size 1 in dimensions without labels.
        """
        mask = None
        for field in fields:
            kept = self.keeps(field)
            mask = kept if mask is None else mask & kept
        return mask

    def sizes(self, fields: Fields, shape: Sequence[int]) -> list[int]:
        """Return a tensor's shape after removal."""
        sizes, mask = list(shape), self.mask(fields)
        if mask is None:
            return sizes
        for dim in reversed(range(mask.ndim)):
            if mask.shape[dim] > 1:
                sizes[dim] = int(mask.sum(dim).max())
                mask = mask.any(dim, keepdim=True)
        return sizes

    def taken(self, tensor: Tensor, fields: Fields) -> Tensor:
        """Return the kept entries of a tensor, as a tensor; the tensor itself if all are kept."""
        mask = self.mask(fields)
        if mask is None or bool(mask.all()):
            return tensor
        return tensor[mask.expand(tensor.shape).to(tensor.device)].reshape(self.sizes(fields, tensor.shape))


def decide_kept_labels(flow: Flow) -> Decision:
    """Decide which labels of a network are kept: as few as its outputs and its shapes allow."""
    labels = flow.labels
    kept = torch.zeros(len(labels), dtype=torch.bool)
    kept[FIXED] = True
    reasons: dict[int, str] = {}

    def keep(which: Tensor, because: str) -> bool:
        roots = torch.from_numpy(np.unique(labels.roots(which).numpy()))
        new = roots[~kept[roots]]
        kept[new] = True
        reasons.update(dict.fromkeys(new.tolist(), because))
        return len(new) > 0

    for pinned, because in labels.pins:
        keep(pinned, because)
    while True:
        while any(
            keep(*each)
            for site in reversed(flow.sites)
            for each in _required_inputs(site, kept[labels.roots(site.outputs)])
        ):
            pass
        decision = Decision(labels, kept, reasons)
        if not keep(_required_by_shapes(flow, decision), REGULAR):
            break
    for site in flow.sites:
        if site.inputs is site.outputs:  # statistics explain a kept channel better than the reader of its outputs
            reasons.update(dict.fromkeys(labels.roots(site.inputs[decision.keeps(site.inputs)]).tolist(), site.because))
    return decision


def _required_inputs(site: Site, outputs: Tensor) -> list[tuple[Tensor, str]]:
    """Return pairs (labels of inputs, reason): inputs that cannot be removed because of the kept outputs."""
    asked = torch.full(site.inputs.shape, bool(outputs.any())) if site.reads is None else site.reads[outputs].any(0)
    asked = asked & site.constant.isnan()
    if site.bordered is None:
        return [(site.inputs[asked], site.because)]
    border = f"{described(site.node)} reads a constant that is left of it, with zeros at the border"
    return [(site.inputs[asked & ~site.bordered], site.because), (site.inputs[asked & site.bordered], border)]


def _required_by_shapes(flow: Flow, decision: Decision) -> Tensor:
    """Return further labels that must be kept, so that the kept entries form tensors."""
    missing = []
    for one, other in flow.shapes.same:
        for rows, partners in ((one, other), (other, one)):
            asked = decision.keeps(partners).any(1) & ~decision.keeps(rows).any(1)
            missing.append(rows[asked, 0])
    missing.extend(grid[_uneven(decision.keeps(grid))] for grid in flow.shapes.grids)
    for node, fields in flow.fields.items():
        if node.op == "get_attr":
            missing.extend(field.flatten()[:1] for field in fields if not decision.keeps(field).any())
    return torch.cat(missing) if missing else torch.empty(0, dtype=torch.int64)


def _uneven(kept: Tensor) -> Tensor:
    """Return entries of a grid to keep in addition; bool, the shape of `kept`.

    Rows that keep fewer entries than the fullest row get more; empty rows stay empty. Once the rows are equal, the
    outer dimensions are made even in the same way.
    """
    if kept.ndim < 2:
        return torch.zeros_like(kept)
    counts = kept.sum(-1, keepdim=True)
    lacking = torch.where(counts > 0, counts.max() - counts, 0)
    added = ~kept & ((~kept).cumsum(-1) <= lacking)
    if added.any():
        return added
    rows = _uneven(counts[..., 0] > 0)
    return rows[..., None] & (torch.arange(kept.shape[-1]) == 0)
