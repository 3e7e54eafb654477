"""Build a smaller network from a traced one: which channels stay, where constants go, and its two forms.

The smaller network is a copy of the modules with smaller parameters, or a rewritten graph. Constant outputs of removed
channels are added to the biases of the layers that read them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from pruning.compact.rewriting import Decision, Rewrite, apply_rewrites, call_functions, decide_kept_labels, rewrites
from pruning.compact.traced_network import TracedNetwork
from pruning.compact.training_calls import not_run, pin_read_in_training
from pruning.graph.constant_tensors import cast
from pruning.graph.label_flow import FIXED, ONLY_ONE, Fields, Flow, Site, along
from pruning.graph.label_rules import flow_of
from pruning.graph.operations import CONVOLUTIONS, FILLED, arguments, described, in_module, name_of
from pruning.graph.traced_parts import graph_of
from pruning.graph.tracing import (
    Traced,
    quiet,
)
from pruning.holding.copies import values_with_history
from pruning.layouts import layout_of, natural_layout
from pruning.measure.matrix_weights import considered

Network = TypeVar("Network", bound=nn.Module)
Form: TypeAlias = Literal["module", "graph", "unchanged"]

OUTSIDE = "it is outside of the parts that can be traced"
COMPUTED = "its weight is computed in each forward, as under a parametrization"


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
    weight = flow.value(site.weight).double()
    if name_of(site.node) not in CONVOLUTIONS:
        return (weight.T if name_of(site.node) == "addmm" else weight) @ constant
    groups = int(arguments(site.node)["groups"])
    rows = weight.flatten(2).sum(2).reshape(groups, len(weight) // groups, -1)
    return (rows @ constant.reshape(groups, -1, 1)).flatten()


def fields_of(flow: Flow, model: nn.Module) -> dict[str, Fields]:
    """Return name -> fields of each parameter and buffer of the network or a copy, under all of its names."""
    fields = {str(node.target): flow.fields[node] for node in flow.fields if node.op == "get_attr"}
    by_tensor = {id(flow.traced.tensor(name)): own for name, own in fields.items()}
    whole = _tensors(flow.traced.model)
    return {name: fields.get(name) or by_tensor.get(id(whole.get(name)), []) for name in _tensors(model)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


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
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        _refit_recurrent(module)
        return
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


def _refit_recurrent(module: nn.RNNBase | nn.RNNCellBase) -> None:
    several = isinstance(module, nn.RNNBase)
    inputs, states = (module.get_parameter(f"weight_{end}{'_l0' * several}") for end in ("ih", "hh"))
    module.input_size, module.hidden_size = inputs.shape[1], states.shape[1]
    if isinstance(module, nn.RNNBase):
        if module.proj_size:
            module.proj_size, module.hidden_size = module.get_parameter("weight_hr_l0").shape
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


@dataclass(frozen=True)
class Analysis:
    """Removable channels of a traced network: labels, folds and rewrites, for a smaller network.

    `forms` are the forms of its parts, `in_training` the modules that run only with the training flag set.
    """

    forms: Mapping[str, Form]
    flow: Flow
    decision: Decision
    folds: list[Fold]
    rewrites: list[Rewrite]
    in_training: Collection[str]

    @classmethod
    def of(cls, trace: Traced, forms: Mapping[str, Form]) -> Analysis:
        """Decide which channels of a traced network are kept."""
        flow = flow_of(trace)
        in_training = pin_read_in_training(flow, _classes(forms))
        decision = decide_kept_labels(flow)
        return cls(forms, flow, decision, folds(flow, decision), rewrites(flow, decision), in_training)

    def not_run(self) -> str:
        """Return a sentence that names modules that no call of the example runs; empty if there are none."""
        return not_run(self.flow, _classes(self.forms), self.in_training)

    @property
    def form(self) -> Form:
        """Form of the whole network."""
        return "graph" if "graph" in self.forms.values() else "module"

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the smaller network, converted to `dtype` if one is given."""
        with quiet():
            graphs = smaller_graphs(self, dtype) if self.form == "graph" else {}
            if "" in graphs:
                return graphs[""]
            model = smaller_module(self, dtype)
            for path, graph in graphs.items():
                parent, _, leaf = path.rpartition(".")
                setattr(model.get_submodule(parent), leaf, graph)
            return model

    def left(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return name of a parameter or buffer -> bool, where its entries are kept; only tensors with labels."""
        fields = fields_of(self.flow, self.flow.traced.model)
        masks = {name: self.decision.mask(fields.get(name, [])) for name in names}
        return {name: mask for name, mask in masks.items() if mask is not None}

    def empty_and_kept(self) -> dict[str, dict[str, int]]:
        """Return name of a weight -> reason -> number of outputs without weights that were kept."""
        found = {}
        for site in self.flow.sites:
            if site.weight is None or site.reads is None:
                continue
            roots = self.decision.labels.roots(site.outputs[~site.reads.any(1)])
            reasons = Counter(self._reason(site, root) for root in roots[self.decision.kept[roots]].tolist())
            if reasons:
                is_parameter = site.weight.op == "get_attr"
                found[str(site.weight.target) if is_parameter else described(site.node)] = dict(reasons)
        for name in self.outside():
            path, _, leaf = name.rpartition(".")
            weight = self.flow.traced.tensor(name)
            layout = layout_of(self.flow.traced.model.get_submodule(path), leaf) or natural_layout(weight.ndim)
            if empty := int((layout.sums((weight != 0).float()) == 0).sum()):
                found[name] = {OUTSIDE: empty}
        return found

    def outside(self) -> dict[str, int]:
        """Return name -> number of entries of each matrix weight outside of the parts that are traced."""
        if not self.flow.traced.refusal:
            return {}
        read = {str(node.target) for node in self.flow.fields if node.op == "get_attr"}
        return dict(considered(self.flow.traced.model, read).dense)

    def _reason(self, site: Site, root: int) -> str:
        """Return the reason for keeping an output of a site."""
        if root == FIXED:
            return ONLY_ONE if len(site.outputs) == 1 else COMPUTED
        return self.decision.reasons[root]


def _classes(forms: Mapping[str, Form]) -> list[str]:
    return [path for path, form in forms.items() if form == "module"]


def smaller_module(analysis: Analysis, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the smaller network from the network's own modules; its class and its names stay the same."""
    whole = analysis.flow.traced.model
    model = converted(copy.deepcopy(whole, values_with_history(whole)), dtype)
    shrink_tensors(model, analysis)
    numbers: dict[str, dict[Any, set[Any]]] = {}
    for change in analysis.rewrites:
        for old, new in change.numbers:
            key = tuple(old) if isinstance(old, list) else old
            own = numbers.setdefault(in_module(change.node), {}).setdefault(key, set())
            own.add(tuple(new) if isinstance(new, list) else new)
    for path, module in model.named_modules():
        _refit(module, numbers.get(path, {}))
    return model


def smaller_graphs(analysis: Analysis, dtype: torch.dtype | None = None) -> dict[str, TracedNetwork]:
    """Build the smaller parts that have graph form; parameters keep their names."""
    graph = converted(copy.deepcopy(analysis.flow.traced.graph), dtype)
    shrink_tensors(graph, analysis)
    here = {node.name: node for node in graph.graph.nodes}
    moved = [
        Rewrite(here[change.node.name], change.target, fx.map_arg(change.arguments, lambda n: here[n.name]), [])
        for change in analysis.rewrites
    ]
    for fold in analysis.folds:
        if fold.bias is None:
            for node in graph.graph.find_nodes(op="get_attr", target=fold.weight):
                with graph.graph.inserting_after(node):
                    bias = graph.graph.get_attr(fold.name)
                (user,) = node.users
                user.args = (*user.args[:2], bias, *user.args[3:])
    apply_rewrites(graph.graph, moved)
    for node in analysis.flow.made:
        left = analysis.decision.taken(analysis.flow.value(node), analysis.flow.fields[node])
        if name_of(node) not in FILLED and left.shape != node.meta["val"].shape:
            left = cast(left, dtype) if dtype else left.to(node.meta["val"].dtype)
            graph.register_buffer(name := f"{node.name}_kept", left)
            with graph.graph.inserting_before(here[node.name]):
                here[node.name].replace_all_uses_with(graph.graph.get_attr(name))
    call_functions(graph.graph)
    found = {}
    for number, part in enumerate(analysis.flow.traced.parts):
        if analysis.forms[part.path] == "graph":
            own = graph_of(graph, number, part) if part.path else graph
            found[part.path] = converted(TracedNetwork.of(own, part.guard), dtype)
    return found


def shrink_tensors(model: nn.Module, analysis: Analysis) -> None:
    """Add constants to the biases of a copy of the network, and remove entries from its tensors."""
    fields = fields_of(analysis.flow, model)
    for fold in analysis.folds:
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
                    done[id(tensor)] = _taken(tensor, analysis.decision, fields.get(name, []))
                    done[id(done[id(tensor)])] = done[id(tensor)]
                store[leaf] = done[id(tensor)]


def converted(model: Network, dtype: torch.dtype | None) -> Network:
    """Convert a network to a dtype if one is given; `Module.to` would make complex tensors real."""
    return model._apply(partial(cast, dtype=dtype)) if dtype else model  # type: ignore[no-untyped-call]
