"""Weights whose outputs are those of a network, found in one call by what its operations make of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.graph.tracing import without_key_caches
from pruning.measure.macs import Product, Products, arguments_on, called, eagerly
from pruning.measure.matrix_weights import shortened
from pruning.scores.readings.network import Network, network
from pruning.scores.readings.scoring_data import tensors


@dataclass(frozen=True)
class OutputWeights:
    """Weights that give a network's outputs, and what one call leaves in doubt.

    Args:
        names: the weights; the last one of the model where no call tells.
        doubt: why no call tells, and what to do; "" if one does.
        idle: weights that the call does not apply.
    """

    names: Collection[str]
    doubt: str = ""
    idle: Sequence[str] = ()

    def sentence(self, losing: Collection[str]) -> str:
        """Return what is in doubt where the weights `losing` lose outputs; "" for nothing."""
        if self.doubt:
            return self.doubt if losing else ""
        idle = [name for name in self.idle if name in losing]
        told = (
            f"the call with `example` does not run {shortened(idle)}: outputs are pruned there, even if "
            "they are outputs of the network; pass an `example` that runs them, or name the weights to prune in "
            "`parameters`, in a sweep by prune.include."
        )
        return told if idle else ""


def output_weights(model: nn.Module, names: Sequence[str], example: Any) -> OutputWeights:
    """Return which weights give the network's outputs, without another but depthwise ones in between.

    Args:
        model: pruned or not.
        names: names of weights, in the order of the model.
        example: input of the network; None takes the last weight.
    """
    last = names[-1:]
    if example is None:
        told = f"without `example`, only {last[0]} is taken for outputs of the network; pass an input of the network "
        return OutputWeights(last, "" if isinstance(model, nn.Sequential) else f"{told}as `example` to find all.")
    with network(model, None, names) as net, without_key_caches(net.model), eagerly(), torch.no_grad():
        given = arguments_on(model, example)
        flow = _Flow(net, given)
        with flow:
            outputs = [*tensors(called(net.model, given, "example"))]
    found = [flow.known[key] for each in outputs if (key := _key(each)) in flow.known]
    if not any(each.is_activation for each in found):
        return OutputWeights(
            last,
            f"the call with `example` returns no tensor that torch computes from its inputs, so only {last[0]} is "
            "taken for outputs of the network; return tensors, or name the weights to prune in `parameters`.",
        )
    return OutputWeights(set().union(*(each.names for each in found)), "", [n for n in names if n not in flow.applied])


class _Source(NamedTuple):
    """Where a tensor is from: `names` of the weights in a function of parameters, or of those that gave an activation.

    `held` is the tensor, which keeps its storage from being used again.
    """

    held: Tensor
    is_activation: bool
    names: frozenset[str] = frozenset()


class _Flow(Products):  # type: ignore[no-untyped-call]
    """Dispatch mode that follows tensors from weight to weight.

    A product with a parameter, or a tensor computed from parameters, ends the way of what is multiplied, and so does
    any operation that reads a weight of `net`.
    """

    def __init__(self, net: Network, given: Any) -> None:
        super().__init__()
        layouts = {name: (weight.layout, weight.parameter.shape) for name, weight in net.weights.items()}
        self._through = {name for name, (own, shape) in layouts.items() if own is not None and own.is_depthwise(shape)}
        named = {id(parameter): name for name, parameter in net.parameters.items()}
        self.applied = set[str]()
        self.known = {_key(each): _Source(each, True) for each in tree_leaves(given) if isinstance(each, Tensor)}
        for each in net.model.parameters():
            beside = self.known.get(_key(each), _Source(each, False)).names  # weights of an RNN may share a storage
            own = {named[id(each)]} if id(each) in named else set()
            self.known[_key(each)] = _Source(each, False, beside | own)

    def note(self, args: tuple[Any, ...], result: Any, products: Sequence[Product]) -> None:
        """Note where the results of an operation are from."""
        read = [self.known[key] for each in tree_leaves(args) if (key := _key(each)) in self.known]
        weights = frozenset[str]().union(*(each.names for each in read if not each.is_activation))
        names = frozenset[str]().union(*(each.names for each in read if each.is_activation))
        factors = [self.known.get(_key(each)) for product in products for each in product[:2]]
        by_parameter = any(each is not None and not each.is_activation for each in factors)
        is_activation = any(each.is_activation for each in read) or (by_parameter and None in factors)
        if is_activation and (by_parameter or weights):
            self.applied |= weights
            names = weights | (names if weights and weights <= self._through else frozenset())
        for each in tree_leaves(result) if read else ():
            if isinstance(each, Tensor):
                self.known[_key(each)] = _Source(each, is_activation, names if is_activation else weights)


def _key(value: Any) -> int:
    """Return a number that a tensor shares with its views."""
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_plain else id(value)
