"""Saved views of a sweep's trials for MLflow's interface, under "Views": columns, grouping and charts. Pure.

The interface keeps a saved view as a tag of the experiment, `mlflow.sharedViewState.KEY`, in the JSON written here.
Another release ignores entries that it does not know, and uses its defaults.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Sequence
from typing import Any

from orchestrator.core.metrics import Metric

COMPRESSION = "parameters/compression"
CHOSEN = ("method.name", "schedule.sparsity")
"""Settings that are always columns, though a sweep has one value of them."""
MIN_WIDTH = 12  # characters of a column
MOST_AXES = 6
"""Maximum number of axes shown: a tag holds 5000 characters, and a parallel plot of more axes cannot be read."""


def links(axes: Sequence[str]) -> dict[str, str]:
    """Return the views of a sweep with these axes: end of the key -> label."""
    averaged = 0 < len(_points(axes)) < len(axes)
    return ({"trials": "trials"} if axes else {}) | ({"means": "means over seeds"} if averaged else {})


def saved_views(
    sweep: str, identity: str, parent: str, axes: Sequence[str], everywhere: Container[str], metric: Metric
) -> dict[str, str]:
    """Return the views of the trials below the run `parent`: key -> value of its tag.

    Args:
        sweep: name of the sweep
        identity: tag of the sweep's runs, the beginning of the keys
        parent: ID of the parent run
        axes: axes of the sweep
        everywhere: axes that every trial has; a parallel plot leaves out trials that lack one of its axes
        metric: primary metric
    """
    now, views = round(1000 * time.time()), {}
    for view, label in links(axes).items():
        state = _state(parent, axes, metric, means=view == "means")
        if view == "trials":
            shown = [name for name in _points(axes) if name in everywhere][:MOST_AXES]
            parallel = _chart("PARALLEL", selectedParams=shown, selectedMetrics=[COMPRESSION, f"test/{metric.name}"])
            state["compareRunCharts"].append(parallel)
        envelope = {"name": f"{sweep}: {label}", "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
        views[f"{identity}-{view}"] = json.dumps(envelope)
    return views


def _state(parent: str, axes: Sequence[str], metric: Metric, *, means: bool) -> dict[str, Any]:
    params = list(dict.fromkeys([*CHOSEN, *(_points(axes) if means else axes)[:MOST_AXES]]))
    grouping = [{"mode": "param", "groupByData": name} for name in _points(axes)]
    test = f"test/{metric.name}"
    metrics = (test, f"difference/{test}", "sparsity/overall", COMPRESSION, "macs/speedup")
    columns = [*(f"params.`{name}`" for name in params), *(f"metrics.`{name}`" for name in metrics)]
    x, y = ({"key": name, "type": "METRIC"} for name in (COMPRESSION, test))
    finished = " AND attributes.status = 'FINISHED'" if means else ""
    return {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'{finished}",
        "orderByKey": f"metrics.`{test}`",
        "orderByAsc": metric.better == "lower",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {column: 8 * max(len(column) - len("metrics.``"), MIN_WIDTH) for column in columns},
        "groupBy": {"aggregateFunction": "average", "groupByKeys": grouping} if means else None,
        "runsHiddenMode": "SHOW_ALL",
        "isAccordionReordered": True,
        "compareRunSections": [{"uuid": "sweep", "name": "Sweep", "display": True, "isReordered": False}],
        "compareRunCharts": [_chart("SCATTER", xaxis=x, yaxis=y)],
    }


def _points(axes: Sequence[str]) -> list[str]:
    """Return the axes that distinguish operating points: all but seeds."""
    return [name for name in axes if not name.endswith("seed")]


def _chart(kind: str, **settings: object) -> dict[str, object]:
    common = {"uuid": kind.lower(), "metricSectionId": "sweep", "runsCountToCompare": 100, "showAllRuns": True}
    return {"type": kind, **common, "deleted": False, "isGenerated": False, **settings}
