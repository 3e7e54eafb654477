"""Label rules of layers and normalisations, which compute each output from several inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from pruning.graph.constant_tensors import constant_along
from pruning.graph.label_flow import Flow, Rule, pin_inputs
from pruning.graph.labels import FIXED, Fields, Site, along, covered, covering
from pruning.graph.tracing import CONVOLUTIONS, described

NAN = float("nan")


def _labels_of(flow: Flow, node: Any, dim: int, size: int, why: str) -> Tensor:
    """Return a parameter's labels along a dimension; `FIXED` for all if it has none there."""
    labels = flow.one_dim(flow.of(node), dim, why) if isinstance(node, fx.Node) else None
    return torch.full((size,), FIXED) if labels is None else labels


def _tied(flow: Flow, labels: Tensor | None, others: Tensor, why: str) -> Tensor:
    """Tie the labels of a tensor to those of a weight along the dimension that they share, and return them.

    Without labels of the tensor, those of the weight are pinned and `FIXED` is returned.
    """
    if labels is None:
        flow.labels.pin(others, why)
        return torch.full_like(others, FIXED)
    flow.labels.tie(labels, others, why)
    return labels


def _foldable(flow: Flow, constant: Tensor, weight: Any, bias: Any) -> Tensor:
    """Return the constants that may be added to a bias, NaN for the others.

    0 is always allowed. Other constants are allowed if the graph reads the weight, and the bias if there is one, only
    once, and both are parameters.
    """
    once = isinstance(weight, fx.Node) and weight.op == "get_attr" and _uses(flow, weight) == 1
    once &= bias is None or (isinstance(bias, fx.Node) and bias.op == "get_attr" and _uses(flow, bias) == 1)
    return constant if once else torch.where(constant == 0, constant, NAN)


def _uses(flow: Flow, node: fx.Node) -> int:
    """Count the reads of a parameter in the graph, under all of its names."""
    tensor = flow.traced.tensor(str(node.target))
    names = [n for n in node.graph.nodes if n.op == "get_attr" and flow.traced.tensor(str(n.target)) is tensor]
    return sum(len(each.users) for each in names)


def _linear(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    return _dense(flow, node, given["input"], given["weight"], given["bias"], 1)


def _addmm(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Linear layer whose weight has shape (inputs, outputs), like `Conv1D` of transformers."""
    bias, source, weight = given["self"], given["mat1"], given["mat2"]
    plain = given["alpha"] == 1 and given["beta"] == 1 and flow.value(bias).ndim == 1
    if not plain or weight.op != "get_attr":
        return pin_inputs(flow, node, given)
    return _dense(flow, node, source, weight, bias, 0)


def _dense(flow: Flow, node: fx.Node, source: fx.Node, weight: fx.Node, bias: Any, inputs_dim: int) -> Fields:
    values = flow.value(weight) if inputs_dim else flow.value(weight).T
    why = f"{described(node)} reads it"
    last = flow.value(source).ndim - 1
    own = _labels_of(flow, weight, inputs_dim, values.shape[1], why)
    read = _tied(flow, flow.one_dim(flow.of(source), last, why), own, why)
    written = _labels_of(flow, weight, 1 - inputs_dim, len(values), why)
    if isinstance(bias, fx.Node):
        written = _tied(
            flow, written, _labels_of(flow, bias, 0, len(values), why), f"the bias of {described(node)} stays"
        )
    live = values.isnan() | (values != 0)
    constant = _foldable(flow, constant_along(flow.value(source), last), weight, bias)
    flow.sites.append(Site(node, read, written, live, constant, why, None, weight, bias))
    left = [field for field in flow.of(source) if last not in covered(field)]
    return flow.labels.packed([*left, along(written, last, last + 1)], why)


def _convolution(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    source, weight, bias = given["input"], given["weight"], given["bias"]
    transposed = "transpose" in str(node.target) or bool(given.get("transposed"))
    groups, values = int(given["groups"]), flow.value(weight)
    why = f"{described(node)} reads it"
    if flow.value(source).ndim != values.ndim or (groups > 1 and weight.op != "get_attr"):
        fields = [*flow.of(source), *flow.of(weight), *flow.of(bias)]
        flow.pin(fields, f"{described(node)} has no batch, or weights that are computed")
        return []
    flow.pin([field for field in flow.of(weight) if max(covered(field)) > 1], why)
    rows, columns = _weight_labels(flow, weight, values.shape, groups, why)
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    read = _tied(flow, flow.one_dim(flow.of(source), 1, why), inputs.flatten(), why).reshape(groups, -1)
    if isinstance(bias, fx.Node):
        own = _labels_of(flow, bias, 0, outputs.numel(), why)
        outputs = _tied(flow, outputs.flatten(), own, f"the bias of {described(node)} stays").reshape(groups, -1)
    if groups > 1:
        if read.shape[1] == 1:
            flow.labels.tie(read, outputs, why)
        else:
            flow.shapes.grids.extend([read, outputs])
            flow.shapes.same.append((read, outputs))
    flow.sites.append(_convolution_site(flow, node, given, read, outputs, transposed))
    whole = flow.labels.packed(flow.of(source), why)
    flow.pin([field for field in whole if max(covered(field)) > 1], why)
    return flow.labels.packed([along(outputs.flatten(), 1, values.ndim)], why)


def _weight_labels(flow: Flow, weight: Any, shape: torch.Size, groups: int, why: str) -> tuple[Tensor, Tensor]:
    """Return the labels of a weight's first and second dimension, each of shape (groups, size per group)."""
    first, second = shape[:2]
    fields = flow.of(weight)
    if groups == 1:
        return _labels_of(flow, weight, 0, first, why)[None], _labels_of(flow, weight, 1, second, why)[None]
    rows = next((field for field in fields if covered(field) == {0}), None)
    both = next((field for field in fields if covered(field) == {0, 1}), None)
    labels = torch.full((first,), FIXED) if rows is None else rows.flatten()
    if second == 1:
        return labels.reshape(groups, -1), labels.reshape(groups, -1)[:, :1]
    columns = torch.full((groups, second), FIXED)
    if both is not None:
        columns = both.reshape(groups, first // groups, second)[:, 0]
    return labels.reshape(groups, -1), columns


def _convolution_site(
    flow: Flow, node: fx.Node, given: dict[str, Any], read: Tensor, written: Tensor, transposed: bool
) -> Site:
    groups, weight = len(read), flow.value(given["weight"])
    live = (weight.isnan() | (weight != 0)).flatten(2).any(2)
    reads = torch.zeros(written.numel(), read.numel(), dtype=torch.bool)
    rows = len(weight) // groups
    for group in range(groups):
        block = live[group * rows : (group + 1) * rows]
        block = block.T if transposed else block
        outputs, inputs = written.shape[1], read.shape[1]
        reads[group * outputs : (group + 1) * outputs, group * inputs : (group + 1) * inputs] = block
    source = flow.value(given["input"])
    constant = _foldable(flow, constant_along(source, 1), given["weight"], given["bias"])
    bordered = constant.isfinite() & (constant != 0) & (transposed or _pads(given.get("padding", 0)))
    bordered |= constant.isnan() & ~source.isnan().transpose(0, 1).flatten(1).any(1)
    constant = torch.where(bordered, NAN, constant)
    why = f"{described(node)} reads it"
    return Site(node, read.flatten(), written.flatten(), reads, constant, why, bordered, given["weight"], given["bias"])


def _pads(padding: Any) -> bool:
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _normalised(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """LayerNorm and RMSNorm: each output reads all inputs of its token."""
    source = given["input"]
    shape, size = flow.value(source).shape, len(given["normalized_shape"])
    why = f"{described(node)} counts it in its statistics"
    fields = flow.of(source)
    last = len(shape) - 1
    params = [given[name] for name in ("weight", "bias") if isinstance(given.get(name), fx.Node)]
    inside = [field for field in fields if covered(field) & set(range(len(shape) - size, len(shape)))]
    if size > 1 or len(inside) > 1:
        flow.pin([*inside, *(field for each in params for field in flow.of(each))], why)
        left = [field for field in fields if not any(field is each for each in inside)]
    else:
        for each in params:
            fields = flow.tie(fields, flow.of(each), shape, flow.value(each).shape, why)
        left = fields
        if covering(fields, last) is not None:
            labels = flow.one_dim(fields, last, why)
            assert labels is not None
            flow.sites.append(Site(node, labels, labels, None, torch.full((len(labels),), NAN).double(), why))
            left = flow.labels.packed(left, why)
    return left if isinstance(flow.constants.values[node], Tensor) else [left, [], []]


def _group_norm(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    source, groups = given["input"], int(given.get("num_groups") or given["group"])
    shape = flow.value(source).shape
    why = f"{described(node)} counts it in its statistics"
    fields = flow.of(source)
    for each in (given["weight"], given["bias"]):
        if isinstance(each, fx.Node):
            raised = [along(field.flatten(), 1, len(shape)) for field in flow.of(each)]
            wide = [shape[1] if dim == 1 else 1 for dim in range(len(shape))]
            fields = flow.tie(fields, raised, shape, wide, why)
    labels = flow.one_dim(fields, 1, why)
    if labels is not None:
        size = math.ceil(len(labels) / groups)
        if size > 1:
            blocks = torch.eye(groups, dtype=torch.bool).repeat_interleave(size, 0).repeat_interleave(size, 1)
            constant = torch.full((len(labels),), NAN).double()
            flow.sites.append(Site(node, labels, labels, blocks, constant, why))
        flow.shapes.grids.append(labels.reshape(groups, -1))
    fields = flow.labels.packed(fields, why)
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, [], []]


def _embedding(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    weight = given["weight"]
    flow.pin([field for field in flow.of(weight) if 0 in covered(field)], f"{described(node)} finds it by its number")
    ndim = flow.value(node).ndim
    return [along(field.flatten(), ndim - 1, ndim) for field in flow.of(weight) if covered(field) == {1}]


RULES: Mapping[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    **dict.fromkeys(["layer_norm", "rms_norm", "native_layer_norm"], _normalised),
    **dict.fromkeys(["group_norm", "native_group_norm"], _group_norm),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
}
