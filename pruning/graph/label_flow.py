"""Labels of positions along dimensions, and their flow through a traced network, with one rule for each operation.

Every position along a dimension of a parameter has a label, an int; label 0 means that the position is always kept.
Labels that are kept or removed together are tied. A tensor has fields. A field is an array of labels with the tensor's
number of dimensions; it has size 1 in a dimension where one label holds for all positions. An entry of the tensor is
kept if all of its labels are kept. Dimensions that no field covers stay whole.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as made
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from pruning.graph.constant_tensors import Constants
from pruning.graph.operations import (
    CONVOLUTIONS,
    FILLED,
    arguments,
    described,
    is_entrywise,
    is_factory,
    is_in_place,
    name_of,
    read_for_labels,
    read_for_values,
)
from pruning.graph.tracing import Traced

Fields: TypeAlias = list[Tensor]
"""Fields of one tensor: int64; they cover disjoint dimensions, except in weights of grouped convolutions."""

FIXED = 0
"""Label of positions that are always kept."""

NAN = float("nan")
"""Value of what varies with the inputs of the network."""

ONLY_ONE = "it is the only one"
"""Reason for keeping the only position of a dimension of size 1."""


class Labels:
    """Labels made so far, the ties between them, and the pins: labels that must be kept, with the reason."""

    def __init__(self) -> None:
        self._parent: NDArray[np.int64] = np.zeros(1, np.int64)
        self.pins: list[tuple[Tensor, str]] = []

    def __len__(self) -> int:
        return len(self._parent)

    def fresh(self, count: int) -> Tensor:
        """Return `count` new labels, shape (count,)."""
        first = len(self._parent)
        self._parent = np.concatenate([self._parent, np.arange(first, first + count)])
        return torch.arange(first, first + count)

    def roots(self, labels: Tensor) -> Tensor:
        """Return the root of each label: the one label that represents all labels tied together."""
        found = labels.numpy()
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                return torch.from_numpy(np.ascontiguousarray(above)).reshape(labels.shape)
            found = above

    def tie(self, one: Tensor, other: Tensor, because: str) -> None:
        """Tie labels at equal places of two arrays that broadcast; a label that meets `FIXED` is pinned."""
        one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
        fixed = (one == FIXED) | (other == FIXED)
        if fixed.any():
            self.pin(torch.cat([one[fixed], other[fixed]]), because)
        one, other = one[~fixed], other[~fixed]
        while True:
            a, b = self.roots(one).numpy(), self.roots(other).numpy()
            low, high = np.minimum(a, b), np.maximum(a, b)
            if np.array_equal(low, high):
                self._parent[one.numpy()], self._parent[other.numpy()] = a, b
                return
            np.minimum.at(self._parent, high, low)

    def pin(self, labels: Tensor, because: str) -> None:
        """Mark labels that must be kept, with the reason."""
        labels = torch.from_numpy(np.unique(labels[labels != FIXED].numpy()))
        if len(labels):
            self.pins.append((labels, because))

    def packed(self, fields: Sequence[Tensor], because: str) -> Fields:
        """Return fields reduced to the dimensions along which their labels differ.

        Fields that cover no dimension, and fields that share a dimension with another field, are pinned and dropped.
        """
        packed = []
        for field in fields:
            roots = self.roots(field)
            for dim in range(field.ndim):
                if field.shape[dim] > 1 and bool((roots == roots.narrow(dim, 0, 1)).all()):
                    field, roots = field.narrow(dim, 0, 1), roots.narrow(dim, 0, 1)
            if covered(field):
                packed.append(field.clone())  # a view would hold the labels of all entries
            else:
                self.pin(field.flatten(), because)
        meeting = [
            field for field in packed if any(other is not field and covered(other) & covered(field) for other in packed)
        ]
        for field in meeting:
            self.pin(field.flatten(), because)
        return [field for field in packed if not any(field is each for each in meeting)]


def covered(field: Tensor) -> set[int]:
    """Return the dimensions in which a field is larger than 1."""
    return {dim for dim, size in enumerate(field.shape) if size > 1}


def covering(fields: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the field that covers a dimension, None if there is none."""
    return next((field for field in fields if field.shape[dim] > 1), None)


def along(labels: Tensor, dim: int, ndim: int) -> Tensor:
    """Reshape the labels of one dimension, shape (n,), to a field of a tensor with `ndim` dimensions."""
    shape = [1] * ndim
    shape[dim] = len(labels)
    return labels.reshape(shape)


@dataclass(frozen=True)
class Site:
    """Operation that computes each output from several inputs.

    Args:
        node: the operation in the graph.
        inputs: label of each input, shape (inputs,).
        outputs: label of each output, shape (outputs,).
        reads: bool, shape (outputs, inputs): whether an output depends on an input; None: on every input.
        constant: value of each constant input that can be removed and added to the bias, else NaN; shape (inputs,).
        because: reason for keeping an input that a kept output reads.
        bordered: bool, shape (inputs,): the input is a constant whose border differs because of zero padding, in this
            operation or an earlier one.
        weight, bias: nodes of the parameters by which a removed constant is multiplied and to which it is added.
    """

    node: fx.Node
    inputs: Tensor
    outputs: Tensor
    reads: Tensor | None
    constant: Tensor
    because: str
    bordered: Tensor | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass
class Shapes:
    """Constraints on the kept labels, so that the remaining entries still form tensors.

    Args:
        grids: arrays of labels; in each dimension, all slices that keep anything keep the same number of labels.
        same: pairs (one, other), both of shape (n, any): row i of `one` keeps a label if and only if row i of `other`
            does.
    """

    grids: list[Tensor] = made(default_factory=list)
    same: list[tuple[Tensor, Tensor]] = made(default_factory=list)


Rule: TypeAlias = Callable[["Flow", fx.Node, dict[str, Any]], Any]
"""Takes a node and its arguments; returns the fields of its result, or a list with the fields of each result."""


class Flow:
    """Labels of all tensors of a traced network, the sites where they meet, and the constraints of shapes."""

    def __init__(self, traced: Traced, constants: Constants, rules: Mapping[str, Rule]) -> None:
        self.traced, self.constants, self._rules = traced, constants, rules
        self.labels, self.shapes, self.sites = Labels(), Shapes(), list[Site]()
        self.fields: dict[fx.Node, Any] = {}
        self.made: dict[fx.Node, None] = {}
        """Nodes that depend on neither inputs nor parameters: constants that the forward makes."""
        self._of_tensor: dict[int, Fields] = {}
        self._reads: Counter[int] = Counter()
        for node in traced.graph.graph.find_nodes(op="get_attr"):
            self._reads[id(traced.tensor(str(node.target)))] += len(node.users)
        for node in traced.graph.graph.nodes:
            self.fields[node] = self._pass(node)
            if is_in_place(node) and isinstance(node.args[0], fx.Node):
                self.fields[node.args[0]] = self.fields[node]

    def value(self, node: fx.Node) -> Tensor:
        """Return the result of a node, with NaN where the result varies."""
        value = self.constants.values[node]
        assert isinstance(value, Tensor)
        return value

    def of(self, node: Any) -> Fields:
        """Return the fields of an argument; an empty list if the argument is no single tensor."""
        found = self.fields.get(node, []) if isinstance(node, fx.Node) else []
        return found if all(isinstance(each, Tensor) for each in found) else []

    def reads(self, node: Any) -> int:
        """Count the reads of a parameter in the graph, under all of its names; 0 for other arguments."""
        known = isinstance(node, fx.Node) and node.op == "get_attr"
        return self._reads[id(self.traced.tensor(str(node.target)))] if known else 0

    def _pass(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._parameter(node)
        if node.op == "output":
            for each in node.all_input_nodes:
                part = self.traced.parts[each.meta.get("part", 0)].path
                it_is = f"leaves `{part}`, a part that is traced by itself" if part else "is an output of the network"
                self.pin(self.of(each), f"it {it_is}")
            return []
        if node.op != "call_function":
            return []
        if node.target is operator.getitem:
            whole, index = self.fields[node.all_input_nodes[0]], node.args[1]
            return whole[index] if isinstance(index, int) and whole and isinstance(whole[0], list) else []
        if is_factory(node) and name_of(node).endswith("_like"):
            return self.of(node.args[0])
        read = read_for_labels(node)
        for each in node.all_input_nodes:
            if each not in read and each.op == "get_attr":
                self.pin(self.of(each), f"{described(node)} reads nothing but its dtype")
        if is_factory(node) or not any(self.fields.get(each) for each in read):
            return self._made(node)
        value = self.constants.values[node]
        if isinstance(value, Tensor) and not value.numel():
            return self._empty(node, read)
        return self._rule(node)(self, node, arguments(node) if name_of(node) else {})

    def _empty(self, node: fx.Node, read: Sequence[fx.Node]) -> Fields:
        """Pin what a result without entries reads: labels cannot pass through it as in inputs of other sizes.

        Raises:
            ValueError: the size of the result depends on values.
        """
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # half a second

        if free_unbacked_symbols(node.meta["val"]):
            raise ValueError(f"{described(node)} has as many entries as values decide")
        for each in read:
            self.pin(self.of(each), f"{described(node)} has no entries for the sizes of the example")
        return []

    def _made(self, node: fx.Node) -> Fields:
        """Return new labels for a constant that the forward makes; none if its values depend on the batch size."""
        value, read = self.constants.values[node], read_for_values(node)
        if not isinstance(value, Tensor) or not (is_factory(node) or (read and self.made.keys() >= set(read))):
            return []
        self.made[node] = None
        filled, shape = name_of(node) in FILLED, node.meta["val"].shape
        known = all(isinstance(size, int) for size in shape) and not value.isnan().any()
        if not value.is_floating_point() or not (filled or known):
            return []
        fields = self._fresh(value)
        return [field for field in fields if all(isinstance(shape[dim], int) for dim in covered(field))]

    def _fresh(self, tensor: Tensor) -> Fields:
        fields = [along(self.labels.fresh(size), dim, tensor.ndim) for dim, size in enumerate(tensor.shape)]
        return self.labels.packed(fields, ONLY_ONE)

    def _rule(self, node: fx.Node) -> Rule:
        name = name_of(node)
        if name in self._rules:
            return self._rules[name]
        return self._rules["entrywise"] if is_entrywise(node) else pin_inputs

    def _parameter(self, node: fx.Node) -> Fields:
        tensor = self.traced.tensor(str(node.target))
        if id(tensor) not in self._of_tensor:
            groups = [int(arguments(each)["groups"]) for each in node.users if _is_weight_of(node, each)]
            if max(groups, default=1) > 1:
                fields = self._grouped(tensor, max(groups))
            else:
                fields = self._fresh(tensor) if tensor.is_floating_point() else []
            self._of_tensor[id(tensor)] = fields
            if id(tensor) in self.traced.outside:
                self.pin(fields, "the network also reads it outside of the parts that can be traced")
        return self._of_tensor[id(tensor)]

    def _grouped(self, weight: Tensor, groups: int) -> Fields:
        """Return the fields of a grouped convolution's weight; each group reads its own inputs."""
        first, second = weight.shape[:2]
        rows = along(self.labels.fresh(first), 0, weight.ndim)
        if second == 1:
            return [rows]
        inputs = self.labels.fresh(groups * second).reshape(groups, 1, second).expand(-1, first // groups, -1)
        return [rows, inputs.reshape(first, second, *[1] * (weight.ndim - 2))]

    def pin(self, fields: Sequence[Tensor], because: str) -> None:
        """Pin every label of these fields, so that its positions are kept."""
        for field in fields:
            self.labels.pin(field.flatten(), because)

    def tie(self, fields: Fields, others: Fields, shape: Sequence[int], other_shape: Sequence[int], why: str) -> Fields:
        """Tie the fields of two tensors that are combined entry by entry, with broadcasting; return the result's."""
        ndim = max(len(shape), len(other_shape))
        one, other = ([raised(field, ndim) for field in each] for each in (fields, others))
        sizes, other_sizes = ([1] * (ndim - len(s)) + list(s) for s in (shape, other_shape))
        for each, others_, size in ((one, other, other_sizes), (other, one, sizes)):
            taken = set[int]().union(*[covered(field) for field in others_])
            for field in each:
                whole = {dim for dim in covered(field) - taken if size[dim] > 1}
                if whole and not covered(field) & taken:
                    self.pin([field], why)
        for field in one:
            for partner in other:
                if covered(field) & covered(partner):
                    self.labels.tie(field, partner, why)
        taken = set[int]().union(*[covered(field) for field in one])
        return self.labels.packed([*one, *(field for field in other if not covered(field) & taken)], why)

    def one_dim(self, fields: Fields, dim: int, because: str) -> Tensor | None:
        """Return the labels along a dimension, shape (n,); None if no field covers the dimension.

        A field that covers other dimensions too has its labels at the same position tied together.
        """
        field = covering(fields, dim)
        if field is None:
            return None
        rows = field.movedim(dim, 0).reshape(field.shape[dim], -1)
        self.labels.tie(rows, rows[:, :1], because)
        return rows[:, 0]

    def labels_along(self, fields: Fields, dim: int, size: int, because: str) -> Tensor:
        """Return a parameter's labels along a dimension, shape (size,); `FIXED` for all if it has none there."""
        labels = self.one_dim(fields, dim, because)
        return torch.full((size,), FIXED) if labels is None else labels

    def tied(self, labels: Tensor | None, others: Tensor, because: str) -> Tensor:
        """Tie the labels of a tensor to those of a weight along the dimension that they share, and return them.

        Without labels of the tensor, those of the weight are pinned and `FIXED` is returned.
        """
        if labels is None:
            self.labels.pin(others, because)
            return torch.full_like(others, FIXED)
        self.labels.tie(labels, others, because)
        return labels


def _is_weight_of(node: fx.Node, user: fx.Node) -> bool:
    return name_of(user) in CONVOLUTIONS and arguments(user)["weight"] is node


def raised(field: Tensor, ndim: int) -> Tensor:
    """Add dimensions of size 1 in front of a field, up to `ndim`."""
    return field.reshape(*[1] * (ndim - field.ndim), *field.shape)


def pin_inputs(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Fields:
    """Rule of an unknown operation: keep everything that it reads."""
    for each in node.all_input_nodes:
        flow.pin(flow.of(each), f"{described(node)} is an operation without a rule")
    return []
