"""Writes to tensors in a traced graph, expressed by operations that return new tensors.

A write to a slice becomes a new whole tensor, and what reads the tensor or another slice of it afterwards reads the new
one. torch's own way, `run_decompositions`, traces the network again, which takes twice as long as the export.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pruning.graph.operations import COMPARISONS, arguments, is_in_place, may_alias, name_of

aten = torch.ops.aten


def writes_to_views(graph: fx.Graph) -> bool:
    """Return whether an operation writes to a tensor that another node may also read, directly or as a view."""
    return any(is_in_place(node) and not _writes_alone(node.args[0]) for node in graph.nodes)


def ends_by_chance(graph: fx.Graph) -> bool:
    """Return whether a slice ends at a number that equals a size of the example by chance, and may lose its end."""
    for node in graph.nodes:
        if name_of(node) == "slice":
            given = arguments(node)
            size = given["self"].meta["val"].shape[given["dim"]]
            if isinstance(size, torch.SymInt) and isinstance(given["end"], int) and given["end"] == size.node.hint:
                return True
    return False


def write_to_new_tensors(graph: fx.Graph) -> None:
    """Let operations return new tensors where all places that share the memory they write to are known."""
    _drop_dropouts(graph)
    memory = _Memory(graph)
    for node in list(graph.nodes):
        memory.read_newest(node)
        if is_in_place(node) and memory.is_known(node):
            memory.write(node)


def _drop_dropouts(graph: fx.Graph) -> None:
    """Remove dropouts in evaluation mode: each returns its input itself, to which a later operation may write."""
    for node in graph.nodes:
        idle = name_of(node).endswith("dropout") and arguments(node).get("train") is False
        if idle and isinstance(node.meta["val"], Tensor) and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _writes_alone(written: Any) -> bool:
    return isinstance(written, fx.Node) and len(written.users) == 1 and _is_new(written)


def _is_new(node: fx.Node) -> bool:
    """Return whether a node makes a tensor that shares no memory with its inputs."""
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return made.op == "call_function" and not may_alias(made.target)


class _Place(NamedTuple):
    """Place of a tensor in memory.

    Args:
        node: node that was first there: one that makes a tensor, or a slice of one.
        owners: nodes that made the memory; several if it is not known which of them it is.
        whole: node of which `node` is a slice; None for a whole tensor.
        known: whether the place is known exactly.
    """

    node: fx.Node
    owners: frozenset[fx.Node]
    whole: fx.Node | None = None
    known: bool = True


class _Memory:
    """Places of a graph's tensors in memory, and the node that has the newest values of each.

    A first walk finds the memory of which writes cannot be followed: that of inputs and parameters, and what is
    written, or read after a write, at a place that is not known.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._places: dict[fx.Node, _Place] = {}
        self._writes: dict[fx.Node, int] = defaultdict(int)
        self._lost: frozenset[fx.Node] = frozenset()
        made: dict[fx.Node, int] = {}
        for node in graph.nodes:
            for place in map(self._places.__getitem__, node.all_input_nodes):
                if not place.known and made[place.node] != self._version(place):
                    self._lost |= place.owners
            self._places[node] = place = self._place(node)
            if is_in_place(node):
                if not place.known or _pure_form(node) is None:
                    self._lost |= place.owners
                for owner in place.owners:
                    self._writes[owner] += 1
            made.setdefault(place.node, self._version(place))
        self._writes.clear()
        self._newest: dict[fx.Node, tuple[int, fx.Node]] = {}

    def _version(self, place: _Place) -> int:
        return sum(self._writes[owner] for owner in place.owners)

    def _place(self, node: fx.Node) -> _Place:
        inputs = [self._places[each] for each in node.all_input_nodes]
        if is_in_place(node) and isinstance(node.args[0], fx.Node) and _writes_first_only(node):
            return self._places[node.args[0]]
        if node.op != "call_function" or _is_new(node):
            return _Place(node, frozenset([node]), known=node.op == "call_function")
        if _bounds(node) is not None and inputs[0].known:
            return _Place(node, inputs[0].owners, node.all_input_nodes[0])
        return _Place(node, frozenset().union(*(each.owners for each in inputs)), known=False)

    def is_known(self, node: fx.Node) -> bool:
        """Return whether writes to the memory of a node can be followed."""
        place = self._places[node]
        return place.known and not place.owners & self._lost

    def read_newest(self, node: fx.Node) -> None:
        """Let a node read the newest values of its inputs."""
        for each in node.all_input_nodes:
            if self.is_known(each) and (newest := self._read(self._places[each], node)) is not each:
                node.replace_input_with(each, newest)
        place = self._places[node]
        self._newest.setdefault(place.node, (self._version(place), node))

    def _read(self, place: _Place, reader: fx.Node) -> fx.Node:
        """Return the node with the newest values of a place; after a write a slice is made anew before its reader."""
        version, newest = self._newest[place.node]
        if version < self._version(place) and place.whole is not None:
            whole = self._read(self._places[place.whole], reader)
            with self._graph.inserting_before(reader):
                newest = self._graph.node_copy(place.node)
            newest.replace_input_with(newest.all_input_nodes[0], whole)
            self._newest[place.node] = (self._version(place), newest)
        return newest

    def write(self, node: fx.Node) -> None:
        """Let a node return what it writes, and put that in new tensors in place of those of which it is a slice."""
        place = self._places[node]
        pure = _pure_form(node)
        assert pure is not None
        node.target = pure
        written = [(place, node)]
        while place.whole is not None:
            cut, place = place.node, self._places[place.whole]
            written.append((place, _assigned(self._read(place, node), written[-1][1], cut)))
        (owner,) = place.owners
        self._writes[owner] += 1
        self._newest |= {each.node: (self._writes[owner], value) for each, value in written}


def _writes_first_only(node: fx.Node) -> bool:
    return not any(each.is_write for each in node.target._schema.arguments[1:])  # type: ignore[union-attr]


def _pure_form(node: fx.Node) -> Any:
    """Return the operation that returns what a node writes, as a new tensor of its dtype; None if there is none."""
    name, target = name_of(node), node.target
    pure = getattr(getattr(aten, name, None), target._overloadname, None)  # type: ignore[union-attr]
    if pure is None or pure._schema.is_mutable or name in COMPARISONS:
        return None
    if any(each.alias_info for each in pure._schema.returns):  # as of `unsqueeze_`, which changes the shape alone
        return None
    given = [each.meta.get("val") for each in node.all_input_nodes]
    dtypes = [each.dtype for each in given if isinstance(each, Tensor)]
    return pure if name == "copy" or reduce(torch.promote_types, dtypes) == dtypes[0] else None


class _Bounds(NamedTuple):
    """Entries of a slice.

    Args:
        dim: dimension that it cuts.
        first: where it begins.
        last: where it ends; None at the end of the dimension.
        step: every so-many-th entry is in it.
    """

    dim: int
    first: int
    last: int | None
    step: int


def _bounds(cut: fx.Node) -> _Bounds | None:
    """Return which entries a slice has; None for other nodes."""
    if name_of(cut) not in ("slice", "select"):
        return None
    given = arguments(cut)
    shape = given["self"].meta["val"].shape
    dim = given["dim"] % len(shape)
    size, end = shape[dim], given.get("end")
    first = given["index"] if name_of(cut) == "select" else given["start"] or 0
    last = sys.maxsize if end is None else end
    if not isinstance(first, int) or not isinstance(last, int):
        return None
    if isinstance(size, int):
        first, last = (max(0, min(each + size * (each < 0), size)) for each in (first, last))
    if first < 0 or last < 0:
        return None
    if name_of(cut) == "select":
        last = first + 1
    last = max(first, last)
    ends = last == sys.maxsize or (isinstance(size, int) and last == size)  # another size may be equal by chance
    return _Bounds(dim, first, None if ends else last, given.get("step", 1))


def _assigned(whole: fx.Node, part: fx.Node, cut: fx.Node) -> fx.Node:
    """Return, after `part`, a node of a whole tensor in which `part` takes the place of a slice."""
    bounds = _bounds(cut)
    assert bounds is not None
    dim, first, last, step = bounds
    with part.graph.inserting_before(part.next):
        if step != 1:
            return _made(aten.slice_scatter.default, (whole, part, *bounds), cut)
        if name_of(cut) == "select":
            part = _made(aten.unsqueeze.default, (part, dim), cut)
        before = [_made(aten.slice.Tensor, (whole, dim, 0, first), cut)] if first else []
        after = [_made(aten.slice.Tensor, (whole, dim, last, sys.maxsize), cut)] if last is not None else []
        return _made(aten.cat.default, ([*before, part, *after], dim), cut) if before or after else part


def _made(target: Any, given: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """Return a new node that stands in the module of another."""
    made = like.graph.call_function(target, given)
    made.meta = {**like.meta, "val": target(*fx.map_arg(given, lambda each: each.meta["val"]))}
    return made
