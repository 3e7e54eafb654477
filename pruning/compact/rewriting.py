"""Rewriting of a graph after a removal: the positions that stay, sizes written as numbers, and faster calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pruning.graph.label_flow import FIXED, Fields, Flow, Labels, Site, covering
from pruning.graph.operations import CONVOLUTIONS, FILLED, arguments, described, name_of

REGULAR = "it keeps heads or groups of one size"


@dataclass(frozen=True)
class Decision:
    """Labels of a network that are kept.

    Args:
        labels: all labels of the network.
        kept: bool, shape (labels,): whether a root is kept; read at roots only.
        reasons: root -> why it is kept.
    """

    labels: Labels
    kept: Tensor
    reasons: Mapping[int, str]

    def keeps(self, labels: Tensor) -> Tensor:
        """Return whether each label is kept; bool, the shape of `labels`."""
        return self.kept[self.labels.roots(labels)]

    def mask(self, fields: Fields) -> Tensor | None:
        """Return where all labels of a tensor are kept; None without fields.

        The result is bool and broadcasts to the tensor: it has size 1 in dimensions without labels.
        """
        mask = None
        for field in fields:
            kept = self.keeps(field)
            mask = kept if mask is None else mask & kept
        return mask

    def sizes(self, fields: Fields, shape: Sequence[int]) -> list[int]:
        """Return a tensor's shape after removal."""
        sizes, mask = list(shape), self.mask(fields)
        if mask is None:
            return sizes
        for dim in reversed(range(mask.ndim)):
            if mask.shape[dim] > 1:
                sizes[dim] = int(mask.sum(dim).max())
                mask = mask.any(dim, keepdim=True)
        return sizes

    def taken(self, tensor: Tensor, fields: Fields) -> Tensor:
        """Return the kept entries of a tensor, as a tensor; the tensor itself if all are kept."""
        mask = self.mask(fields)
        if mask is None or bool(mask.all()):
            return tensor
        return tensor[mask.expand(tensor.shape).to(tensor.device)].reshape(self.sizes(fields, tensor.shape))


def decide_kept_labels(flow: Flow) -> Decision:
    """Decide which labels of a network are kept: as few as its outputs and its shapes allow."""
    labels = flow.labels
    kept = torch.zeros(len(labels), dtype=torch.bool)
    kept[FIXED] = True
    reasons: dict[int, str] = {}

    def keep(which: Tensor, because: str) -> bool:
        roots = torch.from_numpy(np.unique(labels.roots(which).numpy()))
        new = roots[~kept[roots]]
        kept[new] = True
        reasons.update(dict.fromkeys(new.tolist(), because))
        return len(new) > 0

    sites = [(site, labels.roots(site.outputs)) for site in reversed(flow.sites)]
    done: dict[int, int] = {}

    def keep_inputs() -> bool:
        """Keep the inputs of the last site that lacks some; a site's wait for more of its outputs to be kept."""
        for number, (site, outputs) in enumerate(sites):
            count = int(kept[outputs].sum())
            if done.get(number) != count:
                if any(keep(*each) for each in _required_inputs(site, kept[outputs])):
                    return True
                done[number] = count
        return False

    for pinned, because in labels.pins:
        keep(pinned, because)
    while True:
        while keep_inputs():
            pass
        decision = Decision(labels, kept, reasons)
        if not keep(_required_by_shapes(flow, decision), REGULAR):
            break
    for site in flow.sites:
        if site.inputs is site.outputs:  # statistics explain a kept channel better than the reader of its outputs
            reasons.update(dict.fromkeys(labels.roots(site.inputs[decision.keeps(site.inputs)]).tolist(), site.because))
    return decision


def _required_inputs(site: Site, outputs: Tensor) -> list[tuple[Tensor, str]]:
    """Return pairs (labels of inputs, reason): inputs that cannot be removed because of the kept outputs."""
    asked = torch.full(site.inputs.shape, bool(outputs.any())) if site.reads is None else site.reads[outputs].any(0)
    asked = asked & site.constant.isnan()
    if site.bordered is None:
        return [(site.inputs[asked], site.because)]
    border = f"{described(site.node)} reads a constant that is left of it, with zeros at the border"
    return [(site.inputs[asked & ~site.bordered], site.because), (site.inputs[asked & site.bordered], border)]


def _required_by_shapes(flow: Flow, decision: Decision) -> Tensor:
    """Return further labels that must be kept, so that the kept entries form tensors."""
    missing = []
    for one, other in flow.shapes.same:
        for rows, partners in ((one, other), (other, one)):
            asked = decision.keeps(partners).any(1) & ~decision.keeps(rows).any(1)
            missing.append(rows[asked, 0])
    missing.extend(grid[_uneven(decision.keeps(grid))] for grid in flow.shapes.grids)
    for node, fields in flow.fields.items():
        if node.op == "get_attr" or node in flow.made:
            missing.extend(field.flatten()[:1] for field in fields if not decision.keeps(field).any())
    return torch.cat(missing) if missing else torch.empty(0, dtype=torch.int64)


def _uneven(kept: Tensor) -> Tensor:
    """Return entries of a grid to keep in addition; bool, the shape of `kept`.

    Rows that keep fewer entries than the fullest row get more; empty rows stay empty. Once the rows are equal, the
    outer dimensions are made even in the same way.
    """
    if kept.ndim < 2:
        return torch.zeros_like(kept)
    counts = kept.sum(-1, keepdim=True)
    lacking = torch.where(counts > 0, counts.max() - counts, 0)
    added = ~kept & ((~kept).cumsum(-1) <= lacking)
    if added.any():
        return added
    rows = _uneven(counts[..., 0] > 0)
    return rows[..., None] & (torch.arange(kept.shape[-1]) == 0)


SHAPED = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "unflatten": "sizes"}
SHAPED |= dict.fromkeys(FILLED, "size")
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


def _shaped(flow: Flow, decision: Decision, node: fx.Node, given: dict[str, Any], key: str) -> Rewrite:
    before = list(flow.value(node).shape)
    after = decision.sizes(flow.of(node), before)
    old = list(given[key])
    first = int(given["dim"]) % (len(before) - len(old) + 1) if key == "sizes" else 0
    new, numbers = list(old), []
    for index, size in enumerate(old):
        was, left = before[first + index], after[first + index]
        if was == left or size == -1:
            continue
        new[index] = left if isinstance(size, int) else -1  # a size that the graph computes from the batch
        numbers.append((was, left))
    if new.count(-1) > 1:  # `view` computes one size alone
        sizes = node.meta["val"].shape[first:]
        known = (place for place, size in enumerate(old) if size == -1 and isinstance(sizes[place], int))
        for place in known:
            new[place] = after[first + place]
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
    if kept is None or bool(kept.all()) or given.get("step", 1) != 1:  # whole steps are left
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
    pad, numbers = list(given["pad"]), []
    for index in range(len(pad) // 2):
        kept = _kept_along(flow, decision, node, flow.value(node).ndim - 1 - index)
        if kept is None:
            continue
        before, after = 2 * index, 2 * index + 1
        for side, part in ((before, kept[: pad[before]]), (after, kept[len(kept) - pad[after] :])):
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
        if node.target is torch.ops.aten.view.default:  # strides differ from the traced run, so a view may fail
            node.target = torch.ops.aten.reshape.default
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
