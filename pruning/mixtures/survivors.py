"""Networks whose masked experts are not routed to: routers choose among the survivors, as in the smaller network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pruning.holding.parameter import joined, plain_modules, pruned_names
from pruning.holding.reparam import mask_name, orig_name, stored
from pruning.mixtures.finding import Mixture, counts_experts, expert_dim, mixtures
from pruning.mixtures.routing import routed_of

Hook = TypeVar("Hook")


def survivors(mixture: Mixture, masks: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return bool of (experts,): False for experts whose matrices and router rows are all 0, or masked.

    All survive where the parameters of experts are no stacks, one after another in one matrix.

    Args:
        mixture: mixture of a network.
        masks: name -> mask of a tensor, nonzero where an entry is kept.
    """
    parts, tensors = [], {**mixture.stacks, **mixture.router}
    for name in mixture.removable:
        each, kept = tensors[name], (masks or {}).get(name)
        values = each.detach() != 0 if kept is None else (each.detach() != 0) & (kept != 0).to(each.device)
        parts.append(values.flatten(1).any(dim=1).cpu())
    return torch.stack(parts).any(dim=0) if mixture.stacks else torch.ones(mixture.count, dtype=torch.bool)


def route_among_survivors(model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> None:
    """Let the routers of a network choose among the experts that survive, by hooks; call it again when masks change.

    While a mixture is called, its router has only the rows of survivors and is told of so many experts; the chosen ones
    are numbered anew for the experts. So it computes what the network without the removed experts computes, also the
    losses that balance the load of experts. Networks without removed experts have no hooks. A mixture holds its fewer
    rows while it is called, so several threads must not call one such network at once.

    Args:
        model: network whose removed experts hold zeros, or are masked: their matrices and their rows of the router.
        masks: name -> mask, in addition to those that hooks hold in the network.
    """
    if found := mixtures(model):
        held = {**_held_masks(model), **(masks or {})}
        route_among(model, {each.experts: survivors(each, held) for each in found})


def _held_masks(model: nn.Module) -> dict[str, Tensor]:
    return {
        joined(path, leaf): stored(module, leaf)[1]
        for path, module in plain_modules(model)
        for leaf in pruned_names(module)
    }


def route_among(model: nn.Module, alive: Mapping[str, Tensor]) -> None:
    """Let the routers of a network choose among some experts only; see `route_among_survivors`.

    A mixture without experts, as in a removed layer, is called as it is, and counts in no loss. Where others keep
    unequal numbers, that loss reads all rows up to the largest number, of which those that a router lacks are chosen
    never.

    Args:
        model: a network.
        alive: module of a mixture's experts -> bool of (experts,): those among which its router chooses.

    Raises:
        ValueError: a router cannot choose among the experts that are left: some, but too few, or unequal groups.
    """
    modules = dict(plain_modules(model))
    stop_routing_among_survivors(model)
    found = mixtures(model)
    left = [bool(alive[each.experts].any()) for each in found]
    here = [each for each, stays in zip(found, left, strict=True) if stays]
    changed = [each for each in here if not bool(alive[each.experts].all())]
    for mixture in changed:
        kept = alive[mixture.experts].nonzero().flatten()
        by_group = alive[mixture.experts].view(mixture.groups, -1).sum(1).tolist()
        if min(by_group) < mixture.least or len({*by_group}) > 1:
            raise ValueError(
                f"the masks leave {', '.join(map(str, by_group))} of the experts of {mixture.path!r}, whose router "
                f"needs {mixture.least} or more{', equally many in each group' if mixture.groups > 1 else ''}; keep so "
                "many, or remove all experts of the layer."
            )
        _hook(modules[mixture.path], _Fewer(mixture.count, kept, _places(mixture, mixture.router), _counters(mixture)))
        modules[mixture.experts].register_forward_pre_hook(_Numbered(kept), with_kwargs=True)
    sizes = {int(alive[each.experts].sum()) for each in here}
    above = _above(each.path for each in here) if here and (changed or not all(left)) else []
    for path in above:  # the network itself counts experts, for the loss that balances their load
        if names := [name for name in counts_experts(modules[path], here[0].count) if max(sizes) < here[0].count]:
            _hook(modules[path], _Fewer(here[0].count, torch.arange(max(sizes)), (), tuple(("", n) for n in names)))
        if len(sizes) > 1 or not all(left):
            modules[path].register_forward_hook(_Balanced(tuple(left), max(sizes)))


def stop_routing_among_survivors(model: nn.Module) -> None:
    """Remove the hooks of `route_among_survivors`."""
    for _, module in plain_modules(model):
        hooks: Any = (module._forward_pre_hooks, module._forward_hooks)
        own = [key for each in hooks for key, hook in each.items() if isinstance(hook, _OURS)]
        kinds = (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called)
        for each in (*hooks, *kinds):
            for key in own:
                each.pop(key, None)


def leaves_experts_out(model: nn.Module) -> bool:
    """Return whether a router of the model chooses among some of its experts only."""
    return any(_hooks_of(_Numbered, module) for _, module in plain_modules(model))


def drop_removed_experts(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Take the experts that routers leave out from a network without masks, which then computes the same.

    Returns:
        name of each tensor that is smaller -> (the dimension of experts, the numbers of those that stay).
    """
    modules, dropped = dict(plain_modules(model)), dict[str, tuple[int, Tensor]]()
    for mixture in mixtures(model):
        experts = modules[mixture.experts]
        numbered = _hooks_of(_Numbered, experts)
        if not numbered:
            continue
        kept = numbered[0].kept.cpu()
        for name, tensor in {**mixture.stacks, **mixture.router}.items():
            path, _, leaf = name.rpartition(".")
            dim = expert_dim(tensor, mixture.count) or 0
            fewer, learned = tensor.detach().index_select(dim, kept.to(tensor.device)), isinstance(tensor, nn.Parameter)
            setattr(modules[path], leaf, nn.Parameter(fewer, tensor.requires_grad) if learned else fewer)
            dropped[name] = dim, kept
        for key in [*counts_experts(experts, mixture.count)]:
            setattr(experts, key, len(kept))
    for module in modules.values():
        for hook in _hooks_of(_Fewer, module):
            for path, key in hook.counters:
                setattr(module.get_submodule(path), key, len(hook.kept))
    stop_routing_among_survivors(model)
    return dropped


@contextmanager
def routing_among_all(model: nn.Module) -> Iterator[None]:
    """Let routers choose among all experts inside the context, also among those that were removed."""
    hooks: list[_Fewer | _Numbered] = []
    for _, module in plain_modules(model):
        hooks += _hooks_of(_Fewer, module)
        hooks += _hooks_of(_Numbered, module)
    for hook in hooks:
        hook.paused = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.paused = False


def _hooks_of(kind: type[Hook], module: nn.Module) -> list[Hook]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kind)]


def _hook(module: nn.Module, fewer: _Fewer) -> None:
    module.register_forward_pre_hook(fewer)
    module.register_forward_hook(_Restored(fewer), always_call=True)


def _places(mixture: Mixture, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (module below the mixture, leaf) of each name."""
    prefix = f"{mixture.path}." if mixture.path else ""
    below = (name.removeprefix(prefix).rpartition(".") for name in names)
    return tuple((path, leaf) for path, _, leaf in below)


def _counters(mixture: Mixture) -> tuple[tuple[str, str], ...]:
    """Return (module below the mixture, attribute) of each number of experts."""
    routing, count = mixture.routing.items(), mixture.count
    return _places(mixture, [joined(name, each) for name, own in routing for each in counts_experts(own, count)])


def _above(paths: Iterable[str]) -> list[str]:
    """Return the names of all modules that hold others."""
    found = {"": None}
    for path in paths:
        parts = path.split(".")
        found |= {".".join(parts[:end]): None for end in range(1, len(parts))}
    return [*found]


@dataclass
class _Fewer:
    """Hook that gives a mixture fewer experts while it is called.

    Args:
        count: number of experts.
        kept: numbers of those that are left.
        tensors: (module below, leaf) of each tensor with a row for each expert.
        counters: (module below, attribute) of each number of experts.
        paused: whether the mixture keeps all its experts for now.
    """

    count: int
    kept: Tensor
    tensors: tuple[tuple[str, str], ...]
    counters: tuple[tuple[str, str], ...]
    paused: bool = False
    held: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)

    def __call__(self, module: nn.Module, _given: object) -> None:
        if self.paused:
            return
        for path, leaf in self.tensors:
            owner = module.get_submodule(path)
            for place in (owner._parameters, owner._buffers, owner.__dict__):  # with those of a pruned parameter
                for name in (leaf, orig_name(leaf), mask_name(leaf)):
                    if isinstance(whole := place.get(name), Tensor):
                        dim = expert_dim(whole, self.count) or 0
                        self._swap(place, name, whole.index_select(dim, self.kept.to(whole.device)))
        for path, name in self.counters:
            self._swap(module.get_submodule(path).__dict__, name, len(self.kept))

    def _swap(self, place: dict[str, Any], name: str, value: Any) -> None:
        self.held.append((place, name, place[name]))
        place[name] = value


@dataclass
class _Restored:
    """Hook that gives a mixture all its experts back when its call ends, also by an error."""

    fewer: _Fewer

    def __call__(self, *_given: object) -> None:
        while self.fewer.held:
            place, name, value = self.fewer.held.pop()
            place[name] = value


@dataclass
class _Balanced:
    """Hook that leaves the scores of removed layers' routers out of a network's output, and gives others one width.

    Args:
        left: whether each mixture has experts.
        width: number of experts of the widest router.
    """

    left: tuple[bool, ...]
    width: int

    def __call__(self, _module: nn.Module, _given: object, output: Any) -> None:
        scores = getattr(output, "router_logits", None)
        if isinstance(scores, tuple) and len(scores) == len(self.left):
            kept = [each for each, stays in zip(scores, self.left, strict=True) if stays]
            output.router_logits = tuple(
                nn.functional.pad(each, (0, self.width - each.shape[-1]), value=-torch.inf) for each in kept
            )


@dataclass
class _Numbered:
    """Hook that gives experts the numbers of those that a router of fewer experts chose."""

    kept: Tensor
    paused: bool = False

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.paused:
            return args, kwargs
        chosen = routed_of(args, kwargs).experts
        numbered = self.kept.to(chosen.device)[chosen]
        changed: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda leaf: numbered if leaf is chosen else leaf, (args, kwargs)
        )
        return changed


_OURS = (_Fewer, _Restored, _Balanced, _Numbered)
"""Kinds of hooks that `route_among_survivors` registers."""
