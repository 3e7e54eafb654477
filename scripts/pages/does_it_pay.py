#!/usr/bin/env python3
"""Measure on this machine which runtimes gain from a pruned layer, and write docs/does-it-pay.md.

    scripts/does_it_pay                 # about ten minutes on two quiet cores; continues after an interruption
    scripts/does_it_pay --anew          # start from the beginning
    scripts/does_it_pay --quick         # one small layer, briefly, to see whether it works; writes nothing
    scripts/does_it_pay --page          # only write the page, from docs/does-it-pay.json

Each pruned layer is timed in turns with the dense one on the same runtime (CSR: with PyTorch's dense layer), in blocks
that build both again; the 95% interval is a t interval over the blocks. First, outputs are compared with PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from orchestrator.compare.statistics import ratio
from orchestrator.planning.number_formats import ratio_interval
from orchestrator.training.stage_environment import processor
from pruning.measure.latency import compare_latency
from scripts.pages import does_it_pay_page
from scripts.pages.sparse_runtimes import RUNTIMES, Layer, Runtime, absent, pruned

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE, FIGURE = (ROOT / "docs" / f"does-it-pay.{ending}" for ending in ("json", "md", "svg"))
LAYERS = (
    *(Layer(256, 256, 1), Layer(1024, 1024, 1), Layer(1024, 1024, 64), Layer(4096, 1024, 1)),
    *(Layer(16, 16, 1, 3, 32), Layer(64, 64, 1, 3, 16), Layer(64, 64, 16, 3, 16), Layer(256, 256, 1, 1, 14)),
)
QUICK = (Layer(32, 32, 2),)
UNSTRUCTURED = {"CSR (torch.sparse)": (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)}
ZEROS, NO_ZEROS, CHANNELS = (0.5, 0.9, 0.95), (0.9,), (0.5, 0.75)
PACKAGES = ("torch", "onnxruntime", "openvino")


class Cell(NamedTuple):
    """One measurement; the pattern `dense` is the runtime's speed-up over PyTorch without pruning."""

    layer: Layer
    runtime: Runtime
    pattern: str
    sparsity: float


def cells(layers: tuple[Layer, ...]) -> Iterator[Cell]:
    """Yield all measurements, in order."""
    for layer in layers:
        for runtime in RUNTIMES:
            if runtime.shrinks and runtime.name != "PyTorch":
                yield Cell(layer, runtime, "dense", 0.0)
            levels = UNSTRUCTURED.get(runtime.name, ZEROS if runtime.reads_zeros else NO_ZEROS)
            yield from (Cell(layer, runtime, "unstructured", level) for level in levels)
            yield Cell(layer, runtime, "2:4", 0.5)
            yield from (Cell(layer, runtime, "channels", level) for level in CHANNELS if runtime.shrinks)


def measure(cell: Cell, blocks: int, seconds: float) -> dict[str, Any]:
    """Return the speed-up of a cell with its interval; raise AssertionError if its outputs are wrong."""
    layer, runtime, pattern, sparsity = cell
    example, dense = layer.example(), layer.weights()
    weights = dense if pattern == "dense" else pruned(layer, pattern, sparsity)
    beside = RUNTIMES[0] if pattern == "dense" or not runtime.shrinks else runtime
    torch._dynamo.reset()
    before = partial(beside.make, layer, dense, example, 0.0)
    after = partial(runtime.make, layer, weights, example, 0.0 if pattern in ("dense", "channels") else sparsity)
    with torch.no_grad():
        expected = layer.apply(example, *weights)
        off = float((after()() - expected).abs().max() / expected.abs().max())
        assert off < runtime.tolerance, f"{cell}: outputs are off by {off:.1e}"
        found = compare_latency(before, after, blocks=blocks, seconds=seconds)
    estimate = ratio(found.log_ratios)
    assert estimate is not None
    return {
        "layer": layer.name,
        "runtime": runtime.name,
        "pattern": pattern,
        "sparsity": sparsity,
        "speedup": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "dense_seconds": found.a,
        "seconds": found.b,
        "load": os.getloadavg()[0],
    }


def circumstances(blocks: int, seconds: float) -> dict[str, Any]:
    """Return the processor, versions and settings that all measurements of a record share."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in PACKAGES if find_spec(package)},
        "absent": dict(absent()),
        "blocks": blocks,
        "seconds": seconds,
    }


def run(layers: tuple[Layer, ...], blocks: int, seconds: float, file: Path | None, *, anew: bool) -> dict[str, Any]:
    """Measure the cells that are missing in `file`, and return the record.

    Args:
        blocks, seconds: blocks and seconds of one measurement
        file: file of the record, written after each measurement; None writes nothing
        anew: start from the beginning, as also happens on another machine or with another release
    """
    known = circumstances(blocks, seconds)
    held = {} if file is None or anew or not file.exists() else json.loads(file.read_text())
    if held and held["circumstances"] != known:
        print(
            "the existing record was made on another machine or with other settings; starting from the beginning",
            flush=True,
        )
        held = {}
    found = {_named(cell): cell for cell in held.get("cells", [])}
    asked = {_name(cell): cell for cell in cells(layers) if cell.runtime.name not in known["absent"]}
    left, start = [name for name in asked if name not in found], time.monotonic()
    record = {"circumstances": known, "date": held.get("date", ""), "cells": list(found.values())}
    for number, name in enumerate(left, 1):
        found[name] = _rounded(measure(asked[name], blocks, seconds))
        record |= {
            "date": datetime.now(UTC).date().isoformat(),
            "cells": [found[each] for each in asked if each in found],
        }
        if file is not None:
            file.write_text(json.dumps(record, indent=1) + "\n")
        speedup = ratio_interval(*(found[name][part] for part in ("speedup", "low", "high")))
        print(
            f"{number}/{len(left)} {time.monotonic() - start:4.0f} s  {', '.join(map(str, name))}: {speedup}",
            flush=True,
        )
    return record


def _name(cell: Cell) -> tuple[str, str, str, float]:
    return cell.layer.name, cell.runtime.name, cell.pattern, cell.sparsity


def _named(found: dict[str, Any]) -> tuple[str, str, str, float]:
    return found["layer"], found["runtime"], found["pattern"], found["sparsity"]


def _rounded(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in cell.items()}


def main() -> None:
    """Measure, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="measure everything again")
    parser.add_argument("--quick", action="store_true", help="one small layer, writes nothing")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--threads", type=int, default=1, help="threads of each runtime")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of a measurement")
    parser.add_argument("--seconds", type=float, default=0.5, help="least seconds of a measurement")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    torch.set_num_threads(options.threads)
    if options.quick:
        run(QUICK, 2, 0.01, None, anew=True)
        return
    if not options.page:
        run(LAYERS, options.blocks, options.seconds, RECORD, anew=options.anew)
    record = json.loads(RECORD.read_text())
    PAGE.write_text(does_it_pay_page.page(record))
    FIGURE.write_bytes(does_it_pay_page.figure(record))


if __name__ == "__main__":
    main()
