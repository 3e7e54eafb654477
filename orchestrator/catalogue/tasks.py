"""Catalogue of tasks: losses and metrics. A row's code is (**options) -> `workloads.tasks.task.Task`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pruning.catalogue.rows import REQUIRED, Option, Row, Rule, at_least, named, one_of, whole


@dataclass(frozen=True)
class TaskRow(Row):
    """Row of a task.

    Args:
        of_text: the network is a language model.
        labelled: the thing that has a label, if it is never a token; empty for a task that reads a text.
        fraction: title of the primary metric if it is a fraction, shown in percent; empty for another metric.
    """

    FAMILY: ClassVar[str] = "task"

    of_text: bool = False
    labelled: str = ""
    fraction: str = ""


def has_target(value: Any) -> bool:
    """Whether a node has a `_target_`."""
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str) and bool(value["_target_"])


OPTIONAL_TARGET = Rule(has_target, "have a `_target_`").or_null("; add one, or pass null for the default")

STRIDED_PERPLEXITY, KL_FROM_DENSE, AGREEMENT, LAST_WORD, PASSAGE_LAST_WORD, PASSAGE_PERPLEXITY = ASKED_METRICS = (
    *("strided_perplexity", "kl_from_dense", "agreement_with_dense", "last_word"),
    *("passage_last_word", "passage_perplexity"),
)
"""Metrics that are measured on test if an option of the task asks for them; reports show them beside the primary."""
AGAINST_DENSE = "against_dense"
"""Option of a task by which rounds compare their networks with the dense network."""

TASKS: Mapping[str, TaskRow] = named(
    (
        TaskRow(
            "classification",
            "orchestrator.workloads.tasks.classification:Classification",
            "One class for each example: accuracy, accuracy by class, and top-5 accuracy for more than 5 classes.",
            labelled="example",
            fraction="accuracy",
        ),
        TaskRow(
            "regression",
            "orchestrator.workloads.tasks.regression:Regression",
            "Regression by mean squared error: RMSE, MAE and R2. Labels are floating point numbers.",
            (
                Option("unit", str, "", "Unit of the labels."),
                Option(
                    "margin",
                    float,
                    0.0,
                    "Largest rise of RMSE that still counts as a match with dense, unless `compare.margin` is set.",
                    (at_least(0),),
                ),
            ),
            labelled="example",
        ),
        TaskRow(
            "language_modelling",
            "orchestrator.workloads.tasks.language_modelling:LanguageModelling",
            "Prediction of the next token: perplexity and cross-entropy.",
            (
                Option(
                    "protocol",
                    str,
                    "blocks",
                    "`blocks`: every token is predicted; `papers`: one prediction less in each window.",
                    (one_of("blocks", "papers"),),
                    later=True,
                ),
                Option(
                    "stride",
                    int | None,
                    None,
                    "Tokens between overlapping windows of the strided perplexity on test; null: not measured.",
                    (whole(1).or_null(),),
                    later=True,
                ),
                Option(
                    "against_dense",
                    bool,
                    False,
                    "Measure divergence from the dense network and agreement with it, on test.",
                    later=True,
                ),
                Option("last_word", bool, False, "Predict the last whole word of each window of test.", later=True),
                Option(
                    "passages",
                    str | None,
                    None,
                    "File of passages whose last words are predicted: one a line, or JSON lines with `text`.",
                    later=True,
                ),
                Option(
                    "prompts",
                    list[str],
                    [],
                    "Texts that every network continues greedily, shown side by side in the report.",
                    later=True,
                ),
                Option("generate", int, 32, "Tokens of each continuation.", (whole(1),), later=True),
            ),
            unlisted=("content",),
            of_text=True,
        ),
        TaskRow(
            "segmentation",
            "orchestrator.workloads.tasks.segmentation:Segmentation",
            "One class for each pixel: mean IoU, and the fraction of right pixels.",
            (Option("ignore_index", int, 255, "Label of pixels to ignore."),),
            labelled="pixel",
            fraction="mean iou",
        ),
        TaskRow(
            "detection",
            "orchestrator.workloads.tasks.detection:Detection",
            "Boxes around objects: COCO's mean average precision and recall, by faster-coco-eval.",
            labelled="box",
            fraction="mAP",
            packages=("faster_coco_eval",),
            extra="detection",
        ),
        TaskRow(
            "torchmetrics",
            "orchestrator.workloads.tasks.torch_metrics:TorchMetrics",
            "Any metrics of torchmetrics, as in measures: {f1: {_target_: "
            "torchmetrics.classification.MulticlassF1Score, num_classes: 10, average: macro}}; the first is primary.",
            (
                Option(
                    "measures",
                    dict[str, Any],
                    REQUIRED,
                    "Name -> `_target_` and arguments of a metric; the first one is primary.",
                ),
                Option(
                    "criterion",
                    Any,
                    None,
                    "Loss if neither `train.loss` nor the network gives one; null: cross-entropy.",
                    (OPTIONAL_TARGET,),
                ),
                Option(
                    "better",
                    dict[str, str],
                    {},
                    "Name -> `higher` or `lower`, for a metric that does not define its better direction.",
                ),
                Option(
                    "margin",
                    float,
                    0.0,
                    "Largest loss of the primary metric that still counts as a match, unless `compare.margin` is set.",
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
