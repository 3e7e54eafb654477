"""Label rules of products of two tensors that both vary, such as attention, where whole heads can be removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from pruning.graph.label_flow import Flow, Rule
from pruning.graph.labels import FIXED, Fields, Site, covered, covering
from pruning.graph.tracing import PRODUCTS, described

NAN = float("nan")


class Factor(NamedTuple):
    """One factor of a product: its fields of labels, and its value with NaN where it varies."""

    fields: Fields
    value: Tensor

    @classmethod
    def of(cls, flow: Flow, node: fx.Node) -> Factor:
        """Return the fields and the value of a node."""
        return cls(flow.of(node), flow.value(node))

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


def labels_of_rows(flow: Flow, rows: Tensor) -> Tensor:
    """Make a label for each row of (batch ..., positions) that is kept if any label of the row is kept.

    Returns:
        labels of shape (batch ...); rows with equal labels share one.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    unique, inverse = np.unique(flow.labels.roots(flat).numpy(), axis=0, return_inverse=True)
    labels = flow.labels.fresh(len(unique))
    flow.shapes.same.append((labels[:, None], torch.from_numpy(unique)))
    return labels[torch.from_numpy(inverse.reshape(-1))].reshape(rows.shape[:-1])


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
    constant = torch.where(nothing, 0.0, NAN).double()
    if all(size == 1 for size in both.shape[:-1]):
        fixed = torch.full((1,), FIXED)
        flow.sites.append(Site(node, both.flatten(), fixed, None, constant.flatten(), why))
        return None
    labels = labels_of_rows(flow, both)
    flat, blocks = labels.flatten(), torch.eye(labels.numel(), dtype=torch.bool).repeat_interleave(both.shape[-1], 1)
    flow.sites.append(Site(node, both.flatten(), flat, blocks, constant.flatten(), why))
    return labels


def _zero(value: Tensor, dim: int, ndim: int) -> Tensor:
    """Return whether a factor is 0 along its whole other dimension; bool, shape (batch ..., positions)."""
    other = value.ndim - 1 if dim == value.ndim - 2 else value.ndim - 2
    return _leading((value == 0).all(other), ndim)


def _leading(tensor: Tensor, ndim: int) -> Tensor:
    return tensor.reshape(*[1] * (ndim - tensor.ndim), *tensor.shape)


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
    if weights is None or not with_batch:
        flow.pin(with_batch, why)
        if weights is not None:
            flow.labels.pin(weights.flatten(), why)
        return fields
    field = with_batch[0]
    lead = field.reshape(field.shape[:-2].numel(), -1)
    heads = torch.broadcast_to(weights, field.shape[:-2]).flatten()
    flow.shapes.same.append((heads[:, None], lead))
    zero = _reduced_to((other.value == 0).all(-2), field.squeeze(-2).shape).reshape(lead.shape)
    reads = torch.eye(len(heads), dtype=torch.bool).repeat_interleave(lead.shape[1], 0) & ~zero.flatten()[:, None]
    flow.sites.append(Site(node, heads, lead.flatten(), reads, torch.full((len(heads),), NAN).double(), why))
    return fields


def _product(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    one, other = (Factor.of(flow, each) for each in list(given.values())[:2])
    sizes = one.value.shape, other.value.shape
    why = f"{described(node)} reads it"
    if min(map(len, sizes)) < 2:
        flow.pin([*one.fields, *other.fields], why)
        return []
    ndim = max(map(len, sizes))
    dims = len(sizes[0]) - 1, len(sizes[1]) - 2
    labels = contract(flow, node, one, other, dims)
    left = [field for field in one.fields if dims[0] not in covered(field)]
    right = [field for field in other.fields if dims[1] not in covered(field)]
    tokens = [field for field in left if len(sizes[0]) - 2 in covered(field)]
    flow.pin(tokens, why)
    batch = [field for field in left if covered(field) and len(sizes[0]) - 2 not in covered(field)]
    if labels is not None:
        flow.pin([*batch, *right], why)
        return flow.labels.packed([_leading(labels[..., None, None], ndim)], why)
    heads = batch[0].squeeze(-1).squeeze(-1) if batch else None
    flow.pin(batch[1:], why)
    if not right:
        flow.pin(batch, why)
        return []
    weighing = weighted_sum(flow, node, heads, other)
    return flow.labels.packed([_leading(field, ndim) for field in weighing], why)


def _attention(flow: Flow, node: fx.Node, given: dict[str, Any]) -> Fields:
    query, key, value = (Factor.of(flow, given[name]) for name in ("query", "key", "value"))
    mask, why = given["attn_mask"], f"{described(node)} reads it"
    if query.value.ndim < 3:
        flow.pin([*query.fields, *key.fields, *value.fields], why)
        return []
    if given.get("enable_gqa"):
        key, value = (each.for_each(query.value.shape[-3]) for each in (key, value))
    last = query.value.ndim - 1
    heads = contract(flow, node, query, key, (last, last))
    if isinstance(mask, fx.Node) and flow.of(mask):
        shape = flow.value(mask).shape
        if heads is not None:
            wide = heads[..., None, None]
            flow.tie([wide], flow.of(mask), wide.shape, shape, why)
        else:
            flow.pin(flow.of(mask), why)
    return flow.labels.packed(weighted_sum(flow, node, heads, value), why)


RULES: Mapping[str, Rule] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(PRODUCTS, _product),
}
