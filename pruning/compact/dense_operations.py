"""Operations of a graph that the sequences of sparse layers compute, too: activations, normalisations, attention."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from pruning.graph.operations import arguments, is_in_place, name_of
from pruning.kernels.dense_steps import LARGEST_NUMBER, OPERATIONS, DenseStep, StepPlan

NAME, ATTENTION, NORM = "sparse_attention", "attention", "layer_norm"
COPIES = ("clone", "contiguous")
RESHAPES = ("view", "reshape", "_unsafe_view", "unflatten", "flatten")
SWAPS: dict[str, tuple[Any, ...]] = {"transpose": ((1, 2), (2, 1), (-3, -2), (-2, -3)), "permute": ([0, 2, 1, 3],)}
"""Operation -> its arguments where it swaps the second and the third of four dimensions."""


def writes(graph: fx.GraphModule) -> bool:
    """Return whether an operation writes to a tensor, which may be one that a step holds, or a view of its input."""
    return any(map(is_in_place, graph.graph.nodes))


def step_of(graph: fx.GraphModule, node: fx.Node, made: Collection[fx.Node]) -> DenseStep | None:
    """Return the step that computes an operation; None if none does.

    Args:
        graph: the network.
        node: the operation.
        made: nodes whose outputs are in memory of their own: an operation may write to it if nothing else reads it.
    """
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        return module if isinstance(module, DenseStep) else None
    value, given = _value(node), arguments(node) if name_of(node) in OPERATIONS else {}
    x = next(iter(given.values()), None)
    if not given or value is None or value.dtype is not torch.float32 or not value.ndim:
        return None
    if is_in_place(node) and (not isinstance(x, fx.Node) or x not in made or len(x.users) > 1):
        return None
    if name_of(node) != NORM:
        return DenseStep(StepPlan("gelu_tanh" if given.get("approximate") == "tanh" else name_of(node)))
    tensors = [] if writes(graph) else [_tensor(graph, given[each]) for each in ("weight", "bias")]
    held = [each for each in tensors if each is not None and each.dtype is torch.float32 and each.ndim == 1]
    return DenseStep(StepPlan(NORM, number=given["eps"]), *held) if len(held) == 2 else None


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _tensor(graph: fx.GraphModule, node: fx.Node | None) -> Tensor | None:
    """Return a tensor that the network holds."""
    return None if node is None or node.op != "get_attr" else attrgetter(str(node.target))(graph)


def join_heads(graph: fx.GraphModule) -> None:
    """Replace attention of several heads, with the views around it, by a step on tensors (batch, places, channels).

    Without masks and dropout, as in an encoder; none in a graph that writes to tensors, which views may share.
    """
    if writes(graph):
        return
    names = (name for place in count() if not hasattr(graph, name := f"{NAME}_{place}"))
    for node in list(graph.graph.nodes):
        if name_of(node) != "scaled_dot_product_attention":
            continue
        given, last = arguments(node), _joined(node)
        split = [given[each] for each in ("query", "key", "value")]
        read = [_split(each) for each in split]
        plain = given["attn_mask"] is None and not given["is_causal"] and not given["dropout_p"]
        sizes = [_sizes(each) or [] for each in split]
        alike = sizes[1] == sizes[2] and sizes[0][:2] + sizes[0][3:] == sizes[1][:2] + sizes[1][3:]  # all but places
        if last is None or None in read or not plain or not alike:
            continue
        heads, width = int(sizes[0][1]), int(sizes[0][3])
        factor = width**-0.5 if given.get("scale") is None else given["scale"]
        if not isinstance(factor, int | float) or not abs(factor) <= LARGEST_NUMBER:
            continue
        graph.add_submodule(name := next(names), DenseStep(StepPlan(ATTENTION, heads, float(factor))))
        with graph.graph.inserting_before(last):
            call = graph.graph.call_module(name, tuple(read))
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
        while not last.users:  # torch takes attention for random, and would keep it
            before = last.all_input_nodes[0]
            graph.graph.erase_node(last)
            if last is node:
                break
            last = before
    graph.graph.eliminate_dead_code()


def _sizes(node: Any) -> list[str] | None:
    """Return the sizes of a float32 tensor as text, as they may be symbols."""
    value = _value(node)
    return None if value is None or value.dtype is not torch.float32 else [str(size) for size in value.shape]


def _whole(sizes: list[str]) -> list[str]:
    """Return the sizes (batch, places, heads, width) without heads."""
    return [*sizes[:2], str(int(sizes[2]) * int(sizes[3])) if sizes[2].isdigit() and sizes[3].isdigit() else ""]


def _split(node: fx.Node) -> fx.Node | None:
    """Return the tensor (batch, places, channels) that was split to (batch, heads, places, width); None if none was."""
    halved = _swapped(node)
    sizes = _sizes(halved)
    if halved is None or sizes is None or len(sizes) != 4 or name_of(halved) not in RESHAPES:
        return None
    whole = halved.all_input_nodes[0]
    return whole if _sizes(whole) == _whole(sizes) else None


def _joined(node: fx.Node) -> fx.Node | None:
    """Return the only use of (batch, heads, places, width), as (batch, places, channels); None if there are others."""
    sizes = _sizes(node)
    while (last := next(iter(node.users), None)) is not None and len(node.users) == 1:
        if sizes is None or len(sizes) != 4:
            return None
        if _swapped(last) is not None:
            return _flattened(last, [sizes[0], sizes[2], sizes[1], sizes[3]])
        if name_of(last) not in (*RESHAPES, *COPIES) or _sizes(last) != sizes:
            return None
        node = last
    return None


def _flattened(node: fx.Node, sizes: list[str]) -> fx.Node | None:
    """Return the only reader of (batch, places, heads, width), behind copies, if it joins the heads."""
    while len(node.users) == 1:
        (node,) = node.users
        if name_of(node) in RESHAPES and _sizes(node) == _whole(sizes):
            return node
        if name_of(node) not in COPIES:
            return None
    return None


def _swapped(node: Any) -> fx.Node | None:
    """Return the tensor of four dimensions whose second and third an operation swaps."""
    value = _value(node)
    if value is None or value.ndim != 4 or name_of(node) not in SWAPS:
        return None
    x, *dimensions = arguments(node).values()
    said = tuple(dimensions) if name_of(node) == "transpose" else list(dimensions[0])
    return x if said in SWAPS[name_of(node)] else None
