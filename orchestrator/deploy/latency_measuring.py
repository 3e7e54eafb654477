"""Latency of one deployment against another, and the load of other processes meanwhile."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from orchestrator.compare.statistics import ratio
from orchestrator.core.errors import Cancelled
from orchestrator.core.records import BUSY
from orchestrator.core.stage_fields import MeasuringFields
from orchestrator.core.work_order import WorkOrder
from pruning.measure.latency import Call, Make, compare_latency
from pruning.measure.memory import peak_memory


class Measuring:
    """Measures latency with a stage's `measure` settings, and counts other running processes at each block."""

    def __init__(self, what: MeasuringFields, order: WorkOrder, device: torch.device) -> None:
        self._what = what
        self._order, self._device, self._others = order, device, list[float]()

    def figures(self, makes: Sequence[Make], size: int) -> dict[str, float]:
        """Return the figures at a batch size: milliseconds of a call, the speed-up with its 95% interval, peak memory.

        Args:
            makes: function that makes a call of the dense network, and one for the pruned network.
            size: batch size, for the names of the figures.
        """
        dense, pruned = map(self._watched, makes)
        found = compare_latency(
            dense, pruned, blocks=self._what.blocks, seconds=self._what.seconds, threads=self._what.threads
        )
        speedup = ratio(found.log_ratios)
        assert speedup is not None
        assert speedup.low is not None
        assert speedup.high is not None
        peaks = {
            name: peak_memory(make, self._device) for name, make in zip(("dense_memory", "memory"), makes, strict=True)
        }
        return {f"{name}/{size}": float(peak) for name, peak in peaks.items() if peak is not None} | {
            f"latency_ms/{size}": 1e3 * found.b,
            f"dense_ms/{size}": 1e3 * found.a,
            f"speedup/{size}": speedup.mean,
            f"speedup_low/{size}": speedup.low,
            f"speedup_high/{size}": speedup.high,
        }

    @property
    def others(self) -> float:
        """Average number of other running processes."""
        return statistics.fmean(self._others)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A warning if other processes kept the machine busy."""
        if self.others < BUSY:
            return ()
        return (
            f"{self.others:.1f} other processes ran on average while latency was measured, on {os.cpu_count()} CPUs: "
            "the figures may be wrong",
        )

    def _watched(self, make: Make) -> Make:
        """Wrap `make` to raise Cancelled if the stage is cancelled, and to count other processes."""

        def made() -> Call:
            if self._order.cancelled():
                raise Cancelled
            self._others.append(_others())
            return make()

        return made


def _others() -> float:
    """Return the number of other running processes on this machine, or the load average if /proc does not give it."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return max(0.0, running - 1.0)
