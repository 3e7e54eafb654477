"""Dynamics as users write them: the class that docs/how-to/sparse-training.md shows, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import pruning

PAGE = Path(__file__).parents[3] / "docs/how-to/sparse-training.md"
(SHOWN,) = re.findall(r"```python own\n(.*?)```", PAGE.read_text(), re.S)
_names: dict[str, Any] = {"pruning": pruning, "torch": torch}
exec(SHOWN, _names)
Rotating = _names["Rotating"]


class Failing(pruning.dynamics.Dynamics):
    """Raise an error at the first step."""

    def after_step(self) -> None:
        raise KeyError("no such layer")


class Losing(pruning.dynamics.Dynamics):
    """Drop an entry of each tensor after each step, although the class says that counts stay."""

    keeps_counts = True

    def after_step(self) -> None:
        self.change({name: _less(kept) for name, kept in self.kept.items()})


class Pruning(pruning.dynamics.Dynamics):
    """Prune to a sparsity halfway, by position."""

    nested = True

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity

    def after_step(self) -> None:
        if self.step == self.length // 2:
            self.change({name: _first(kept, self.sparsity) for name, kept in self.kept.items()})


def _less(kept: torch.Tensor) -> torch.Tensor:
    return kept.flatten().index_fill(0, kept.flatten().nonzero()[0], False).view(kept.shape)


def _first(kept: torch.Tensor, sparsity: float) -> torch.Tensor:
    places = torch.arange(kept.numel(), device=kept.device).view(kept.shape)
    return places >= round(sparsity * kept.numel())


def function(every: int) -> None:
    """Not a class."""
