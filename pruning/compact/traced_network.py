"""A traced network as a module for inference: checks of its inputs, copies, and pickles without another trace."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

from pruning.graph.input_guard import InputGuard
from pruning.graph.tracing import quiet


class TracedNetwork(fx.GraphModule):
    """The operations of a network in evaluation mode.

    A call with inputs for which the trace does not hold raises ValueError, and so does `train()`.
    """

    guard: InputGuard

    @classmethod
    def of(cls, graph: fx.GraphModule, guard: InputGuard) -> TracedNetwork:
        """Return the network of a graph, in evaluation mode."""
        own = {name: each for name, each in vars(graph).items() if name in OF_MODULES}
        return _network(cls, graph.graph, {**own, "guard": guard}).eval()

    def train(self, mode: bool = True) -> TracedNetwork:
        """Set evaluation mode.

        Raises:
            ValueError: `mode` is True.
        """
        if mode:
            kind = type(self).__mro__[1].__name__
            raise ValueError(
                f"this {kind} (mode=True) must stay in evaluation mode: it repeats the operations of a "
                "call in evaluation mode, without dropout, and with the running statistics of batch normalisation; "
                "fine-tune the masked network and make this one from it again."
            )
        super().train(False)
        return self

    def recompile(self) -> Any:
        """Generate the code of the graph anew, and guard its inputs; a hook would take a microsecond longer."""
        code, kind = super().recompile(), type(self)
        run = kind.forward

        @functools.wraps(run)
        def forward(self: TracedNetwork, *args: Any, **kwargs: Any) -> Any:
            seen = (
                len(args) == 1
                and not kwargs
                and isinstance(args[0], Tensor)
                and (args[0].shape, args[0].dtype) in self.guard.seen
            )
            if not seen:
                self.guard.check(args, kwargs)
            return run(self, *args, **kwargs)

        kind.forward = forward  # each graph module has a class of its own
        kind.__call__ = nn.Module.__call__  # type: ignore[method-assign]  # torch.fx adds half a microsecond
        return code

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TracedNetwork:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.guard = self.guard.converted(fn)
        made = [node for node in self.graph.nodes if "pin_memory" in node.kwargs]  # as the first states of an LSTM
        for node in made:
            node.kwargs = _following(node.kwargs, fn)
        if made:
            self.recompile()
        return self

    def _own(self) -> dict[str, Any]:
        """Return the attributes of the module, with those that torch.fx does not make."""
        return {name: each for name, each in vars(self).items() if name in OF_MODULES or name not in OF_GRAPHS}

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedNetwork:
        with quiet():
            return _network(type(self).__mro__[1], *copy.deepcopy((self.graph, self._own()), memo))

    def __reduce__(self) -> tuple[Any, ...]:  # torch.fx would trace its code again, which fails for `torch.zeros(n)`
        return _unpickled, (type(self).__mro__[1], _packed(self.graph), self.graph._codegen, self._own())


def _following(kwargs: Mapping[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the options of an operation that makes a tensor, for a network whose tensors are converted."""
    given = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    made = convert(torch.empty(0, **{"dtype": torch.bool, **given}))
    return {**kwargs, **{name: getattr(made, name) for name in given}}


MEMORY_FORMATS = [each for each in vars(torch).values() if isinstance(each, torch.memory_format)]
OF_MODULES = frozenset(vars(nn.Module()))
OF_GRAPHS = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) | {"_in_spec", "_out_spec"}


def _network(kind: type[TracedNetwork], graph: fx.Graph, own: Mapping[str, Any]) -> TracedNetwork:
    network = kind(nn.Module(), fx.Graph())
    vars(network).update(own)
    network.graph = graph
    return network


@dataclass(frozen=True)
class _Named:
    """A node, an operation or a memory format in a pickle; the protocol of `torch.save` has no memory formats."""

    name: str


def _as_named(leaf: Any) -> Any:
    if isinstance(leaf, torch.memory_format):
        return _Named(str(leaf))
    return _Named(leaf.name) if isinstance(leaf, fx.Node) else leaf


def _packed(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return the nodes of a graph as values that can be pickled."""
    found = []
    for node in graph.nodes:
        target = _Named(str(node.target)) if isinstance(node.target, OpOverload) else node.target
        given: Any = (node.args, node.kwargs)
        found.append((node.name, node.op, target, map_aggregate(given, _as_named)))
    return found


def _unpickled(
    kind: type[TracedNetwork], nodes: list[tuple[Any, ...]], codegen: Any, own: Mapping[str, Any]
) -> TracedNetwork:
    graph, made = fx.Graph(), dict[str, Any]({str(each): each for each in MEMORY_FORMATS})
    for name, op, target, given in nodes:
        args: Any = map_aggregate(given, lambda leaf: made[leaf.name] if isinstance(leaf, _Named) else leaf)
        target = attrgetter(target.name)(torch.ops) if isinstance(target, _Named) else target
        made[name] = graph.create_node(op, target, args[0], args[1], name)
    graph.set_codegen(codegen)
    return _network(kind, graph, own)
