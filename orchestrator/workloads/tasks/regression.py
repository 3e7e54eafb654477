"""Regression: mean squared error, and the size of the errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks.batch import labels_of
from orchestrator.workloads.tasks.supervised import Supervised, add_examples, misfit
from orchestrator.workloads.tasks.totals import Totals

R2 = Metric("r2", "", "higher", margin=0.01, format=".4f")
"""1 - (sum of squared errors) / (sum of squared differences from the mean), averaged over the outputs.

Outputs whose labels are constant are left out; R2 is NaN if the labels of all outputs are constant.
"""


class Regression(Supervised):
    """Regression: outputs and labels are real numbers of one shape, (batch,) or (batch, outputs).

    RMSE and MAE cover all outputs of all examples.

    Args:
        unit: unit of the labels.
        margin: largest rise of RMSE that still counts as matching the dense network; 0 allows none.
    """

    numbers = True

    def __init__(self, unit: str = "", margin: float = 0.0) -> None:
        super().__init__(nn.MSELoss())
        rmse, mae = (Metric(name, unit, "lower", margin, ".4g") for name in ("rmse", "mae"))
        self.metrics = (rmse, mae, R2)

    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and labels of one shape."""
        labels = labels_of(batch)
        if not labels.is_floating_point():
            remedy = "convert them in the data, or pass task=classification for classes"
            raise misfit("regression", "labels that are floating point numbers", labels, remedy)
        if outputs.shape == (*labels.shape, 1):
            outputs = outputs.squeeze(-1)
        elif labels.shape == (*outputs.shape, 1):
            labels = labels.squeeze(-1)
        if outputs.shape != labels.shape:
            remedy = "change `model.classes`, the number of outputs, or `data`"
            raise misfit("regression", f"outputs of the shape of its labels, {tuple(labels.shape)}", outputs, remedy)
        return outputs, labels

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Add errors, labels and their squares, from which R2 follows; squares of float32 are exact in float64."""
        add_examples(totals, losses, examples)
        labels = labels.double().flatten(1) if labels.ndim > 1 else labels.double().unsqueeze(1)
        error = outputs.double().reshape(labels.shape) - labels
        for name, values in (
            ("square", error**2),
            ("off", error.abs()),
            ("label", labels),
            ("label_square", labels**2),
        ):
            totals.add(name, values)

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss, RMSE, MAE and R2."""
        loss = {"loss": totals.mean("loss", "examples")}
        count = int(totals.counted("examples"))
        sums = [totals.exact(name) for name in ("square", "off", "label", "label_square")]
        if any(found is None for found in sums):
            return loss | {metric.name: math.nan for metric in self.metrics}
        squares, offs, labels, label_squares = (found or [] for found in sums)
        spreads = [q - s * s / count for s, q in zip(labels, label_squares, strict=True)]
        r2 = [1 - float(s / spread) for s, spread in zip(squares, spreads, strict=True) if spread > 0] or [math.nan]
        cells = count * len(squares)
        return loss | {"rmse": math.sqrt(sum(squares) / cells), "mae": float(sum(offs) / cells), "r2": fmean(r2)}

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return the number of examples, and the RMSE of the best constant answer, the mean of the labels."""
        count = int(totals.counted("examples"))
        sums, squares = (totals.exact(name) if count else None for name in ("label", "label_square"))
        if sums is None or squares is None:
            return {"examples": count}
        spread = sum(q - s * s / count for s, q in zip(sums, squares, strict=True))
        return {"examples": count, "constant": math.sqrt(spread / (count * len(sums)))}
