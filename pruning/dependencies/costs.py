"""Costs in multiply-accumulates: how often a network multiplies each entry of its weights and activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pruning.dependencies.dependency_groups import Member, Multiplied
from pruning.graph.label_flow import Flow
from pruning.graph.labels import covering
from pruning.graph.operations import CONVOLUTIONS, PRODUCTS, arguments, name_of
from pruning.measure.matrix_products import Products

WHOLE = ("baddbmm", "addbmm", "einsum", "mv", "addmv", "dot")
"""Products without a label rule: all of their inputs are kept."""


class Use(NamedTuple):
    """Use of a weight by a layer: how often each entry is multiplied, and the dimension of the outputs."""

    weight: fx.Node
    times: int
    dim: int


def use_of(flow: Flow, node: fx.Node) -> Use | None:
    """Return how a node uses its weight; None if the node is not the operation of a layer."""
    name = name_of(node)
    if name not in ("linear", "addmm", *PRODUCTS, *CONVOLUTIONS):
        return None
    given = arguments(node)
    by_inputs = name in ("addmm", *PRODUCTS)  # weight of shape (inputs, outputs), like transformers' Conv1D
    source, weight = (
        list(given.values())[int(name == "addmm") :][:2] if by_inputs else (given["input"], given["weight"])
    )
    shape, result = flow.value(weight).shape, flow.value(node)
    if name in PRODUCTS and (weight.op != "get_attr" or len(shape) != 2):
        return None
    if "transpose" in name or bool(given.get("transposed")):
        return Use(weight, flow.value(source).numel() // shape[0], 1)
    return Use(weight, result.numel() // shape[int(by_inputs)], int(by_inputs))


def multiplied_activations(flow: Flow, numbers: Iterable[tuple[str, Tensor]]) -> Iterator[Multiplied]:
    """Yield the factors of products that are not parameters: queries, attention weights, computed weights.

    Args:
        numbers: pairs (name of a group, channel number of each label); -1 for labels outside the group.
    """
    numbers = list(numbers)
    for node in flow.traced.graph.graph.nodes:
        if name_of(node) in WHOLE:
            yield Multiplied(torch.Size(), _macs(flow, node), ())
        for factor, times in _factors(flow, node):
            fields = [flow.labels.roots(field) for field in flow.of(factor)]
            members = [(name, Member(factor.name, number[field])) for name, number in numbers for field in fields]
            own = tuple((name, member) for name, member in members if bool((member.channels >= 0).any()))
            yield Multiplied(flow.value(factor).shape, times, own)


def _factors(flow: Flow, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield (factor, multiplications per entry of the factor) that together count a node's multiplications."""
    use, name = use_of(flow, node), name_of(node)
    if use and use.weight.op != "get_attr":
        yield use.weight, use.times
    elif name == "scaled_dot_product_attention":
        query, key, *_ = arguments(node).values()
        yield query, flow.value(key).shape[-2]
        yield node, flow.value(key).shape[-2]
    elif name in PRODUCTS and use is None:
        one, result = next(iter(arguments(node).values())), flow.value(node)
        shape = flow.value(one).shape
        if covering(flow.of(one), len(shape) - 1) is None:
            yield node, shape[-1]
        else:  # only the kept entries of this factor are multiplied; the other factor keeps all of its outputs
            yield one, result.numel() * shape[-1] // max(1, shape.numel())


def _macs(flow: Flow, node: fx.Node) -> int:
    """Count the multiply-accumulates of an operation by running it on the meta device."""
    found: list[int] = []
    args, kwargs = tree_map(
        lambda each: flow.value(each).to("meta") if isinstance(each, fx.Node) else each, (node.args, dict(node.kwargs))
    )
    with Products(lambda product: found.append(product.macs)):
        node.target(*args, **kwargs)  # type: ignore[operator]
    return sum(found)
