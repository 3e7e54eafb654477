"""How much memory something takes while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pruning.measure.memory import peak_memory

MEGABYTE = 2**20


def making(held: int, passing: int) -> Callable[[], Callable[[], object]]:
    """What holds so many megabytes, and takes others at every call."""

    def make() -> Callable[[], object]:
        weights = torch.ones(held * MEGABYTE // 4)
        return lambda: (weights, torch.ones(passing * MEGABYTE // 4).sum())

    return make


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel is not Linux")
def test_what_is_held_and_what_passes_count_at_their_peak() -> None:
    peak_memory(making(1, 1))  # what torch takes once

    peaks = [peak_memory(making(64, passing)) for passing in (1, 128, 1)]

    assert peaks == pytest.approx([65 * MEGABYTE, 192 * MEGABYTE, 65 * MEGABYTE], abs=12 * MEGABYTE)


def test_a_system_that_does_not_say_gives_nothing(tmp_path: Path) -> None:
    assert peak_memory(making(1, 1), proc=tmp_path / "nowhere") is None

    (tmp_path / "status").write_text("VmRSS:\tmuch\n")
    assert peak_memory(making(1, 1), proc=tmp_path) is None
