"""Report as one self-contained HTML page: tables, figures, audit, configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.compare.audit.rule import Finding
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.core.events import SweepInfo
from orchestrator.core.redact import html
from orchestrator.core.specs import Plan
from orchestrator.planning.configuration_text import as_yaml
from orchestrator.planning.number_formats import counted, whole_number
from orchestrator.views.report import tables
from orchestrator.views.report.answers import answer_lines
from orchestrator.views.report.columns import COLUMNS, NARROW, Column, blocks, folded, narrow
from orchestrator.views.report.figures import figure_data
from orchestrator.views.report.figures.figure_table import FIGURES
from orchestrator.views.report.table import ROWS, Table, typeset
from orchestrator.views.report.tables import pair_table

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --quiet: #595959; --page: #fff; --block: #f6f6f6; --rule: #e3e3e3;
  --strong: #8c8c8c; --pass: #00694d; --fail: #a33c00; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --quiet: #a6a6a6; --page: #16181b; --block: #22252a; --rule: #33373d; --strong: #7d848d;
    --pass: #4cc79f; --fail: #ff9a62; }
  figure svg { background: #fff; border-radius: 4px; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 86rem;
  margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; } h3 { font-size: 1rem; }
p { margin: .4rem 0; } .quiet, figcaption { color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .84rem; }
th, td { padding: .2rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { border-bottom: 2px solid var(--strong); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; } td.written { white-space: pre-wrap; text-align: left; }
tr.line td { border-top: 2px solid var(--strong); } tr.best td { font-weight: 700; }
.pass::before { content: "✓ "; color: var(--pass); } .fail::before { content: "✗ "; color: var(--fail); }
.na::before { content: "– "; } .fail { font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figure.wide { grid-column: 1 / -1; }
figure svg { max-width: 100%; height: auto; }
pre { background: var(--block); padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
td { overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: 0 .8rem; margin: 1rem auto; } }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
@media print {
  @page { margin: 12mm; }
  body { max-width: none; margin: 0; padding: 0; font-size: 12px; }
  .scroll { overflow: visible; } table { font-size: 10px; } .scroll table { font-size: 8px; }
  th, td { padding: .1rem .25rem; }
  details::details-content { content-visibility: visible; display: block; }
  .figures { grid-template-columns: 1fr 1fr; } figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
}
"""

WINDOWS, NETWORKS = 200, 60
"""Maximum number of differences by window or document on the page, and of networks that continue a prompt."""
HALF_PAGE = 480.0
"""Width in points above which a figure has a row to itself."""


def page(
    info: SweepInfo,
    plan: Plan,
    comparison: Comparison,
    findings: Sequence[Finding],
    svgs: Mapping[str, bytes],
    spent: str = "",
    written: Mapping[str, Table] = {},
) -> str:
    """Return the whole page.

    Args:
        info: name, command and configuration of the sweep
        plan: plan of the sweep
        comparison: comparison of its trials
        findings: results of the audit
        svgs: name of a figure -> SVG
        spent: sentence with the estimated and the actual time
        written: prompt -> table of its continuations
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html(info.name)}</title><style>{STYLE}</style></head><body>",
            *_head(info, plan, comparison),
            *([f'<p class="quiet">{html(spent)}</p>'] if spent else []),
            "<h2>Comparison</h2>",
            *comparison_tables(comparison),
            *pair_table(comparison),
            *_windows(comparison),
            *_harness(comparison),
            *_continuations(written),
            *_figures(svgs, figure_data.left_out(comparison)),
            "<h2>Audit</h2>",
            *_audit(findings),
            "<h2>How it was made</h2>",
            *_details("Configuration", as_yaml(info.config).decode()),
            *_details("Environment", as_yaml(info.environment).decode()),
            *_details(counted(len(plan.trials), "trial"), "\n".join(_names(plan))),
            "</body></html>",
        ]
    )


def _head(info: SweepInfo, plan: Plan, comparison: Comparison) -> Iterator[str]:
    finished = sum(status == "finished" for status in comparison.trials.values())
    yield f"<h1>{html(info.name)}</h1>"
    yield f'<p class="quiet">{finished} of {len(plan.trials)} trials finished, {len(plan.stages)} stages</p>'
    yield f"<pre>{html(info.command)}</pre>"


def comparison_tables(comparison: Comparison, *, folds: bool = True) -> Iterator[str]:
    """Yield the HTML parts of the tables, panel by panel, and the notes; `folds`: further columns below each table."""
    for title, points in tables.sections(comparison):
        for suffix, columns, here in blocks(comparison, points, beside=True):
            shown, constant = folded(here, columns)
            yield f"<h3>{html(title + suffix)}</h3>"
            yield from _constant(constant, here)
            stopped = [] if suffix else tables.ruled_out(comparison, title)
            yield from tables.point_table(shown, here, stopped).html(rest="are in summary.csv")
        if folds:
            yield from _fold(comparison, points)
    yield from (f"<p>{html(line)}</p>" for line in (*tables.notes(comparison, pairs=False), *answer_lines(comparison)))


def _fold(comparison: Comparison, points: Sequence[Point]) -> Iterator[str]:
    """Yield the columns that are not in the main table."""
    more = [column for column in COLUMNS if column not in (*NARROW, *narrow(comparison, points))]
    shown, constant = folded(points, more)
    yield "<details><summary>Intervals, training and work</summary>"
    yield from _constant(constant, points)
    yield from tables.point_table((NARROW[0], *shown), points).html(rest="are in summary.csv")
    yield "</details>"


def _constant(found: Sequence[tuple[Column, str]], points: Sequence[Point]) -> Iterator[str]:
    """Yield a line with the columns that have one text in all rows."""
    if found:
        same = " · ".join(f"{each.heading(points[0].metric)}: {typeset(text)}" for each, text in found)
        yield f'<p class="quiet">Equal in all rows: {html(same)}</p>'


def _windows(comparison: Comparison) -> Iterator[str]:
    if not comparison.windows:
        return
    yield f'<h2>Differences by held-out window</h2><p class="quiet">{html(tables.NOTE)}</p>'
    for title, _ in tables.sections(comparison):
        if found := tables.of_panel(comparison.windows, title):
            yield f"<h3>{html(title)}</h3>"
            yield from tables.window_table(found).html(WINDOWS, "are in windows.csv")


def _harness(comparison: Comparison) -> Iterator[str]:
    if not comparison.harness:
        return
    yield f'<h2>lm-evaluation-harness</h2><p class="quiet">{html(tables.HARNESS_NOTE)}</p>'
    for title, _ in tables.sections(comparison):
        if found := tables.of_panel(comparison.harness, title):
            yield f"<h3>{html(title)}</h3>"
            yield from tables.harness_table(found).html(WINDOWS, "are in harness.csv")


def _continuations(written: Mapping[str, Table]) -> Iterator[str]:
    if not written:
        return
    yield "<h2>Continuations</h2>"
    yield (
        '<p class="quiet">Greedy continuations of each prompt by the networks of the first seed, with their perplexity '
        "on test.</p>"
    )
    for prompt, table in written.items():
        yield f"<h3>{html(prompt)}</h3>"
        yield from table.html(NETWORKS)


def _names(plan: Plan) -> Iterator[str]:
    yield from (trial.name for trial in plan.trials[:ROWS])
    if len(plan.trials) > ROWS:
        yield f"and {whole_number(len(plan.trials) - ROWS)} more, in trials.csv"


def _figures(svgs: Mapping[str, bytes], left_out: str) -> Iterator[str]:
    if not svgs:
        return
    yield "<h2>Figures</h2>"
    if left_out:
        yield f'<p class="quiet">{html(left_out)}</p>'
    yield '<div class="figures">'
    for name, content in svgs.items():
        caption = f"<figcaption>{html(FIGURES[name].caption)}</figcaption>"
        kind = ' class="wide"' if _width(content) > HALF_PAGE else ""
        yield f'<figure id="{name}"{kind}>{_inlined(content.decode(), name)}{caption}</figure>'
    yield "</div>"


def _width(svg: bytes) -> float:
    width = re.search(rb'<svg[^>]* width="([\d.]+)pt"', svg)
    return float(width[1]) if width else 0.0


def _inlined(svg: str, name: str) -> str:
    """Return an SVG file as an element with identifiers that are unique within the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    return svg.replace("url(#", f"url(#{name}-")


def _audit(findings: Sequence[Finding]) -> Iterator[str]:
    heads = "".join(f'<th class="text">{name}</th>' for name in ("rule", "verdict", "reason"))
    yield f"<table><thead><tr>{heads}</tr></thead>"
    for finding in findings:
        kind = "na" if finding.verdict == "n/a" else finding.verdict
        yield (
            f'<tr><td class="text">{html(finding.rule)}</td><td class="text {kind}">{finding.verdict}</td>'
            f'<td class="text">{html(finding.reason)}</td></tr>'
        )
    yield "</table>"
    yield (
        '<p class="quiet">After Blalock et al., What is the State of Neural Network Pruning?, arXiv 2003.03033. '
        "Masked dense weights run no faster by themselves: MACs count the remaining operations, and measured speeds "
        "are those of deployed networks.</p>"
    )


def _details(title: str, text: str) -> Iterator[str]:
    yield f"<details><summary>{html(title)}</summary><pre>{html(text)}</pre></details>"
