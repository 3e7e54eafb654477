"""Calls of a network's blocks with calibration data: of single blocks if this gives equal bits, or by whole passes."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from pruning.graph.tracing import copied
from pruning.holding.parameter import hooked
from pruning.measure.macs import called
from pruning.reconstruction.block_order import Part

Batch = Any

PLAIN = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of arguments, besides tensors, that no call can change."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call a network with a copy of a batch: a dict by keyword, a tuple or list by position, else one argument."""
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    return called(model, copied((args, dict(batch) if isinstance(batch, Mapping) else {})), "batches")


@dataclass(frozen=True)
class Held:
    """Place of an argument among the tensors that the calls for a batch share.

    Args:
        index: index in their list.
    """

    index: int


@dataclass(frozen=True)
class Carried:
    """Place of an argument that is an output of the part before.

    Args:
        output: index among the leaves of the outputs.
    """

    output: int


@dataclass(frozen=True)
class PartCall:
    """Call of a part for one batch, which can be repeated.

    Args:
        leaves: arguments, flattened; `Held` and `Carried` in place of tensors.
        form: how the leaves make up (args, kwargs).
    """

    leaves: Sequence[Any]
    form: TreeSpec

    @property
    def carried(self) -> list[int]:
        """Outputs of the part before that the call needs."""
        return list(dict.fromkeys(leaf.output for leaf in self.leaves if isinstance(leaf, Carried)))

    def arguments(self, held: Sequence[Tensor], carried: Sequence[Tensor]) -> Any:
        """Return (args, kwargs)."""
        outputs = dict(zip(self.carried, carried, strict=True))
        leaves = [
            held[leaf.index] if isinstance(leaf, Held) else outputs[leaf.output] if isinstance(leaf, Carried) else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.form)


@dataclass
class Chain:
    """Consecutive parts whose calls can be repeated.

    Args:
        start, end: indices of the first part, and of the part after the last.
        calls: for each batch, the calls of the parts.
        at: part whose inputs are stored.
    """

    start: int
    end: int
    calls: list[Sequence[PartCall]]
    at: int


class BlockCalls:
    """Calls of the parts of a network with all batches.

    A whole pass for each batch captures the arguments of a chain of blocks; then each block's outputs are the inputs of
    the next. The first and the last batch of each form are compared: while the outputs of all blocks of the chain are
    disturbed, repeated calls must have the same arguments and outputs, bit by bit, as the calls in a whole pass. The
    chain ends before the first block that differs. Parts outside of chains are called by whole passes.

    Args:
        model: the network.
        parts: its parts in the order of their calls.
        batches: calibration data.
        replay: call single blocks where this gives equal bits; False: only whole passes.
        activation_bytes: bytes of activations that stay in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        batches: Sequence[Batch],
        replay: bool,
        activation_bytes: int | None,
    ) -> None:
        self._model, self._parts, self._batches = model, parts, batches
        self._store = ActivationStore(activation_bytes)
        self._chain: Chain | None = None
        self._whole_until = 0 if replay else len(parts)

    def of(self, index: int) -> Iterator[tuple[Batch, Callable[[], object]]]:
        """Yield each batch, and a function that calls a part as a pass of the network as it is by then calls it.

        Args:
            index: index of the part, not below that of the call before.
        """
        if self._chain is not None and index >= self._chain.end:
            self.close()
        if self._chain is None and index >= self._whole_until:
            self._open(index)
        chain = self._chain
        if chain is not None:
            self._advance(chain, index)
        for position, batch in enumerate(self._batches):
            whole = partial(call_model, self._model, batch)
            yield batch, whole if chain is None else partial(self._repeat, chain, index, position)

    def close(self) -> None:
        """Delete the stored activations."""
        self._chain = None
        self._store.close()

    def _open(self, start: int) -> None:
        """Capture the chain that begins with a part; leave the part to whole passes if there is none."""
        self._whole_until = start + 1
        if not all(part.is_block for part in self._parts[start : start + 2]):
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers() if not buffer.is_meta]
        with torch.random.fork_rng(devices=[]):  # a network that draws numbers goes on as if nothing was tried
            try:
                self._chain = self._captured(start)
            except Exception:  # code of the network with odd outputs; if whole passes fail too, they say so
                self._chain = None
        if self._chain is None:
            self.close()
            for buffer, before in buffers:
                buffer.copy_(before)

    def _captured(self, start: int) -> Chain | None:
        """Return the chain from a part with the calls of all batches; None if it has fewer than two parts."""
        chain = Chain(start, len(self._parts), [], start)
        for position, batch in enumerate(self._batches):
            passed = captured_calls(self._model, self._parts[start : chain.end], batch, to_its_end=position == 0)
            chain.end = start + len(passed)
            if chain.end - start < 2:
                return None
            calls, held, carried = _repeatable(passed)
            chain.calls.append(calls)
            self._store.put(("held", position), held)
            self._store.put(position, carried)
            if position == 0:  # most networks that differ do so here, before the other batches are passed
                chain.end = self._equal_until(chain, [0])
        chain.end = self._equal_until(chain, _ends_of_forms(self._batches))
        return chain if chain.end - start >= 2 else None

    def _equal_until(self, chain: Chain, positions: Sequence[int]) -> int:
        """Return the first part whose repeated call differs from that of disturbed whole passes, or the chain's end."""
        parts = self._parts[chain.start : chain.end]
        with recorded([part.module for part in parts]) as record:
            for position in positions:  # before any whole pass, which might leave what this batch needs
                carried = self._store.get(position)
                for index in range(chain.start, chain.end):
                    outputs = self._call(chain, index, position, carried)
                    carried = _carried(chain, index + 1, position, outputs)
            repeated = record.copy()
            record.clear()
            for position in positions:
                call_model(self._model, self._batches[position])
        if len(repeated) != len(record):
            return chain.start
        differing = {own[0] for own, other in zip(repeated, record, strict=True) if own != other}
        return chain.start + min(differing, default=len(parts))

    def _repeat(self, chain: Chain, index: int, position: int) -> Any:
        return self._call(chain, index, position, self._store.get(position))

    def _call(self, chain: Chain, index: int, position: int, carried: Sequence[Tensor]) -> Any:
        call = chain.calls[position][index - chain.start]
        args, kwargs = call.arguments(self._store.get(("held", position)), carried)
        return self._parts[index].module(*args, **kwargs)

    def _advance(self, chain: Chain, index: int) -> None:
        """Store the inputs of a part: outputs of the parts before it as they are by now."""
        while chain.at < index:
            for position in range(len(self._batches)):
                outputs = self._repeat(chain, chain.at, position)
                self._store.put(position, _carried(chain, chain.at + 1, position, outputs))
            chain.at += 1


class _Ended(BaseException):
    """The last part that a pass is run for has been called."""


def captured_calls(model: nn.Module, parts: Sequence[Part], batch: Batch, *, to_its_end: bool) -> list[PartCall]:
    """Run a network with a batch, and return the calls of its parts: up to one that is not the next, or comes again.

    Args:
        model: the network.
        parts: parts in the order of their calls.
        batch: the batch.
        to_its_end: run the whole pass, which may call a part again; False: the pass ends after the last part.

    Returns:
        the calls, with tensors among their leaves.
    """
    calls: list[PartCall] = []
    end, before = len(parts), dict[int, int]()

    def enter(index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal end
        if index != len(calls):
            end = min(end, index)
            return
        leaves, form = tree_flatten((args, kwargs))
        if not all(map(_is_plain, leaves)):
            end = min(end, index)
        linked = [Carried(before[id(leaf)]) if id(leaf) in before else leaf for leaf in leaves]
        calls.append(PartCall(linked, form))

    def leave(index: int, _module: nn.Module, _args: tuple[Any, ...], outputs: Any) -> None:
        leaves = tree_leaves(outputs)
        kept[:] = leaves  # or their addresses, by which the next arguments are known, would be used again
        before.clear()
        before.update({id(leaf): at for at, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, Tensor)})
        if index == len(parts) - 1 and not to_its_end:
            raise _Ended

    kept: list[Any] = []
    with calls_watched([part.module for part in parts], enter, leave), suppress(_Ended):
        call_model(model, batch)
    return calls[:end]


@contextmanager
def calls_watched(
    modules: Sequence[nn.Module], enter: Callable[..., None], leave: Callable[..., Any]
) -> Iterator[None]:
    """Call `enter` before each module's call, and `leave` after it, with the module's index, inside the context."""
    placed = list(enumerate(modules))
    before = [m.register_forward_pre_hook(partial(enter, i), prepend=True, with_kwargs=True) for i, m in placed]
    with hooked([*before, *(module.register_forward_hook(partial(leave, index)) for index, module in placed)]):
        yield


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

    with calls_watched(modules, enter, leave):
        yield record


class ActivationStore:
    """Lists of tensors by key: in memory up to a limit, and in temporary files beyond it.

    Args:
        limit: bytes that stay in memory; further lists go to files of a temporary folder. None: all stay.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit, self._bytes = limit, 0
        self._held: dict[Hashable, list[Tensor]] = {}
        self._files: dict[Hashable, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Store a list of tensors in place of the key's earlier one."""
        self.drop(key)
        size = _bytes(tensors)
        if self._limit is None or self._bytes + size <= self._limit:
            self._held[key] = list(tensors)
            self._bytes += size
            return
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="activations-")
        self._files[key] = Path(self._folder.name) / f"{len(self._files)}-{abs(hash(key))}.pt"
        torch.save(list(tensors), self._files[key])

    def get(self, key: Hashable) -> list[Tensor]:
        """Return the tensors of a key."""
        if key in self._held:
            return self._held[key]
        found: list[Tensor] = torch.load(self._files[key], weights_only=True)
        return found

    def drop(self, key: Hashable) -> None:
        """Forget a key, if there is one."""
        self._bytes -= _bytes(self._held.pop(key, []))
        if key in self._files:
            self._files.pop(key).unlink()

    def close(self) -> None:
        """Forget all tensors, and delete the files."""
        self._held, self._files, self._bytes = {}, {}, 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _carried(chain: Chain, index: int, position: int, outputs: Any) -> list[Tensor]:
    """Return the outputs that the call of the next part needs."""
    if index == chain.end:
        return []
    leaves = tree_leaves(outputs)
    return [leaves[output] for output in chain.calls[position][index - chain.start].carried]


def _repeatable(passed: Sequence[PartCall]) -> tuple[list[PartCall], list[Tensor], list[Tensor]]:
    """Return a chain's calls, the tensors that they share, and those that the first call alone needs."""
    held: list[Tensor] = []
    places: dict[int, Held] = {}
    for call in passed[1:]:
        for leaf in call.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                places[id(leaf)] = Held(len(held))
                held.append(leaf)
    given = passed[0].leaves
    own = [at for at, leaf in enumerate(given) if isinstance(leaf, Tensor) and id(leaf) not in places]
    first = [Carried(at) if at in own else places.get(id(leaf), leaf) for at, leaf in enumerate(given)]
    further = [PartCall([places.get(id(leaf), leaf) for leaf in call.leaves], call.form) for call in passed[1:]]
    return [PartCall(first, passed[0].form), *further], held, [given[at] for at in own]


def _ends_of_forms(batches: Sequence[Batch]) -> list[int]:
    """Return the positions of the first and the last batch of each form."""
    last = {_form(batch): position for position, batch in enumerate(batches)}
    first = {_form(batch): position for position, batch in reversed([*enumerate(batches)])}
    return sorted({*first.values(), *last.values()})


def _form(batch: Batch) -> Hashable:
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


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in PLAIN or (type(leaf) in (Tensor, nn.Parameter) and not leaf.is_inference())


def _bytes(tensors: Sequence[Tensor]) -> int:
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(sizes.values())
