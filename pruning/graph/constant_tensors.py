"""Constant entries of a network's tensors: the values that do not depend on the inputs.

The network runs in float64, with NaN in place of every value that varies. A zero weight times NaN counts as exactly 0,
so NaN does not spread through zero weights.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pruning.graph.operations import (
    CHANNELWISE_NORMALISATIONS,
    CONVOLUTIONS,
    GROUPED_PRODUCT,
    MOVES,
    NORMALISATIONS,
    PRODUCTS,
    RECURRENCES,
    REDUCTIONS,
    SOFTMAXES,
    SPATIAL,
    Recurrence,
    arguments,
    is_entrywise,
    is_in_place,
    name_of,
    read_for_values,
)
from pruning.graph.tracing import Traced, first_line

ROUNDING = 1e-12
"""Largest difference between values that count as equal in float64, relative to the largest value."""

_TRUSTED = {"cat", "constant_pad_nd", "pad", "stack", *MOVES, *REDUCTIONS, *SPATIAL, *SOFTMAXES, *NORMALISATIONS}
_TRUSTED |= {*CHANNELWISE_NORMALISATIONS}
"""Operations that return NaN in every entry of a result that an input with NaN reaches."""

Rule: TypeAlias = Callable[[Mapping[str, Any]], Any]


class Constants(fx.Interpreter):
    """Run a traced network; `values` maps each node to its result, with NaN where the result varies.

    Results are in float64; parameters and buffers are the network's own tensors, of which copies would take twice the
    memory.
    """

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.graph)
        self.values: dict[fx.Node, Any] = {}
        self.varying: set[fx.Node] = set()
        """Nodes whose integers or truth values depend on the inputs."""
        self._traced = traced
        try:
            with torch.no_grad():
                self.run(*traced.inputs, enable_io_processing=False)  # the graph's placeholders take the flat leaves
        except RuntimeError as error:
            if not any(name_of(node) in ("item", "_local_scalar_dense") for node in traced.graph.graph.nodes):
                raise
            raise ValueError(
                f"{type(traced.model).__name__} takes sizes of tensors from the values of its inputs, so channels "
                f"cannot be followed ({first_line(error)}); make tensors of fixed sizes in the forward."
            ) from error

    def run_node(self, n: fx.Node) -> Any:
        written = n.args[0] if is_in_place(n) and isinstance(n.args[0], fx.Node) else None
        if written is not None and _is_float(self.env.get(written)):
            self.env[written] = self.env[written].contiguous()
        value = self.values[n] = _without_copies(self._value(n))
        if written is not None:
            self.env[written] = self.values[written] = value
            self.varying |= {written} if n in self.varying else set()
        return value

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._input(node, super().run_node(node))
        if node.op == "get_attr":
            return self._traced.tensor(str(node.target)).detach()
        name, part = name_of(node), _reads_a_part(node, self.values)
        if node.op == "output" or not (part or self._varies(node)):
            return _wide(super().run_node(node))
        if part and name != "embedding":
            return self._at_any_place(node)
        if name in _RULES and all(map(_is_float, flat(node.meta.get("val")))):
            return _RULES[name](fx.map_arg(arguments(node), self._in_rule))
        result = _wide(super().run_node(node))
        if name in ("to", "_to_copy", "type_as") and _is_float(result):
            given = _wide(self.values[node.all_input_nodes[0]])
            return given if _is_float(given) else self._marked(node, name, result)
        if node.target is operator.getitem:
            if node.args[0] in self.varying:
                self.varying.add(node)
            return result
        return self._marked(node, name, result)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # here, and not where a parameter is read: the wide copy goes as soon as the operation has run
        given: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_wide, super().fetch_args_kwargs_from_env(n))
        return given

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except RuntimeError:  # strides differ from the traced run, so a view may fail
            plain = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            with contextlib.suppress(RuntimeError):
                return super().call_function(target, *plain)
            # some operations refuse NaN, as histc; the caller marks what depends on inputs
            plain = tree_map(lambda leaf: leaf.nan_to_num() if _is_float(leaf) else leaf, plain)
            with contextlib.suppress(RuntimeError):
                return super().call_function(target, *plain)
            # others refuse float64, as fake quantisation
            return super().call_function(target, *tree_map(lambda leaf: cast(leaf, torch.float32), plain))

    def _input(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_floating_point():
            self.varying.add(node)
        return _wide(_unknown(value))

    def _in_rule(self, node: fx.Node) -> Any:
        """Return a value as rules take it: NaN also in place of integers and truth values that depend on the inputs."""
        value = _wide(self.values[node])
        if node not in self.varying or not isinstance(value, Tensor):
            return value
        return torch.tensor(float("nan"), dtype=torch.float64).expand(value.shape)

    def _varies(self, node: fx.Node) -> bool:
        name = name_of(node)
        if name == "sym_size":
            return False
        if isinstance(node.target, torch._ops.OpOverload) and (
            "empty" in name or torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            return True
        read = read_for_values(node)
        return any(each in self.varying or any(map(_has_nan, flat(self.values[each]))) for each in read)

    def _marked(self, node: fx.Node, name: str, result: Any) -> Any:
        """Return a result with NaN where it may vary; a result with integers or booleans is added to `varying`."""
        read = read_for_values(node)
        by_integers = any(each in self.varying for each in read)
        tensors = [v for v in flat(result) if isinstance(v, Tensor)]
        if any(not v.is_floating_point() for v in tensors) or not tensors:
            self.varying.add(node)
        if is_entrywise(node) and len(tensors) == 1 and tensors[0].is_floating_point() and not by_integers:
            given = [self.values[each] for each in read]
            for each in filter(_has_nan, given):
                result = result.masked_fill(each.isnan().expand_as(result), float("nan"))
            return result
        if name in _TRUSTED and not by_integers:
            return _by_channel(result, self.values[node.all_input_nodes[0]], name) if name in SPATIAL else result
        if name in ("index", "index_select") and _is_float(result):
            return self._at_any_place(node)
        if not isinstance(result, list | tuple):
            return _unknown(result)
        return [_unknown(each) for each in result]

    def _at_any_place(self, node: fx.Node) -> Any:
        """Return what an operation takes at places that vary, such as the matrices of some experts."""
        whole, *rest = fx.map_arg(arguments(node), self.values.__getitem__).values()
        places = dict(enumerate(rest[0])) if name_of(node) == "index" else {rest[0]: rest[1]}
        for dim, place in places.items():
            if place is not None:
                same = (whole == whole.narrow(dim, 0, 1)).all(dim, keepdim=True) & (place.dtype is not torch.bool)
                whole = torch.where(same, whole, float("nan"))  # a mask may stand for several dimensions
        return _wide(node.target(whole, *rest))  # type: ignore[operator]


def _reads_a_part(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Return whether an operation reads some rows of a table of the network by number, and others for other sizes."""
    name, source = name_of(node), node.args[0] if node.args else None
    if name not in ("embedding", "index", "index_select") or not isinstance(source, fx.Node):
        return False
    if source.op != "get_attr" or not _is_float(values[source]):
        return False
    given = fx.map_arg(arguments(node), values.__getitem__)
    places = {int(given.get("dim", 0)): given.get("indices", given.get("index"))}
    if name == "index":
        places = dict(enumerate(given["indices"]))
    sizes = values[source].shape
    return any(each is not None and len(each.unique()) < sizes[dim] for dim, each in places.items())


def constant_along(value: Tensor, dim: int) -> Tensor:
    """Return the constant value at each position of a dimension, NaN where the value varies; shape (positions,)."""
    if not value.numel():
        return torch.full((value.shape[dim],), float("nan"), dtype=torch.float64)
    rows = value.movedim(dim, 0).reshape(value.shape[dim], -1)
    low, high = rows.amin(1), rows.amax(1)
    same = high - low <= ROUNDING * torch.maximum(high.abs(), low.abs())
    return torch.where(same, rows[:, 0].double(), float("nan"))


def _by_channel(result: Any, given: Tensor, name: str) -> Any:
    """Return a result of pooling with NaN in every channel whose input varies anywhere."""
    positions = tuple(range(-next(int(each) for each in name if each.isdigit()), 0))
    varies = given.isnan().any(dim=positions[0], keepdim=True)
    for dim in positions[1:]:
        varies = varies.any(dim=dim, keepdim=True)
    if isinstance(result, list | tuple):
        return [result[0].masked_fill(varies, float("nan")), *result[1:]]
    return result.masked_fill(varies, float("nan"))


def _wide(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_wide(each) for each in value]
    return cast(value, torch.float64)


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """Return a floating-point tensor in another dtype, a complex one in the complex dtype of that precision."""
    if _is_complex(leaf):
        return leaf.to(dtype.to_complex())
    return leaf.to(dtype) if _is_float(leaf) else leaf


def flat(value: Any) -> list[Any]:
    """Return the items of a list or tuple, else a list of the one value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_copies(value: Any) -> Any:
    """Return a tensor of NaN alone as a view of one NaN: a large network has gigabytes of values that vary."""
    if _is_float(value) and value.numel() > 1 and bool(value.isnan().all()):
        return value.new_full((), float("nan")).expand(value.shape)
    return value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _has_nan(value: Any) -> bool:
    return _is_float(value) and bool(value.isnan().any())


def _unknown(value: Any) -> Any:
    return torch.full_like(value, float("nan")) if _is_float(value) else value


def _bilinear(operation: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> Tensor:
    """Return a sum of products, NaN where a product varies; a product with a constant 0 is 0."""
    varies, other_varies = one.isnan(), other.isnan()
    spread = operation(varies.float(), (other_varies | (other != 0)).float())
    if other_varies.any():
        spread = spread + operation((varies | (one != 0)).float(), other_varies.float())
    if bool((unknown := spread > 0.5).all()):
        return one.new_full((), float("nan")).expand(spread.shape)
    return operation(one.nan_to_num(0.0), other.nan_to_num(0.0)).masked_fill(unknown, float("nan"))


def _linear(given: Mapping[str, Any]) -> Tensor:
    result = _bilinear(F.linear, given["input"], given["weight"])
    return result if given["bias"] is None else result + given["bias"]


def _addmm(given: Mapping[str, Any]) -> Tensor:
    product = _bilinear(torch.matmul, given["mat1"], given["mat2"])
    return torch.add(product * given["alpha"], given["self"], alpha=given["beta"])


def _convolution(operation: Callable[..., Tensor]) -> Rule:
    def rule(given: Mapping[str, Any]) -> Tensor:
        options = {k: v for k, v in given.items() if k not in ("input", "weight", "bias")}
        x, weight, bias = given["input"], given["weight"], given["bias"]
        result = _bilinear(lambda x, w: operation(x, w, None, **options), x, weight)
        if _is_smaller_than_kernel(x, weight, given["dilation"]):
            transposed = "transpose" in operation.__name__ or bool(given.get("transposed"))
            result = result.masked_fill(_reads_any(x, weight, given["groups"], transposed), float("nan"))
        return result if bias is None else result + bias.reshape(-1, *[1] * (weight.ndim - 2))

    return rule


def _is_smaller_than_kernel(x: Tensor, weight: Tensor, dilation: Sequence[int]) -> bool:
    """Return whether an image is so small that weights of a kernel may meet padding alone at all its positions."""
    sizes = weight.shape[2:]
    reaches = [step * (size - 1) for step, size in zip([*dilation] * len(sizes), sizes, strict=False)]
    return any(reach >= size for reach, size in zip(reaches, x.shape[-len(sizes) :], strict=True))


def _reads_any(x: Tensor, weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """Return which filters have a weight on a channel that is not 0 everywhere: bool, shape (filters, 1, ...)."""
    dims = weight.ndim - 2
    ones, zeros = [1] * dims, [0] * dims
    live = (x != 0).movedim(-dims - 1, 0).flatten(1).any(1).double().reshape(1, -1, *ones)
    read = (weight != 0).flatten(2).any(2).double().reshape(*weight.shape[:2], *ones)
    return torch.convolution(live, read, None, ones, zeros, ones, transposed, zeros, groups)[0] > 0.5


def _product(operation: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    def rule(given: Mapping[str, Any]) -> Tensor:
        one, other = list(given.values())[:2]
        return _bilinear(operation, one, other)

    return rule


def _grouped_product(given: Mapping[str, Any]) -> Tensor:
    """Product in groups: NaN but for outputs that are 0 by each matrix of the stack."""
    one, other, *_ = given.values()
    largest = _bilinear(torch.matmul, one.abs(), other.abs().sum(0))
    return torch.where(largest == 0, 0.0, float("nan")).double()


def _mul(given: Mapping[str, Any]) -> Tensor:
    one, other = (torch.as_tensor(given[key], dtype=torch.float64) for key in ("self", "other"))
    return (one * other).masked_fill((one == 0) | (other == 0), 0.0)


def _attention(given: Mapping[str, Any]) -> Tensor:
    """Attention: its weights sum to 1 for each query, so a value that all tokens share is also the output.

    The output of a query that sees no key is 0.
    """
    query, value, mask = given["query"], given["value"], given["attn_mask"]
    same = (value == value.narrow(-2, 0, 1)).all(-2, keepdim=True) & (given["dropout_p"] == 0.0)
    if mask is not None:
        hides = ~mask if mask.dtype is torch.bool else mask.isnan() | mask.isneginf()
        same &= (value.narrow(-2, 0, 1) == 0) | ~hides.all(-1).any()
    shape = (*query.shape[:-1], value.shape[-1])
    result = torch.where(same, value.narrow(-2, 0, 1), float("nan"))
    if result.shape[:-2] != query.shape[:-2]:  # several query heads share one value head
        return torch.full(shape, float("nan"), dtype=torch.float64)
    return result.expand(shape).clone()


def _embedding(given: Mapping[str, Any]) -> Tensor:
    weight, indices = given["weight"], given["indices"]
    same = (weight == weight[:1]).all(0)
    return torch.where(same, weight[0], float("nan")).expand(*indices.shape, weight.shape[1]).clone()


def _batch_norm(given: Mapping[str, Any]) -> Tensor:
    x, weight, bias, mean, var = (given[key] for key in ("input", "weight", "bias", "running_mean", "running_var"))
    result = F.batch_norm(x, mean, var, weight, bias, bool(given.get("training")), eps=given["eps"])
    if weight is None or given.get("training"):
        return result
    shift = torch.zeros_like(weight) if bias is None else bias
    shape = (-1, *[1] * (x.ndim - 2))
    return torch.where(weight.reshape(shape) == 0, shift.reshape(shape), result)


def _recurrence(name: str) -> Rule:
    """Return the rule of an RNN: a unit stays 0 if it starts at 0 and its candidate reads only zeros."""

    def rule(given: Mapping[str, Any]) -> Any:
        found = getattr(torch, name)(*given.values())
        results = [_unknown(each).clone() for each in (found if isinstance(found, tuple) else (found,))]
        if "input" in given:  # else of sequences packed in one tensor
            layers, states, source = Recurrence.all_of(given), flat(given["hx"]), given["input"]
            start = [(state == 0).reshape(len(layers), -1, state.shape[-1]).all(1) for state in states]
            last = [result.view(len(layers), -1, result.shape[-1]) for result in results[-len(states) :]]
            zero, beside = constant_along(source, source.ndim - 1) == 0, 1 + bool(given.get("bidirectional"))
            for first in range(0, len(layers), beside):
                own = [_silent(layers[n], zero, [each[n] for each in start]) for n in range(first, first + beside)]
                for n, silent in enumerate(own, first):
                    for state, which in zip(last, silent, strict=True):
                        state[n, :, which] = 0.0
                zero = torch.cat([outputs for outputs, *_ in own])
            if "params" in given:
                results[0][..., zero] = 0.0
        return results if isinstance(found, tuple) else results[0]

    return rule


def _silent(layer: Recurrence, zero: Tensor, start: list[Tensor]) -> list[Tensor]:
    """Return which outputs and, of an LSTM, which cells of a layer stay 0; bool, shape (outputs,) and (units,)."""
    units = layer.states.shape[1] if layer.projection is None else layer.projection.shape[1]
    own = slice(min(2, len(layer.inputs) // units - 1) * units, None)  # gates: i f g o, r z n, or one
    live = [(weight != 0)[own][:units] for weight in layer[:4] if weight is not None]
    silent = ~live[0][:, ~zero].any(1) & start[-1]
    for bias in live[2:]:
        silent &= ~bias
    if layer.projection is None:
        silent &= start[0]
    while True:
        outputs = silent
        if layer.projection is not None:
            outputs = ~(layer.projection != 0)[:, ~silent].any(1) & start[0]
        left = silent & ~live[1][:, ~outputs].any(1)
        if torch.equal(left, silent):
            return [outputs, silent][: len(start)]
        silent = left


_RULES: dict[str, Rule] = {
    "batch_norm": _batch_norm,
    "linear": _linear,
    "addmm": _addmm,
    "mul": _mul,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    GROUPED_PRODUCT: _grouped_product,
    **{name: _product(getattr(torch, name)) for name in PRODUCTS},
    **{name: _convolution(getattr(F, name)) for name in CONVOLUTIONS if hasattr(F, name)},
    "convolution": _convolution(torch.convolution),
    **{name: _recurrence(name) for name in RECURRENCES},
}
