"""Successive pruning methods on one parameter, each on what the ones before have left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor

from pruning.base import BasePruningMethod, drawing_from, is_builtin, is_pruning_hook
from pruning.channels import alive_channels, check_dim


class PruningContainer(BasePruningMethod):
    """The methods applied to one parameter, oldest first; `compute_mask` is that of the newest, on what survives.

    Amounts are relative to the survivors: k rounds of amount p leave (1 - p)^k.

    Args:
        methods: methods, or one iterable of them.
    """

    def __init__(self, *methods: BasePruningMethod | Iterable[BasePruningMethod]) -> None:
        self._pruning_methods: tuple[BasePruningMethod, ...] = ()
        for item in methods:
            if isinstance(item, Iterable):
                for method in item:
                    self.add_pruning_method(method)
            else:
                self.add_pruning_method(item)

    def add_pruning_method(self, method: BasePruningMethod) -> None:
        """Append `method`.

        Raises:
            TypeError: it is no pruning method.
            ValueError: it acts on a parameter of another name.
        """
        if not is_pruning_hook(cast(object, method)):
            raise TypeError(f"`method` (={method!r}) must be a BasePruningMethod, not {type(method).__name__}.")
        name = getattr(method, "_tensor_name", None)
        if not self._pruning_methods and self._tensor_name is None:
            self._tensor_name = name
        elif name != self._tensor_name:
            raise ValueError(
                f"`method` acts on the parameter {name!r}, this container on {self._tensor_name!r}; "
                "use one container for each parameter."
            )
        self._pruning_methods += (method,)

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, index: int) -> BasePruningMethod:
        return self._pruning_methods[index]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` without what the newest method prunes of the rest, in the dtype of `t`.

        Raises:
            ValueError: the container is empty, or the method's `PRUNING_TYPE` is unknown.
        """
        if not self._pruning_methods:
            raise ValueError("An empty PruningContainer computes no mask; call `add_pruning_method` first.")
        return prune_survivors(self._pruning_methods[-1], t, default_mask, self.generator)


def prune_survivors(
    method: BasePruningMethod, t: Tensor, default_mask: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return a new mask: `default_mask` without what `method` prunes of the entries or channels still unpruned."""
    mask = default_mask.detach().to(dtype=t.dtype, copy=True)
    with drawing_from(method, generator):
        if is_builtin(method):
            method.prune_(mask, t)
        else:
            where = _survivors(method, default_mask)
            mask[where] = method.compute_mask(t[where], default_mask=default_mask[where]).detach().to(mask.dtype)
    return mask


def _survivors(method: BasePruningMethod, mask: Tensor) -> Tensor | tuple[slice | Tensor, ...]:
    """Return the index of what `method` may still prune, by its `PRUNING_TYPE`."""
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind == "unstructured":
        return mask == 1
    everything = (slice(None),) * mask.dim()
    if kind == "global":
        return everything
    if kind != "structured":
        raise ValueError(
            f"`PRUNING_TYPE` (={kind!r}) of {type(method).__name__} must be 'unstructured', 'structured' or 'global'."
        )
    if not hasattr(method, "dim"):
        raise AttributeError(f"{type(method).__name__} is 'structured', so it needs an attribute `dim`.")
    dim = check_dim(mask, method.dim)
    return (*everything[:dim], alive_channels(mask, dim), *everything[dim + 1 :])


def appended(hook: BasePruningMethod | None, method: BasePruningMethod) -> BasePruningMethod:
    """Return the hook that holds `method` after those of `hook`, which may be one of torch's."""
    if hook is None:
        return method
    if isinstance(hook, PruningContainer):
        hook.add_pruning_method(method)
        return hook
    return PruningContainer(hook, method)  # of one method, or of all in a container of torch's


torch_prune.PruningContainer.register(PruningContainer)
