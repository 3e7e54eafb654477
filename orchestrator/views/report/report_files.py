"""Files of a sweep's report, in `comparison/` of the parent run: a self-contained page, figures and data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.audit.rule import Finding
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.sensitivity import sensitivity_curves
from orchestrator.core.events import SweepInfo
from orchestrator.core.file_names import METRICS_FILE, NOTE_FILE
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import logger, markdown, shown, shown_json
from orchestrator.core.specs import Plan
from orchestrator.planning.forecast import afterwards
from orchestrator.planning.number_formats import whole_number
from orchestrator.views.report import plain_files, tables
from orchestrator.views.report.columns import narrow
from orchestrator.views.report.figures import drawing
from orchestrator.views.report.figures.figure_table import FIGURES, Source
from orchestrator.views.report.figures.layer_data import ReadFile
from orchestrator.views.report.page import page
from orchestrator.views.report.tables import generations

T = TypeVar("T")
_LOGGER = logger("orchestrator")
FOLDER = "comparison"
METRICS_SHOWN, MARKDOWN_ROWS = 200, 30
"""Maximum number of summary metrics, as MLflow's table cannot show thousands, and of points in the description."""


def report(
    info: SweepInfo,
    plan: Plan,
    records: Mapping[str, StageRecord],
    comparison: Comparison,
    read: ReadFile | None = None,
) -> dict[str, bytes]:
    """Return the files of a report: path -> content.

    A file that cannot be made is left out with a warning; the other files and the sweep's status are not affected.

    Args:
        info: name, command and configuration of the sweep
        plan: plan of the sweep
        records: stage key -> record
        comparison: comparison of the trials
        read: reads a file of a stage (stage key, file name), for the overlap of masks; None: without this figure
    """
    findings = _or_left_out("the audit", lambda: audit(plan, records, comparison)) or ()
    sensitivity = _or_left_out("the sensitivity", lambda: sensitivity_curves(plan, records)) or ()
    figures = draw(plan, records, comparison, read)
    spent = afterwards(info.forecast, plan, records) if info.forecast is not None else ""
    summary = _or_left_out(METRICS_FILE, lambda: headline(comparison))
    svgs = {name: formats["svg"] for name, formats in figures.items()}
    contents: dict[str, Callable[[], bytes]] = {
        f"{FOLDER}/report.html": lambda: page(
            info, plan, comparison, findings, svgs, spent, generations(records, comparison)
        ).encode(),
        f"{FOLDER}/trials.csv": lambda: plain_files.rows_csv(comparison),
        f"{FOLDER}/summary.csv": lambda: plain_files.points_csv(comparison),
        **({f"{FOLDER}/sensitivity.csv": lambda: plain_files.sensitivity_csv(sensitivity)} if sensitivity else {}),
        **({f"{FOLDER}/windows.csv": lambda: plain_files.windows_csv(comparison)} if comparison.windows else {}),
        **({f"{FOLDER}/harness.csv": lambda: plain_files.harness_csv(comparison)} if comparison.harness else {}),
        f"{FOLDER}/audit.json": lambda: shown_json([asdict(f) for f in findings], indent=1).encode(),
        NOTE_FILE: lambda: note(comparison, findings, tuple(figures), len(summary or {})).encode(),
    }
    if summary is not None:
        contents[METRICS_FILE] = lambda: _figures_json(dict(islice(summary.items(), METRICS_SHOWN)))
    files = {path: content for path, make in contents.items() if (content := _or_left_out(path, make)) is not None}
    for name, formats in figures.items():
        for suffix, content in formats.items():
            files[f"{FOLDER}/figures/{name}.{suffix}"] = content
    files[f"{FOLDER}/comparison.json"] = plain_files.as_json(comparison)  # last: a report with it is whole
    return files


def _or_left_out(what: str, make: Callable[[], T]) -> T | None:
    """Call `make`; if it raises any exception, log a warning and return None."""
    try:
        return make()
    except Exception as error:
        reason = " ".join(str(error).split())
        _LOGGER.warning("The report is made without %s: %s: %s", what, type(error).__name__, reason)
        return None


def kept(folder: Path, comparison: Comparison) -> dict[str, bytes]:
    """Return the report in `folder` if its comparison is equal, else an empty dict; drawing it again is slow."""
    try:
        if (folder / FOLDER / "comparison.json").read_bytes() != plain_files.as_json(comparison):
            return {}
        files = sorted(path for path in (folder / FOLDER).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    except OSError:
        return {}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a report below `folder`; files with equal content are not touched."""
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
    """Return the figures that the sweep has data for: name -> {"svg": ..., "png": ...}."""
    if not comparison.operating_points:
        return {}
    source = Source(plan, records, comparison, read)
    rendered = {
        name: _or_left_out(f"the figure {name}", partial(drawing.render, partial(drawing.figure, found, row.draw)))
        for name, row in FIGURES.items()
        if row.caption and (found := _or_left_out(f"the figure {name}", partial(row.data, source)))
    }
    return {name: formats for name, formats in rendered.items() if formats is not None}


def _figures_json(figures: Mapping[str, float]) -> bytes:
    """Return figures by redacted name; a figure is no secret, even if its name looks like the name of one."""
    return json.dumps({shown(name): value for name, value in figures.items()}, allow_nan=False).encode()


def headline(comparison: Comparison) -> dict[str, float]:
    """Return the figures of a sweep's parent run in MLflow, by name.

    First the dense networks' means and the largest matching sparsity, over all lines and of each line; a line without
    a tested point is left out, because its matching sparsity is not known. Then the mean difference to dense and the
    compression at each operating point, as `difference/LINE/SPARSITY`.
    """
    many = len(comparison.panels) > 1
    figures: dict[str, float] = {}
    for point in comparison.dense:
        if point.test is not None:
            suffix = f"/{point.model}/{point.data}" if many else ""
            figures[f"summary/dense_{point.metric.name}{suffix}"] = point.test.mean
    for (model, data, line), sparsest in comparison.largest_matching.items():
        panel = f"{model}/{data}/" if many else ""
        found = (sparsest.sparsity, sparsest.compression) if sparsest else (0.0, 1.0)
        for name, value in zip(("matching_sparsity", "matching_compression"), found, strict=True):
            best = f"summary/best_{name}" + (f"/{model}/{data}" if many else "")
            figures[best] = max(value, figures.get(best, value))
            figures[f"summary/{name}/{panel}{line}"] = value
    for point in comparison.whole_points:
        place = f"{point.model}/{point.data}/{point.line}" if many else point.line
        if point.difference is not None:
            figures[f"difference/{place}/{point.sparsity:.3g}"] = point.difference.mean
        figures[f"compression/{place}/{point.sparsity:.3g}"] = point.compression
    return figures


def note(comparison: Comparison, findings: Sequence[Finding], drawn: Sequence[str], metrics: int) -> str:
    """Return the parent run's description in Markdown: links to the report's files, then the tables.

    Args:
        comparison: comparison of the trials
        findings: results of the audit
        drawn: names of the figures
        metrics: number of summary figures, of which the run has METRICS_SHOWN as metrics
    """
    links = [("report", "report.html"), ("summary", "summary.csv"), ("every round", "trials.csv")]
    links += [(name, f"figures/{name}.png") for name in drawn]
    lines = [" · ".join(f"[{name}]({path})" for name, path in links), ""]
    lines += [next(tables.audit_notes(findings)), ""]
    if metrics > METRICS_SHOWN:
        few = f"{METRICS_SHOWN} of {whole_number(metrics)} figures"
        lines += [f"This run has the first {few} of the points as metrics; [summary](summary.csv) has all.", ""]
    for title, points in tables.sections(comparison):
        table = tables.point_table(narrow(comparison, points), points)
        lines += [f"**{markdown(title)}**", "", *table.markdown(MARKDOWN_ROWS)]
    if comparison.points:
        tested = (point.test for point in comparison.shown)
        lines += [tables.match_note(comparison), *tables.two_seeds_note(tested)]
    return "\n".join(lines)
