"""Share of a network's matrix weights that a pruning considers, and the largest weights that it leaves dense."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from pruning.holding.parameter import PRUNABLE, plain_weights
from pruning.layouts import EMBEDDING, kind_of, layout_of

ENOUGH = 0.9
"""Share of the matrix weights from which a pruning says nothing of those that it leaves dense."""
NAMED = 3
"""Maximum number of weights that a sentence names."""
NAME_THEM = "name them in `parameters`"
BY_ENTRIES = "call pruning.prune(model, sparsity=..., parameters=[...]), which prunes single entries"
"""Advice for weights that a method does not prune where they are named."""
BEFORE = "do it before the network is quantised"
"""Advice for weights of whole or packed numbers, which are never pruned."""


def shortened(names: Sequence[str]) -> str:
    """Return the first names of a list, as part of a sentence, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


@dataclass(frozen=True)
class Considered:
    """Matrix weights of a network, and those that a pruning leaves dense.

    Args:
        entries: number of entries of all matrix weights.
        dense: name -> number of entries of each matrix weight that the pruning leaves dense, the largest first.
        packed: those among them of whole or packed numbers.
    """

    entries: int
    dense: Mapping[str, int]
    packed: Collection[str] = ()

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
        return replace(self, dense={name: size for name, size in self.dense.items() if name not in names})

    def sentence(self, named: Collection[str], naming: str = NAME_THEM, otherwise: str = BY_ENTRIES) -> str:
        """Return what stays dense, and how to prune it; empty if nine tenths of the entries are considered.

        Args:
            named: weights that the call prunes if they are named.
            naming: how to name them.
            otherwise: how to prune the others.
        """
        if self.share >= ENOUGH:
            return ""
        could = [name for name in self.dense if name not in self.packed]
        groups = (
            ([name for name in could if name in named], naming),
            ([name for name in could if name not in named], otherwise),
            ([name for name in self.dense if name in self.packed], BEFORE),
        )
        ways = [(", ".join(names[:NAMED]), way) for names, way in groups if names]
        ways[-1] = ("the others" if len(ways) > 1 else "them", ways[-1][1])
        advice = "; ".join(f"to prune {names}, {way}" for names, way in ways)
        sizes = shortened([f"{name} ({size:,} entries)" for name, size in self.dense.items()])
        return f"{1 - self.share:.0%} of the network's matrix weights stay dense: {sizes}; {advice}"


def considered(model: nn.Module, names: Iterable[str]) -> Considered:
    """Return the matrix weights of a network, and those among them that are not named.

    Matrix weights are those with a layout, and other parameters with two or more dimensions of more than one entry, but
    for embeddings, weights tied to them, norms, biases and tables of biases. A tied weight counts once.

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
    packed = [name for name in dense if known[name].dtype not in PRUNABLE]
    return Considered(total, dict(sorted(dense.items(), key=lambda item: -item[1])), packed)


def _is_matrix(module: nn.Module, leaf: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a weight with a layout, or may be a matrix that a forward multiplies with."""
    if isinstance(parameter, UninitializedParameter):
        return False
    if layout_of(module, leaf) is not None:
        return True
    added = isinstance(module, nn.LayerNorm) or re.search("(?<![a-z])bias(es)?(?![a-z])", leaf)
    return not added and sum(size > 1 for size in parameter.shape) > 1
