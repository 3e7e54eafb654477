"""How many times as fast one thing is as another, measured side by side in one process.

Where the weights and buffers of a network lie in memory is worth half a percent of its time, for as long as it lives.
So a measurement is made of blocks, each of which makes both things anew, in alternating order, and times them in turns.
The blocks are independent samples: a t interval over their log ratios says what the ratio is worth.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pruning.holding.copies import values_with_history
from pruning.measure.macs import arguments_of

Call = Callable[[], object]
"""What is timed; one on a GPU waits for it."""
Make = Callable[[], Call]
"""Makes it anew, with all that it holds."""
Clock = Callable[[], float]

LEAST_PAIRS = 4
"""Of a block, however long they take: a median of fewer is no more than a mean."""


@dataclass(frozen=True)
class LatencyRatio:
    """What `compare_latency` has measured, as plain data.

    Args:
        log_ratios: of each block, the median over its pairs of log(time of a / time of b).
        a, b: median seconds of a call, over all pairs.
        pairs: timed pairs of all blocks.
        threads: of torch, meanwhile.
    """

    log_ratios: tuple[float, ...]
    a: float
    b: float
    pairs: int
    threads: int

    @property
    def ratio(self) -> float:
        """How many times as long a takes as b: the speed-up of b. exp(mean of the blocks' log ratios)."""
        return math.exp(statistics.fmean(self.log_ratios))


def compare_latency(
    make_a: Make,
    make_b: Make,
    *,
    blocks: int = 16,
    seconds: float = 1.5,
    warmup: int = 3,
    threads: int | None = None,
    clock: Clock = time.perf_counter,
) -> LatencyRatio:
    """Time two things in turns, in blocks that make both anew.

    Args:
        make_a: makes the first, such as the dense network: `calling(dense, example)`.
        make_b: makes the second, such as the pruned one.
        blocks: independent samples, at least 2; of an even number each is made first as often as the other.
        seconds: of the whole measurement, less where making and 4 pairs a block take longer than that.
        warmup: untimed calls of each in every block.
        threads: of torch during the measurement; by default as many as it has.
        clock: seconds, monotonic.

    Example:
        >>> found = compare_latency(calling(dense, images), calling(pruning.shrink(dense, images), images))
        >>> found.ratio  # how many times as fast the shrunk network is
    """
    if blocks < 2:
        raise ValueError(f"`blocks` (={blocks}) must be at least 2: one block has no spread.")
    if seconds <= 0:
        raise ValueError(f"`seconds` (={seconds}) must be above 0, the length of the measurement.")
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` (={threads}) must be at least 1; pass None for as many as torch has.")
    for name, make in (("make_a", make_a), ("make_b", make_b)):
        if isinstance(make, nn.Module):
            raise TypeError(
                f"`{name}` (a {type(make).__name__}) must be a function that makes what is timed; pass "
                "calling(network, example)."
            )
    ratios, of_a, of_b = [], list[float](), list[float]()
    with _threads(threads):
        for block in range(blocks):
            pairs = _block(make_a, make_b, bool(block % 2), seconds / blocks, warmup, clock)
            ratios.append(statistics.median(math.log(a / b) for a, b in pairs))
            of_a += [a for a, _ in pairs]
            of_b += [b for _, b in pairs]
        used = torch.get_num_threads()
    return LatencyRatio(tuple(ratios), statistics.median(of_a), statistics.median(of_b), len(of_a), used)


def calling(model: nn.Module, example: Any) -> Make:
    """Return what makes a copy of `model` and of `example`, to be called in evaluation mode without gradients.

    Args:
        model: any module; it stays as it is.
        example: what to call the model with: a tensor, a plain tuple of arguments, or a mapping of them by name.
    """

    def make() -> Call:
        network, inputs = copy.deepcopy(model, values_with_history(model)).eval(), copy.deepcopy(example)
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        given = () if named else arguments_of(inputs)
        devices = {parameter.device for parameter in network.parameters() if parameter.is_cuda}

        def call() -> None:
            with torch.no_grad():
                network(*given, **named)
                for device in devices:
                    torch.cuda.synchronize(device)

        return call

    return make


def _block(
    make_a: Make, make_b: Make, b_first: bool, seconds: float, warmup: int, clock: Clock
) -> list[tuple[float, float]]:
    """Return the seconds of each pair of calls of a block."""
    end = clock() + seconds
    made = {b: (make_b if b else make_a)() for b in (b_first, not b_first)}
    a, b = made[False], made[True]
    for _ in range(warmup):
        a()
        b()
    pairs: list[tuple[float, float]] = []
    with _no_garbage_collection():
        while len(pairs) < LEAST_PAIRS or clock() < end:
            pairs.append((_timed(a, clock), _timed(b, clock)))
            second = _timed(b, clock)
            pairs.append((_timed(a, clock), second))
    return pairs


def _timed(call: Call, clock: Clock) -> float:
    start = clock()
    call()
    return max(clock() - start, 1e-9)  # of a clock that did not move


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Have Python collect no cycles meanwhile, which takes longer than a small network does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
