"""Rewriting of a graph after a removal: sizes written as numbers, and faster calls of its operations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, fx

from pruning.compact.kept_labels import Decision
from pruning.graph.label_flow import Flow
from pruning.graph.labels import covering
from pruning.graph.operations import CONVOLUTIONS, arguments, name_of

SHAPED = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "unflatten": "sizes"}
"""Operation whose arguments give the sizes of its result -> name of that argument."""


@dataclass(frozen=True)
class Rewrite:
    """New arguments of one operation.

    Args:
        node: the operation in the graph.
        target: the ATen operation to call instead.
        arguments: all arguments of `target`, by their names in its schema.
        numbers: (old, new) for each number that changes.
    """

    node: fx.Node
    target: Any
    arguments: dict[str, Any]
    numbers: list[tuple[Any, Any]]


def rewrites(flow: Flow, decision: Decision) -> list[Rewrite]:
    """Return a rewrite of each operation whose numbers do not fit the smaller tensors."""
    found = []
    for node in flow.fields:
        if not name_of(node):
            continue
        made = _rewrite(flow, decision, node, dict(arguments(node)))
        if made is not None and made.numbers:
            found.append(made)
    return found


def _rewrite(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any]) -> Rewrite | None:
    name = name_of(node)
    if name in SHAPED:
        return _shaped(flow, decision, node, given, SHAPED[name])
    if name in CONVOLUTIONS and given["groups"] > 1:
        return _with(node, given, "groups", _groups_left(flow, decision, given["input"], int(given["groups"])))
    if name in ("group_norm", "native_group_norm"):
        key = "num_groups" if "num_groups" in given else "group"
        return _with(node, given, key, _groups_left(flow, decision, given["input"], int(given[key])))
    if name in ("slice", "select", "narrow"):
        return _cut(flow, decision, node, given)
    if name in ("split", "split_with_sizes", "chunk"):
        return _pieces(flow, decision, node, given)
    if name in ("constant_pad_nd", "pad"):
        return _pads(flow, decision, node, given)
    if name == "scaled_dot_product_attention" and given["scale"] is None:
        size = flow.value(given["query"]).shape[-1]
        left = decision.sizes(flow.of(given["query"]), flow.value(given["query"]).shape)[-1]
        return _with(node, given, "scale", None if left == size else size**-0.5)
    return None


def _with(node: fx.Node, given: dict[str, Any], key: str, value: Any) -> Rewrite:
    old = given[key]
    return Rewrite(node, node.target, {**given, key: value}, [] if old == value else [(old, value)])


def _sizes(flow: Flow, decision: Decision, node: fx.Node) -> tuple[list[int], list[int]]:
    """Return the shape of a node's result before and after the removal."""
    shape = list(flow.value(node).shape)
    return shape, decision.sizes(flow.of(node), shape)


def _shaped(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any], key: str) -> Rewrite:
    before, after = _sizes(flow, decision, node)
    old = list(given[key])
    first = int(given["dim"]) % (len(before) - len(old) + 1) if key == "sizes" else 0
    new, numbers = list(old), []
    for index, size in enumerate(old):
        was, left = before[first + index], after[first + index]
        if was == left or size == -1:
            continue
        new[index] = left if isinstance(size, int) else -1  # a size that the graph computes from the batch
        numbers.append((was, left))
    return Rewrite(node, node.target, {**given, key: new}, numbers)


def _groups_left(flow: Flow, decision: Decision, source: fx.Node, groups: int) -> int:
    kept = _kept_along(flow, decision, source, 1)
    return groups if kept is None else int(kept.reshape(groups, -1).any(1).sum())


def _kept_along(flow: Flow, decision: Decision, source: fx.Node, dim: int) -> Tensor | None:
    field = covering(flow.of(source), dim)
    if field is None:
        return None
    return decision.keeps(field).movedim(dim, 0).reshape(field.shape[dim], -1).any(1)


def _cut(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any]) -> Rewrite | None:
    source = given["self"]
    shape = flow.value(source).shape
    kept = _kept_along(flow, decision, source, int(given["dim"]) % len(shape))
    if kept is None or bool(kept.all()):
        return None
    new, numbers = dict(given), []
    for key in ("start", "end", "index"):
        old = given.get(key)
        if isinstance(old, int) and old < len(kept):
            new[key] = int(kept[: old if old >= 0 else len(kept) + old].sum())
            if new[key] != old:
                numbers.append((old, new[key]))
    if "length" in given:
        start = int(given["start"]) % len(kept)
        new["length"] = int(kept[start : start + given["length"]].sum())
        numbers.append((given["length"], new["length"]))
    return Rewrite(node, node.target, new, numbers)


def _pieces(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any]) -> Rewrite | None:
    values = flow.constants.values[node]
    dim = int(given["dim"]) % values[0].ndim
    fields = flow.fields[node] or [[] for _ in values]
    before = [value.shape[dim] for value in values]
    after = [decision.sizes(own, value.shape)[dim] for own, value in zip(fields, values, strict=True)]
    if before == after:
        return None
    target = torch.ops.aten.split_with_sizes.default
    numbers = [(before, after), *zip(before, after, strict=True)]
    return Rewrite(node, target, {"self": given["self"], "split_sizes": after, "dim": dim}, numbers)


def _pads(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any]) -> Rewrite | None:
    pad, (shape, _) = list(given["pad"]), _sizes(flow, decision, node)
    numbers = []
    for index in range(len(pad) // 2):
        dim = len(shape) - 1 - index
        kept = _kept_along(flow, decision, node, dim)
        if kept is None:
            continue
        for side, part in (
            (2 * index, kept[: pad[2 * index]]),
            (2 * index + 1, kept[len(kept) - pad[2 * index + 1] :]),
        ):
            left = int(part.sum())
            if left != pad[side]:
                numbers.append((pad[side], left))
                pad[side] = left
    return Rewrite(node, node.target, {**given, "pad": pad}, numbers)


def apply_rewrites(graph: fx.Graph, changes: list[Rewrite]) -> None:
    """Write the new arguments into the graph."""
    for change in changes:
        schema = change.target._schema.arguments
        node = change.node
        node.target = change.target
        node.args = tuple(change.arguments[each.name] for each in schema if not each.kwarg_only)
        node.kwargs = {
            each.name: change.arguments[each.name]
            for each in schema
            if each.kwarg_only and change.arguments.get(each.name) is not None
        }
    graph.lint()


def call_functions(graph: fx.Graph) -> None:
    """Replace ATen operations in a graph by the equal functions and methods of torch.

    A call through `torch.ops` takes about 3 microseconds longer: a tenth of a small ResNet's time for one image.
    """
    for node in graph.nodes:
        name = name_of(node)
        if name == "batch_norm":  # torch.export turns cuDNN off
            given = arguments(node) | {"cudnn_enabled": True}
            node.args, node.kwargs = tuple(given.values()), {}
        if name == "slice":
            given = arguments(node)
            if given["dim"] >= 0:
                cut = slice(given["start"], given["end"], given["step"])
                node.target = operator.getitem
                node.args, node.kwargs = (given["self"], (*[slice(None)] * given["dim"], cut)), {}
        elif name and name != "to" and "layout" not in node.kwargs:  # tensor methods take no `layout`
            found = _function(node.target)
            if isinstance(found, MethodDescriptorType):  # called by name, because it cannot be imported by a copy
                node.op, node.target = "call_method", found.__name__
            else:
                node.target = found or node.target


def _function(target: Any) -> Callable[..., Any] | None:
    """Return the built-in function or tensor method of torch with an operation's name; None if there is none."""
    if not target._schema.arguments or str(target._schema.arguments[0].type) not in ("Tensor", "List[Tensor]"):
        return None
    name = target.overloadpacket.__name__
    for home, kind in (
        (torch, BuiltinFunctionType),
        (torch._C._nn, BuiltinFunctionType),
        (torch.Tensor, MethodDescriptorType),
    ):
        found = getattr(home, name, None)
        if isinstance(found, kind):
            return found
    return None
