"""The report of a sweep, which goes to `comparison/` on its parent run: a page that needs no network, and the data."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orchestrator.compare.audit import Finding, audit
from orchestrator.compare.comparison import Comparison
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.file_names import MASKS, METRICS_FILE, NOTE_FILE
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown
from orchestrator.core.specs import Plan
from orchestrator.planning.forecast import afterwards
from orchestrator.views.report import plain_files, tables
from orchestrator.views.report.figures import by_method, drawing, figure_data, measured
from orchestrator.views.report.page import page
from orchestrator.views.report.texts import markdown

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Masks = Mapping[str, NDArray[np.bool_]]

T = TypeVar("T")
_LOGGER = logging.getLogger("orchestrator")
FOLDER = "comparison"
MOST_ENTRIES = 2**27
"""Of all masks that are compared: a byte each, and while one is read some more."""
METRICS_SHOWN = 200
"""At most so many summary metrics: a run with thousands of them is of no use in a table."""

ReadFile = Callable[[str, str], bytes]


def report(
    info: SweepInfo,
    plan: Plan,
    records: Mapping[str, StageRecord],
    comparison: Comparison,
    read: ReadFile | None = None,
) -> dict[str, bytes]:
    """Return the files of a report, {path: content}; `read(stage key, file name)` fetches masks to be compared.

    A file that cannot be made is left out with a warning: the others stand, and so does the sweep's status.
    """
    findings = _or_left_out("the audit", lambda: audit(plan, records, comparison)) or ()
    figures = draw(plan, records, comparison, read)
    spent = afterwards(info.forecast, plan, records) if info.forecast is not None else ""
    svgs = {name: formats["svg"] for name, formats in figures.items()}
    contents: dict[str, Callable[[], bytes]] = {
        f"{FOLDER}/report.html": lambda: page(info, plan, comparison, findings, svgs, spent).encode(),
        f"{FOLDER}/trials.csv": lambda: plain_files.rows_csv(comparison),
        f"{FOLDER}/summary.csv": lambda: plain_files.points_csv(comparison),
        f"{FOLDER}/audit.json": lambda: json.dumps(
            [asdict(f) for f in findings], indent=1, ensure_ascii=False
        ).encode(),
        METRICS_FILE: lambda: json.dumps(headline(comparison)).encode(),
        NOTE_FILE: lambda: note(comparison, findings, tuple(figures)).encode(),
    }
    files = {path: content for path, make in contents.items() if (content := _or_left_out(path, make)) is not None}
    for name, formats in figures.items():
        for suffix, content in formats.items():
            files[f"{FOLDER}/figures/{name}.{suffix}"] = content
    files[f"{FOLDER}/comparison.json"] = plain_files.as_json(comparison)  # last: a report with it is whole
    return files


def _or_left_out(what: str, make: Callable[[], T]) -> T | None:
    """Return what `make` returns; where it raises, whatever it raises, say so in a sentence and return None."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(shown(error).split())
        _LOGGER.warning("The report is made without %s: %s: %s", what, type(error).__name__, reason)
        return None


def kept(folder: Path, comparison: Comparison) -> dict[str, bytes]:
    """Return the report that stands below `folder` if it is of this very comparison, else nothing: drawing is slow."""
    try:
        if (folder / FOLDER / "comparison.json").read_bytes() != plain_files.as_json(comparison):
            return {}
        files = sorted(path for path in (folder / FOLDER).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    except OSError:
        return {}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a report below `folder`; a file that holds these bytes already is left alone."""
    for name, content in files.items():
        path = folder / name
        with suppress(OSError):
            if path.read_bytes() == content:
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def draw(
    plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison, read: ReadFile | None
) -> dict[str, dict[str, bytes]]:
    """Return the figures there is something to show in: name -> {"svg": ..., "png": ...}."""
    if not comparison.operating_points:
        return {}
    figures: dict[str, Callable[[], Figure]] = {
        "tradeoff": lambda: drawing.tradeoff(figure_data.tradeoff(comparison)),
        "fine_tuning": lambda: drawing.fine_tuning(figure_data.fine_tuning(comparison)),
        "curves": lambda: drawing.curves(figure_data.curves(plan, records, comparison)),
        "layers": lambda: drawing.matrices(figure_data.layer_sparsity(records, comparison), "sparsity"),
    }
    if cost := _or_left_out("the figure cost", lambda: figure_data.cost(comparison)):
        figures["cost"] = lambda: drawing.cost(cost)
    if latency := _or_left_out("the figure latency", lambda: measured.against_latency(comparison)):
        figures["latency"] = lambda: drawing.deployed(latency, "milliseconds of a call, measured")
    if sizes := _or_left_out("the figure bytes", lambda: measured.against_bytes(comparison)):
        figures["bytes"] = lambda: drawing.deployed(sizes, "bytes, deployed")
    if densities := _or_left_out("the figure densities", lambda: by_method.densities(records, comparison)):
        figures["densities"] = lambda: drawing.densities(densities)
    if read is not None and (
        overlap := _or_left_out("the figure overlap", lambda: overlap_of(records, comparison, read))
    ):
        figures["overlap"] = lambda: drawing.matrices(overlap, "kept by both")
    rendered = {
        name: _or_left_out(f"the figure {name}", partial(drawing.render, make)) for name, make in figures.items()
    }
    return {name: formats for name, formats in rendered.items() if formats is not None}


def overlap_of(
    records: Mapping[str, StageRecord], comparison: Comparison, read: ReadFile
) -> tuple[figure_data.Matrix, ...]:
    """Return a matrix for each panel in which masks of two methods, for networks of one shape, can be read."""
    masks = _masks(records, read, by_method.overlapping(comparison))
    return by_method.overlap(comparison, masks, lambda one, other: _shared(masks[one], masks[other]))


def headline(comparison: Comparison) -> dict[str, float]:
    """Return the few figures by which sweeps can be sorted: those of dense, and what each line can do without loss.

    Of a line of which nothing could be tested it is not known, and left out.
    """
    many = len(comparison.panels) > 1
    figures: dict[str, float] = {}
    for point in comparison.dense:
        if point.test is not None:
            suffix = f"/{point.model}/{point.data}" if many else ""
            figures[f"summary/dense_{point.metric.name}{suffix}"] = point.test.mean
    for (model, data, line), sparsest in comparison.largest_matching.items():
        suffix = f"{model}/{data}/{line}" if many else line
        figures[f"summary/matching_sparsity/{suffix}"] = sparsest.sparsity if sparsest else 0.0
        figures[f"summary/matching_compression/{suffix}"] = sparsest.compression if sparsest else 1.0
    return dict(list(figures.items())[:METRICS_SHOWN])


def note(comparison: Comparison, findings: Sequence[Finding], drawn: Sequence[str]) -> str:
    """Return the parent run's description: links to the files beside it, then the table, in Markdown."""
    links = [("report", "report.html"), ("summary", "summary.csv"), ("every round", "trials.csv")]
    links += [(name, f"figures/{name}.png") for name in drawn]
    lines = [" · ".join(f"[{name}]({path})" for name, path in links), ""]
    failed = sum(finding.verdict == "fail" for finding in findings)
    lines += [f"Audit: {len(findings) - failed} of {len(findings)} rules pass or do not apply, {failed} fail.", ""]
    for title, points in tables.sections(comparison):
        columns = tables.narrow(comparison, points)
        lines += [
            f"**{markdown(title)}**",
            "",
            "| method | " + " | ".join(column.heading(points[0].metric) for column in columns) + " |",
            "|---" * (1 + len(columns)) + "|",
        ]
        for point in points[:30]:
            lines.append(f"| {markdown(point.line)} | " + " | ".join(each.cell(point) for each in columns) + " |")
        lines += ["", f"and {len(points) - 30} more points"] if len(points) > 30 else [""]
    lines += [tables.match_note(comparison)] if comparison.points else []
    return "\n".join(lines)


def _masks(records: Mapping[str, StageRecord], read: ReadFile, keys: Iterable[str]) -> Mapping[str, Masks]:
    """Return the masks of these stages; where some cannot be read, or would fill the memory, say so and do without."""
    # Files, unlike the masks of a model, need no torch: two seconds for the driver.
    from pruning.masks import files as mask_files

    readable: dict[str, Masks] = {}
    room = MOST_ENTRIES
    for key in keys:
        sizes = records[key].tensor_sizes

        def check(name: str, shape: Sequence[int], sizes: Mapping[str, int] = sizes) -> None:
            if math.prod(shape) != sizes.get(name):
                raise ValueError(f"The mask of `{name}` has not the {sizes.get(name)} entries that the record says.")

        try:
            if sum(sizes.values()) > room:
                raise ValueError(f"The figure holds at most {MOST_ENTRIES} entries of masks.")
            room -= sum(sizes.values())
            readable[key], _digest = mask_files.decode(mask_files.read_npz(read(key, MASKS)), check)
        except (OrchestratorError, OSError, ValueError) as error:
            _LOGGER.warning("The overlap of masks is shown without stage %s: %s", key[:12], shown(error))
    return readable


def _shared(one: Masks, other: Masks) -> tuple[float, float] | None:
    """Return what fraction of the entries that two networks keep both keep; None for networks of other shapes.

    The second is what it would be by chance, with as many entries kept of each tensor.
    """
    if {name: mask.shape for name, mask in one.items()} != {name: mask.shape for name, mask in other.items()}:
        return None
    counts = [(int(mask.sum()), int(other[name].sum()), mask.size) for name, mask in one.items()]
    kept = sum(a + b for a, b, _ in counts) / 2
    both = sum(int((mask & other[name]).sum()) for name, mask in one.items())
    by_chance = sum(a * b / size for a, b, size in counts if size)
    return (both / kept, by_chance / kept) if kept else (1.0, 1.0)
