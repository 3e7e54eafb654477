"""Share of a network's matrix weights that a pruning considers, and the largest weights that it leaves dense."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from pruning.holding.parameter import plain_weights
from pruning.layouts import EMBEDDING, kind_of, layout_of

ENOUGH = 0.9
"""Share of the matrix weights from which a pruning says nothing of those that it leaves dense."""
NAMED = 3
"""Maximum number of weights that a sentence names."""
NAME_THEM = "name them in `parameters`"
BY_ENTRIES = "call pruning.prune(model, sparsity=..., parameters=[...]), which prunes single entries"
"""Advice for weights that a method does not prune where they are named."""


@dataclass(frozen=True)
class Considered:
    """Matrix weights of a network, and those that a pruning leaves dense.

    Args:
        entries: number of entries of all matrix weights.
        dense: name -> number of entries of each matrix weight that the pruning leaves dense, the largest first.
    """

    entries: int
    dense: Mapping[str, int]

    @property
    def share(self) -> float:
        """Fraction of the entries that the pruning considers; 1 for a network without matrix weights."""
        return 1 - sum(self.dense.values()) / max(1, self.entries)

    def plain(self) -> dict[str, Any]:
        """Return numbers of entries, and the largest weights that stay dense, in JSON types."""
        largest = dict([*self.dense.items()][:NAMED])
        return {"entries": self.entries, "considered": self.entries - sum(self.dense.values()), "dense": largest}

    def without(self, names: Collection[str]) -> Considered:
        """Return what is left dense besides the weights `names`, which the caller left out on purpose."""
        return Considered(self.entries, {name: size for name, size in self.dense.items() if name not in names})

    def sentence(self, named: Collection[str], naming: str = NAME_THEM, otherwise: str = BY_ENTRIES) -> str:
        """Return what stays dense, and how to prune it; empty if nine tenths of the entries are considered.

        Args:
            named: weights that the call prunes if they are named.
            naming: how to name them.
            otherwise: how to prune the others.
        """
        if self.share >= ENOUGH:
            return ""
        first = [name for name in self.dense if name in named]
        if len(first) in (0, len(self.dense)):
            advice = f"to prune them, {naming if first else otherwise}"
        else:
            advice = f"to prune {', '.join(first[:NAMED])}, {naming}; to prune the others, {otherwise}"
        more = f" and {len(self.dense) - NAMED} more" if len(self.dense) > NAMED else ""
        listed = ", ".join(f"{name} ({size:,} entries)" for name, size in [*self.dense.items()][:NAMED])
        return f"{1 - self.share:.0%} of the network's matrix weights stay dense: {listed}{more}; {advice}"


def considered(model: nn.Module, names: Iterable[str]) -> Considered:
    """Return the matrix weights of a network, and those among them that are not named.

    Matrix weights are those with a layout, and other parameters of floating-point numbers with two or more dimensions,
    but for embeddings, weights tied to them, norms, biases and tables of biases, and parameters of one row, such as
    positions. A tied weight counts once.

    Args:
        model: pruned or not.
        names: names of the weights that the pruning considers; a tied weight under any of its names.
    """
    every = [*plain_weights(model)]
    known = {name: parameter for name, _, _, parameter in every}
    taken = {id(known[name]) for name in names if name in known}
    embeddings = {id(parameter) for _, module, _, parameter in every if kind_of(module) is EMBEDDING}
    first: dict[int, str] = {}
    for name, module, leaf, parameter in every:
        if id(parameter) not in embeddings and _is_matrix(module, leaf, parameter):
            first.setdefault(id(parameter), name)
    dense = {name: known[name].numel() for key, name in first.items() if key not in taken}
    total = sum(known[name].numel() for name in first.values())
    return Considered(total, dict(sorted(dense.items(), key=lambda item: -item[1])))


def _is_matrix(module: nn.Module, leaf: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a weight with a layout, or may be a matrix that a forward multiplies with."""
    if isinstance(parameter, UninitializedParameter) or not parameter.is_floating_point():
        return False
    if layout_of(module, leaf) is not None:
        return True
    added = isinstance(module, nn.LayerNorm) or "bias" in leaf
    return not added and sum(size > 1 for size in parameter.shape) > 1 and len(parameter) > 1
