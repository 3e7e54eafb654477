"""Sparse layers that follow each other as one module, and as one call of C: Python takes longer than a small layer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from pruning.kernels.dense_steps import DenseStep, Form
from pruning.kernels.library import CompiledCall, check_code, library
from pruning.kernels.sparse_layer import MOST_SHAPES, SparseLayer, check_conversion, checked, is_recorded

MOST_LAYERS = 256
"""Layers of a sequence."""
LINE = 64
"""Bytes of a line of the cache, at which tensors start."""


@dataclass(frozen=True)
class Wiring:
    """The tensors that the layers of a sequence read, as plain data.

    Tensors have numbers: 0 to `given - 1` are given to the sequence, and the outputs of the layers follow.

    Args:
        given: number of tensors that the sequence takes.
        reads: for each layer, the number of its inputs, and of the tensor that is added, if there is one; for each
            step, the numbers of its inputs.
        returned: numbers of the outputs that the sequence returns.
    """

    given: int
    reads: tuple[tuple[int, ...], ...]
    returned: tuple[int, ...]

    def last_reads(self) -> dict[int, int]:
        """Return number of a tensor -> place of the last layer that reads it; of the last layer if it is returned."""
        found = {number: place for place, read in enumerate(self.reads) for number in read}
        return {**found, **dict.fromkeys(self.returned, len(self.reads))}


class SparseSequence(nn.Module):
    """Sparse layers, and steps between them, that are computed in one call.

    Args:
        layers: name -> layer or step, in the order of computation.
        wiring: what they read.
    """

    def __init__(self, layers: Mapping[str, SparseLayer | DenseStep], wiring: Wiring) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.wiring = wiring
        self._dtypes = _given_dtypes(list(layers.values()), wiring)
        self._calls: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}
        self._held: list[tuple[int, ...]] = []

    @property
    def layers(self) -> list[SparseLayer | DenseStep]:
        """The layers, in the order of computation."""
        return list(self._modules.values())  # type: ignore[arg-type]

    def forward(self, *given: Tensor) -> Any:
        """Return the outputs that are returned, as a tuple if there are several."""
        layers = self.layers
        hooked = [1 for layer in layers if layer._forward_hooks or layer._forward_pre_hooks]
        if hooked or _global_forward_hooks or _global_forward_pre_hooks:
            return self._in_turn(*given)
        if is_recorded() or [1 for x in given if type(x) is not Tensor]:
            return self._in_turn(*given)
        given = tuple([checked(x, dtype) for x, dtype in zip(given, self._dtypes, strict=True)])
        call = self._calls.get(tuple([x.shape for x in given]))
        if call is None or [layer.held() for layer in layers] != self._held:
            call = self._bind(given)
        return call(*given)

    def _in_turn(self, *given: Tensor) -> Any:
        """Call the layers one after the other; keep no tensor longer than it is read."""
        values, last = dict(enumerate(given)), self.wiring.last_reads()
        for place, (layer, read) in enumerate(zip(self.layers, self.wiring.reads, strict=True)):
            values[len(given) + place] = layer(*[values[number] for number in read])
            values = {number: value for number, value in values.items() if last.get(number, -1) > place}
        found = tuple(values[number] for number in self.wiring.returned)
        return found[0] if len(found) == 1 else found

    def _bind(self, given: Sequence[Tensor]) -> Callable[..., Any]:
        """Make the call for shapes; calls made for other arrays, as in torch.func.functional_call, are dropped."""
        held = [layer.held() for layer in self.layers]
        if len(self._calls) >= MOST_SHAPES or held != self._held:
            self._calls, self._held = {}, held
        runs = list(_runs(self.layers, self.wiring.reads, [(x.shape, x.dtype) for x in given]))
        call = _compiled(runs, self.wiring) if len(runs) == len(held) else self._in_turn
        self._calls[tuple([x.shape for x in given])] = call
        return call

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseSequence:
        """Convert the layers, and drop the calls, which hold addresses of arrays."""
        check_conversion(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._calls = {}
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_calls": {}, "_held": []}


def _given_dtypes(layers: Sequence[SparseLayer | DenseStep], wiring: Wiring) -> list[torch.dtype]:
    """Return the dtype that a layer reads of each given tensor."""
    found: dict[int, torch.dtype] = {}
    for layer, read in zip(layers, wiring.reads, strict=True):
        found |= dict(zip(read, layer.dtypes, strict=False))
    return [found[number] for number in range(wiring.given)]


def _runs(
    layers: Sequence[SparseLayer | DenseStep],
    reads: Sequence[tuple[int, ...]],
    tensors: list[Form],
) -> Iterator[CompiledCall]:
    """Yield the call of each layer, up to the first that C cannot compute from these tensors; adds outputs to them."""
    for layer, read in zip(layers, reads, strict=True):
        run = layer.compiled([tensors[number] for number in read])
        if run is None:
            return
        yield run
        tensors.append((run.like.shape, run.like.dtype))


class _Place(ctypes.Structure):
    """The struct `Place` of `sources/sequence.c`."""

    _fields_ = (("memory", ctypes.c_int64), ("offset", ctypes.c_int64))


class _Step(ctypes.Structure):
    """The struct `Step` of `sources/sequence.c`."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        *((name, _Place) for name in ("x", "added", "more", "y")),
    )


def _compiled(runs: Sequence[CompiledCall], wiring: Wiring) -> Callable[..., Any]:
    """Return one call for the calls of all layers; outputs that are not returned share one piece of memory."""
    offsets, size = _offsets(runs, wiring)
    memory = {number: place for place, number in enumerate((*range(wiring.given), *wiring.returned))}
    last = len(memory)

    def place(number: int) -> _Place:
        return _Place(memory[number], 0) if number in memory else _Place(last, offsets[number])

    steps = (_Step * len(runs))()
    for at, (run, read) in enumerate(zip(runs, wiring.reads, strict=True)):
        kernel = ctypes.cast(run.kernel, ctypes.c_void_p)  # type: ignore[arg-type]  # a function of the library
        read_places = [*map(place, read), *[_Place(-1, 0)] * (3 - len(read))]
        steps[at] = _Step(kernel, run.address, *read_places, place(wiring.given + at))
    first, count, addresses = ctypes.addressof(steps), len(runs), ctypes.c_void_p * (last + 1)
    sequence = library().sequence
    sequence.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    made = [runs[number - wiring.given].like for number in wiring.returned]

    def call(*given: Tensor, _held: Any = (steps, runs)) -> Any:
        found = [torch.empty_like(each) for each in made]
        pointers = addresses(*[each.data_ptr() for each in (*given, *found)])
        check_code(sequence(first, count, pointers, last, size, torch.get_num_threads()))
        return found[0] if len(found) == 1 else tuple(found)

    return call


def _offsets(runs: Sequence[CompiledCall], wiring: Wiring) -> tuple[dict[int, int], int]:
    """Return number of an output that is not returned -> its first byte in the memory between, and that memory's size.

    Two outputs overlap only if no layer reads the first when the second is written, or later.
    """
    last, whole = wiring.last_reads(), 0
    held: dict[int, tuple[int, int]] = {}
    for place, run in enumerate(runs):
        number = wiring.given + place
        if number in wiring.returned:
            continue
        size = -(-run.like.numel() * run.like.itemsize // LINE) * LINE
        start = 0
        for other, end in sorted(span for each, span in held.items() if last[each] >= place):
            if start + size > other:
                start = max(start, end)
        held[number] = start, start + size
        whole = max(whole, start + size)
    return {number: start for number, (start, _) in held.items()}, whole
