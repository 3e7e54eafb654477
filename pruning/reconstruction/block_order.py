"""Blocks of a network, found or named, in the order in which a forward pass calls them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from pruning.holding.default_weights import default_weights
from pruning.holding.parameter import joined, plain_modules, plain_parameters, pruned_names, unwrapped
from pruning.layouts import EXPERTS, kind_of, layout_of
from pruning.measure.matrix_weights import NAME_THEM, considered
from pruning.repair import corrections
from pruning.scores.readings.network import require_name

OR_BLOCKS = ", or name the blocks that hold them in `blocks`"


@dataclass(frozen=True)
class Part:
    """Part of a network that is pruned at once: a block, or a layer outside of the blocks.

    Args:
        name: qualified name of the module.
        module: the module.
        layers: name of a weight -> the layer that it belongs to.
        in_lists: weights of layers in lists that hold no blocks, such as experts, which may get vectors in any order.
    """

    name: str
    module: nn.Module
    layers: Mapping[str, nn.Module]
    in_lists: Collection[str] = ()

    @property
    def is_block(self) -> bool:
        """Whether the part is a block, not a single layer."""
        return self.module not in self.layers.values()


def parts_of(
    model: nn.Module,
    blocks: str | Sequence[str] | None,
    parameters: Iterable[str] | None,
    *,
    with_head: bool = True,
) -> list[Part]:
    """Return the parts of a network in the order of its modules.

    Args:
        model: a plain network.
        blocks: names of blocks or of lists of blocks, or patterns for them; None finds them: the children of each
            ModuleList, and of each Sequential of two or more, that holds modules of one class with layers inside; and
            of a ModuleList of several classes, one of them repeated, that holds most of the weights, if these lists
            leave out some of its layers, or there are none and each child has several layers. [] takes each layer by
            itself.
        parameters: names of the weights to prune, or patterns; None: those of the layers in blocks, or of all layers if
            there are none. A weight that several modules share is left out, or refused if it is named.
        with_head: see `default_weights`.

    Raises:
        ValueError: a name fits nothing, a named weight is tied or belongs to no layer, blocks of a ModuleList share
            weights while no weight is named, or the model is pruned by hooks.
    """
    modules = dict(plain_modules(model))
    if held := [path for path, module in modules.items() if pruned_names(module)]:
        raise ValueError(
            f"`model` (whose {held[0]!r} is pruned by hooks) must be plain; call pruning.remove_all(model) first."
        )
    layers = _layers(unwrapped(model), modules)
    if parameters is None:
        _require_own_weights(modules)
    found = _blocks(modules, layers, blocks)
    usual = default_weights(model, with_head=with_head)
    wanted = _usual(layers, found, usual) if parameters is None else _named(model, layers, parameters)
    in_lists = _in_lists(modules, layers)
    inside = {name: [weight for weight in wanted if weight.startswith(f"{name}.")] for name in found}
    taken = {weight for weights in inside.values() for weight in weights}
    grouped = [(name, found[name], weights) for name, weights in inside.items() if weights]
    alone: dict[str, list[str]] = {}
    for weight in wanted:
        if weight not in taken:
            alone.setdefault(weight.rpartition(".")[0], []).append(weight)
    grouped += [(path, layers[weights[0]], weights) for path, weights in alone.items()]
    parts = [Part(name, module, {each: layers[each] for each in own}, in_lists) for name, module, own in grouped]
    said = considered(model, wanted).sentence(layers, f"{NAME_THEM}{OR_BLOCKS}")
    if blocks is None and parameters is None and said:
        warnings.warn(f"{said}.", stacklevel=3)
    if not parts:
        raise ValueError("`parameters` (or `blocks`) must leave a linear or convolutional layer to prune.")
    return parts


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer whose inputs and weights can be laid out as rows.

    The output projection of `nn.MultiheadAttention` is none: its weight is used without a call of the layer.
    """
    known = corrections.is_layer(module) and not isinstance(module, NonDynamicallyQuantizableLinear)
    return known and isinstance(module._parameters.get("weight"), nn.Parameter)


def _layers(root: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return name of a weight -> its layer, without empty weights, and those with several places in the network."""
    owners = Counter(
        id(parameter)
        for _, module in root.named_modules(remove_duplicate=False)
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return {
        joined(path, leaf): module
        for path, module in modules.items()
        for leaf, parameter in plain_parameters(module)
        if owners[id(parameter)] == 1 and ((leaf == "weight" and is_layer(module)) or is_stack(module, leaf))
        if isinstance(parameter, UninitializedParameter) or parameter.numel()
    }


def is_stack(module: nn.Module, leaf: str) -> bool:
    """Return whether a parameter stacks the matrices of experts, which no call of a layer of their own reads."""
    layout = layout_of(module, leaf) if kind_of(module) is EXPERTS else None
    return layout is not None and layout.is_oriented


def weight_of(name: str, layer: nn.Module) -> nn.Parameter:
    """Return a weight by its qualified name and its module."""
    return layer.get_parameter(name.rpartition(".")[2])


def _blocks(
    modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module], asked: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Return name -> block; none lies inside another."""
    if asked is None:
        lists = _lists_of_blocks(modules, layers)
        return {name: block for path in lists for name, block in _children(path, modules[path])}
    found: dict[str, nn.Module] = {}
    for pattern in [asked] if isinstance(asked, str) else asked:
        fits = [path for path in modules if path and fnmatchcase(path, pattern)]
        if not fits:
            near = ", ".join([path for path, module in modules.items() if isinstance(module, nn.ModuleList)][:3])
            raise ValueError(f"`blocks` (={pattern!r}) must name modules of the network{near and f', such as {near}'}.")
        for path in fits:
            is_list = isinstance(modules[path], nn.ModuleList) or _is_list_of_blocks(path, modules[path], layers)
            found |= dict(_children(path, modules[path])) if is_list else {path: modules[path]}
    return {name: block for name, block in found.items() if not any(_is_inside(name, other) for other in found)}


def _require_own_weights(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if two blocks of a ModuleList share the weight of a layer."""
    for path, blocks in modules.items():
        owners: dict[int, tuple[str, str]] = {}
        inside = blocks.named_modules(remove_duplicate=False) if isinstance(blocks, nn.ModuleList) else ()
        for name, module in inside:
            block, weight = name.split(".")[0], f"{path}.{name}.weight".lstrip(".")
            if is_layer(module):
                other, first = owners.setdefault(id(module.weight), (block, weight))
                if other != block:
                    raise ValueError(
                        f"`blocks` ({first!r} and {weight!r}, one weight) must not share weights; name the weights to "
                        "prune in `parameters`."
                    )


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield from ((f"{path}.{name}" if path else name, child) for name, child in module.named_children())


def _lists_of_blocks(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of the lists whose children are blocks; none lies inside another."""
    lists = _outermost([path for path, module in modules.items() if _is_list_of_blocks(path, module, layers)])
    left = [weight for weight in layers if not any(weight.startswith(f"{path}.") for path in lists if path)]
    if "" in lists or not left:
        return lists
    mixed = [
        path
        for path, module in modules.items()
        if _repeats_classes(module) and (lists or _holds_several_layers(path, module, layers))
    ]
    large = [
        path
        for path in mixed
        if 2 * _size([name for name in layers if name.startswith(f"{path}.")], layers) > _size(layers, layers)
        and any(name.startswith(f"{path}.") for name in left)
    ]
    found = {*lists, *large}
    return _outermost([path for path in modules if path in found])


def _in_lists(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the weights below a ModuleList or ModuleDict that holds no blocks."""
    blocks = _lists_of_blocks(modules, layers)
    lists = {path for path, module in modules.items() if isinstance(module, nn.ModuleList | nn.ModuleDict)}
    inner = {path for path in lists if not any(path == other or _is_inside(other, path) for other in blocks)}
    return frozenset(
        weight for weight in layers if any(weight[:end] in inner for end, each in enumerate(weight) if each == ".")
    )


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(_is_inside(path, other) for other in paths)]


def _repeats_classes(module: nn.Module) -> bool:
    """Return whether a module is a ModuleList of modules with a forward, of more modules than classes."""
    children = list(module.children())
    have_forward = not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children)
    is_repeated = len({type(child) for child in children}) < len(children)
    return isinstance(module, nn.ModuleList) and have_forward and is_repeated


def _holds_several_layers(path: str, module: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    """Return whether each child of a module has two or more layers inside, as a block has."""
    return all(sum(weight.startswith(f"{name}.") for weight in layers) > 1 for name, _ in _children(path, module))


def _size(names: Iterable[str], layers: Mapping[str, nn.Module]) -> int:
    return sum(weight_of(name, layers[name]).numel() for name in names)


def _is_list_of_blocks(path: str, module: nn.Module, layers: Mapping[str, nn.Module]) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = dict(_children(path, module))
    kinds = {type(child) for child in children.values()}
    inside = [any(weight.startswith(f"{name}.") for weight in layers) for name in children]
    least = 1 if isinstance(module, nn.ModuleList) else 2
    no_block = any(is_layer(child) or isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children.values())
    return len(children) >= least and len(kinds) == 1 and all(inside) and not no_block


def _usual(layers: Iterable[str], blocks: Iterable[str], usual: Sequence[str]) -> list[str]:
    """Return the weights of layers that are pruned where none is named, in the order of the network."""
    inside = [weight for weight in layers if any(weight.startswith(f"{name}.") for name in blocks)]
    return [weight for weight in (inside if blocks else layers) if weight in usual]


def _named(model: nn.Module, layers: Mapping[str, nn.Module], parameters: Iterable[str]) -> list[str]:
    """Return the weights of layers that names or patterns select, in the order of the network."""
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        require_name(model, pattern)
        if not any(fnmatchcase(weight, pattern) for weight in layers):
            raise ValueError(
                f"`parameters` (={pattern!r}) must name weights of linear or convolutional layers that one module "
                f"alone holds; such as {', '.join([*layers][:3])}; in a sweep, pass prune.exclude=[{pattern}]."
            )
    return [weight for weight in layers if any(fnmatchcase(weight, pattern) for pattern in patterns)]
