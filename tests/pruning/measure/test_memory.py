"""Peak memory of a function while it is built and called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pruning.measure.latency import peak_memory

MEGABYTE = 2**20


def making(held: int, passing: int) -> Callable[[], Callable[[], object]]:
    """Return a builder of a function that keeps `held` megabytes and allocates `passing` more in each call."""

    def make() -> Callable[[], object]:
        weights = torch.ones(held * MEGABYTE // 4)
        return lambda: (weights, torch.ones(passing * MEGABYTE // 4).sum())

    return make


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel is not Linux")
def test_what_is_held_and_what_passes_count_at_their_peak() -> None:
    peak_memory(making(1, 1))  # warm-up: torch allocates some memory once

    peaks = [peak_memory(making(64, passing)) for passing in (1, 128, 1)]

    assert peaks == pytest.approx([65 * MEGABYTE, 192 * MEGABYTE, 65 * MEGABYTE], abs=12 * MEGABYTE)


def test_a_system_that_does_not_say_gives_nothing(tmp_path: Path) -> None:
    assert peak_memory(making(1, 1), proc=tmp_path / "nowhere") is None

    (tmp_path / "status").write_text("VmRSS:\tmuch\n")
    assert peak_memory(making(1, 1), proc=tmp_path) is None
