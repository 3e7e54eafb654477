"""Operations of a graph that change nothing, taken out: a small network's time is mostly that of its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from pruning.graph.operations import arguments, is_in_place, name_of

VIEWS = frozenset({"expand", "expand_as", "unsqueeze", "squeeze", "view", "reshape", "slice", "select", "transpose"})
"""Operations whose outputs have entries of their first argument alone."""


def skip_needless(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Remove slices of everything, padding by nothing, dropouts that drop nothing, and masks that hide nothing.

    They stay if an operation but those in `kept` writes to its inputs.
    """
    if any(is_in_place(node) and node not in kept for node in graph.nodes if node.op == "call_function"):
        return
    for node in list(graph.nodes):
        if name_of(node) == "scaled_dot_product_attention" and _is_true(arguments(node)["attn_mask"]):
            _take_out(node, arguments(node)["attn_mask"])
        given = arguments(node) if name_of(node) in ("slice", "pad", "constant_pad_nd", "dropout") else {}
        end = given.get("end")
        whole = (given.get("start"), given.get("step")) in ((0, 1), (None, 1)) and (
            end is None or (isinstance(end, int) and end >= 2**62)
        )
        changes = not whole if "start" in given else given.get("train") or any(given.get("pad", ()))
        if given and not changes:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _take_out(node: fx.Node, given: fx.Node) -> None:
    """Let an operation take None in place of one of its inputs."""
    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), lambda each: None if each is given else each)


def _is_true(node: Any) -> bool:
    """Return whether all entries of a mask are true for inputs of any size, as those that transformers makes are."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    name, given = name_of(node), list(node.args)
    if name in VIEWS:
        return _is_true(given[0])
    if name in ("logical_and", "bitwise_and", "__and__"):
        return _is_true(given[0]) and _is_true(given[1])
    bound = given[1] if name in ("ge", "gt") else None
    return isinstance(bound, int | float) and (bound <= 0 if name == "ge" else bound < 0) and _is_natural(given[0])


def _is_natural(node: Any) -> bool:
    """Return whether a number or all entries of a tensor are at least 0: positions that count from a constant."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int | float) and node >= 0
    name, given = name_of(node), arguments(node) if name_of(node) else {}
    if given.get("dtype") not in (None, torch.int64):  # fewer bits may wrap around
        return False
    if name in VIEWS:
        return _is_natural(given["self"])
    if name == "add":
        return all(_is_natural(given[each]) for each in ("self", "other", "alpha") if each in given)
    return name == "arange" and _is_natural(given.get("start", 0)) and _is_natural(given.get("step", 1))
