"""Label rules of products: with stacks of matrices, which keep equal rows and columns, and of two tensors that vary.

In products of two tensors that both vary, such as attention, whole heads can go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from pruning.graph.constant_tensors import constant_along
from pruning.graph.label_flow import FIXED, NAN, Fields, Flow, Site, along, covered, covering, pin_inputs, raised
from pruning.graph.operations import arguments, described


class Factor(NamedTuple):
    """One factor of a product: its fields of labels, and its value with NaN where it varies."""

    fields: Fields
    value: Tensor

    @classmethod
    def of(cls, flow: Flow, node: fx.Node) -> Factor:
        """Return the fields and the value of a node."""
        return cls(flow.of(node), flow.value(node))

    def turned(self) -> Factor:
        """Exchange the last two dimensions."""
        return Factor([each.transpose(-1, -2) for each in self.fields], self.value.transpose(-1, -2))

    def for_each(self, heads: int) -> Factor:
        """Repeat each head for the consecutive query heads that share it; shape (..., heads, tokens, features)."""
        times = heads // self.value.shape[-3]
        repeated = [each.repeat_interleave(times, -3) if each.shape[-3] > 1 else each for each in self.fields]
        return Factor(repeated, self.value.repeat_interleave(times, -3)) if times > 1 else self


def _rows(flow: Flow, fields: Fields, shape: torch.Size, dim: int, why: str) -> Tensor | None:
    """Return the labels of a factor's contracted dimension, shape (batch ..., positions); None if it has none."""
    field = covering(fields, dim)
    if field is None:
        return None
    other = len(shape) - 1 if dim == len(shape) - 2 else len(shape) - 2
    if field.shape[other] > 1:
        flow.labels.tie(field, field.narrow(other, 0, 1), why)
        field = field.narrow(other, 0, 1)
    return field.squeeze(other)


def _distinct(flow: Flow, rows: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the different rows of labels, the place of each row among them, and where all equal rows are zero."""
    found, places = np.unique(flow.labels.roots(rows).numpy(), axis=0, return_inverse=True)
    place = torch.from_numpy(places.reshape(-1))
    others = torch.zeros(len(found), zero.shape[1]).index_add_(0, place, (~zero).float())
    return torch.from_numpy(found), place, others == 0


def contract(flow: Flow, node: fx.Node, one: Factor, other: Factor, dims: tuple[int, int]) -> Tensor | None:
    """Contract one dimension of each factor, and return the result's labels, shape (batch ...).

    Returns:
        None if one of the dimensions has no labels, or if the batch has one entry, which is always kept.
    """
    why = f"{described(node)} reads it"
    rows = [_rows(flow, each.fields, each.value.shape, dim, why) for each, dim in zip((one, other), dims, strict=True)]
    if rows[0] is None or rows[1] is None:
        for each in rows:
            if each is not None:
                flow.labels.pin(each.flatten(), why)
        return None
    flow.labels.tie(rows[0], rows[1], why)
    both = rows[0].expand((rows[0] + rows[1]).shape)
    zero = [_zero(each.value, dim, both.ndim) for each, dim in zip((one, other), dims, strict=True)]
    nothing = _reduced_to(zero[0] | zero[1], both.shape).expand(both.shape)
    rows_left, place, silent = _distinct(flow, *(each.reshape(-1, both.shape[-1]) for each in (both, nothing)))
    constant = torch.where(silent, 0.0, NAN).double().flatten()
    if all(size == 1 for size in both.shape[:-1]):
        flow.sites.append(Site(node, rows_left.flatten(), torch.full((1,), FIXED), None, constant, why))
        return None
    labels = flow.labels.fresh(len(rows_left))
    flow.shapes.same.append((labels[:, None], rows_left))
    blocks = torch.eye(len(labels), dtype=torch.bool).repeat_interleave(both.shape[-1], 1)
    flow.sites.append(Site(node, rows_left.flatten(), labels, blocks, constant, why))
    return labels[place].reshape(both.shape[:-1])


def _zero(value: Tensor, dim: int, ndim: int) -> Tensor:
    """Return whether a factor is 0 along its whole other dimension; bool, shape (batch ..., positions)."""
    other = value.ndim - 1 if dim == value.ndim - 2 else value.ndim - 2
    return raised((value == 0).all(other), ndim)


def _reduced_to(flags: Tensor, shape: torch.Size) -> Tensor:
    for dim, size in enumerate(shape):
        if size == 1 and flags.shape[dim] > 1:
            flags = flags.all(dim, keepdim=True)
    return flags


def weighted_sum(flow: Flow, node: fx.Node, weights: Tensor | None, other: Factor) -> Fields:
    """Return the labels of a weighted sum over tokens.

    Args:
        weights: labels of the attention weights, one per head, of a shape that broadcasts to (batch ...); None if
            they have none.
        other: the weighted values, (batch ..., tokens, channels).
    """
    why = f"{described(node)} puts it together with what stays"
    fields, ndim = other.fields, other.value.ndim
    flow.pin([field for field in fields if ndim - 2 in covered(field)], why)
    fields = [field for field in fields if ndim - 2 not in covered(field)]
    batch = set(range(ndim - 2))
    with_batch = [field for field in fields if covered(field) & batch]
    of_heads = [field for field in with_batch if weights is not None and _broadcasts(weights.shape, field.shape[:-2])]
    flow.pin([field for field in with_batch if not any(field is each for each in of_heads[:1])], why)
    if weights is None or not of_heads:
        if weights is not None:
            flow.labels.pin(weights.flatten(), why)
        return fields
    field = of_heads[0]
    lead = field.reshape(field.shape[:-2].numel(), -1)
    heads = torch.broadcast_to(weights, field.shape[:-2]).flatten()
    zero = _reduced_to((other.value == 0).all(-2), field.squeeze(-2).shape).reshape(lead.shape)
    rows, _, silent = _distinct(flow, torch.cat([heads[:, None], lead], 1), zero)
    flow.shapes.same.append((rows[:, :1], rows[:, 1:]))
    reads = torch.eye(len(rows), dtype=torch.bool).repeat_interleave(lead.shape[1], 0) & ~silent.flatten()[:, None]
    constant = torch.full((len(rows),), NAN).double()
    flow.sites.append(Site(node, rows[:, 0], rows[:, 1:].flatten(), reads, constant, why))
    return fields


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) <= len(to) and all(size in (1, own) for size, own in zip(shape[::-1], to[::-1], strict=False))


def product(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    one, other = (Factor.of(flow, each) for each in list(given.values())[:2])
    sizes = one.value.shape, other.value.shape
    why = f"{described(node)} reads it"
    if min(map(len, sizes)) < 2:
        flow.pin([*one.fields, *other.fields], why)
        return []
    if weight := stack_of(flow, node):
        if weight is not node.args[0]:
            return _stacked(flow, node, one, other, weight)
        return [each.transpose(-1, -2) for each in _stacked(flow, node, other.turned(), one.turned(), weight)]
    if _is_weighted_from_the_right(one, other):
        return [each.transpose(-1, -2) for each in _contracted(flow, node, other.turned(), one.turned())]
    return _contracted(flow, node, one, other)


def stack_of(flow: Flow, node: fx.Node) -> fx.Node | None:
    """Return the factor of a product that is a stack of constant matrices, such as those of experts; None if none is.

    Neither is one if the other factor has labels for each matrix, as of attention's heads.
    """
    first, second = list(arguments(node).values())[:2]
    one, other = Factor.of(flow, first), Factor.of(flow, second)
    if min(one.value.ndim, other.value.ndim) > 1:
        pairs = {second: (one, other), first: (other.turned(), one.turned())}
        return next((weight for weight, pair in pairs.items() if _reads_stack(*pair)), None)
    return None


def _reads_stack(source: Factor, stack: Factor) -> bool:
    """Return whether a factor is multiplied by constant matrices, and its labels are the same for each of them."""
    matrices, inner = max(stack.value.shape[:-2], default=1), {source.value.ndim - 2, source.value.ndim - 1}
    apart = any(covered(field) & inner and covered(field) - inner for field in source.fields)
    return matrices > 1 and bool(stack.fields) and not apart and not stack.value.isnan().any()


def _stacked(flow: Flow, node: fx.Node, source: Factor, stack: Factor, weight: fx.Node) -> Fields:
    ndim, why = max(source.value.ndim, stack.value.ndim), f"{described(node)} reads it"
    left = [raised(each, ndim) for each in source.fields if covered(each) == {source.value.ndim - 2}]
    return flow.labels.packed([*left, along(_of_stack(flow, node, source, stack, weight), ndim - 1, ndim)], why)


def grouped_product(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    """Product of the rows of one matrix, in groups, each with a matrix of a stack, like those of experts."""
    source, weight, *rest = given.values()
    if flow.value(weight).ndim != 3 or flow.value(source).ndim != 2 or any(flow.of(each) for each in rest):
        return pin_inputs(flow, node, given)
    flow.pin([field for field in flow.of(source) if 0 in covered(field)], f"{described(node)} reads it")
    written = _of_stack(flow, node, Factor.of(flow, source), Factor.of(flow, weight), weight)
    return flow.labels.packed([along(written, 1, 2)], f"{described(node)} reads it")


def _of_stack(flow: Flow, node: fx.Node, source: Factor, stack: Factor, weight: fx.Node) -> Tensor:
    """Label products with the matrices of a stack, (..., inputs, outputs), and return the labels of the outputs.

    All matrices keep the same inputs and outputs, so that they remain a stack.
    """
    why, ndim, last = f"{described(node)} reads it", stack.value.ndim, source.value.ndim - 1
    flow.pin([field for field in stack.fields if not covered(field) & {ndim - 2, ndim - 1}], why)
    flow.pin([field for field in source.fields if not covered(field) & {last - 1, last}], why)
    own, written = (flow.labels_along(stack.fields, dim, stack.value.shape[dim], why) for dim in (ndim - 2, ndim - 1))
    read = flow.tied(flow.one_dim(source.fields, last, why), own, why)
    live = (stack.value.isnan() | (stack.value != 0)).flatten(0, -3).any(0).T
    zero = torch.where(constant_along(source.value, last) == 0, 0.0, NAN).double()
    flow.sites.append(Site(node, read, written, live, zero, why, None, weight))
    return written


def _is_weighted_from_the_right(values: Factor, weights: Factor) -> bool:
    """Return whether columns are weighted, as in `v @ attention.transpose(-2, -1)`."""
    has_channels = any(field.shape[-2] > 1 and field.shape[-1] == 1 for field in values.fields)
    has_batch = max(weights.value.shape[:-2], default=1) > 1
    return has_channels and has_batch and not any(max(field.shape[-2:]) > 1 for field in weights.fields)


def _contracted(flow: Flow, node: fx.Node, one: Factor, other: Factor) -> Fields:
    sizes = one.value.shape, other.value.shape
    why = f"{described(node)} reads it"
    ndim = max(map(len, sizes))
    dims = len(sizes[0]) - 1, len(sizes[1]) - 2
    labels = contract(flow, node, one, other, dims)
    left = [field for field in one.fields if dims[0] not in covered(field)]
    right = [field for field in other.fields if dims[1] not in covered(field)]
    if labels is None and max(sizes[1][:-2], default=1) == 1:  # one matrix for all
        return flow.labels.packed([raised(field, ndim) for field in (*left, *right)], why)
    rows = [field for field in left if covered(field) == {len(sizes[0]) - 2}]
    flow.pin([field for field in left if len(sizes[0]) - 2 in covered(field) and len(covered(field)) > 1], why)
    batch = [field for field in left if covered(field) and len(sizes[0]) - 2 not in covered(field)]
    if labels is not None:
        flow.pin([*batch, *rows, *right], why)
        return flow.labels.packed([raised(labels[..., None, None], ndim)], why)
    heads = batch[0].squeeze(-1).squeeze(-1) if batch else None
    flow.pin(batch[1:], why)
    if not right:
        flow.pin(batch, why)
    weighing = weighted_sum(flow, node, heads, Factor(right, other.value)) if right else []
    return flow.labels.packed([raised(field, ndim) for field in (*rows, *weighing)], why)


def attention(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    query, key, value = (Factor.of(flow, given[name]) for name in ("query", "key", "value"))
    mask, why = given["attn_mask"], f"{described(node)} reads it"
    if query.value.ndim < 3:
        flow.pin([*query.fields, *key.fields, *value.fields], why)
        return []
    if given.get("enable_gqa"):
        key, value = (each.for_each(query.value.shape[-3]) for each in (key, value))
    last = query.value.ndim - 1
    flow.pin([field for each in (query, key) for field in each.fields if last not in covered(field)], why)
    heads = contract(flow, node, query, key, (last, last))
    if isinstance(mask, fx.Node):
        shape = flow.value(mask).shape
        tokens = {len(shape) - 2, len(shape) - 1}
        flow.pin([field for field in flow.of(mask) if covered(field) & tokens], why)
        own = [field for field in flow.of(mask) if not covered(field) & tokens]
        wide = [] if heads is None else [heads[..., None, None]]
        flow.tie(wide, own, query.value.shape, shape, why)
    return flow.labels.packed(weighted_sum(flow, node, heads, value), why)
