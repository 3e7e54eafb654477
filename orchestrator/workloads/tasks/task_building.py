"""Build the task of a configuration: a built-in one by `kind`, or the user's own by `_target_`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from torch import nn

from orchestrator.catalogue.tasks import TASKS
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import LARGEST, canonical_json, read_as
from orchestrator.workloads.targets import TargetError, create, given
from orchestrator.workloads.tasks.batch import named_kind
from orchestrator.workloads.tasks.supervised import Supervised
from orchestrator.workloads.tasks.task import Measured, Task

RULES = {
    "name": "`name` must be 1 to 40 letters, digits and underscores that begin with a letter, as in `off_by`",
    "unit": "`unit` must be a text of at most 16 characters",
    "better": "`better` must be `higher` or `lower`",
    "margin": "`margin` must be a number from 0",
    "format": "`format` must be a point, a digit and one of %, e, f, g, as in `.2f`",
}
"""Rules for the members of a metric, in words."""


class TaskError(OrchestratorError):
    """Task that cannot be used as it is configured or written."""


def build(config: Mapping[str, Any]) -> Task:
    """Build the task that `config` describes.

    Raises:
        OrchestratorError: the target fails, or lacks a member of a task, or its metrics are invalid.
    """
    task = create("task", config, kinds=TASKS)
    for member in ("metrics", "loss", "size", "measure"):
        if not hasattr(task, member):
            raise TaskError(
                f"{given('task', config)} must have `metrics`, `loss`, `size` and `measure`, but lacks `{member}`; see "
                "docs/reference/tasks.md."
            )
    metrics = task.metrics
    if not (isinstance(metrics, list | tuple) and metrics and all(isinstance(each, Metric) for each in metrics)):
        raise TaskError(
            f"{given('task', config)} must have at least one `Metric` (orchestrator.core.metrics) in `metrics`, not "
            f"{metrics!r}; the first is the primary one."
        )
    for metric in metrics:
        try:
            read_as(Metric, msgspec.to_builtins(metric))
        except ValueError as error:
            raise TaskError(
                f"{given('task', config)} has an invalid metric {metric!r}: {_broken_rule(error)}."
            ) from None
    names = [metric.name for metric in metrics]
    if len({*names, "loss"}) <= len(names):
        raise TaskError(f"{given('task', config)} must give its metrics different names, none of them `loss`: {names}.")
    found: Task = task
    return found


def _broken_rule(error: ValueError) -> str:
    """Return the rule that a metric's member breaks, in words; the error's own text if there is no rule."""
    return next((rule for member, rule in RULES.items() if f"$.{member}`" in str(error)), str(error))


def with_loss(task: Task, node: Mapping[str, Any] | None, where: str, device: Any) -> Task:
    """Return `task` with the loss built from `node` on `device`; `task` itself if `node` is None.

    Args:
        task: the task whose loss is replaced.
        node: plain data of the loss: its `_target_` and arguments.
        where: key of the node, for errors.
        device: device of the loss's tensors.

    Raises:
        TaskError: the task is not a `Supervised`, so it has its own loss.
        TargetError: the loss cannot be built.
    """
    if node is None:
        return task
    if not isinstance(task, Supervised):
        raise TaskError(
            f"`{where}` (={node.get('_target_')}) must be null for `task` (={type(task).__name__}), which has its "
            "own loss; leave it out, or derive the task from Supervised."
        )
    hint = f"a function (outputs, labels) that is the loss itself needs +{where}._partial_=true"
    try:
        criterion = create(where, node)
    except TargetError as error:
        if not isinstance(error.__cause__, TypeError) or "_partial_" in node:
            raise
        raise TargetError(f"{str(error).removesuffix('.')}; {hint}.") from error.__cause__
    if not callable(criterion):
        raise TaskError(
            f"{given(where, node)} must return the loss, a function (outputs, labels), not {named_kind(criterion)}; "
            f"{hint}."
        )
    return task.with_loss(criterion.to(device) if isinstance(criterion, nn.Module) else criterion)


def measured(task: Task, found: Measured | Mapping[str, float]) -> Measured:
    """Return the result of `task.measure`, checked against the task's metrics.

    A metric that does not apply may be missing, except the primary one. Metrics that the task does not declare are
    dropped.
    """
    result = found if isinstance(found, Measured) else Measured(found)
    names = ("loss", *(metric.name for metric in task.metrics))
    for name in names[:2]:
        if name not in result.figures:
            raise TaskError(f"{_measures(task, name)}, which returned {sorted(result.figures)}; add `{name}`.")
    _require_plain_details(task, result.details)
    figures = {name: _number(task, name, value) for name, value in result.figures.items() if name in names}
    return Measured(
        {name: math.copysign(math.inf, value) if abs(value) > LARGEST else value for name, value in figures.items()},
        result.details,
    )


def _number(task: Task, name: str, value: Any) -> float:
    """Return a figure of `measure` as a float; raise `TaskError` if it is not one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TaskError(f"{_measures(task, name)}, not {named_kind(value)}; return a float.") from None


def _measures(task: Task, name: str) -> str:
    return f"`task` (={type(task).__name__}) must return a number as `{name}` from `measure`"


def _require_plain_details(task: Task, details: Mapping[str, Any]) -> None:
    """Raise `TaskError` for details that a record cannot hold."""
    where = f"`task` (={type(task).__name__}) must return `details` from `measure`"
    try:
        canonical_json(details)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{where} that JSON can hold: {error}; convert them, as by int(count) or counts.tolist(), without NaN."
        ) from None
    hits, of = (details.get(name, []) for name in ("hits", "of"))
    counts = all(isinstance(each, list | tuple) and all(type(n) is int and n >= 0 for n in each) for each in (hits, of))
    if not counts or len(hits) != len(of):
        raise TaskError(
            f"{where} with `hits` and `of` as lists of counts, one per class; use other names for other values."
        )
