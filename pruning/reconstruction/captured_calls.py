"""Calls of a network's parts: captured from forward passes, and made again with the outputs of the part before."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pruning.reconstruction.block_order import Part

Batch = Any


class _Reached(Exception):
    """A forward pass reached the part whose inputs are wanted."""


@dataclass(frozen=True)
class Call:
    """Arguments of a part's call: a flattened (args, kwargs)."""

    leaves: tuple[Any, ...]
    form: Any

    def arguments(self, held: Mapping[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, with held tensors in place of leaves that were left out."""
        leaves = [held.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.form)
        return args, kwargs

    def split(self, taken: Collection[int] | None = None) -> tuple[Call, dict[int, Tensor]]:
        """Return the call without some leaves, and these leaves; None takes all tensors."""
        found = {
            index: leaf
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and (taken is None or index in taken)
        }
        left = tuple(None if index in found else leaf for index, leaf in enumerate(self.leaves))
        return Call(left, self.form), found


@dataclass(frozen=True)
class Link:
    """How a part's outputs become inputs of the next: (leaf of the outputs, leaf of the arguments) pairs."""

    leaves: tuple[tuple[int, int], ...]

    @property
    def goals(self) -> set[int]:
        """Leaves of the arguments that come from the part before."""
        return {goal for _, goal in self.leaves}


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call a network with a batch: a dict by keyword, a tuple or list by position, anything else as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def order_of_calls(model: nn.Module, parts: Sequence[Part], batch: Batch) -> tuple[list[Part], list[Link | None]]:
    """Run a batch; return the parts in the order of their calls, and how each is linked to the one before.

    A part is linked if outputs of the part before are its arguments, the same tensors, and no other argument depends on
    outputs of parts. Parts that are not called are left out.

    Raises:
        ValueError: a part is called more than once.
    """
    tracing = _Tracing()
    handles = []
    for part in parts:
        handles.append(part.module.register_forward_pre_hook(partial(tracing.enter, part), with_kwargs=True))
        handles.append(part.module.register_forward_hook(tracing.leave))
    try:
        with torch.enable_grad(), frozen(model), without_cache(model):
            call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tracing.called, tracing.links


@dataclass
class _Tracing:
    """Calls of a forward pass in which outputs of parts are marked by `requires_grad`, so that dependence shows."""

    called: list[Part] = field(default_factory=list)
    links: list[Link | None] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def enter(self, part: Part, _module: nn.Module, given: Any, named: Any) -> None:
        if part in self.called:
            raise ValueError(
                f"`blocks` (with {part.name!r}) must be called once in a forward pass, because each is pruned with "
                "the blocks before it; leave the weights of shared blocks out of `parameters`."
            )
        self.called.append(part)
        pairs, dependent = [], False
        for goal, leaf in enumerate(tree_leaves((given, named))):
            if isinstance(leaf, Tensor):
                source = next((index for index, each in enumerate(self.outputs) if each is leaf), None)
                pairs += [] if source is None else [(source, goal)]
                dependent |= source is None and leaf.requires_grad
        self.links.append(Link(tuple(pairs)) if pairs and not dependent else None)

    def leave(self, _module: nn.Module, _given: Any, found: Any) -> Any:
        marked = tree_map(_marked, found)
        self.outputs = tree_leaves(marked)
        return marked


def _marked(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter require gradients inside the context."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Run a model of transformers without a cache of keys and values, which a second call of a block would extend."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is None:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


def captured(model: nn.Module, chain: Sequence[Part], batch: Batch, *, whole: bool) -> list[Call]:
    """Return the calls of a chain of parts in a forward pass of the network.

    Args:
        model: the network.
        chain: parts, each linked to the one before.
        batch: the batch.
        whole: run through the whole chain for the arguments of all its parts; False: only its first part.
    """
    found: list[Call] = []
    last = len(chain) - 1 if whole else 0

    def note(_module: nn.Module, given: Any, named: Any) -> None:
        leaves, form = tree_flatten((given, named))
        found.append(Call(tuple(leaves), form))
        if len(found) > last:
            raise _Reached

    handles = [part.module.register_forward_pre_hook(note, with_kwargs=True) for part in chain[: last + 1]]
    try:
        with torch.no_grad(), without_cache(model):
            call_model(model, batch)
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found


@dataclass
class HeldTensors:
    """List of trees of tensors in memory, and in a temporary folder beyond a number of bytes.

    Args:
        limit: bytes in memory; None: all.
    """

    limit: int | None = None
    used: int = 0
    items: list[Any] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, index: int, tree: Any) -> None:
        """Hold a tree in place of the one at an index, or after the last one."""
        if index == len(self.items):
            self.items.append(None)
        self.used -= _bytes(self.items[index])
        size = _bytes(tree)
        if self.limit is not None and self.used + size > self.limit:
            self.folder = self.folder or tempfile.TemporaryDirectory(prefix="pruning-activations-")
            path = Path(self.folder.name) / f"{index}.pt"
            torch.save(tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, tree), path)
            tree = path
        else:
            self.used += size
        self.items[index] = tree

    def close(self) -> None:
        """Forget all, and remove the folder."""
        self.items.clear()
        if self.folder is not None:
            self.folder.cleanup()

    def get(self, index: int, device: torch.device) -> Any:
        """Return the tree at an index, with tensors on a device."""
        found = self.items[index]
        if isinstance(found, Path):
            found = torch.load(found, weights_only=True, map_location=device)
        return found


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
