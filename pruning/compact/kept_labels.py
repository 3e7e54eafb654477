"""Which labels are kept: what the outputs ask for, and what is needed for tensors to stay regular."""

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
    """What stays of a network.

    Args:
        labels: of the network.
        kept: whether a root is kept, for every label; shape (labels,).
        reasons: root -> why it is kept.
    """

    labels: Labels
    kept: Tensor
    reasons: Mapping[int, str]

    def keeps(self, labels: Tensor) -> Tensor:
        """Return for each label whether it is kept."""
        return self.kept[self.labels.roots(labels)]

    def mask(self, fields: Fields) -> Tensor | None:
        """Return where all labels are kept, 1 along dimensions without any; None where there are no fields."""
        mask = None
        for field in fields:
            kept = self.keeps(field)
            mask = kept if mask is None else mask & kept
        return mask

    def sizes(self, fields: Fields, shape: Sequence[int]) -> list[int]:
        """Return what is left of a shape."""
        sizes, mask = list(shape), self.mask(fields)
        if mask is None:
            return sizes
        for dim in reversed(range(mask.ndim)):
            if mask.shape[dim] > 1:
                sizes[dim] = int(mask.sum(dim).max())
                mask = mask.any(dim, keepdim=True)
        return sizes

    def taken(self, tensor: Tensor, fields: Fields) -> Tensor:
        """Return what is left of a tensor."""
        mask = self.mask(fields)
        if mask is None or bool(mask.all()):
            return tensor
        return tensor[mask.expand(tensor.shape).to(tensor.device)].reshape(self.sizes(fields, tensor.shape))


def decided(flow: Flow) -> Decision:
    """Decide what of a network is kept: as little as its outputs and its shapes allow."""
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
            keep(*each) for site in reversed(flow.sites) for each in _asked(site, kept[labels.roots(site.outputs)])
        ):
            pass
        decision = Decision(labels, kept, reasons)
        if not keep(_missing(flow, decision), REGULAR):
            break
    for site in flow.sites:
        if site.inputs is site.outputs:  # statistics, which tell more than who reads their outputs
            reasons.update(dict.fromkeys(labels.roots(site.inputs[decision.keeps(site.inputs)]).tolist(), site.because))
    return decision


def _asked(site: Site, outputs: Tensor) -> list[tuple[Tensor, str]]:
    """Return the inputs that the outputs which are kept depend on, and why."""
    asked = torch.full(site.inputs.shape, bool(outputs.any())) if site.reads is None else site.reads[outputs].any(0)
    asked = asked & site.constant.isnan()
    if site.bordered is None:
        return [(site.inputs[asked], site.because)]
    border = f"{described(site.node)} reads a constant that is left of it, with zeros at the border"
    return [(site.inputs[asked & ~site.bordered], site.because), (site.inputs[asked & site.bordered], border)]


def _missing(flow: Flow, decision: Decision) -> Tensor:
    """Return labels that must be kept for what is kept to be tensors of one shape."""
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
    """Return where to keep more, so that there are as many along each dimension wherever there are any."""
    if kept.ndim < 2:
        return torch.zeros_like(kept)
    counts = kept.sum(-1, keepdim=True)
    lacking = torch.where(counts > 0, counts.max() - counts, 0)
    added = ~kept & ((~kept).cumsum(-1) <= lacking)
    if added.any():
        return added
    rows = _uneven(counts[..., 0] > 0)
    return rows[..., None] & (torch.arange(kept.shape[-1]) == 0)
