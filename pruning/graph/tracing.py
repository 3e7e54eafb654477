"""A network as a graph of ATen operations on named parameters."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from pruning.holding.copies import values_with_history
from pruning.holding.parameter import check_all_have_values, unwrapped
from pruning.methods.functions import remove_all

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a network is called with: one tensor, a tuple of arguments, or a mapping of them by name."""


@dataclass(frozen=True)
class Traced:
    """A network in evaluation, its graph, and what it is called with.

    Args:
        model: a plain copy: masks are zeros, and there are no hooks of them.
        graph: its operations; parameters and buffers are attributes under the names that they have in `model`.
        args, kwargs: of the example.
    """

    model: nn.Module
    graph: fx.GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensor(self, name: str) -> Tensor:
        """Return the parameter, buffer or constant that an attribute of the graph names, one object for all names."""
        value: Any = self.model
        for step in name.split("."):
            value = getattr(value, step, None)
        if not isinstance(value, Tensor):  # a constant of the graph's own
            value = self.graph
            for step in name.split("."):
                value = getattr(value, step)
        assert isinstance(value, Tensor)
        return value


def arguments_of(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of an example, on the CPU.

    Raises:
        TypeError: it is none.
    """
    if isinstance(example, Tensor):
        return (example.cpu(),), {}
    if isinstance(example, tuple):
        return tree_map(_on_cpu, example), {}
    if isinstance(example, Mapping):
        return (), tree_map(_on_cpu, dict(example))
    raise TypeError(
        f"`example` (a {type(example).__name__}) must be what the network is called with: a tensor, a tuple of "
        "arguments, or a mapping of them by name."
    )


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU, in evaluation, whose masks are zeros of plain parameters.

    Raises:
        ValueError: a parameter or buffer is on the meta device.
    """
    check_all_have_values(model)
    copied = copy.deepcopy(unwrapped(model), values_with_history(model))
    remove_all(copied)
    return copied.cpu().eval()


def traced(model: nn.Module, example: Example, *, any_batch: bool = False) -> Traced:
    """Trace a plain copy of a network.

    Args:
        model: is not changed.
        example: what it is called with.
        any_batch: for batches of any size, which takes four times as long; else for the example's alone.

    Raises:
        ValueError: it cannot be traced.
        TypeError: `example` is none.
    """
    args, kwargs = arguments_of(example)
    plain = plain_copy(model)
    with quiet():
        program = exported(plain, args, kwargs, any_batch=any_batch)
        if _writes_to_views(program.graph):
            program = program.run_decompositions({})
        module = _module_of(program, plain)
    graph = fx.GraphModule(module, module.graph)
    _plain_calls(graph.graph, args, kwargs)
    _inlined(graph)
    for node in graph.graph.nodes:
        if (node.op == "get_attr" and not node.users) or node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    return Traced(plain, graph, args, kwargs)


def _module_of(program: ExportedProgram, model: nn.Module) -> fx.GraphModule:
    """Return a program as a module."""
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:  # torch.fx writes names into Python as they are
        odd = next((name for name, _ in model.named_modules() if any(map(iskeyword, name.split(".")))), "")
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export: the name of its module `{odd}` holds a keyword "
            "of Python; give the module another name."
        ) from error
    assert isinstance(module, fx.GraphModule)
    return module


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, any_batch: bool = False
) -> ExportedProgram:
    """Return the program of a plain network in evaluation; its parameters are told to take gradients.

    Raises:
        ValueError: it cannot be traced.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # else attention takes a fused path of its own
    shapes = tree_map(_batches, args or kwargs) if any_batch and not (args and kwargs) else None
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises what the network's own code does
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export ({type(error).__name__}: {first[0][:200]}); "
            "check that `example` is what it is called with, and take control flow on data out of its forward."
        ) from error


_CONTEXTS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Contexts that hold a part of the graph, and which of their arguments it is; before it, whether they are enabled."""


def _inlined(module: fx.GraphModule) -> None:
    """Put what runs under `no_grad`, or with autocast off, into the graph itself."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        place = _CONTEXTS.get(node.target.__name__)
        if place is None or (node.target.__name__ == "wrap_with_autocast" and node.args[2]):
            raise ValueError(
                f"`model` has a part under {node.target.__name__}, which is not followed; take it out of its forward."
            )
        part: Any = module.get_submodule(node.args[place].target).graph
        given = dict(zip(part.find_nodes(op="placeholder"), node.args[place + 1 :], strict=True))
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(part, given)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def _plain_calls(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a graph that takes tensors, and returns one or a tuple of them, be called without pytrees."""
    spec = graph._codegen.pytree_info.out_spec  # type: ignore[attr-defined]
    (output,) = graph.find_nodes(op="output")
    if not all(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return
    if spec.is_leaf():
        output.args = (output.args[0][0],)
    elif spec.type is tuple and all(each.is_leaf() for each in spec.children()):
        output.args = (tuple(output.args[0]),)
    else:
        return
    graph.set_codegen(fx.graph.CodeGen())


def _batches(leaf: Any) -> dict[int, Any] | None:
    return {0: Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) > 1 else None


def _writes_to_views(graph: fx.Graph) -> bool:
    """Say whether an operation changes a tensor that something else may read under another name."""
    for node in graph.nodes:
        if is_in_place(node):
            written = node.args[0]
            alone = isinstance(written, fx.Node) and len(written.users) == 1 and written.op == "call_function"
            if not alone or _may_alias(written.target):
                return True
    return False


def is_in_place(node: fx.Node) -> bool:
    """Say whether an operation of the graph writes to its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _may_alias(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return any(each.alias_info is not None for each in target._schema.returns) or target.is_view


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own warnings and logs of an export to itself."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
