"""Dependencies of the arguments of a network's parts on the parts before, tracked in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from pruning.reconstruction.block_order import Part
from pruning.reconstruction.replay.whole_passes import Batch, call_model

PLAIN = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of arguments, besides tensors, that no call can change."""


@dataclass(frozen=True)
class Carried:
    """Place of an argument that is an output of the part before.

    Args:
        output: index among the leaves of the outputs.
    """

    output: int


@dataclass
class TracedCall:
    """Call of a part in a forward pass.

    Args:
        part: the part.
        leaves: arguments, flattened; `Carried` in place of outputs of the part before.
        form: how the leaves make up (args, kwargs).
        versions: versions of the tensors among the leaves.
        level: index of the last call on whose outputs the other arguments, or the call itself, may depend; -1: none.
        is_repeatable: a second call with these arguments does the same as the first, as far as tracking can see.
    """

    part: Part
    leaves: list[Any]
    form: TreeSpec
    versions: list[int]
    level: int
    is_repeatable: bool

    def is_unchanged(self) -> bool:
        """Return whether nothing has written to the tensors since the call began."""
        return _versions(self.leaves) == self.versions


class _Ended(Exception):
    """The last part that a pass is run for has been called."""


class DependencyTracker(TorchDispatchMode):
    """Mode for one forward pass that records the calls of parts, and what their arguments depend on.

    A tensor depends on a part if an operation made it, or wrote to it, inside of the part or from a tensor that depends
    on the part. Tensors that share memory depend on the same parts. After an operation whose result lets Python branch
    on values, such as `Tensor.item`, every later call depends on the parts that its inputs depend on.

    Args:
        model: the network.
        parts: its parts.
        last: part after whose call the pass ends; None: the pass runs to its end.

    Attributes:
        calls: calls of the parts, in their order. A part that is called again has its first call alone.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, parts: Sequence[Part], last: Part | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._parts, self._last = model, parts, last
        self.calls: list[TracedCall] = []
        self._levels: dict[StorageWeakRef, int] = {}
        self._owners: dict[StorageWeakRef, Part | None] = {}
        self._inside: int | None = None
        self._given: set[StorageWeakRef] = set()
        self._before: tuple[list[Any], list[int]] | None = None
        self._escaped = -1

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track the forward pass inside the context."""
        state = list(_state(self._model))
        for _, value, _ in state:
            if isinstance(value, Tensor):
                self._owners.update(dict.fromkeys(_storages([value])))
        self._context = _context(self._model)
        torch.clear_autocast_cache()  # else parts read copies of weights that an earlier pass made
        handles = []
        for part in self._parts:
            weights = [layer.weight for layer in part.layers.values()]
            self._owners.update(dict.fromkeys(_storages(weights), part))
            enter, leave = partial(self._enter, part), partial(self._leave, part)
            handles.append(part.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(part.module.register_forward_hook(leave))
        try:
            with self, suppress(_Ended):
                yield
        finally:
            for handle in handles:
                handle.remove()
        self._finish(_is_same_state(state, list(_state(self._model))))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given, made = _storages(tree_leaves((args, kwargs))), _storages(tree_leaves(found))
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            made += given
        else:  # a view of what was given is nothing new
            made = [storage for storage in made if storage not in given]
        level = self._inside
        if level is None:
            level = max((self._levels.get(storage, -1) for storage in given), default=-1)
            if not ESCAPES.isdisjoint(getattr(func, "tags", ())):
                self._escaped = max(self._escaped, level)
        elif func is not torch.ops.aten.lift_fresh.default and not all(map(self._is_own, given)):
            self.calls[level].is_repeatable = False  # a tensor that is no argument: another batch may have another
        if level >= 0:
            for storage in made:
                self._levels[storage] = max(self._levels.get(storage, -1), level)
        return found

    def _is_own(self, storage: StorageWeakRef) -> bool:
        """Return whether the part that runs got a tensor as an argument, made it, or finds it in every pass."""
        if storage in self._given or self._levels.get(storage) == self._inside:
            return True
        part = self.calls[self._inside or 0].part
        if storage not in self._owners:  # perhaps a weight that was loaded when the part was called
            self._owners.update(dict.fromkeys(_storages([*part.module.parameters()]), part))
        return storage in self._owners and self._owners[storage] in (None, part)

    def _enter(self, part: Part, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        earlier = [call for call in self.calls if call.part is part]
        for call in [*earlier, *([] if self._inside is None else [self.calls[self._inside]])]:
            call.is_repeatable = False  # called twice, or with another part inside
        if earlier:
            return
        leaves, form = tree_flatten((args, kwargs))
        linked, storages = self._links(leaves), [_storages([leaf]) for leaf in leaves]
        others = [own for at, each in enumerate(storages) if at not in linked for own in each]
        level = max((self._levels.get(own, -1) for own in others), default=-1)
        kept = [linked.get(at, leaf) for at, leaf in enumerate(leaves)]
        known = all(map(_is_plain, leaves)) and _context(self._model) == self._context and self._inside is None
        self.calls.append(TracedCall(part, kept, form, _versions(kept), max(level, self._escaped), known))
        self._inside, self._given = len(self.calls) - 1, {own for each in storages for own in each}
        self._arguments = (args, kwargs), leaves, form, _versions(leaves)

    def _links(self, leaves: list[Any]) -> dict[int, Any]:
        """Return position of a leaf -> the output of the part before that it is."""
        if self._before is None:
            return {}
        outputs, versions = self._before
        places = {id(each): at for at, each in reversed([*enumerate(outputs)]) if isinstance(each, Tensor)}
        same = [now == then for now, then in zip(_versions(outputs), versions, strict=True)]
        return {
            at: Carried(places[id(leaf)])
            for at, leaf in enumerate(leaves)
            if id(leaf) in places and same[places[id(leaf)]]
        }

    def _leave(self, part: Part, _module: nn.Module, _args: tuple[Any, ...], found: Any) -> None:
        self._before = None
        if self._inside is None or self.calls[self._inside].part is not part:
            return
        given, leaves, form, versions = self._arguments
        after, form_after = tree_flatten(given)  # the call may have changed a list, or written to a tensor
        same = form == form_after and all(map(_is_same, leaves, after))
        if not same or _versions(after) != versions:
            self.calls[self._inside].is_repeatable = False
        outputs = tree_leaves(found)
        self._levels.update(dict.fromkeys(_storages(outputs), self._inside))
        self._levels = {storage: level for storage, level in self._levels.items() if not storage.expired()}  # type: ignore[no-untyped-call]
        self._before, self._inside, self._given = (outputs, _versions(outputs)), None, set()
        if part is self._last:
            raise _Ended

    def _finish(self, is_same_state: bool) -> None:
        """Mark the calls whose arguments were written to after them, or all of them if the network changed."""
        self._before = None
        for call in self.calls:
            call.is_repeatable = call.is_repeatable and is_same_state and call.is_unchanged()


def traced_calls(model: nn.Module, parts: Sequence[Part], batch: Batch, last: Part | None = None) -> list[TracedCall]:
    """Run a network with a batch, until the call of a last part, and return the calls of its parts in their order."""
    tracker = DependencyTracker(model, parts, last)
    with tracker.tracking():
        call_model(model, batch)
    return tracker.calls


def chain_end(traced: Sequence[TracedCall], order: Sequence[Part], start: int) -> int:
    """Return the end of the longest chain of parts from one on whose calls can be repeated.

    Args:
        traced: calls of the parts in a pass.
        order: the parts.
        start: index of the first part of the chain.
    """
    end = 0
    for call, part in zip(traced, order, strict=False):
        fits = end < start or (call.is_repeatable and (end == start or call.level < start))
        if call.part is not part or not fits:
            break
        end += 1
    return max(end, start)


ESCAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose results let Python read values: as a number, or as the shape of the result."""


def _storages(leaves: Sequence[Any]) -> list[StorageWeakRef]:
    """Return the memory of tensors; a weak reference keeps its address from being used again."""
    return [StorageWeakRef(leaf.untyped_storage()) for leaf in leaves if isinstance(leaf, Tensor)]  # type: ignore[no-untyped-call]


def _versions(leaves: Sequence[Any]) -> list[int]:
    """Return how often each tensor was written to; 0 for other arguments."""
    return [leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0 for leaf in leaves]


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in PLAIN or (type(leaf) in (Tensor, nn.Parameter) and not leaf.is_inference())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and one == other)


def _context(model: nn.Module) -> tuple[Any, ...]:
    """Return the settings of the thread that decide how an operation computes."""
    kinds = {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(torch.is_autocast_cache_enabled(), torch.get_float32_matmul_precision()),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
        *(torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()),
        *(torch._C._get_math_sdp_enabled(), torch.are_deterministic_algorithms_enabled()),
    )


def _state(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, version) for each attribute of the network's modules that a pass could change."""
    for path, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if not key.startswith("_forward")}
        for group in (held, module._parameters, module._buffers):
            for name, value in group.items():
                if isinstance(value, Tensor):
                    yield f"{path}.{name}", value, (value._version, value.data_ptr())
                else:
                    yield f"{path}.{name}", value, len(value) if isinstance(value, dict | list | set) else None


def _is_same_state(one: list[tuple[str, Any, Any]], other: list[tuple[str, Any, Any]]) -> bool:
    if len(one) != len(other):
        return False
    for (name, value, version), (name_after, after, version_after) in zip(one, other, strict=True):
        if name != name_after or version != version_after or not _is_same(value, after):
            return False
    return True
