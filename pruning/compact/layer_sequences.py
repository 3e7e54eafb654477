"""Sparse layers of a graph that can follow each other without another operation between them, as one module each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, groupby
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload

from pruning.catalogue.kernels import DENSE
from pruning.graph.tracing import arguments, is_in_place
from pruning.kernels.sparse_layer import SparseLayer
from pruning.kernels.sparse_sequence import MOST_LAYERS, SparseSequence, Wiring

NAME = "sparse_sequence"
MOST_MOVED = 3
"""Layers that move to a sequence: their outputs take memory until they are read."""


def join_layers(graph: fx.GraphModule) -> None:
    """Replace calls of sparse layers by calls of sequences of them, of at most `MOST_LAYERS`.

    A layer moves to the end of the sequence before it if its inputs are known there, as keys and values move to
    queries; `MOST_MOVED` of them for each sequence, because their outputs wait for their readers. None moves where an
    operation writes to a tensor or draws numbers. Layers that PyTorch computes for a batch size join no sequence.
    """

    def joins(node: fx.Node) -> bool:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        return isinstance(layer, SparseLayer) and all(choice.kernel != DENSE for choice in layer.plan.choices)

    if not any(map(_keeps_its_place, graph.graph.nodes)):
        _gather(graph.graph, joins)
    adjacent = [list(nodes) for joined, nodes in groupby(graph.graph.nodes, joins) if joined]
    runs = [each[start : start + MOST_LAYERS] for each in adjacent for start in range(0, len(each), MOST_LAYERS)]
    names = (name for place in count() if not hasattr(graph, name := f"{NAME}_{place}"))
    for nodes, name in zip((run for run in runs if len(run) > 1), names, strict=False):
        _join(graph, nodes, name)


def _keeps_its_place(node: fx.Node) -> bool:
    """Return whether an operation writes to a tensor, or draws numbers: then its order among others matters."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if is_in_place(node) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return is_in_place(node)
    given = arguments(node)  # attention with a dropout of 0, and a dropout in evaluation, draw nothing
    return bool(given.get("dropout_p", True) and given.get("train", True))


def _gather(graph: fx.Graph, joins: Callable[[fx.Node], bool]) -> None:
    """Move layers to the end of the sequence before them, if their inputs are known there."""
    at: dict[fx.Node, int] = {}
    last, moved = None, 0
    for place, node in enumerate(list(graph.nodes)):
        at[node] = place
        if not joins(node):
            continue
        if last is not None and last.next is not node:
            if moved == MOST_MOVED or any(at[each] > at[last] for each in node.all_input_nodes):
                last, moved = node, 0
                continue
            last.append(node)
            at[node], moved = at[last], moved + 1
        last = node


def _join(graph: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> None:
    """Replace adjacent calls of layers by one of a sequence."""
    own = set(nodes)
    given = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own))
    numbers = {node: number for number, node in enumerate((*given, *nodes))}
    reads = [[numbers[each] for each in node.args if isinstance(each, fx.Node)] for node in nodes]
    returned = [node for node in nodes if not own >= set(node.users)]
    wiring = Wiring(
        len(given),
        tuple((each[0], each[1] if len(each) > 1 else None) for each in reads),
        tuple(numbers[node] for node in returned),
    )
    layers = {str(node.target): graph.get_submodule(str(node.target)) for node in nodes}
    graph.add_submodule(name, SparseSequence(layers, wiring))  # type: ignore[arg-type]
    with graph.graph.inserting_after(nodes[-1]):
        call = graph.graph.call_module(name, tuple(given))
    after = call
    for place, node in enumerate(returned):
        found = call
        if len(returned) > 1:
            with graph.graph.inserting_after(after):
                found = after = graph.graph.call_function(getitem, (call, place))
        found.meta = dict(node.meta)
        node.replace_all_uses_with(found, delete_user_cb=lambda user: user not in own)
    for node in reversed(nodes):
        graph.graph.erase_node(node)
        graph._modules.pop(str(node.target))
