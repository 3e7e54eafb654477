"""Tracing of a network to a graph of ATen operations on named parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from keyword import iskeyword
from operator import attrgetter
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pruning.graph.assignments import ends_by_chance, write_to_new_tensors, writes_to_views
from pruning.graph.decompositions import decompositions
from pruning.graph.input_guard import ANY_SIZE, InputGuard
from pruning.graph.operations import in_module
from pruning.graph.untraceable import advice, is_known
from pruning.holding.copies import to_run, values_with_history
from pruning.holding.parameter import check_all_have_values, unwrapped
from pruning.measure import macs
from pruning.measure.macs import Inputs
from pruning.methods.functions import remove_all

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Inputs of one forward call: a tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


Sizes: TypeAlias = Literal["example", "batch", "any"]
"""Sizes of inputs for which a network is traced: the example's, any size of the first dimension, or any sizes."""
SIZES: tuple[Sizes, ...] = ("any", "batch", "example")


@dataclass(frozen=True)
class Part:
    """Part of a network that is traced whole: the network itself, or one of its modules in one call.

    Args:
        path: name of the module; "" for the network itself.
        graph: operations of the part; parameters and buffers are attributes with the same names as in the module.
        args, kwargs: inputs of the trace.
        guard: inputs for which the graph holds.
        sizes: sizes for which it was traced, as far as possible.
        calls: calls of the part in one call of the network for which the graph holds.
    """

    path: str
    graph: fx.GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    guard: InputGuard
    sizes: Sizes
    calls: tuple[Inputs, ...] = ()


@dataclass(frozen=True)
class Traced:
    """Network in evaluation mode, the parts of it that are traced, and their graph.

    Args:
        model: plain copy of the network: pruned entries are zeros, pruning hooks are removed.
        parts: the network itself, or the parts to which its trace is limited.
        graph: operations of all parts; parameters and buffers are attributes with the same names as in `model`.
        outside: ids of the tensors of `model` that are used outside of the parts.
        refusal: why the network itself cannot be traced; empty if it is.
    """

    model: nn.Module
    parts: tuple[Part, ...]
    graph: fx.GraphModule
    outside: frozenset[int] = frozenset()
    refusal: str = ""

    @property
    def whole(self) -> Part:
        """The network itself."""
        (part,) = self.parts
        return part

    @property
    def inputs(self) -> list[Any]:
        """Values for the placeholders of the graph."""
        return [leaf for part in self.parts for leaf in tree_leaves((part.args, part.kwargs))]

    def tensor(self, name: str) -> Tensor:
        """Return a parameter, buffer or constant of the graph; all names of a tied tensor give the same object."""
        with contextlib.suppress(AttributeError):
            if isinstance(value := attrgetter(name)(self.model), Tensor):
                return value
        constant = attrgetter(name)(self.graph)  # torch.export adds constants to the graph alone
        assert isinstance(constant, Tensor)
        return constant


def arguments_of(example: Example, name: str = "example") -> Inputs:
    """Return an example as (args, kwargs) on the CPU; `name` is the argument that gave it.

    Raises:
        ValueError: a tensor is on the meta device.
        TypeError: the example is no tensor, tuple or mapping.
    """
    if not isinstance(example, Tensor | tuple | Mapping):
        raise TypeError(
            f"`{name}` (a {type(example).__name__}) must be the network's input; pass a tensor, a tuple of positional "
            "arguments, or a mapping of keyword arguments."
        )
    given = macs.arguments_of(tuple(example) if isinstance(example, tuple) else example)
    return macs.on_device(given, torch.device("cpu"), name)


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in evaluation mode, with plain parameters that are 0 where they were pruned.

    Raises:
        ValueError: a parameter or buffer is on the meta device.
    """
    check_all_have_values(model)
    copied = copy.deepcopy(unwrapped(model), values_with_history(model))
    remove_all(copied)
    return copied.cpu().eval()


def traced(model: nn.Module, example: Example, *, sizes: Sizes = "example") -> Traced:
    """Trace a plain copy of a network.

    A batch of 1 is traced as one of 2 where the network runs on it, because a trace may take 1 for a constant.

    Args:
        model: network to trace; it is not changed.
        example: inputs of the network.
        sizes: sizes for which the graph holds, if its guard admits them; "any" may take five times as long.

    Raises:
        ValueError: the network cannot be traced.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    plain, part = traced_part(model, arguments_of(example), sizes)
    return Traced(plain, (part,), part.graph)


def traced_part(model: nn.Module, given: Inputs, sizes: Sizes, path: str = "") -> tuple[nn.Module, Part]:
    """Trace a copy of a network or of its module `path`, and return the copy and its trace; see `traced`.

    If the first way fails, the most modest way comes next, so that a module that cannot be traced costs two attempts.
    """
    doubled = [] if sizes == "example" else list(_of_two(plain_copy(model), given))
    tried = [(fewer, each) for fewer in SIZES[SIZES.index(sizes) :] for each in (*doubled, given)]

    def attempt(fewer: Sizes, inputs: Inputs) -> tuple[nn.Module, Part]:
        plain = plain_copy(model)
        part = _traced(plain, *inputs, fewer)
        part.guard.check(*given)  # a forward may take another branch for a batch of 2
        return plain, replace(part, path=path, sizes=sizes, calls=(given,))

    modest = None
    for each in tried[:-1]:
        with contextlib.suppress(ValueError):
            return attempt(*each)
        modest = modest or attempt(*tried[-1])
    return modest or attempt(*tried[-1])


def _traced(plain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sizes) -> Part:
    order = _by_position(plain)
    kwargs = {name: kwargs[name] for name in order if name in kwargs} | kwargs
    strided = sizes != "example" and _asks_for_strides(plain, (args, kwargs))
    with quiet(), _any_size(), _any_length():
        program = exported(plain, args, kwargs, sizes=sizes)
        _check_no_vmap(program.graph, plain)
        table = decompositions()
        if any(node.target in table for node in program.graph.nodes):  # these may fix sizes
            program = program.run_decompositions(table)
        guard = InputGuard.of(program.graph, args, kwargs, order, strided=strided)
        if writes_to_views(program.graph):
            write_to_new_tensors(program.graph)
            if writes_to_views(program.graph):
                if ends_by_chance(program.graph):
                    raise ValueError("a slice ends where the example does, so that other sizes cannot be followed")
                read = _sizes_read(program.graph)
                program = program.run_decompositions(table)
                guard = guard.fixed(read - _sizes_read(program.graph), tree_leaves((args, kwargs)))
        if isinstance(earlier := getattr(plain, "guard", None), InputGuard):
            guard = guard.within(earlier)
        module = _module_of(program, plain)
    graph = fx.GraphModule(module, module.graph)
    _plain_calls(graph.graph, args, kwargs)
    _inlined(graph)
    for node in graph.graph.nodes:
        if (node.op == "get_attr" and not node.users) or node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default and node.meta["val"].is_complex():
            node.target = torch.ops.aten.reshape.default  # results of FFTs lie otherwise in memory than a trace says
    return Part("", graph, args, kwargs, guard, sizes)


def _sizes_read(graph: fx.Graph) -> set[tuple[str, int]]:
    """Return (name of an input, dimension) of sizes that a graph reads."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    return {(str(node.args[0].target), node.args[1]) for node in nodes}


def _check_no_vmap(graph: fx.Graph, model: nn.Module) -> None:
    """Raise ValueError if a graph has the steps of `torch.vmap` itself, whose tensors live inside of it alone."""
    for node in graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            place = f"`{path}`" if (path := in_module(node)) else "its forward"
            raise ValueError(
                f"{type(model).__name__} cannot be traced by torch.export: it calls torch.vmap in {place}; compute the "
                "same by broadcasting."
            )


def _by_position(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that a network's forward takes by position."""
    taken = inspect.signature(model.forward).parameters.values()
    return tuple(each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD)


def _any_size() -> contextlib.AbstractContextManager[Any]:
    """Let a trace treat sizes of 0 and 1 like others, where torch can."""
    if not hasattr(_config, ANY_SIZE):
        return contextlib.nullcontext()
    setting: contextlib.AbstractContextManager[Any] = _config.patch(**{ANY_SIZE: True})  # type: ignore[attr-defined]
    return setting


@contextlib.contextmanager
def _any_length() -> Iterator[None]:
    """Let a trace take recurrent layers for sequences of any length; torch would run each step of the example's."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    operations = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    with contextlib.ExitStack() as patches:
        for each in operations:
            patches.callback(each._dispatch_cache.clear)
            patches.enter_context(patch.dict(each.py_kernels, {key: _recurrent_shapes}))
            each._dispatch_cache.clear()
        yield


def _recurrent_shapes(
    x: Tensor, states: Tensor | Sequence[Tensor], _weights: Any, _biases: bool, _layers: int, *flags: Any
) -> tuple[Tensor, ...]:
    """Return empty tensors like the outputs and last states of a recurrent layer."""
    _dropout, _train, both, batch_first = flags
    states = (states,) if isinstance(states, Tensor) else states
    steps = x.transpose(0, 1) if batch_first else x
    found = steps.new_empty((*steps.shape[:2], states[0].shape[-1] * (1 + both)))
    return (found.transpose(0, 1) if batch_first else found, *map(torch.empty_like, states))


def _of_two(model: nn.Module, given: Inputs) -> Iterator[Inputs]:
    """Yield inputs with a batch of 1 repeated, if the network runs on them.

    The batch is the first dimension of size 1 of each tensor, as of a sequence and of the states of two recurrent
    layers, or the first one after dimension 0.
    """
    for start in (0, 1):
        with contextlib.suppress(Exception):  # a tensor may have no such dimension, and a forward may raise anything
            doubled: Inputs = tree_map(partial(_twice, start=start), given)
            outputs_of(to_run(model), doubled)
            yield doubled
            return


def _twice(leaf: Any, start: int) -> Any:
    return torch.cat([leaf, leaf], leaf.shape.index(1, start)) if isinstance(leaf, Tensor) else leaf


class _Strides(TorchFunctionMode):
    """Notes whether a forward asks how a tensor lies in memory."""

    asked: bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked = self.asked or func in (Tensor.is_contiguous, Tensor.stride)
        return func(*args, **(kwargs or {}))


def _asks_for_strides(model: nn.Module, given: Inputs) -> bool:
    copied_model = to_run(model)
    with _Strides() as strides, contextlib.suppress(Exception):  # a trace says why a forward fails
        outputs_of(copied_model, given)
    return bool(strides.asked)


def _module_of(program: ExportedProgram, model: nn.Module) -> fx.GraphModule:
    """Convert a program to a module."""
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:  # torch.fx writes module names into Python code
        name = next((name for name, _ in model.named_modules() if any(map(iskeyword, name.split(".")))), "")
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export: the name of its module `{name}` contains a "
            "Python keyword; rename the module."
        ) from error
    assert isinstance(module, fx.GraphModule)
    return module


def exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sizes: Sizes = "example"
) -> ExportedProgram:
    """Export a plain network in evaluation mode; sets `requires_grad` of its floating-point parameters.

    Raises:
        ValueError: the network cannot be traced.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())  # else attention takes a fused fast path
    args, kwargs = copied((args, kwargs))  # one tensor given twice would be traced as one input
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.ndim and (sizes == "any" or len(leaf) > 1):
            shapes[leaf] = dict.fromkeys(range(leaf.ndim if sizes == "any" else 1), Dim.AUTO)
    dynamic = None if sizes == "example" else shapes
    hooks = [model.register_forward_hook(_known)]
    hooks += [each.register_forward_pre_hook(_check_sizes_are_short) for each in model.modules() if sizes == "any"]
    try:
        with without_key_caches(model), _attributes_kept(model):
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch.export passes on any error of the network's own code
        raise ValueError(
            f"{type(model).__name__} cannot be traced by torch.export ({type(error).__name__}: {first_line(error)}); "
            f"{advice(model, (args, kwargs))}."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


LONGEST_SIZE = 100
"""Most operations in the formula of a tensor's size: torch takes minutes to simplify longer ones, again and again."""


def _check_sizes_are_short(module: nn.Module, given: tuple[Any, ...]) -> None:
    """Raise ValueError if the sizes of a module's inputs have become long formulas of the sizes of the network's."""
    sizes: list[Any] = [size for leaf in tree_leaves(given) if isinstance(leaf, Tensor) for size in leaf.shape]
    for size in sizes:
        if isinstance(size, torch.SymInt) and (length := size.node.expr.count_ops()) > LONGEST_SIZE:
            raise ValueError(
                f"the size of an input of a {type(module).__name__} is a formula of {length} operations on the sizes "
                f"of `example`, and at most {LONGEST_SIZE} can be followed"
            )


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a forward assigns to modules: values of a trace are no tensors outside of it."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, own in before.items():
            vars(module).clear()
            vars(module).update(own)


def caching_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a network that let it return a cache of keys or states."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]


@contextlib.contextmanager
def without_key_caches(model: nn.Module) -> Iterator[None]:
    """Set `use_cache` of the configurations of transformers' models to False; a cache of keys is no output here."""
    caching = caching_configs(model)
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _known(_model: nn.Module, _inputs: Any, found: Any) -> Any:
    """Return outputs with None for caches, whose class torch.export does not know; None if no tensor is left."""
    known = tree_map(lambda leaf: leaf if is_known(leaf) else None, found)
    return known if any(isinstance(leaf, Tensor) for leaf in tree_leaves(known)) else None


def copied(given: Inputs) -> Inputs:
    """Return (args, kwargs) with copies of all tensors, each its own."""
    found: Inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given)
    return found


def outputs_of(model: nn.Module, given: Inputs, *, caching: bool = False) -> list[Tensor]:
    """Return all tensors that a network returns, without gradients, warnings and logs; with caches of keys if asked."""
    args, kwargs = copied(given)  # a forward may write to its inputs
    with torch.no_grad(), quiet(), contextlib.nullcontext() if caching else without_key_caches(model):
        return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def output_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of outputs, relative to the largest of their tensor.

    It is inf if shapes, integers, or the places of NaN and infinity differ.
    """
    found, expected = (
        [torch.view_as_real(e.resolve_conj()) if e.is_complex() else e for e in s] for s in (found, expected)
    )
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if not one.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one, other) else float("inf"))
            continue
        finite = other.isfinite()
        if not torch.equal(one.isfinite(), finite):
            return float("inf")
        if finite.any():
            one, other = one[finite], other[finite]
            difference = (one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)
            worst = max(worst, float(difference))
    return worst


def difference_told(difference: float) -> str:
    """Return a difference of outputs in words."""
    if difference == float("inf"):
        return "outputs differ in their shapes, whole numbers, or places of NaN and infinity"
    return f"outputs differ by {difference:.2g} of the largest"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_CONTEXTS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Context operator that wraps a subgraph -> the subgraph's index among its arguments; settings come before it."""


def _inlined(module: fx.GraphModule) -> None:
    """Inline the subgraphs that run under `no_grad` or with autocast off."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        place = _CONTEXTS.get(node.target.__name__)
        if place is None or (node.target.__name__ == "wrap_with_autocast" and node.args[2]):
            raise ValueError(
                f"`model` runs a part of its forward under {node.target.__name__}, which pruning cannot trace; remove "
                "that context from the forward."
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
    """Drop pytree handling from a graph that takes only tensors and returns a tensor or a tuple of tensors."""
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings, logs and stderr output."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
