"""Comparison of repeated calls of parts with the calls in a whole pass, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map


@contextmanager
def recorded(modules: Sequence[nn.Module]) -> Iterator[list[tuple[int, str]]]:
    """Record digests of the arguments and outputs of modules, and disturb their outputs, in calls inside the context.

    An argument that depends on outputs in another way than by being one of them has another digest in a pass with other
    outputs. Disturbed entries have factors of their own, from -1 to 0.5.

    Args:
        modules: the modules.

    Returns:
        list of (index of a module, digest) for each call's arguments, then its outputs.
    """
    record: list[tuple[int, str]] = []

    def enter(index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.append((index, _digest((args, kwargs))))

    def leave(index: int, _module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> Any:
        found = tree_map(_disturbed, outputs)
        record.append((index, _digest(found)))
        return found

    handles = []
    for index, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(partial(enter, index), prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leave, index)))
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def form_of(batch: Any) -> Hashable:
    """Return the structure of a batch: where its tensors are, their shapes and dtypes, and its other values."""
    leaves, form = tree_flatten(batch)
    tensors = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return str(form), tuple(tensors)


def _disturbed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf * torch.linspace(-1, 0.5, leaf.numel(), dtype=leaf.dtype, device=leaf.device).view(leaf.shape)


def _digest(given: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
