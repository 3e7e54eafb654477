"""Construction of the smaller network: a copy of the modules with smaller parameters, or a rewritten graph.

Constant outputs of removed channels are added to the biases of the layers that read them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from pruning.compact.rewriting import Decision, Rewrite, apply_rewrites, call_functions
from pruning.graph.label_flow import Flow
from pruning.graph.labels import Fields, Site, along
from pruning.graph.tracing import CONVOLUTIONS, arguments, in_module, name_of
from pruning.holding.copies import values_with_history


@dataclass(frozen=True)
class Fold:
    """Constants of removed channels that are added to a bias.

    Args:
        weight: name of the layer's weight.
        bias: name of the bias; None if the layer has none and gets a new one.
        added: value added to each output of the whole layer, before outputs are removed; float64.
        outputs: labels of these outputs.
        channels: number of removed channels with a constant.
    """

    weight: str
    bias: str | None
    added: Tensor
    outputs: Tensor
    channels: int

    @property
    def name(self) -> str:
        """Name of the bias, also if it is new."""
        return self.bias or f"{self.weight.rpartition('.')[0]}.bias".lstrip(".")


def folds(flow: Flow, decision: Decision) -> list[Fold]:
    """Return the additions to biases that replace the constants of removed channels."""
    found = []
    for site in flow.sites:
        gone = ~decision.keeps(site.inputs) & site.constant.isfinite() & (site.constant != 0)
        if site.weight is None or not gone.any():
            continue
        added = _sum(flow, site, torch.where(gone, site.constant, 0.0))
        if not added.any():
            continue
        name = None if site.bias is None else str(site.bias.target)
        found.append(Fold(str(site.weight.target), name, added, site.outputs, int(gone.sum())))
    return found


def _sum(flow: Flow, site: Site, constant: Tensor) -> Tensor:
    assert site.weight is not None
    weight = flow.value(site.weight)
    if name_of(site.node) not in CONVOLUTIONS:
        return (weight.T if name_of(site.node) == "addmm" else weight) @ constant
    groups = int(arguments(site.node)["groups"])
    rows = weight.flatten(2).sum(2).reshape(groups, len(weight) // groups, -1)
    return (rows @ constant.reshape(groups, -1, 1)).flatten()


def smaller_module(
    flow: Flow, decision: Decision, given: Sequence[Fold], changes: Sequence[Rewrite], dtype: torch.dtype | None = None
) -> nn.Module:
    """Build the smaller network from the network's own modules; its class and its names stay the same."""
    whole = flow.traced.model
    model = copy.deepcopy(whole, values_with_history(whole)).to(dtype)
    shrink_tensors(model, flow, decision, given)
    numbers: dict[str, dict[Any, set[Any]]] = {}
    for change in changes:
        for old, new in change.numbers:
            key = tuple(old) if isinstance(old, list) else old
            own = numbers.setdefault(in_module(change.node), {}).setdefault(key, set())
            own.add(tuple(new) if isinstance(new, list) else new)
    for path, module in model.named_modules():
        _refit(module, numbers.get(path, {}))
    return model


def smaller_graph(
    flow: Flow, decision: Decision, given: Sequence[Fold], changes: Sequence[Rewrite], dtype: torch.dtype | None = None
) -> fx.GraphModule:
    """Build the smaller network from the traced graph; parameters keep their names."""
    graph = copy.deepcopy(flow.traced.graph).to(dtype)
    shrink_tensors(graph, flow, decision, given)
    here = {node.name: node for node in graph.graph.nodes}
    moved = [
        Rewrite(here[change.node.name], change.target, fx.map_arg(change.arguments, lambda n: here[n.name]), [])
        for change in changes
    ]
    for fold in given:
        if fold.bias is None:
            for node in list(graph.graph.nodes):
                if node.op == "get_attr" and node.target == fold.weight:
                    with graph.graph.inserting_after(node):
                        bias = graph.graph.get_attr(fold.name)
                    (user,) = node.users
                    user.args = (*user.args[:2], bias, *user.args[3:])
    apply_rewrites(graph.graph, moved)
    call_functions(graph.graph)
    graph._tracer_cls = None  # the tracer class of torch.export cannot be pickled
    graph.recompile()
    return graph


def shrink_tensors(model: nn.Module, flow: Flow, decision: Decision, given: Sequence[Fold]) -> None:
    """Add constants to the biases of a copy of the network, and remove entries from its tensors."""
    fields = fields_of(flow, model)
    for fold in given:
        _fold(model, fold)
        if fold.bias is None:
            fields[fold.name] = [along(fold.outputs, 0, 1)]
    done: dict[int, Tensor] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        for store in (module._parameters, module._buffers):
            for leaf, tensor in store.items():
                name = f"{path}.{leaf}" if path else leaf
                if tensor is None:
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = _taken(tensor, decision, fields.get(name, []))
                    done[id(done[id(tensor)])] = done[id(tensor)]
                store[leaf] = done[id(tensor)]


def fields_of(flow: Flow, model: nn.Module) -> dict[str, Fields]:
    """Return name -> fields of each parameter and buffer of the network or a copy, under all of its names."""
    fields = {str(node.target): flow.fields[node] for node in flow.fields if node.op == "get_attr"}
    by_tensor = {id(flow.traced.tensor(name)): own for name, own in fields.items()}
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    names = [name for each in tensors for name, _ in each]
    return {name: fields.get(name) or by_tensor.get(id(_find(flow, name)), []) for name in names}


def _find(flow: Flow, name: str) -> Tensor | None:
    try:
        return flow.traced.tensor(name)
    except AttributeError:
        return None


def _taken(tensor: Tensor, decision: Decision, fields: Fields) -> Tensor:
    left = decision.taken(tensor.detach(), fields)
    if left.shape == tensor.shape:
        return tensor
    left = left.contiguous()
    return nn.Parameter(left, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else left


def _fold(model: nn.Module, fold: Fold) -> None:
    path, _, leaf = fold.name.rpartition(".")
    module = model.get_submodule(path)
    weight = model.get_parameter(fold.weight)
    bias = module._parameters.get(leaf)
    added = fold.added.to(weight.device)
    if bias is None:
        module.register_parameter(leaf, nn.Parameter(added.to(weight.dtype)))
    else:
        with torch.no_grad():
            bias.copy_((bias.double() + added).to(bias.dtype))


def _refit(module: nn.Module, numbers: dict[Any, set[Any]]) -> None:
    """Update a module's attributes that hold sizes."""
    for name, value in list(vars(module).items()):
        new = numbers.get(value) if isinstance(value, int | tuple) and not isinstance(value, bool) else None
        if new is not None and len(new) == 1:
            setattr(module, name, next(iter(new)))
    weight = module._parameters.get("weight")
    if weight is None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, _ConvNd):
        first, second = weight.shape[0], weight.shape[1] * module.groups
        if module.transposed:
            module.in_channels, module.out_channels = first, second
        else:
            module.out_channels, module.in_channels = first, second
    elif isinstance(module, _NormBase):
        module.num_features = len(weight)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(weight)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.normalized_shape = tuple(weight.shape)
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(weight)
