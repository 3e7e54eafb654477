"""Tasks measured by torchmetrics, each metric named by a `_target_`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.workloads.targets import create
from orchestrator.workloads.tasks.batch import kind, labels_of
from orchestrator.workloads.tasks.supervised import Supervised, add_examples
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.tasks.totals import Totals


class TorchMetrics(Supervised):
    """Task whose metrics are torchmetrics metrics; outputs and labels go unchanged to their `update`.

    Args:
        measures: name -> `_target_` of a metric that computes one number, and its arguments; the first is the primary.
        criterion: `_target_` and arguments of the loss if neither `train.loss` nor the model gives one.
        better: name -> `higher` or `lower`, for a metric that does not say so itself.
        margin: largest loss of the primary metric that still counts as matching the dense network.
    """

    def __init__(
        self,
        measures: Mapping[str, Any],
        criterion: Mapping[str, Any] | None = None,
        better: Mapping[str, str] | None = None,
        margin: float = 0.0,
    ) -> None:
        super().__init__(nn.CrossEntropyLoss() if criterion is None else create("task.criterion", criterion))
        if not measures:
            raise OrchestratorError(
                "`task.measures` (={}) must hold at least one metric, as in "
                "{f1: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10}}."
            )
        self._nodes = measures
        self._running: dict[str, Any] = self._made()
        asked = better or {}
        if unknown := sorted(asked.keys() - measures.keys()):
            raise OrchestratorError(
                f"`task.better` (={dict(asked)}) must name metrics of `task.measures` ({', '.join(measures)}), not "
                f"{', '.join(unknown)}; leave these out."
            )
        self.metrics = tuple(_described(name, each, asked.get(name), margin) for name, each in self._running.items())

    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and labels unchanged."""
        return outputs, labels_of(batch)

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Update each metric."""
        add_examples(totals, losses, examples)
        for name, metric in self._running.items():
            try:
                metric.to(outputs.device).update(outputs, labels)
            except (ValueError, TypeError, LookupError, RuntimeError) as error:
                said = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
                raise OrchestratorError(
                    f"`task.measures.{name}` (={type(metric).__name__}) does not take outputs {kind(outputs)} with "
                    f"labels {kind(labels)}: {said}; change the metric's arguments, or use another metric."
                ) from error

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured:
        """Return `loss` and every metric over all of `batches`."""
        self._running = self._made()
        for part in (part for metric in self._running.values() for part in metric.modules()):
            if hasattr(part, "distributed_available_fn"):
                part.distributed_available_fn = _measures_alone
        return super().measure(model, batches)

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss and metrics."""
        found = {"loss": totals.mean("loss", "examples")}
        for name, metric in self._running.items():
            value = metric.compute()
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise OrchestratorError(
                    f"`task.measures.{name}` (={type(metric).__name__}) must compute one number; pass an average, as "
                    f"in task.measures.{name}.average=macro."
                )
            found[name] = float(value)
        return found

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return the number of examples."""
        return {"examples": int(totals.counted("examples"))}

    def _made(self) -> dict[str, Any]:
        """Return new metrics, whose sums are in float64."""
        made = {name: create(f"task.measures.{name}", node) for name, node in self._nodes.items()}
        for name, metric in made.items():
            if not all(hasattr(metric, member) for member in ("update", "compute", "set_dtype")):
                raise OrchestratorError(
                    f"`task.measures.{name}` (={type(metric).__name__}) must be a metric of torchmetrics, with "
                    "`update` and `compute`."
                )
            metric.set_dtype(torch.float64)
        return made


def _measures_alone() -> bool:
    """Return False: one process of a trial measures a split, and a metric must not wait for the others."""
    return False


def _described(name: str, metric: Any, asked: str | None, margin: float) -> Metric:
    """Return the name, direction and margin of a metric."""
    says = getattr(metric, "higher_is_better", None)
    own = None if says is None else "higher" if says else "lower"
    if (asked or own) not in ("higher", "lower") or (asked and own and asked != own):
        said = f"its own direction is {own}" if own else "it does not say so itself"
        raise OrchestratorError(
            f"`task.better.{name}` (={asked}) must say whether higher or lower is better for {type(metric).__name__}; "
            f"{said}; pass {own or 'higher or lower'}."
        )
    return Metric(name, "", "higher" if (asked or own) == "higher" else "lower", margin)
