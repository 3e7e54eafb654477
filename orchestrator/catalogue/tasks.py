"""The catalogue of tasks: losses and metrics. A row's code is (**options) -> `workloads.tasks.task.Task`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pruning.catalogue.rows import REQUIRED, Option, Row, named
from pruning.catalogue.value_rules import Rule, at_least


class Task(Row):
    """A task."""

    FAMILY: ClassVar[str] = "task"


def has_target(value: Any) -> bool:
    """Whether a node names something of the user's own by `_target_`."""
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str) and bool(value["_target_"])


OPTIONAL_TARGET = Rule(has_target, "have a `_target_`").or_null("; add one, or pass null for the default")

TASKS: Mapping[str, Task] = named(
    (
        Task(
            "classification",
            "orchestrator.workloads.tasks.classification:Classification",
            "One class an example: accuracy, top-5 where there are more classes, per class.",
        ),
        Task(
            "regression",
            "orchestrator.workloads.tasks.regression:Regression",
            "Numbers, by mean squared error: RMSE, MAE and R2. Labels are floating point numbers.",
            (
                Option("unit", str, "", "Unit of the labels."),
                Option(
                    "margin",
                    float,
                    0.0,
                    "The rise of RMSE that a match with dense may hide, unless `compare.margin` says otherwise.",
                    (at_least(0),),
                ),
            ),
        ),
        Task(
            "language_modelling",
            "orchestrator.workloads.tasks.language_modelling:LanguageModelling",
            "The next token: perplexity and cross-entropy.",
        ),
        Task(
            "segmentation",
            "orchestrator.workloads.tasks.segmentation:Segmentation",
            "A class for each pixel: mean IoU and the fraction of pixels.",
            (Option("ignore_index", int, 255, "The label of pixels that count for nothing."),),
        ),
        Task(
            "torchmetrics",
            "orchestrator.workloads.tasks.torch_metrics:TorchMetrics",
            "Any metrics of torchmetrics, the first of them the primary one, as in measures: {f1: {_target_: "
            "torchmetrics.classification.MulticlassF1Score, num_classes: 10, average: macro}}",
            (
                Option(
                    "measures",
                    dict[str, Any],
                    REQUIRED,
                    "Name -> `_target_` and arguments; the first is the primary one.",
                ),
                Option(
                    "criterion",
                    Any,
                    None,
                    "The loss, where neither `train.loss` nor the network gives one; null is cross-entropy.",
                    (OPTIONAL_TARGET,),
                ),
                Option(
                    "better",
                    dict[str, str],
                    {},
                    "Name -> `higher` or `lower`, of a metric that does not say so itself.",
                ),
                Option(
                    "margin",
                    float,
                    0.0,
                    "The loss of the primary metric that a match with dense may hide, unless `compare.margin` says so.",
                    (at_least(0),),
                ),
            ),
            packages=("torchmetrics",),
            extra="torchmetrics",
            in_sweeps={"measures": {}},
        ),
    )
)
"""Name -> task."""
