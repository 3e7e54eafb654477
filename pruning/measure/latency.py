"""Latency of two functions, measured side by side in one process without garbage collection, and peak memory.

The addresses of a network's weights and buffers change its time by half a percent for as long as the network exists.
So a measurement consists of blocks. Each block builds both functions again, in alternating order, and times them in
turns. The blocks are independent samples: a t interval over their log ratios gives the uncertainty of the ratio.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pruning.holding.copies import values_with_history
from pruning.holding.parameter import check_all_have_values
from pruning.measure.garbage_collection import collector_paused
from pruning.measure.macs import arguments_of

Call = Callable[[], object]
"""Function to time; on a GPU it must wait for the result."""
Make = Callable[[], Call]
"""Function that builds a new `Call` with all its memory."""
Clock = Callable[[], float]

LEAST_PAIRS = 4
"""Minimum number of timed pairs in a block, however long they take: a median of fewer is hardly robust."""


@dataclass(frozen=True)
class LatencyRatio:
    """Result of `compare_latency`, as plain data.

    Args:
        log_ratios: for each block, the median over its pairs of log(time of a / time of b).
        a, b: median seconds of a call, over all pairs.
        pairs: number of timed pairs in all blocks.
        threads: number of torch threads during the measurement.
    """

    log_ratios: tuple[float, ...]
    a: float
    b: float
    pairs: int
    threads: int

    @property
    def ratio(self) -> float:
        """Speed-up of b over a: exp(mean of the blocks' log ratios)."""
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
    """Time two functions in turns, in blocks that build both again.

    Args:
        make_a: builds the first function, for example the dense network: `calling(dense, example)`.
        make_b: builds the second function, for example the pruned network.
        blocks: number of independent samples, at least 2; with an even number each function is built first equally
            often.
        seconds: length of the whole measurement; it takes longer if building and 4 pairs per block need more time.
        warmup: untimed calls of each function in every block.
        threads: number of torch threads during the measurement; None: torch's current number.
        clock: monotonic clock in seconds.

    Raises:
        ValueError: `blocks`, `seconds` or `threads` is too small.
        TypeError: `make_a` or `make_b` is a module.

    Example:
        >>> found = compare_latency(calling(dense, images), calling(pruning.shrink(dense, images), images))
        >>> found.ratio  # speed-up of the shrunk network
    """
    if blocks < 2:
        raise ValueError(f"`blocks` (={blocks}) must be at least 2, because one block has no spread.")
    if seconds <= 0:
        raise ValueError(f"`seconds` (={seconds}) must be above 0, because it is the length of the measurement.")
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` (={threads}) must be at least 1; pass None for torch's current number.")
    for name, make in (("make_a", make_a), ("make_b", make_b)):
        if isinstance(make, nn.Module):
            raise TypeError(
                f"`{name}` (a {type(make).__name__}) must be a function that builds the function to time; pass "
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
    """Return a function that copies `model` and `example`, and returns a call of the copies for `compare_latency`.

    The copy runs in evaluation mode, without gradients.

    Args:
        model: any module; it is not changed.
        example: input of the model: a tensor, a plain tuple of positional arguments, or a mapping of keyword arguments.
    """

    def make() -> Call:
        return call_of(copy.deepcopy(model, values_with_history(model)).eval(), copy.deepcopy(example))

    return make


def call_of(model: nn.Module, example: Any) -> Call:
    """Return a call of `model(example)` without gradients, which on a GPU waits for the result."""
    check_all_have_values(model)
    given, named = arguments_of(example)
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}

    def call() -> None:
        with torch.no_grad():
            model(*given, **named)
            for device in devices:
                torch.cuda.synchronize(device)

    return call


def _block(
    make_a: Make, make_b: Make, b_first: bool, seconds: float, warmup: int, clock: Clock
) -> list[tuple[float, float]]:
    """Time one block; return the seconds of each pair of calls (a, b)."""
    end = clock() + seconds
    made = {b: (make_b if b else make_a)() for b in (b_first, not b_first)}
    a, b = made[False], made[True]
    for _ in range(warmup):
        a()
        b()
    pairs: list[tuple[float, float]] = []
    with collector_paused():
        while len(pairs) < LEAST_PAIRS or clock() < end:
            pairs.append((timed(a, clock), timed(b, clock)))
            second = timed(b, clock)
            pairs.append((timed(a, clock), second))
    return pairs


def timed(call: Call, clock: Clock) -> float:
    """Return the seconds of a call."""
    start = clock()
    call()
    return max(clock() - start, 1e-9)  # a coarse clock may not have advanced


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PEAK = "5"
"""Value for /proc/self/clear_refs that resets the kernel's peak of a process's resident memory."""
CALLS = 3


def peak_memory(
    make: Callable[[], Callable[[], object]], device: torch.device | None = None, *, proc: Path = Path("/proc/self")
) -> int | None:
    """Return the peak growth of this process's memory, in bytes, while a function is built and called.

        peak_memory(calling(network, images))           # weights, and activations that exist at the same time

    On the CPU the measure is resident memory of all threads, as Linux counts it: nothing else may run in the process
    meanwhile. Memory that the process freed earlier is returned to the system first.

    Args:
        make: builds the function with all its memory, as for `compare_latency`.
        device: for a GPU, memory that torch allocates there is measured instead.
        proc: folder where the kernel describes this process.

    Returns:
        bytes; None if the system does not report its memory.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _called(make)
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (proc / "clear_refs").write_text(PEAK)
        before = _resident(proc, "VmRSS")
        _called(make)
        return max(0, _resident(proc, "VmHWM") - before)
    except (OSError, ValueError):
        return None


def _called(make: Callable[[], Callable[[], object]]) -> None:
    call = make()
    for _ in range(CALLS):
        call()


def _resident(proc: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", (proc / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(field)
    return 1024 * int(found[1])
