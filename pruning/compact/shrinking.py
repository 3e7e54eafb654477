"""`pruning.shrink`: build the smaller network, compare its outputs with the masked network's, and report.

The smaller network is a copy of the modules with smaller parameters, or a rewritten graph. Constant outputs of removed
channels are added to the biases of the layers that read them.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from pruning.compact.other_inputs import OtherInputs
from pruning.compact.rewriting import Decision, Rewrite, apply_rewrites, call_functions, decide_kept_labels, rewrites
from pruning.compact.traced_network import TracedNetwork
from pruning.compact.training_calls import not_run, pin_read_in_training
from pruning.graph.constant_tensors import cast
from pruning.graph.label_flow import FIXED, ONLY_ONE, Fields, Flow, Site, along
from pruning.graph.label_rules import flow_of
from pruning.graph.operations import CONVOLUTIONS, FILLED, arguments, described, in_module, name_of
from pruning.graph.traced_parts import graph_of, retraced, traced_in_parts
from pruning.graph.tracing import (
    Example,
    Sizes,
    Traced,
    arguments_of,
    difference_told,
    first_line,
    output_difference,
    outputs_of,
    plain_copy,
    quiet,
)
from pruning.holding.copies import values_with_history
from pruning.layouts import layout_of, natural_layout
from pruning.measure.macs import Inputs
from pruning.measure.matrix_weights import considered
from pruning.measure.report import parameters
from pruning.mixtures.survivors import drop_removed_experts, leaves_experts_out


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


Network = TypeVar("Network", bound=nn.Module)
Form: TypeAlias = Literal["module", "graph", "unchanged"]

OUTSIDE = "it is outside of the parts that can be traced"
COMPUTED = "its weight is computed in each forward, as under a parametrization"
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""dtype of the computation -> largest allowed difference of outputs, relative to the largest output."""


@dataclass(frozen=True)
class Shrunk:
    """Report of `shrink`, as plain data.

    Args:
        before, after: number of parameters of the network.
        removed: name -> (shape before, shape after) of each parameter and buffer that is smaller.
        left: name of each smaller tensor -> bool that broadcasts to the shape before: True where entries are kept.
        folded: name of a bias -> number of removed channels whose constant output was added to it; some biases are
            new.
        kept: name of a weight -> reason -> number of its empty outputs that were kept for that reason; a computed
            weight is named by its layer and operation.
        form: "module": the network's own class; "graph": a `torch.fx.GraphModule` of its operations for evaluation, in
            place of the network or of a part of it; "unchanged": a copy.
        parts: name of each part that was traced -> its form; "" is the network itself.
        outside: name -> number of entries of each matrix weight outside of these parts; they stay.
        tried: why each earlier form was rejected, why this form was compared in float32 alone, inputs at which it
            was not compared, and modules that the example's call does not run.
        error: dtype -> largest difference from the masked network's outputs, relative to the largest output.
    """

    before: int
    after: int
    removed: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    left: Mapping[str, Tensor]
    folded: Mapping[str, int]
    kept: Mapping[str, Mapping[str, int]]
    form: Form
    parts: Mapping[str, Form]
    outside: Mapping[str, int]
    tried: tuple[str, ...]
    error: Mapping[str, float]


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
    model = _converted(copy.deepcopy(whole, values_with_history(whole)), dtype)
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
    graph = _converted(copy.deepcopy(analysis.flow.traced.graph), dtype)
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
            found[part.path] = _converted(TracedNetwork.of(own, part.guard), dtype)
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


def shrink(model: nn.Module, example: Example) -> nn.Module:
    """Remove the channels, heads and experts that pruning emptied, and return a smaller network with the same outputs.

        smaller = pruning.shrink(model, images[:2])
        smaller.shrunk.removed, smaller.shrunk.kept         # removed channels; empty channels kept, and why

    `shrink` follows values through the network. A channel is removed if it is 0, if it is a constant that the biases
    of its readers can absorb, or if nothing reads it. Experts that a router leaves out go first. The result has the
    model's own class and names if the model's forward takes its sizes from its modules; else it is a
    `torch.fx.GraphModule` for evaluation, which refuses inputs for which the example's operations do not hold. The
    outputs are compared with the masked network's, on the example and on noise in float32 and float64, and on inputs of
    other sizes, also where conditions on sizes have another outcome. If they differ by more than 1e-5 (float32) or
    1e-10 (float64) of the largest output, an unshrunk copy is returned. A network that runs in only one of these
    dtypes, for example because its forward makes a constant of that dtype, is compared in that one, and so is a graph
    that fails in float64. Flags of the forward with which the smaller network computes something else, and modules that
    the example's call does not run, are named in a warning.

    If `torch.export` cannot trace the model whole, its largest modules that can be traced become smaller, and all else
    stays: `smaller.shrunk.parts` and `outside`.

    Args:
        model: pruned or not; it is not changed. Its outputs in evaluation mode are preserved.
        example: input of the network: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.

    Returns:
        a network in evaluation mode; its attribute `shrunk` is the report, a `Shrunk`.

    Raises:
        ValueError: `torch.export` can trace neither the model nor a part of it, or it runs neither in float32 nor in
            float64.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    plain = plain_copy(model)
    trace, experts = _traced_without_experts(plain, example)
    comparison = Comparison(plain, arguments_of(example), trace)
    tried = [f"the whole network: {trace.refusal}"] * bool(trace.refusal)
    ways = {part.path: 0 for part in trace.parts}
    while ways:
        forms = {path: FORMS[way][0] for path, way in ways.items()}
        trace, failures = retraced(trace, {path: FORMS[way][1] for path, way in ways.items()})
        counts = Counter(part.path for part in trace.parts)
        failures |= {path: SEVERAL for path, form in forms.items() if form == "graph" and counts[path] > 1}
        analysis = None
        if not failures:
            analysis, failures, notes, errors = _compared(comparison, trace, forms)
        if analysis and not failures:
            tried += [*_said(forms, notes), *comparison.untried]
            smaller = comparison.relaxed(analysis.build())
            doubts = [analysis.not_run(), *comparison.flags] if parameters(smaller) < parameters(plain) else []
            for said in filter(None, doubts):
                tried.append(said)
                warnings.warn(f"shrink: {said}", stacklevel=2)
            return _finished(smaller, model, plain, analysis, experts, tried, errors)
        tried += _said(forms, failures)
        ways = {path: way + (path in failures) for path, way in ways.items()}
        ways = {path: way for path, way in ways.items() if way < len(FORMS)}
    return _finished(plain, model, plain, None, {}, tried, {})


def _traced_without_experts(plain: nn.Module, example: Example) -> tuple[Traced, dict[str, tuple[int, Tensor]]]:
    """Return the trace of a network without the experts that routers leave out, and their places."""
    if not leaves_experts_out(plain):
        return traced_in_parts(plain, example, sizes="batch"), {}
    fewer = copy.deepcopy(plain, values_with_history(plain))
    experts = drop_removed_experts(fewer)
    return traced_in_parts(fewer, example, sizes="batch"), experts


FORMS: tuple[tuple[Form, Sizes], ...] = (("module", "batch"), ("graph", "any"), ("graph", "batch"))
"""Forms of a part, in the order in which they are tried, and the sizes for which it is traced."""


def _compared(
    comparison: Comparison, trace: Traced, forms: Mapping[str, Form]
) -> tuple[Analysis | None, dict[str, str], dict[str, str], dict[torch.dtype, float]]:
    """Return the analysis of a smaller network, and its comparison.

    If the network fails around its parts, those are rejected that fail alone, else those in graph form, else all.
    """
    analysis = None
    try:
        analysis = Analysis.of(trace, forms)
        reasons, notes, errors = comparison.of(analysis)
    except Exception as error:  # a forward may raise anything for sizes that it was not written for
        reasons, notes, errors = {"" if len(forms) > 1 else next(iter(forms)): first_line(error)}, {}, {}
    if "" in reasons and "" not in forms:
        around, sizes = reasons.pop(""), {part.path: part.sizes for part in trace.parts}
        for path, form in forms.items() if len(forms) > 1 and not reasons else ():
            reasons |= _compared(comparison, retraced(trace, {path: sizes[path]})[0], {path: form})[1]
        graphs = [path for path, form in forms.items() if form == "graph"]
        reasons = reasons or dict.fromkeys(graphs or forms, f"the network around it: {around}")
    return analysis, reasons, notes, errors


SEVERAL = "it is called in ways for which no single graph holds"


def _said(forms: Mapping[str, Form], reasons: Mapping[str, str]) -> list[str]:
    return [f"`{path}`, {forms[path]}: {why}" if path else f"{forms[path]}: {why}" for path, why in reasons.items()]


def _tolerances(analysis: Analysis) -> dict[torch.dtype, float]:
    """Return the tolerance of each dtype; a network that casts to float32 itself gets float32's for float64 too.

    So does a graph with constants, which were traced in float32.
    """
    nodes = analysis.flow.traced.graph.graph.nodes
    casts = any(
        name_of(node) in ("to", "_to_copy") and torch.float32 in (*node.args, *node.kwargs.values()) for node in nodes
    )
    casts |= analysis.form == "graph" and any(node.meta["val"].dtype is torch.float32 for node in analysis.flow.made)
    return dict.fromkeys(TOLERANCES, max(TOLERANCES.values())) if casts else TOLERANCES


def _finished(
    smaller: nn.Module,
    model: nn.Module,
    plain: nn.Module,
    analysis: Analysis | None,
    experts: Mapping[str, tuple[int, Tensor]],
    tried: list[str],
    errors: Mapping[torch.dtype, float],
) -> nn.Module:
    """Attach the report, freeze the parameters that are frozen in `plain`, and move to the model's device."""
    shapes, left = ({name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (plain, smaller))
    removed = {name: (shapes[name], shape) for name, shape in left.items() if name in shapes and shapes[name] != shape}
    smaller.shrunk = Shrunk(  # type: ignore[assignment]
        parameters(plain),
        parameters(smaller),
        removed,
        _left(analysis, removed, experts, shapes) if analysis else {},
        {fold.name: fold.channels for fold in analysis.folds} if analysis else {},
        analysis.empty_and_kept() if analysis else {},
        analysis.form if analysis else "unchanged",
        dict(analysis.forms) if analysis else {},
        analysis.outside() if analysis else {},
        tuple(tried),
        {str(dtype).removeprefix("torch."): error for dtype, error in errors.items()},
    )
    frozen = {name for name, each in plain.named_parameters() if not each.requires_grad}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen and parameter.is_floating_point())
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return smaller.to(device).eval()


def _left(
    analysis: Analysis,
    removed: Iterable[str],
    experts: Mapping[str, tuple[int, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Return name -> bool, where entries of the masked network are kept, also in tensors of experts."""
    found = analysis.left(removed)
    for name, (dim, kept) in experts.items():
        whole = torch.zeros(shapes[name], dtype=torch.bool)
        own = found.get(name, torch.ones((), dtype=torch.bool))
        size = [len(kept) if each == dim else length for each, length in enumerate(whole.shape)]
        found[name] = whole.index_copy(dim, kept, own.expand(size))
    return found


class Comparison:
    """Comparison of smaller networks with the masked one: its parts, and the network as a whole.

    Outputs of the parts are compared in float32 and float64, on the example and on noise; a forward may make constants
    of one dtype that fail with the other. If the network has other operations around its parts, these may order close
    values, as detectors do, so its outputs are compared in the wider dtype alone; on inputs of other sizes, which are
    many, only where they differ in float32.

    Args:
        model: the masked network.
        given: inputs of the example.
        trace: the parts, of a network without the experts that routers leave out.
    """

    def __init__(self, model: nn.Module, given: Inputs, trace: Traced) -> None:
        calls: dict[str, list[Inputs]] = {}
        for part in trace.parts:
            calls.setdefault(part.path, []).extend(part.calls)
        self._calls = {
            path: [*own, *(tree_map(_noise, each) for each in own)] for path, own in {**calls, "": [given]}.items()
        }
        self._expected = self._expectations(model, trace.model)
        self._whole = "" in calls
        self._model, self._dtype = model, None
        if not self._whole:
            self._dtype = next(iter(self._expected[""]))
            self._expected[""] = dict([self._expected[""].popitem()])
            model = _converted(copy.deepcopy(model, values_with_history(model)), self._dtype)
            given = _cast_all(given, self._dtype)
        self._others = OtherInputs(model, given)

    def _expectations(self, model: nn.Module, fewer: nn.Module) -> dict[str, dict[torch.dtype, list[list[Tensor]]]]:
        """Return path -> dtype -> outputs for the dtypes that a part runs in."""
        expected: dict[str, dict[torch.dtype, list[list[Tensor]]]] = {path: {} for path in self._calls}
        reasons: dict[str, str] = {}
        paths = [path for path in self._calls if path]
        for dtype, network, own in ((d, *each) for d in TOLERANCES for each in ((model, [""]), (fewer, paths))):
            converted = _converted(copy.deepcopy(network), dtype) if own else network
            for path in own:
                try:
                    expected[path][dtype] = self._outputs(converted, path, dtype)
                except Exception as error:  # a forward may raise anything
                    reasons[path] = first_line(error)
        for path in (path for path, own in expected.items() if not own):
            raise ValueError(
                f"{type(model.get_submodule(path)).__name__} runs neither in float32 nor in float64 ({reasons[path]}), "
                "so the outputs of the smaller network cannot be checked; use real numbers, and create tensors in its "
                "forward with the dtype of its inputs."
            )
        return expected

    def _outputs(self, model: nn.Module, path: str, dtype: torch.dtype) -> list[list[Tensor]]:
        part = model.get_submodule(path).eval()
        return [outputs_of(part, _cast_all(given, dtype)) for given in self._calls[path]]

    def of(self, analysis: Analysis) -> tuple[dict[str, str], dict[str, str], dict[torch.dtype, float]]:
        """Compare a smaller network.

        Returns:
            path of a part, or "" -> why it is rejected; path -> why it is compared in float32 alone; dtype -> largest
            difference of outputs, relative to the largest output.
        """
        found, failed = self._errors(analysis.build)
        within = _tolerances(analysis)
        reasons, notes = dict[str, str](), dict[str, str]()
        for path, errors in found.items():
            own = within if path in analysis.forms else dict.fromkeys(TOLERANCES, max(TOLERANCES.values()))
            if any(error > max(own[dtype], self._rounding(path, dtype)) for dtype, error in errors.items()):
                reasons[path] = difference_told(max(errors.values()))
            elif not errors:
                reasons[path] = failed[path]
            elif path in failed:
                notes[path] = f"compared in float32 alone, because it fails in float64: {failed[path]}"
        if not reasons and (elsewhere := self._elsewhere(analysis)):
            reasons[""] = elsewhere
        largest = {
            dtype: max(each[dtype] for each in found.values() if dtype in each)
            for each in found.values()
            for dtype in each
        }
        return reasons, notes, largest

    def _elsewhere(self, analysis: Analysis) -> str:
        """Return where a smaller network differs on inputs of other sizes; empty if it agrees."""
        smaller, within = analysis.build(self._dtype), max(TOLERANCES.values())
        widest, model = next(iter(self._expected[""])), self._model
        if self._dtype in (None, widest):
            return self._others.disagreement(smaller, within)

        def wider(given: Inputs) -> tuple[nn.Module, nn.Module, Inputs]:
            masked = _converted(copy.deepcopy(model, values_with_history(model)), widest)
            return masked, analysis.build(widest), _cast_all(given, widest)

        return self._others.disagreement(smaller, within, wider)

    def _errors(
        self, build: Callable[[torch.dtype], nn.Module]
    ) -> tuple[dict[str, dict[torch.dtype, float]], dict[str, str]]:
        """Return path -> dtype -> largest difference of outputs, and why a part failed.

        A graph whose operations make tensors in float32 fails in float64 alone.
        """
        found: dict[str, dict[torch.dtype, float]] = {path: {} for path in self._calls}
        failed: dict[str, str] = {}
        for dtype in TOLERANCES:
            paths = [path for path in self._calls if dtype in self._expected[path] and path not in failed]
            for path, error in self._differences(build(dtype), paths, dtype) if paths else ():
                if isinstance(error, str):
                    failed[path] = error
                else:
                    found[path][dtype] = error
        return found, failed

    def _differences(
        self, smaller: nn.Module, paths: Iterable[str], dtype: torch.dtype
    ) -> Iterator[tuple[str, float | str]]:
        """Yield each part with the largest difference of its outputs, or with the reason why it failed."""
        for path in paths:
            try:
                outputs = self._outputs(smaller, path, dtype)
                yield path, max(map(output_difference, outputs, self._expected[path][dtype]))
            except Exception as error:  # a forward may raise anything
                yield path, first_line(error)

    def _rounding(self, path: str, dtype: torch.dtype) -> float:
        """Return how far two results in float32 may lie apart: twice the distance of the masked one from float64."""
        expected = self._expected[path]
        if dtype is torch.float64 or len(expected) < len(TOLERANCES):
            return 0.0
        return 2 * max(map(output_difference, *expected.values()))

    @property
    def untried(self) -> list[str]:
        """Sentences that name the inputs at which outputs are not compared."""
        return [f"not compared for {each}, {why}" for each, why in self._others.untried.items()]

    @property
    def flags(self) -> list[str]:
        """Sentences that name flags with which the smaller network computes something else."""
        return [
            f"with `{flag}`, which the example's call does not have, {reason}: make another smaller network from the "
            "masked one for such calls, with an example that has it."
            for flag, reason in self._others.flags.items()
        ]

    def relaxed(self, smaller: nn.Module) -> nn.Module:
        """Return a smaller network in its final form, without conditions on sizes at which it agrees, too."""
        if isinstance(smaller, TracedNetwork):
            self._others.relax(smaller, max(TOLERANCES.values()))
        return smaller


def _noise(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    generator = torch.Generator().manual_seed(0)
    return torch.randn(leaf.shape, generator=generator).to(leaf.device, leaf.dtype)


def _cast_all(given: Inputs, dtype: torch.dtype) -> Inputs:
    found: Inputs = tree_map(partial(cast, dtype=dtype), given)
    return found


def _converted(model: Network, dtype: torch.dtype | None) -> Network:
    """Convert a network to a dtype if one is given; `Module.to` would make complex tensors real."""
    return model._apply(partial(cast, dtype=dtype)) if dtype else model  # type: ignore[no-untyped-call]
