"""Flow of labels through a traced network: node by node, with one rule for each kind of operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, fx

from pruning.graph.constant_tensors import Constants
from pruning.graph.labels import ONLY_ONE, Fields, Labels, Shapes, Site, along, covered, covering
from pruning.graph.tracing import CONVOLUTIONS, Traced, arguments, described, is_entrywise, is_in_place, name_of

Rule: TypeAlias = Callable[["Flow", fx.Node, dict[str, Any]], Any]
"""Takes a node and its arguments; returns the fields of its result, or a list with the fields of each result."""


class Flow:
    """Labels of all tensors of a traced network, the sites where they meet, and the constraints of shapes."""

    def __init__(self, traced: Traced, constants: Constants, rules: Mapping[str, Rule]) -> None:
        self.traced, self.constants, self._rules = traced, constants, rules
        self.labels, self.shapes, self.sites = Labels(), Shapes(), list[Site]()
        self.fields: dict[fx.Node, Any] = {}
        self._of_tensor: dict[int, Fields] = {}
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

    def _pass(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._parameter(node)
        if node.op == "output":
            for each in node.all_input_nodes:
                self.pin(self.of(each), "it is an output of the network")
            return []
        if node.op != "call_function":
            return []
        if node.target is operator.getitem:
            whole, index = self.fields[node.all_input_nodes[0]], node.args[1]
            return whole[index] if isinstance(index, int) and whole and isinstance(whole[0], list) else []
        if not any(self.fields.get(each) for each in node.all_input_nodes):
            return []
        return self._rule(node)(self, node, arguments(node) if name_of(node) else {})

    def _rule(self, node: fx.Node) -> Rule:
        name = name_of(node)
        if name in self._rules:
            return self._rules[name]
        return self._rules["entrywise"] if is_entrywise(node) else pin_inputs

    def _parameter(self, node: fx.Node) -> Fields:
        tensor = self.traced.tensor(str(node.target))
        if id(tensor) not in self._of_tensor:
            sizes = list(tensor.shape) if tensor.is_floating_point() else []
            groups = [int(arguments(each)["groups"]) for each in node.users if _is_weight_of(node, each)]
            if max(groups, default=1) > 1:
                fields = self._grouped(tensor, max(groups))
            else:
                fields = [along(self.labels.fresh(size), dim, tensor.ndim) for dim, size in enumerate(sizes)]
                fields = self.labels.packed(fields, ONLY_ONE)
            self._of_tensor[id(tensor)] = fields
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
        one, other = ([_raised(field, ndim) for field in each] for each in (fields, others))
        sizes, other_sizes = ([1] * (ndim - len(s)) + list(s) for s in (shape, other_shape))
        for each, others_, size in ((one, other, other_sizes), (other, one, sizes)):
            taken = set[int]().union(*[covered(field) for field in others_])
            for field in each:
                if any(size[dim] > 1 and dim not in taken for dim in covered(field)):
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


def _is_weight_of(node: fx.Node, user: fx.Node) -> bool:
    return name_of(user) in CONVOLUTIONS and arguments(user)["weight"] is node


def _raised(field: Tensor, ndim: int) -> Tensor:
    return field.reshape(*[1] * (ndim - field.ndim), *field.shape)


def pin_inputs(flow: Flow, node: fx.Node, _given: dict[str, Any]) -> Fields:
    """Rule of an unknown operation: keep everything that it reads."""
    for each in node.all_input_nodes:
        flow.pin(flow.of(each), f"{described(node)} is an operation without a rule")
    return []
