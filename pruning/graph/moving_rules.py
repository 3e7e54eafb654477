"""Label rules of operations that move entries, join tensors, or work on each entry or channel alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pruning.graph.label_flow import Flow, Rule, pin_inputs
from pruning.graph.labels import FIXED, Fields, along, covered, covering
from pruning.graph.tracing import (
    CHANNELWISE_NORMALISATIONS,
    MOVES,
    REDUCTIONS,
    SOFTMAXES,
    SPATIAL,
    described,
    name_of,
)


def _entrywise(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Fields:
    tensors = [each for each in node.all_input_nodes if isinstance(flow.constants.values[each], Tensor)]
    fields, shape = flow.of(tensors[0]), tuple(flow.value(tensors[0]).shape)
    for each in tensors[1:]:
        other = tuple(flow.value(each).shape)
        why = f"{described(node)} puts it together with what stays"
        fields = flow.tie(fields, flow.of(each), shape, other, why)
        shape = tuple(torch.broadcast_shapes(shape, other))  # type: ignore[no-untyped-call]
    return fields


def _moved(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """Run the operation on the labels, so that each label moves where its entry moves."""
    source = next(each for each in node.all_input_nodes if flow.of(each))
    if node.args[0] is not source or any(each in flow.constants.varying for each in node.all_input_nodes):
        return pin_inputs(flow, node, given)
    by_index = _by_index(node, given, flow.value(source).ndim)
    flow.pin([each for each in flow.of(source) if covered(each) & by_index], f"{described(node)} reads it by its place")
    shape = flow.value(source).shape
    rest, options = tree_map(
        lambda each: flow.constants.values[each] if isinstance(each, fx.Node) else each, (node.args[1:], node.kwargs)
    )
    target = torch.ops.aten.reshape.default if name_of(node) == "view" else node.target
    results = [target(field.expand(shape).double(), *rest, **options) for field in flow.of(source)]  # type: ignore[operator]
    why = f"{described(node)} does not keep it apart"
    if isinstance(results[0], Tensor):
        return _with_grids(flow, flow.labels.packed([each.long() for each in results], why))
    return [
        _with_grids(flow, flow.labels.packed([each.long() for each in piece], why))
        for piece in zip(*results, strict=True)
    ]


def _by_index(node: fx.Node, given: dict[str, Any], ndim: int) -> set[int]:
    """Return the dimensions that an operation indexes by fixed numbers, which `rewriting` does not change."""
    name = name_of(node)
    if name == "index":
        return {dim for dim, each in enumerate(given["indices"]) if each is not None}
    if name == "slice" and given["step"] != 1:
        return {int(given["dim"]) % ndim}
    if name == "roll":
        return {dim % ndim for dim in given["dims"]} or set(range(ndim))
    if name in ("index_select", "unfold", "gather"):
        return {int(given["dim"] if "dim" in given else given["dimension"]) % ndim}
    return set(range(ndim)) if name in ("im2col", "channel_shuffle", "native_channel_shuffle") else set()


def _with_grids(flow: Flow, fields: Fields) -> Fields:
    """Record fields over several dimensions as grids, and return all fields."""
    flow.shapes.grids.extend(field for field in fields if len(covered(field)) > 1)
    return fields


def _joined(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Concatenate labels as the operation concatenates entries; a part without labels gets `FIXED`."""
    every: list[fx.Node] = list(given["tensors"])
    parts = [part for part in every if flow.value(part).shape != (0,)] or every  # torch.cat skips these
    shapes = [list(flow.value(part).shape) for part in parts]
    ndim = len(shapes[0])
    dim = int(given["dim"]) % ndim
    why = f"{described(node)} puts it beside what stays"
    across = [covering(flow.of(part), dim) for part in parts]
    kept: Fields = [field for field in flow.of(parts[0]) if field is not across[0]]
    flat = [1 if d == dim else size for d, size in enumerate(shapes[0])]
    for part, own in zip(parts[1:], across[1:], strict=True):
        kept = flow.tie(kept, [field for field in flow.of(part) if field is not own], flat, flat, why)
    if all(field is None for field in across):
        return kept
    spread = set[int]().union(*[covered(field) for field in across if field is not None])
    pieces = []
    for field, shape in zip(across, shapes, strict=True):
        wide = [shape[d] if d in spread else 1 for d in range(ndim)]
        pieces.append((torch.full([1] * ndim, FIXED) if field is None else field).expand(wide))
    return flow.labels.packed([*kept, torch.cat(pieces, dim)], why)


def _padded(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Padding: new labels for zeros along a labelled dimension, so that the zeros can be removed too."""
    source, pad = given["self"], list(given["pad"])
    fields, ndim = list(flow.of(source)), flow.value(source).ndim
    for index in range(len(pad) // 2):
        dim, (before, after) = ndim - 1 - index, pad[2 * index : 2 * index + 2]
        field = covering(fields, dim)
        if field is None or not (before or after):
            continue
        others = [each for each in fields if each is not field]
        if len(covered(field)) > 1 or min(before, after) < 0 or given.get("mode", "constant") != "constant":
            flow.pin([field], f"{described(node)} pads it")
            fields = others
        else:
            ends = [along(flow.labels.fresh(size), dim, ndim) for size in (before, after)]
            fields = [*others, torch.cat([ends[0], field, ends[1]], dim)]
    return fields


def _by_channel(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Any:
    """Pooling, resizing and padding of channels one by one; a second result holds indices and has no labels."""
    source = node.all_input_nodes[0]
    ndim = flow.value(source).ndim
    positions = set(range(ndim - next(int(each) for each in name_of(node) if each.isdigit()), ndim))
    fields = [field for field in flow.of(source) if not covered(field) & positions]
    flow.pin([field for field in flow.of(source) if covered(field) & positions], f"{described(node)} reads it")
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, []]


def _reduced(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    source = given["self"]
    ndim = flow.value(source).ndim
    dims = given.get("dim")
    listed = range(ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in listed}
    flow.pin([field for field in flow.of(source) if covered(field) & gone], f"{described(node)} is over all of them")
    left = [field for field in flow.of(source) if not covered(field) & gone]
    if given.get("keepdim"):
        return left
    return [field.reshape([size for dim, size in enumerate(field.shape) if dim not in gone]) for field in left]


def _softmax(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    fields = flow.of(given["self"])
    dim = int(given["dim"]) % flow.value(given["self"]).ndim
    flow.pin([field for field in fields if dim in covered(field)], f"{described(node)} is over all of them")
    return [field for field in fields if dim not in covered(field)]


def _channelwise(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Any:
    """BatchNorm and other operations with a parameter per channel; input (batch, channels, positions ...)."""
    source = given["input"] if "input" in given else given["self"]
    shape = flow.value(source).shape
    fields = flow.of(source)
    for name in ("weight", "bias", "running_mean", "running_var"):
        own = given.get(name)
        if isinstance(own, fx.Node) and flow.value(own).numel() > 1:
            raised = [along(field.flatten(), 1, len(shape)) for field in flow.of(own)]
            wide = [shape[1] if dim == 1 else 1 for dim in range(len(shape))]
            fields = flow.tie(fields, raised, shape, wide, f"{described(node)} is on what stays")
    return fields if isinstance(flow.constants.values[node], Tensor) else [fields, [], []]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(SPATIAL, _by_channel),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys([*CHANNELWISE_NORMALISATIONS, "prelu", "_prelu_kernel"], _channelwise),
    **dict.fromkeys(["constant_pad_nd", "pad"], _padded),
    "cat": _joined,
    "entrywise": _entrywise,
}
