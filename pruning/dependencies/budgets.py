"""Budgets for dependency groups: channels are removed in one order over the network until the target is met.

The order is by score ("global"), or by a channel's rank in its group as a fraction of the group ("layer"), so that
every group loses the same fraction. Among equal channels, the lowest index is removed first. A cost in
multiply-accumulates counts how often a network multiplies each entry of its weights and activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pruning.choices.axes import Budget
from pruning.dependencies.dependency_groups import DependencyGroup, DependencyGroups, Member, Multiplied
from pruning.graph.label_flow import Flow, covering
from pruning.graph.tracing import CONVOLUTIONS, PRODUCTS, arguments, name_of
from pruning.measure.macs import Products

TINY = 1e-9
"""Tolerance for rounding errors, relative to the budget: 0.29 of 100 must count as 29."""


def kept_channels(
    groups: DependencyGroups,
    sparsity: float,
    scores: Mapping[str, Tensor],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name of a group -> bool for each channel: the channels to keep so that `sparsity` is reached.

    As few channels as possible are removed: one step less would miss the target. A step is one channel, or the number
    that `scope.round_to` removes at once.

    Args:
        groups: dependency groups; their `scope` holds the budget, the rounding and the minimum to keep.
        sparsity: fraction of `scope.budget` removed in the end, including channels pruned before.
        scores: name of a group -> score of each channel; the lowest scores are removed first.
        alive: name of a group -> bool for each channel: whether it may be kept; None: `groups.alive()`.

    Raises:
        ValueError: the sparsity cannot be reached, or the score of a channel that is alive is NaN.
    """
    alive = alive or groups.alive()
    for name, values in scores.items():
        if bool((values.isnan() & alive[name]).any()):
            raise ValueError(
                f"scores of {name!r} are NaN for channels that are not pruned; scores must be numbers: correct the "
                "values of the tensor."
            )
    own = {group.name: _own_order(scores[group.name], alive[group.name]) for group in groups}
    order = _order(groups, scores, alive)

    def after(count: int) -> dict[str, Tensor]:
        if groups.equal_widths:
            gone = [count] * len(groups.sizes)
        else:
            gone = torch.bincount(order[:count], minlength=len(groups.sizes)).tolist()
        return {
            group.name: _kept(groups, group, own[group.name], alive[group.name], gone[number])
            for number, group in enumerate(groups)
        }

    check_reachable(groups, sparsity, alive)
    budget = groups.scope.budget
    whole = groups.whole(budget)
    most = whole - sparsity * whole + TINY * whole
    fewest, enough = 0, max(groups.sizes.values()) if groups.equal_widths else len(order)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if groups.remaining(after(middle), budget) <= most:
            enough = middle
        else:
            fewest = middle + 1
    return after(enough)


def check_reachable(groups: DependencyGroups, sparsity: float, alive: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError if the budget cannot be reached, whatever the scores.

    Args:
        groups, sparsity, alive: see `kept_channels`.
    """
    alive, budget = alive or groups.alive(), groups.scope.budget
    whole, left = groups.whole(budget), _least(groups, alive)
    if left > whole - sparsity * whole + TINY * whole:
        raise ValueError(_unreachable(budget, sparsity, left, whole, groups))


def most_removable(groups: DependencyGroups, alive: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that can be removed, whatever the scores."""
    budget = groups.scope.budget
    return 1 - _least(groups, alive) / max(1, groups.whole(budget))


def _least(groups: DependencyGroups, alive: Mapping[str, Tensor]) -> int:
    """Return what is left of the budget if every group keeps as few channels as it may."""
    fewest = {
        group.name: _kept(
            groups, group, _own_order(torch.zeros(group.units), alive[group.name]), alive[group.name], group.units
        )
        for group in groups
    }
    return groups.remaining(fewest, groups.scope.budget)


def gone(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the removed fraction of the budget."""
    budget = groups.scope.budget
    return 1 - groups.remaining(kept, budget) / max(1, groups.whole(budget))


def largest_step(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that one step of removed channels takes, over all groups.

    `gone` exceeds the requested sparsity by less than this fraction.
    """
    budget, most = groups.scope.budget, 0
    for together in [groups.groups] if groups.equal_widths else [(group,) for group in groups]:
        back = {**kept, **{group.name: _before_last_step(groups, group, kept[group.name]) for group in together}}
        touched = {member.tensor for group in together for member in group.members}
        most = max(most, groups.remaining(back, budget, touched) - groups.remaining(kept, budget, touched))
    return most / max(1, groups.whole(budget))


def _before_last_step(groups: DependencyGroups, group: DependencyGroup, kept: Tensor) -> Tensor:
    """Return the kept channels of a group with those that its last step removed."""
    count = int(kept.sum())
    back = _permitted(groups, group, min(count + 1, group.units)) - count
    return kept.index_fill(0, (~kept).nonzero().flatten()[:back], True)


def _unreachable(budget: Budget, sparsity: float, left: int, whole: int, groups: DependencyGroups) -> str:
    scope = groups.scope
    larger = [name for name, least in (("min_kept", 1), ("round_to", 1)) if getattr(scope, name) > least]
    others = "".join(f", or a lower `scope.{name}`" for name in larger)
    return (
        f"`sparsity` (={sparsity}) cannot be reached: it must be at most {1 - left / whole:.6g} of the {budget} with "
        f"`scope.min_kept` (={scope.min_kept}; each group keeps at least one channel) and `scope.round_to` "
        f"(={scope.round_to}); type a lower sparsity{others}."
    )


def _own_order(scores: Tensor, alive: Tensor) -> Tensor:
    """Return the channels of a group in the order of removal: dead channels first, then by ascending score."""
    order = scores.cpu().sort(stable=True).indices
    return order[alive[order].to(torch.uint8).sort(stable=True).indices]


def _order(groups: DependencyGroups, scores: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> Tensor:
    """Return the group number of each channel of the network, in the order of removal."""
    numbers = torch.cat([torch.full((group.units,), number) for number, group in enumerate(groups)])
    if groups.scope.kind == "global":
        everything = torch.cat([scores[group.name].cpu() for group in groups])
        return numbers[_own_order(everything, torch.cat([alive[group.name] for group in groups]))]
    shares = torch.cat([torch.arange(1, group.units + 1).double() / group.units for group in groups])
    return numbers[shares.sort(stable=True).indices]


def _kept(groups: DependencyGroups, group: DependencyGroup, own: Tensor, alive: Tensor, gone: int) -> Tensor:
    """Return which channels of a group are kept after removing `gone` of them; the kept count is rounded up."""
    count = max(group.units - gone, groups.scope.min_kept, 1)
    count = min(_permitted(groups, group, count), int(alive.sum()))
    kept = torch.ones(group.units, dtype=torch.bool)
    kept[own[: group.units - count]] = False
    return kept


def _permitted(groups: DependencyGroups, group: DependencyGroup, count: int) -> int:
    """Return the smallest number of channels, `count` or more, that a group can keep by `round_to` and its `counts`."""
    step = groups.scope.round_to // math.gcd(groups.scope.round_to, group.width)
    if not group.counts:
        return min(-(-count // step) * step, group.units)
    return next((each for each in group.counts if each >= count and each % step == 0), group.units)


WHOLE = ("baddbmm", "addbmm", "einsum", "mv", "addmv", "dot")
"""Products without a label rule: all of their inputs are kept."""


class Use(NamedTuple):
    """Use of a weight by a layer: how often each entry is multiplied, and the dimension of the outputs."""

    weight: fx.Node
    times: int
    dim: int


def use_of(flow: Flow, node: fx.Node) -> Use | None:
    """Return how a node uses its weight; None if the node is not the operation of a layer."""
    name = name_of(node)
    if name not in ("linear", "addmm", *PRODUCTS, *CONVOLUTIONS):
        return None
    given = arguments(node)
    by_inputs = name in ("addmm", *PRODUCTS)  # weight of shape (inputs, outputs), like transformers' Conv1D
    source, weight = (
        list(given.values())[int(name == "addmm") :][:2] if by_inputs else (given["input"], given["weight"])
    )
    shape, result = flow.value(weight).shape, flow.value(node)
    if name in PRODUCTS and (weight.op != "get_attr" or len(shape) != 2):
        return None
    if "transpose" in name or bool(given.get("transposed")):
        return Use(weight, flow.value(source).numel() // shape[0], 1)
    return Use(weight, result.numel() // shape[int(by_inputs)], int(by_inputs))


def multiplied_activations(flow: Flow, numbers: Iterable[tuple[str, Tensor]]) -> Iterator[Multiplied]:
    """Yield the factors of products that are not parameters: queries, attention weights, computed weights.

    Args:
        numbers: pairs (name of a group, channel number of each label); -1 for labels outside the group.
    """
    numbers = list(numbers)
    for node in flow.traced.graph.graph.nodes:
        if name_of(node) in WHOLE:
            yield Multiplied(torch.Size(), _macs(flow, node), ())
        for factor, times in _factors(flow, node):
            fields = [flow.labels.roots(field) for field in flow.of(factor)]
            members = [(name, Member(factor.name, number[field])) for name, number in numbers for field in fields]
            own = tuple((name, member) for name, member in members if bool((member.channels >= 0).any()))
            yield Multiplied(flow.value(factor).shape, times, own)


def _factors(flow: Flow, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield (factor, multiplications per entry of the factor) that together count a node's multiplications."""
    use, name = use_of(flow, node), name_of(node)
    if use and use.weight.op != "get_attr":
        yield use.weight, use.times
    elif name == "scaled_dot_product_attention":
        query, key, *_ = arguments(node).values()
        yield query, flow.value(key).shape[-2]
        yield node, flow.value(key).shape[-2]
    elif name in PRODUCTS and use is None:
        one, result = next(iter(arguments(node).values())), flow.value(node)
        shape = flow.value(one).shape
        if covering(flow.of(one), len(shape) - 1) is None:
            yield node, shape[-1]
        else:  # only the kept entries of this factor are multiplied; the other factor keeps all of its outputs
            yield one, result.numel() * shape[-1] // max(1, shape.numel())


def _macs(flow: Flow, node: fx.Node) -> int:
    """Count the multiply-accumulates of an operation by running it on the meta device."""
    found: list[int] = []
    args, kwargs = tree_map(
        lambda each: flow.value(each).to("meta") if isinstance(each, fx.Node) else each, (node.args, dict(node.kwargs))
    )
    with Products(lambda product: found.append(product.macs)):
        node.target(*args, **kwargs)  # type: ignore[operator]
    return sum(found)
