"""Networks that cannot be traced whole: their largest modules that can be, with the inputs of one plain call.

The graph of such a network holds the operations of its parts side by side. Each part has its own inputs and outputs,
whose channels stay, because the operations between the parts are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pruning.graph.label_rules import flow_of
from pruning.graph.operations import described
from pruning.graph.tracing import (
    Example,
    Part,
    Sizes,
    Traced,
    arguments_of,
    copied,
    first_line,
    outputs_of,
    plain_copy,
    traced,
    traced_part,
)
from pruning.graph.untraceable import is_known
from pruning.holding.copies import to_run
from pruning.holding.parameter import joined
from pruning.measure.macs import Inputs, Watching


def traced_in_parts(model: nn.Module, example: Example, *, sizes: Sizes = "example") -> Traced:
    """Trace a network whole, or else its largest modules that can be traced; see `traced`.

    Raises:
        ValueError: neither the network nor a module with layers of its own can be traced.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    try:
        return _followed(traced(model, example, sizes=sizes))
    except ValueError as error:
        plain = plain_copy(model)
        calls = _Calls(plain)
        with suppress(Exception):  # a forward may raise anything; `error` says that the network cannot be traced
            calls.record(arguments_of(example))
        parts = list(_parts(plain, "", calls.inputs, sizes))
        if not parts:
            raise
        outside = {id(attrgetter(name)(plain)) for name in calls.used_outside({part.path for part in parts})}
        return _joined(Traced(plain, (), fx.GraphModule({}, fx.Graph()), frozenset(outside), str(error)), parts)


def _followed(trace: Traced) -> Traced:
    """Return a trace whose channels can be followed, which may fail after a size that depends on values.

    Raises:
        ValueError: the channels cannot be followed.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # half a second, where a network is loaded

    name, nodes = type(trace.model).__name__, trace.graph.graph.nodes
    if sized := next((node for node in nodes if free_unbacked_symbols(node.meta.get("val"))), None):
        try:
            flow_of(trace)
        except Exception as error:  # an operation on a tensor of an unknown size may raise anything
            raise ValueError(
                f"{name} makes a tensor in {described(sized)} whose size depends on values, and its channels cannot be "
                f"followed from there ({first_line(error)})"
            ) from error
    return trace


def retraced(trace: Traced, sizes: Mapping[str, Sizes]) -> tuple[Traced, dict[str, str]]:
    """Return the trace of some parts for other sizes, and why a part cannot be traced for them.

    Args:
        trace: the parts.
        sizes: path of each part to keep -> its sizes.
    """
    parts: list[Part] = []
    failures: dict[str, str] = {}
    for path, wanted in sizes.items():
        own = [part for part in trace.parts if part.path == path]
        if any(part.sizes != wanted for part in own):
            try:
                own = _by_calls(trace.model, path, [call for part in own for call in part.calls], wanted)
            except ValueError as error:
                failures[path] = str(error)
        parts += own
    return _joined(trace, parts), failures


def _parts(plain: nn.Module, path: str, inputs: Mapping[str, Sequence[Inputs]], sizes: Sizes) -> Iterator[Part]:
    """Yield the traces of a module, or else those of the modules inside."""
    if inputs.get(path):
        with suppress(ValueError):
            yield from _by_calls(plain, path, inputs[path], sizes)
            return
    for name, _ in plain.get_submodule(path).named_children():
        yield from _parts(plain, joined(path, name), inputs, sizes)


def _by_calls(plain: nn.Module, path: str, calls: Iterable[Inputs], sizes: Sizes) -> list[Part]:
    """Trace a module for each call for which no earlier trace holds."""
    found: list[Part] = []
    for given in calls:
        for place, part in enumerate(found):
            if not part.guard.refusal(*given):
                found[place] = replace(part, calls=(*part.calls, given))
                break
        else:
            module, part = traced_part(plain.get_submodule(path), given, sizes, path)
            found.append(_followed(Traced(module, (part,), part.graph)).whole)
    return found


def _joined(trace: Traced, parts: Sequence[Part]) -> Traced:
    """Return a trace limited to some parts, with their operations in one graph."""
    if [part.path for part in parts] == [""]:
        return replace(trace, parts=tuple(parts), graph=parts[0].graph)
    graph, tensors, outputs = fx.Graph(), dict[str, Any](), []
    for number, part in enumerate(parts):
        nodes: dict[fx.Node, fx.Node] = {}
        for node in part.graph.graph.nodes:
            if node.op == "output":
                outputs.append(fx.map_arg(node.args[0], nodes.__getitem__))
                continue
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            stack = {key: (joined(part.path, path), kind) for key, (path, kind) in _stack(node).items()}
            nodes[node].meta |= {"part": number, "nn_module_stack": {"": (part.path, None), **stack}}
            if node.op == "placeholder":
                nodes[node].target = nodes[node].name
            if node.op == "get_attr":
                nodes[node].target = _name(trace.model, part.path, str(node.target), number)
                tensors[str(nodes[node].target)] = attrgetter(str(node.target))(part.graph)
    graph.output(tuple(outputs))
    return replace(trace, parts=tuple(parts), graph=fx.GraphModule(tensors, graph))


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """Return the modules in whose forward a node was made."""
    return {key: each for key, each in (node.meta.get("nn_module_stack") or {}).items() if isinstance(each[0], str)}


def _name(model: nn.Module, path: str, name: str, number: int) -> str:
    """Return the name in the network of a part's tensor; a constant of a trace gets a name of its own."""
    with suppress(AttributeError):
        attrgetter(name)(model.get_submodule(path))
        return joined(path, name)
    return joined(path, f"{name}_{number}")


def graph_of(network: fx.GraphModule, number: int, part: Part) -> fx.GraphModule:
    """Cut the graph of a part out of the graph of all parts, which may have been rewritten."""
    graph, tensors, nodes = fx.Graph(), dict[str, Any](), dict[fx.Node, fx.Node]()
    for node in network.graph.nodes:
        if number in [each.meta.get("part") for each in (node, *node.users)]:  # a rewritten graph has further tensors
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
            if node.op == "get_attr":
                nodes[node].target = str(node.target).removeprefix(f"{part.path}.")
                tensors[str(nodes[node].target)] = attrgetter(str(node.target))(network)
    for node, own in zip(
        graph.find_nodes(op="placeholder"), part.graph.graph.find_nodes(op="placeholder"), strict=True
    ):
        node.target = own.target
    (output,) = network.graph.find_nodes(op="output")
    graph.output(fx.map_arg(output.args[0][number], nodes.__getitem__))
    graph.set_codegen(part.graph.graph._codegen)
    return fx.GraphModule(tensors, graph)


class _Calls(Watching):  # type: ignore[no-untyped-call]
    """Inputs of the modules in one call of a network, and which modules run when a tensor of the network is used.

    Only modules with two matrices are noted: others have no channels between layers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = to_run(model)
        each = (self._model.named_parameters, self._model.named_buffers)
        self._names = {id(tensor): name for named in each for name, tensor in named()}
        self.inputs: dict[str, list[Inputs]] = defaultdict(list)
        self._running: list[str] = []
        self._uses: set[tuple[str, frozenset[str]]] = set()

    def record(self, given: Inputs) -> None:
        """Run the network once."""
        opaque: set[str] = set()
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                if sum(each.ndim > 1 for each in module.parameters()) > 1:
                    enter, leave = partial(self._enter, path, opaque), partial(self._leave, path, opaque)
                    hook = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                    stack.callback(hook.remove)
                    stack.callback(module.register_forward_hook(leave).remove)
            with self:
                outputs_of(self._model, given)
        for path in ("", *opaque):
            self.inputs.pop(path, None)

    def _enter(self, path: str, opaque: set[str], _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(path)
        leaves = tree_leaves((args, kwargs))
        if not all(map(is_known, leaves)):
            opaque.add(path)
        elif all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):  # a call without values shows nothing
            self.inputs[path].append(copied((args, kwargs)))

    def _leave(self, path: str, opaque: set[str], _module: nn.Module, _args: Any, output: Any) -> None:
        while self._running.pop() != path:  # modules inside whose error was caught never come here
            pass
        if not all(map(is_known, tree_leaves(output))):
            opaque.add(path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the modules that run while an operation reads tensors of the network."""
        names = {self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names}
        self._uses |= {(name, frozenset(self._running)) for name in names}
        return func(*args, **(kwargs or {}))

    def used_outside(self, paths: set[str]) -> set[str]:
        """Return the names of tensors that are used while none of the modules `paths` runs."""
        return {name for name, running in self._uses if not running & paths}
