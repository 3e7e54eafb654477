"""Ask a network for its outputs and measure them: the one place that says what loss and accuracy are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.workloads.splits import Split
from orchestrator.workloads.targets import create
from pruning.measure.macs import in_mode

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) -> loss."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class OutputError(OrchestratorError):
    """A network that does not return logits."""


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    device: torch.device,
    batch_size: int = 512,
    precision: str = "fp32",
    loss: Criterion | None = None,
) -> dict[str, float]:
    """Return {"loss", "accuracy"} of `model` on `split`: the mean, and the fraction whose argmax is the label (or 0).

    The examples' float32 losses are summed exactly and rounded once, so the sum does not depend on their order. What a
    network or a Dataset draws is the same in every evaluation. Training modes and generators are restored.

    Args:
        loss: None is cross-entropy. A loss with an attribute `reduction` is asked for "none"; of another, the mean of a
            batch counts for each of its examples.
    """
    criterion = _unreduced(loss or nn.CrossEntropyLoss())
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    with seeded(0, device), in_mode(model, training=False), torch.no_grad(), autocast(device, precision):
        for inputs, labels in split.batches(batch_size, device=device):
            outputs = outputs_of(model, inputs)
            each = criterion(outputs, labels).float()
            losses.append(each.flatten(1).mean(1) if each.ndim > 1 else each.expand(len(labels)))
            hits.append((outputs.argmax(1) == labels).sum() if is_class(labels) else labels.new_zeros(()))
    values = torch.cat(losses).tolist()
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
    return {"loss": mean, "accuracy": int(torch.stack(hits).sum()) / len(split)}


def criterion_of(loss: Mapping[str, Any] | None, device: torch.device) -> Criterion:
    """Create the loss that the plain node `loss` describes, with its tensors on `device`; None is cross-entropy."""
    criterion: Criterion = nn.CrossEntropyLoss() if loss is None else create("train.loss", loss)
    return criterion.to(device) if isinstance(criterion, nn.Module) else criterion


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits: what the model returns, or that object's `logits` (transformers)."""
    outputs: Any = model(inputs)
    if isinstance(outputs, Tensor):
        return outputs
    logits: Any = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise OutputError(
        f"`model` returned {type(outputs).__name__}; it must return logits of shape (batch, classes), or an object "
        "that has them as `logits`. Wrap it in a module that does."
    )


def is_class(labels: Tensor) -> bool:
    """Whether labels are classes, and not the numbers of a regression, of which there is no accuracy."""
    return not labels.is_floating_point()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the scope in which operations run in `precision`; for fp32 it does nothing, and so takes no time."""
    return torch.autocast(device.type, dtype=_DTYPES[precision]) if precision in _DTYPES else nullcontext()


def _unreduced(loss: Criterion) -> Criterion:
    if not hasattr(loss, "reduction"):
        return loss
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    return unreduced
