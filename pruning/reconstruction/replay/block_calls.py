"""Calls of a network's parts with calibration data: repeated where this is proven equal, else whole passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from pruning.reconstruction.block_order import Part
from pruning.reconstruction.replay.activation_store import ActivationStore
from pruning.reconstruction.replay.dependency_tracking import Carried, TracedCall, chain_end, traced_calls
from pruning.reconstruction.replay.equality_proof import form_of, recorded
from pruning.reconstruction.replay.whole_passes import Batch, call_model


@dataclass(frozen=True)
class Held:
    """Place of an argument among the tensors that the calls for a batch share.

    Args:
        index: index in their list.
    """

    index: int


@dataclass(frozen=True)
class RepeatedCall:
    """Call of a part for one batch, which can be repeated.

    Args:
        leaves: arguments, flattened; `Held` and `Carried` in place of tensors.
        form: how the leaves make up (args, kwargs).
        carried: which outputs of the part before the call needs.
    """

    leaves: Sequence[Any]
    form: TreeSpec
    carried: Sequence[int]

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
    calls: Sequence[Sequence[RepeatedCall]]
    at: int


class BlockCalls:
    """Calls of the parts of a network with all batches.

    A whole pass for each batch captures the arguments of a chain of parts; then each part's outputs are the inputs of
    the next. The proof, for one batch of each form: while the outputs of all parts of the chain are disturbed, repeated
    calls have the same arguments and outputs, bit by bit, as the calls in a whole pass.

    Args:
        model: the network.
        parts: its parts in the order of their calls.
        batches: calibration data.
        traced: calls of the parts in a pass with the first batch; []: only whole passes.
        activation_bytes: bytes of activations that stay in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        batches: Sequence[Batch],
        traced: Sequence[TracedCall],
        activation_bytes: int | None,
    ) -> None:
        self._model, self._parts, self._batches = model, parts, batches
        self._ends = [chain_end(traced, parts, index) for index in range(len(parts))]
        self._store = ActivationStore(activation_bytes)
        self._chain: Chain | None = None
        self._whole_until = 0

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
        """Capture the calls of the chain that begins with a part; leave it to whole passes if they differ."""
        self._whole_until = self._ends[start]
        if self._whole_until - start < 2:
            return
        with torch.random.fork_rng(devices=[]):  # a network that draws numbers goes on as if nothing was tried
            try:
                chain = self._captured(start)
                self._chain = chain if chain is not None and self._is_proven(chain) else None
            except Exception:  # code of the network under tracking; if whole passes fail too, they say so
                self._chain = None
        if self._chain is None:
            self.close()

    def _captured(self, start: int) -> Chain | None:
        end, calls = self._ends[start], []
        for position, batch in enumerate(self._batches):
            traced = traced_calls(self._model, self._parts, batch, self._parts[end - 1])
            end = min(end, chain_end(traced, self._parts, start))
            if end - start < 2:
                return None
            repeated, held, carried = _repeatable(traced[start:end])
            calls.append(repeated)
            self._store.put(("held", position), held)
            self._store.put(position, carried)
        return Chain(start, end, calls, start)

    def _is_proven(self, chain: Chain) -> bool:
        """Return whether repeated calls equal those of disturbed whole passes, for one batch of each form."""
        modules = [part.module for part in self._parts[chain.start : chain.end]]
        chosen = {form_of(batch): position for position, batch in reversed([*enumerate(self._batches)])}
        with recorded(modules) as record:
            for position in chosen.values():  # before any whole pass, which might leave what this batch needs
                carried = self._store.get(position)
                for index in range(chain.start, chain.end):
                    outputs = self._call(chain, index, position, carried)
                    carried = _carried(chain, index + 1, position, outputs)
            repeated = record.copy()
            record.clear()
            for position in chosen.values():
                call_model(self._model, self._batches[position])
        return repeated == record

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


def _carried(chain: Chain, index: int, position: int, outputs: Any) -> list[Tensor]:
    """Return the outputs that the call of the next part needs."""
    if index == chain.end:
        return []
    leaves = tree_leaves(outputs)
    return [leaves[output] for output in chain.calls[position][index - chain.start].carried]


def _repeatable(traced: Sequence[TracedCall]) -> tuple[list[RepeatedCall], list[Tensor], list[Tensor]]:
    """Return a chain's calls, the tensors that they share, and those that the first call alone needs."""
    held: list[Tensor] = []
    places: dict[int, Held] = {}
    for call in traced[1:]:
        for leaf in call.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                places[id(leaf)] = Held(len(held))
                held.append(leaf)
    found = []
    first = [at for at, leaf in enumerate(traced[0].leaves) if isinstance(leaf, Tensor) and id(leaf) not in places]
    for call in traced:
        leaves = [places.get(id(leaf), leaf) for leaf in call.leaves]
        if call is traced[0]:
            leaves = [Carried(at) if at in first else leaf for at, leaf in enumerate(leaves)]
        needed = [leaf.output for leaf in leaves if isinstance(leaf, Carried)]
        found.append(RepeatedCall(leaves, call.form, list(dict.fromkeys(needed))))
    return found, held, [traced[0].leaves[at] for at in first]
