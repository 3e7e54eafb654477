"""Hooks of MkDocs that add pages from outside of docs/: files of the repository's root, and the API.

On the site, a link to a file of the repository that is not a page is shown as plain text, so that the site stands
alone.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""File of the root -> page of the site."""
RESULTS = """\
# Results in Python

A sweep in a notebook: tables as pandas DataFrames, figures as matplotlib axes, networks with their masks.

::: orchestrator.open

::: orchestrator.results.sweep_results.StoreResults

::: orchestrator.results.sweep_results.SweepResults

::: orchestrator.results.plots.Plots

::: orchestrator.results.trial_results.TrialResults
"""
LOOPS = """\
# Training loops of your own

The arguments of a training function: see [Your own training loop](../how-to/own-training-loops.md).

::: orchestrator.training.loop.own_loop.Context

::: orchestrator.training.loop.own_loop.TrainingData
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in OUTSIDE.items()}
    pages |= {
        "reference/api-pruning.md": _pruning(),
        "reference/api-results.md": RESULTS,
        "reference/api-training-loops.md": LOOPS,
    }
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Make links lead to pages of the site, and remove the names of code blocks, which only tests read."""
    source = next((outside for outside, name in OUTSIDE.items() if name == page.file.src_uri), None)
    here = (ROOT / source if source else ROOT / "docs" / page.file.src_uri).parent

    def lead(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = Path(normpath(here / target))
        if ":" in target or not path.is_relative_to(ROOT) or not path.exists():
            return link[0]  # another site, or a broken link that the build reports
        inside = path.relative_to(ROOT).as_posix()
        name = OUTSIDE.get(inside, inside.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text
        return f"[{text}]({relpath(name, Path(page.file.src_uri).parent.as_posix() or '.')}{anchor or ''})"

    markdown = re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]\n]*(?:\n[^\]\n]+)?)\]\(([^)#\s]+)(#[^)\s]*)?\)", lead, markdown)


def _pruning() -> str:
    """Return the page of the engine: every public name, by room."""
    import pruning
    from pruning import _HOMES

    lines = ["# The engine, pruning\n", f"{(pruning.__doc__ or '').partition(chr(10))[0]}\n"]
    for room, names in groupby(sorted(_HOMES, key=lambda name: (_HOMES[name], name)), lambda name: _room(_HOMES[name])):
        lines += [f"## pruning.{room}\n", *(f"::: pruning.{_HOMES[name]}.{name}\n" for name in names)]
    return "\n".join(lines)


def _room(home: str) -> str:
    return home.partition(".")[0]
