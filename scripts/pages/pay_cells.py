"""Measurements of scripts/does_it_pay: their names, and the timing that layers and networks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from orchestrator.compare.statistics import ratio
from pruning.measure.latency import Make, compare_latency

Found = dict[str, Any]
"""A measurement as it is recorded: the fields of its `Cell`, and its figures."""
Makes = tuple[Make, Make]
"""Functions that build the dense and the pruned call."""
PYTORCH, COMPILED, ONNX, OPENVINO = "PyTorch", "torch.compile", "ONNX Runtime", "OpenVINO fp32"
SPARSE = "sparse kernels (pruning.to_sparse)"
DENSE_RUNTIMES = (PYTORCH, COMPILED, ONNX, OPENVINO)
"""Runtimes among which the best one of a dense layer or network is looked for; all compute in float32."""
BEST = "the best dense runtime"
ONNX_INT8, OPENVINO_INT8, OPENVINO_VNNI = "ONNX Runtime int8", "OpenVINO int8", "OpenVINO int8 (VNNI)"
SPARSE_INT8 = "sparse kernels int8"
INT8_RUNTIMES = (ONNX_INT8, OPENVINO_INT8)
"""Runtimes among which the best one of a dense layer or network in 8 bits is looked for."""
BEST_INT8 = "the best dense int8 runtime"
BESTS: Mapping[str, tuple[str, ...]] = {BEST: DENSE_RUNTIMES, BEST_INT8: INT8_RUNTIMES}
"""Name of a best runtime -> the runtimes that it is looked for among."""


class Cell(NamedTuple):
    """Name of one measurement.

    Args:
        subject: name of the layer, or of the network with its batch size.
        runtime: runtime of the pruned layer or network.
        pattern: `unstructured`, `1x4 blocks`, `2:4`, `channels`, or `dense`: nothing is pruned.
        sparsity: fraction of weights that are zero or removed.
        against: runtime of the dense layer or network, or a name in `BESTS`.
    """

    subject: str
    runtime: str
    pattern: str
    sparsity: float
    against: str


@dataclass(frozen=True)
class Part:
    """Part of the record.

    Args:
        name: key of the part in the record.
        cells: the measurements, in order; those of dense runtimes come before those against the best.
        makes: (cell, runtime of the dense one) -> functions to time; raises AssertionError if outputs are wrong.
        warmup: untimed calls in each block.
        further: cell -> further fields of its measurement.
    """

    name: str
    cells: tuple[Cell, ...]
    makes: Callable[[Cell, str], Makes]
    warmup: int = 3
    further: Callable[[Cell], Found] = field(default=lambda _: {})

    def measure(self, cell: Cell, found: Mapping[Cell, Found], blocks: int, seconds: float) -> Found:
        """Return the speed-up of a cell with its interval.

        Args:
            cell: one of `cells`.
            found: measurements so far; they decide which dense runtime is the best one.
            blocks, seconds: as in `compare_latency`.
        """
        dense = cell.against
        if dense in BESTS:
            dense = best_runtime(found.values(), cell.subject, BESTS[dense])
        known = found.get(cell._replace(against=dense))
        if known is not None:
            return known | cell._asdict()
        with torch.no_grad():
            timed = compare_latency(*self.makes(cell, dense), blocks=blocks, seconds=seconds, warmup=self.warmup)
        estimate = ratio(timed.log_ratios)
        assert estimate is not None
        return {
            **cell._asdict(),
            "dense_runtime": dense,
            "speedup": estimate.mean,
            "low": estimate.low,
            "high": estimate.high,
            "dense_seconds": timed.a,
            "seconds": timed.b,
            "load": os.getloadavg()[0],
            **self.further(cell),
        }


def best_runtime(found: Iterable[Mapping[str, Any]], subject: str, runtimes: tuple[str, ...] = DENSE_RUNTIMES) -> str:
    """Return the fastest of some runtimes on a dense layer or network, by their speed-ups over PyTorch."""
    speeds = {PYTORCH: 1.0} if PYTORCH in runtimes else {}
    for cell in found:
        if (cell["subject"], cell["pattern"]) == (subject, "dense") and cell["runtime"] in runtimes:
            speeds[cell["runtime"]] = cell["speedup"]
    return max(speeds, key=lambda name: speeds[name])


def cell_of(found: Mapping[str, Any]) -> Cell:
    """Return the name of a recorded measurement."""
    return Cell(*(found[field] for field in Cell._fields))
