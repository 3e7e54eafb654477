"""Sparse layers of a graph that can follow each other without another operation between them, as one module each."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count, groupby
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload

from pruning.catalogue.kernels import DENSE
from pruning.compact.dense_operations import join_heads, step_of
from pruning.graph.operations import arguments, in_module, is_in_place
from pruning.kernels.dense_steps import DenseStep
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
    if not any(_is_sparse(graph, node) for node in graph.graph.nodes):
        return
    join_heads(graph)
    parts = _parts(graph)
    if not any(_keeps_its_place(node) for node in graph.graph.nodes if node not in parts):
        _gather(graph.graph, parts)
    adjacent = [list(nodes) for joined, nodes in groupby(graph.graph.nodes, parts.__contains__) if joined]
    runs = [each[start : start + MOST_LAYERS] for each in adjacent for start in range(0, len(each), MOST_LAYERS)]
    names = (name for place in count() if not hasattr(graph, name := f"{NAME}_{place}"))
    for nodes, name in zip((run for run in runs if _pays(run, parts)), names, strict=False):
        _join(graph, {node: parts[node] for node in nodes}, name)


def _pays(run: Sequence[fx.Node], parts: Mapping[fx.Node, SparseLayer | DenseStep]) -> bool:
    """Return whether adjacent operations become one call: attention, or several operations with a layer among them.

    Attention alone, too: a sequence keeps the calls of C, and a step outside takes twice as long as PyTorch.
    """
    layered = any(isinstance(parts[node], SparseLayer) for node in run)
    attends = any(node.op == "call_module" and isinstance(parts[node], DenseStep) for node in run)
    return attends or (layered and len(run) > 1)


def _is_sparse(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether an operation is a layer that C computes at all batch sizes."""
    layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return isinstance(layer, SparseLayer) and all(choice.kernel != DENSE for choice in layer.plan.choices)


def _parts(graph: fx.GraphModule) -> dict[fx.Node, SparseLayer | DenseStep]:
    """Return the operations that C computes -> the layer or step of each."""
    found: dict[fx.Node, SparseLayer | DenseStep] = {}
    for node in graph.graph.nodes:
        if _is_sparse(graph, node):
            found[node] = graph.get_submodule(str(node.target))  # type: ignore[assignment]
        elif (step := step_of(graph, node, found)) is not None:
            found[node] = step
    return found


def _keeps_its_place(node: fx.Node) -> bool:
    """Return whether an operation writes to a tensor, or draws numbers: then its order among others matters."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if is_in_place(node) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return is_in_place(node)
    given = arguments(node)  # attention with a dropout of 0, and a dropout in evaluation, draw nothing
    return bool(given.get("dropout_p", True) and given.get("train", True))


def _gather(graph: fx.Graph, parts: Collection[fx.Node]) -> None:
    """Move layers to the end of the sequence before them, if their inputs are known there."""
    at: dict[fx.Node, int] = {}
    last, moved = None, 0
    for place, node in enumerate(list(graph.nodes)):
        at[node] = place
        if node not in parts:
            continue
        if last is not None and last.next is not node:
            if moved == MOST_MOVED or any(at[each] > at[last] for each in node.all_input_nodes):
                last, moved = node, 0
                continue
            last.append(node)
            at[node], moved = at[last], moved + 1
        last = node


def _join(graph: fx.GraphModule, parts: Mapping[fx.Node, SparseLayer | DenseStep], name: str) -> None:
    """Replace adjacent calls of layers and steps by one of a sequence."""
    nodes, own = list(parts), set(parts)
    inputs = [_inputs(node) for node in nodes]
    given = list(dict.fromkeys(each for read in inputs for each in read if each not in own))
    numbers = {node: number for number, node in enumerate((*given, *nodes))}
    reads = [[numbers[each] for each in read] for read in inputs]
    returned = [node for node in nodes if not own >= set(node.users)]
    wiring = Wiring(
        len(given),
        tuple(map(tuple, reads)),
        tuple(numbers[node] for node in returned),
    )
    layers: dict[str, SparseLayer | DenseStep] = {}
    for node, part in parts.items():
        path = re.sub("[^A-Za-z0-9_]", "_", in_module(node) or node.name)
        called = str(node.target) if node.op == "call_module" else f"sparse_{path}"
        layers[called if called not in layers else f"{called}_{node.name}"] = part
    graph.add_submodule(name, SparseSequence(layers, wiring))
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
        held = [each for each in node.all_input_nodes if each.op == "get_attr"]
        graph.graph.erase_node(node)
        graph._modules.pop(str(node.target), None)
        for each in held:
            if not each.users:
                graph.graph.erase_node(each)


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Return what a layer or step reads besides its own tensors."""
    given = node.args if node.op == "call_module" else node.all_input_nodes[:1]
    return [each for each in given if isinstance(each, fx.Node)]
