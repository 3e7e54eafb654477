"""Weights that are pruned where none is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from pruning.holding.parameter import plain_modules, plain_parameters, plain_weights
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
    for name, module, leaf, parameter in plain_weights(model):
        if id(parameter) not in left and is_prunable(module, leaf):
            found.setdefault(id(parameter), name)
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
    yield from stacks_of(modules)
    for path, module in modules.items():
        if isinstance(module, nn.ModuleList) and "expert" in path.rpartition(".")[2]:
            yield path.rpartition(".")[0], len(module)


def stacks_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    """Yield (name, number of experts) for the modules whose parameters stack the matrices of experts."""
    for path, module in modules.items():
        if kind_of(module) is EXPERTS:
            leaf, layout = next((n, layout) for n, _ in plain_parameters(module) if (layout := layout_of(module, n)))
            yield path, layout.split if layout.split > 1 else getattr(module, leaf).shape[0]
