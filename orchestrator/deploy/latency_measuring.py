"""Measurement of a deployment: latency against another with the load meanwhile, and metrics."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from orchestrator.compare.statistics import ratio
from orchestrator.core.errors import Cancelled
from orchestrator.core.records import BUSY
from orchestrator.core.specs import MeasuringFields
from orchestrator.core.work_order import StageOrder
from orchestrator.deploy.dense_runtimes import DenseRuntimes
from pruning.graph.tracing import Example
from pruning.measure.latency import Call, Make, compare_latency, peak_memory


class Measuring:
    """Measures latency with a stage's `measure` settings, and counts other running processes at each block."""

    def __init__(self, what: MeasuringFields, order: StageOrder, device: torch.device) -> None:
        self._what = what
        self._order, self._device, self._others = order, device, list[float]()
        self.dense_runtimes: dict[int, str] = {}
        """Batch size -> the fastest dense runtime, for formats that are measured against it."""
        self.int8_runtimes: dict[int, str] = {}
        """Batch size -> the fastest runtime of the dense network in 8 bits, for formats in 8 bits."""
        self.left_out: dict[str, str] = {}
        """Dense runtime that is installed and does not run the network -> why."""

    def figures(self, dense: Make, pruned: Make, size: int) -> dict[str, float]:
        """Return the figures at a batch size: milliseconds of a call, the speed-up with its 95% interval, peak memory.

        Args:
            dense, pruned: functions that make a call of each network.
            size: batch size, for the names of the figures.
        """
        return self.latency(dense, pruned, size) | self.memory(dense, pruned, size)

    def figures_against_fastest(
        self, runtimes: DenseRuntimes, pruned: Make, example: Example, size: int
    ) -> dict[str, float]:
        """Return `figures` against the dense network in the fastest runtime, and beside it against PyTorch.

        Figures against PyTorch are `pytorch_ms`, `speedup_pytorch`, `speedup_pytorch_low` and `speedup_pytorch_high`;
        those against dense in 8 bits, where `runtimes` have it, have `int8` for `pytorch`. `dense_memory` is the peak
        memory of the dense network in PyTorch.
        """
        pytorch = runtimes.pytorch(example)
        name, fastest = runtimes.fastest(example)
        found = self.latency(fastest or pytorch, pruned, size)
        beside = self.latency(pytorch, pruned, size) if fastest else found
        found = found | _over("pytorch", beside, size)
        if (int8 := runtimes.fastest_int8(example)) is not None:
            self.int8_runtimes[size], dense_int8 = int8
            found |= _over("int8", self.latency(dense_int8, pruned, size), size)
        self.dense_runtimes[size], self.left_out = name, runtimes.left_out
        return found | self.memory(pytorch, pruned, size)

    def latency(self, dense: Make, pruned: Make, size: int) -> dict[str, float]:
        """Return the milliseconds of a call at a batch size, and the speed-up with its 95% interval."""
        dense, pruned = map(self._watched, (dense, pruned))
        found = compare_latency(
            dense, pruned, blocks=self._what.blocks, seconds=self._what.seconds, threads=self._what.threads
        )
        speedup = ratio(found.log_ratios)
        assert speedup is not None
        assert speedup.low is not None
        assert speedup.high is not None
        return {
            f"latency_ms/{size}": 1e3 * found.b,
            f"dense_ms/{size}": 1e3 * found.a,
            f"speedup/{size}": speedup.mean,
            f"speedup_low/{size}": speedup.low,
            f"speedup_high/{size}": speedup.high,
        }

    def token(self, dense: Make, pruned: Make, size: int) -> dict[str, float]:
        """Return the milliseconds of one more token at a batch size, and the speed-up with its 95% interval."""
        names = {"latency_ms": "token_ms", "dense_ms": "dense_token_ms"}
        found = self.latency(dense, pruned, size)
        return {
            f"{names.get(name, f'token_{name}')}/{size}": value
            for name, value in ((each.partition("/")[0], value) for each, value in found.items())
        }

    def memory(self, dense: Make, pruned: Make, size: int) -> dict[str, float]:
        """Return the peak memory of each network at a batch size, if the system reports it."""
        makes = {"dense_memory": dense, "memory": pruned}
        peaks = {name: peak_memory(make, self._device) for name, make in makes.items()}
        return {f"{name}/{size}": float(peak) for name, peak in peaks.items() if peak is not None}

    @property
    def others(self) -> float:
        """Average number of other running processes."""
        return statistics.fmean(self._others)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Dense runtimes that were left out, and a warning if other processes kept the machine busy."""
        found = [f"the dense network was not measured in {name} ({why})" for name, why in self.left_out.items()]
        if self.others >= BUSY:
            found.append(
                f"{self.others:.1f} other processes ran on average while latency was measured, on {os.cpu_count()} "
                "CPUs: the figures may be wrong"
            )
        return tuple(found)

    @property
    def environment(self) -> dict[str, str]:
        """The fastest dense runtimes at each batch size, as entries of a record's environment."""
        runtimes = {"dense_runtime": self.dense_runtimes, "int8_runtime": self.int8_runtimes}
        return {f"{key}/{size}": name for key, each in runtimes.items() for size, name in each.items()}

    def _watched(self, make: Make) -> Make:
        """Wrap `make` to raise Cancelled if the stage is cancelled, and to count other processes."""

        def made() -> Call:
            if self._order.cancelled():
                raise Cancelled
            self._others.append(_others())
            return make()

        return made


def _over(name: str, found: Mapping[str, float], size: int) -> dict[str, float]:
    """Return the time of the dense network and the speed-up with its interval, under the names of an opponent."""
    names = {"dense_ms": f"{name}_ms"} | {f"speedup{end}": f"speedup_{name}{end}" for end in ("", "_low", "_high")}
    return {f"{new}/{size}": found[f"{old}/{size}"] for old, new in names.items()}


def _others() -> float:
    """Return the number of other running processes on this machine, or the load average if /proc does not give it."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return max(0.0, running - 1.0)
