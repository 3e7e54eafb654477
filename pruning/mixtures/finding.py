"""Mixtures of experts in a network, found by their structure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pruning.holding.default_weights import stacks_of
from pruning.holding.parameter import plain_modules, plain_tensors

TOP_K = ("top_k", "num_experts_per_tok")
"""Attributes by which modules name the number of experts that a token is routed to."""
GROUPS = ("num_group", "n_group")
"""Attributes by which modules name the number of groups of experts, some of which a token's experts come from."""
TOP_GROUPS = ("topk_group",)
"""Attributes by which modules name the number of groups that a token's experts come from."""


@dataclass(frozen=True)
class Mixture:
    """Mixture whose experts' matrices are stacked in parameters of one module.

    Args:
        path: name of the module that routes tokens and calls the experts; "" for the network itself.
        experts: name of the module with the stacks.
        count: number of experts.
        top_k: experts that a token is routed to; None if no module of the mixture names it.
        router: name -> each parameter and buffer with a row or an entry for each expert: weight, bias, correction of
            scores; empty for a router of another form, as one that looks a token's experts up in a table.
            `expert_dim` tells the dimension that counts experts.
        stacks: name -> each parameter of the experts; its first dimension counts them.
        routing: modules that route: those inside `path` that are no part of the experts, and `path` itself.
        groups: number of groups of consecutive experts among which the router chooses first.
        top_groups: groups that a token is routed to.
        ranks_groups: whether the router ranks groups by their two best experts, as also where there is one group.
    """

    path: str
    experts: str
    count: int
    top_k: int | None
    router: Mapping[str, Tensor]
    stacks: Mapping[str, Tensor]
    routing: Mapping[str, nn.Module]
    groups: int = 1
    top_groups: int = 1
    ranks_groups: bool = False

    @property
    def least(self) -> int:
        """Smallest number of experts, of each group, among which the router can choose."""
        least = -(-(self.top_k or 1) // self.top_groups)
        return max(2, least) if self.ranks_groups else least

    @property
    def removable(self) -> tuple[str, ...]:
        """Names of the tensors with entries for each expert, all of which are 0 if an expert is removed."""
        rows = [name for name, each in self.router.items() if each.ndim > 1 and len(each) == self.count]
        return (*self.stacks, *rows)


def mixtures(model: nn.Module) -> tuple[Mixture, ...]:
    """Return the mixtures of a network whose experts are stacked, in the order of its modules.

    Experts in a ModuleList are layers like others, and no mixture here.

    Args:
        model: pruned or not; it is not changed.
    """
    modules = dict(plain_modules(model))
    return tuple(_mixture(modules, experts, count) for experts, count in stacks_of(modules))


def experts_left(count: int, names: Collection[str], masks: Mapping[str, Tensor]) -> int | Tensor:
    """Return how many of `count` experts have entries in any of these tensors under masks; at least 1."""
    if any(name not in masks for name in names):
        return count
    kept = [masks[name].reshape(count, -1).any(1) for name in names]
    return torch.stack(kept).any(0).sum().clamp(min=1)


def expert_dim(tensor: Tensor, count: int) -> int | None:
    """Return the dimension of a router's tensor that counts experts: the first, or the last of a row; else None."""
    if not tensor.ndim or count not in (tensor.shape[0], tensor.shape[-1]):
        return None
    if tensor.shape[0] == count:
        return 0
    return tensor.ndim - 1 if tensor.numel() == count else None


def counts_experts(module: nn.Module, count: int) -> Iterator[str]:
    """Yield the attributes in which a module holds the number of experts."""
    for name, value in vars(module).items():
        if "expert" in name and type(value) is int and value == count:
            yield name


def _mixture(modules: Mapping[str, nn.Module], experts: str, count: int) -> Mixture:
    path = experts.rpartition(".")[0]
    while path and not _routing(modules, path, experts)[1:]:
        path = path.rpartition(".")[0]
    inside = dict(_routing(modules, path, experts))
    stacks = {n: each for n, each in plain_tensors([(experts, modules[experts])]).items() if len(each) == count}
    top_k, groups, top_groups = (_named(inside, keys) for keys in (TOP_K, GROUPS, TOP_GROUPS))
    router = _router(inside, path, count)
    ranks = groups is not None
    return Mixture(path, experts, count, top_k, router, stacks, inside, groups or 1, top_groups or 1, ranks)


def _named(modules: Mapping[str, nn.Module], keys: Iterable[str]) -> int | None:
    """Return the number that one of the modules has by one of the names; None without one."""
    found = (getattr(module, key, None) for module in modules.values() for key in keys)
    return next((each for each in found if isinstance(each, int)), None)


def _routing(modules: Mapping[str, nn.Module], path: str, experts: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of a path and of what is inside it, without the experts."""
    prefix = f"{path}." if path else ""
    return [
        (name, module)
        for name, module in modules.items()
        if f"{name}.".startswith(prefix) and not f"{name}.".startswith(f"{experts}.")
    ]


def _router(inside: Mapping[str, nn.Module], path: str, count: int) -> dict[str, Tensor]:
    """Return the tensors of the one module that can be the router, and those of the mixture itself."""
    prefix = f"{path}." if path else ""
    near = {n: module for n, module in inside.items() if n == path or n.removeprefix(prefix).count(".") < 2}
    tensors = {name: plain_tensors([(name, module)]) for name, module in near.items()}
    found = [name for name, own in tensors.items() if any(t.ndim == 2 and len(t) == count for t in own.values())]
    if len(found) > 1:  # layers of as many outputs are routers if they, or what holds them, name the experts
        holders = {name: (near[name], near.get(name.rpartition(".")[0], near[name])) for name in found}
        found = [n for n, own in holders.items() if any(any(counts_experts(each, count)) for each in own)]
    if len(found) != 1:
        return {}
    (router,) = found
    holder = router.rpartition(".")[0]
    beside = [each for each in near if each.startswith(f"{router}.")]
    own = {**tensors[router], **tensors.get(holder, {}), **tensors.get(path, {})}
    own |= {name: tensor for each in beside for name, tensor in tensors[each].items()}
    if any(tensor.ndim > 1 and not tensor.is_floating_point() for tensor in own.values()):  # a table of experts
        return {}
    return {name: tensor for name, tensor in own.items() if expert_dim(tensor, count) is not None}
