"""History of masks that change: how much each change moved, without storing every mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskUpdate:
    """A change of all masks together.

    Args:
        step: number of finished steps at the change.
        kept: number of entries that are kept after it.
        dropped: number of entries that were kept at the last record and are not any more.
        grown: number of entries that are kept and were not at the last record.
        first_overlap: fraction of the kept entries that the first masks kept.
        last_overlap: fraction of the kept entries that were kept at the last record.
        explored: fraction of all entries that were kept at some record.
    """

    step: int
    kept: int
    dropped: int
    grown: int
    first_overlap: float
    last_overlap: float
    explored: float


@dataclass
class MaskHistory:
    """Changes of masks in a training.

    Args:
        first: name -> bool, the masks at the beginning.
        last: the masks at the last record.
        ever: entries that were kept at some record.
        every: records are at least this number of steps apart.
        updates: the records.
    """

    first: dict[str, Tensor]
    last: dict[str, Tensor]
    ever: dict[str, Tensor]
    every: int = 1
    updates: list[MaskUpdate] = field(default_factory=list)

    @classmethod
    def of(cls, kept: Mapping[str, Tensor], every: int = 1) -> MaskHistory:
        """Return the empty history of a training that begins with these masks."""
        return cls(dict(kept), dict(kept), {name: each.clone() for name, each in kept.items()}, every)

    def record(self, step: int, kept: Mapping[str, Tensor], *, always: bool = False) -> None:
        """Record a change: the masks after `step` finished steps; `always`: also soon after the last record."""
        if not always and self.updates and step - self.updates[-1].step < self.every:
            return
        count = dropped = grown = first = explored = entries = 0
        for name, now in kept.items():
            before, ever = self.last[name], self.ever[name]
            ever |= now
            both = _count(now & before)
            here = _count(now)
            count, grown, dropped = count + here, grown + here - both, dropped + _count(before) - both
            first += _count(now & self.first[name])
            explored, entries = explored + _count(ever), entries + now.numel()
            self.last[name] = now
        shares = first / max(1, count), (count - grown) / max(1, count), explored / max(1, entries)
        self.updates.append(MaskUpdate(step, count, dropped, grown, *shares))

    def state(self) -> dict[str, Any]:
        """Return the history as tensors and plain values."""
        return {
            "first": dict(self.first),
            "last": dict(self.last),
            "ever": {name: each.clone() for name, each in self.ever.items()},
            "updates": [asdict(each) for each in self.updates],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, on the devices of the masks of now."""
        for name, now in self.first.items():
            self.last[name] = state["last"][name].to(now.device)
            self.ever[name] = state["ever"][name].to(now.device, copy=True)
            self.first[name] = state["first"][name].to(now.device)
        self.updates = [MaskUpdate(**each) for each in state["updates"]]


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))
