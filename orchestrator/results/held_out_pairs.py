"""Differences of language models paired by window of held-out text, as rows of a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.compare.comparison import Comparison
from orchestrator.compare.secondary.window_differences import WindowDifference
from orchestrator.compare.statistics import Estimate
from orchestrator.results.missing_names import not_there
from orchestrator.views.report.plain_files import window_row


def paired_by_window(comparison: Comparison, reference: str | None) -> list[dict[str, Any]]:
    """Return a row for each pair of lines at one sparsity, or for each pair with `reference`, which is subtracted.

    Raises:
        ResultsError: no pair has the line `reference`
    """
    found = comparison.windows
    if reference is None:
        return [*map(window_row, found)]
    names = list(dict.fromkeys(name for each in found for name in (each.reference, each.line)))
    if reference not in names:
        raise not_there("reference", reference, names, "networks were compared by window with")
    oriented = (each if each.reference == reference else _reversed(each) for each in found)
    return [window_row(each) for each in oriented if each.reference == reference and each.line != "dense"]


def _reversed(each: WindowDifference) -> WindowDifference:
    windows, draws = map(_negative, (each.windows, each.draws))
    return replace(each, line=each.reference, reference=each.line, windows=windows, draws=draws)


def _negative(each: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (each.high, each.low))
    return replace(each, mean=-each.mean, low=low, high=high)
