"""Weights that are pruned where none is named, and the part of a network's matrices that a call considers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pruning.holding.parameter import joined, plain_modules, plain_parameters
from pruning.layouts import EMBEDDING, EXPERTS, LINEAR, TRANSPOSED_LINEAR, kind_of, layout_of


def is_prunable(module: nn.Module, leaf: str) -> bool:
    """Return whether a parameter is a weight with a layout, and no embedding."""
    return layout_of(module, leaf) is not None and kind_of(module) is not EMBEDDING


def default_weights(model: nn.Module, *, with_head: bool = True) -> list[str]:
    """Return the names of the weights that are pruned where none is named, in the order of the model.

    They are the weights with a layout (`pruning.layouts`), a tied one once, but for embeddings, heads tied to them, and
    routers: linear layers with an output for each expert of the mixture beside them.

    Args:
        model: pruned or not.
        with_head: whether a head that is not tied, a last linear layer of an embedding's shape, is among them.
    """
    modules = dict(plain_modules(model))
    embeddings = [each for each in modules.values() if kind_of(each) is EMBEDDING]
    left = {id(parameter) for each in embeddings for _, parameter in plain_parameters(each)}
    left |= {id(parameter) for each in _routers(modules) for _, parameter in plain_parameters(each)}
    found: dict[int, str] = {}
    for path, module in modules.items():
        for leaf, parameter in plain_parameters(module):
            if id(parameter) not in left and is_prunable(module, leaf):
                found.setdefault(id(parameter), joined(path, leaf))
    names = list(found.values())
    if not with_head and names:
        module = modules[names[-1].rpartition(".")[0]]
        sizes = {parameter.shape for each in embeddings for _, parameter in plain_parameters(each)}
        if isinstance(module, nn.Linear) and (module.out_features, module.in_features) in sizes:
            names.pop()
    return names


def _routers(modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the linear layers whose outputs are as many as the experts beside them, or in a module beside them."""
    for path, count in _mixtures(modules):
        place = path
        while place and len([*modules[place].children()]) < 2:
            place = place.rpartition(".")[0]
        for name, module in modules.items():
            inside = name.startswith(f"{place}.") if place else bool(name)
            near = name.removeprefix(f"{place}." if place else "").count(".") < 2
            linear = kind_of(module) in (LINEAR, TRANSPOSED_LINEAR) and not name.startswith(f"{path}.experts")
            if inside and near and linear and getattr(module, "out_features", getattr(module, "nf", None)) == count:
                yield module


def _mixtures(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Yield (module, number of experts) for stacked experts, and for the holder of a list named as experts."""
    for path, module in modules.items():
        if kind_of(module) is EXPERTS:
            leaf, layout = next((n, layout) for n, _ in plain_parameters(module) if (layout := layout_of(module, n)))
            stacks = layout.split if layout.split > 1 else getattr(module, leaf).shape[0]
            yield path, stacks
        elif isinstance(module, nn.ModuleList) and "expert" in path.rpartition(".")[2]:
            yield path.rpartition(".")[0], len(module)


@dataclass(frozen=True)
class Considered:
    """Part of a network's matrices that a call prunes.

    Args:
        entries: number of entries of the matrices that the call names.
        left: name -> entries of each other matrix, the largest first.
    """

    entries: int
    left: Mapping[str, int]

    @property
    def share(self) -> float:
        """Entries that the call considers, as a fraction of all matrices; 1 for a network without matrices."""
        total = self.entries + sum(self.left.values())
        return self.entries / total if total else 1.0


def considered(model: nn.Module, names: Iterable[str]) -> Considered:
    """Return which of a network's matrices a call considers.

    Matrices are the parameters of two or more dimensions of which two are larger than 1, a tied one once. Embeddings,
    whose rows are looked up, are none, unless a call names them; nor are biases and tables of biases.

    Args:
        model: pruned or not.
        names: names of the weights that the call prunes.
    """
    named = set(names)
    matrices: dict[int, tuple[str, Tensor]] = {}
    taken: set[int] = set()
    lookups: set[int] = set()
    for path, module in plain_modules(model):
        for leaf, parameter in plain_parameters(module):
            name = joined(path, leaf)
            is_bias = isinstance(parameter, UninitializedParameter) or "bias" in leaf
            if is_bias or sum(size > 1 for size in parameter.shape) < 2:
                continue
            matrices.setdefault(id(parameter), (name, parameter))
            taken |= {id(parameter)} if name in named else set()
            lookups |= {id(parameter)} if kind_of(module) is EMBEDDING else set()
    entries = sum(parameter.numel() for key, (_, parameter) in matrices.items() if key in taken)
    left = {n: p.numel() for key, (n, p) in matrices.items() if key not in taken | lookups}
    return Considered(entries, dict(sorted(left.items(), key=lambda each: -each[1])))
