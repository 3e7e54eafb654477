"""What a task is: a loss to train by, and metrics to measure by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from orchestrator.core.metrics import Metric


@dataclass(frozen=True)
class Measured:
    """What a network achieved on a split."""

    figures: Mapping[str, float]
    """`loss`, and each of the task's metrics by name."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What is no single number, as JSON has it; `hits` and `of` count for each class what is right, and of how many."""


class Task(Protocol):
    """What a network is trained for and measured by.

    Batches come as the data gives them, on the device. A class of your own needs these members and no base:

        class Counting:
            metrics = (Metric("off_by", "", "lower", margin=0.1),)

            def loss(self, model, batch):
                return (model(batch[0]).squeeze(1) - batch[1]).abs().mean()

            def size(self, batch):
                return len(batch[1])

            def measure(self, model, batches):
                losses, count = [], 0
                for batch in batches:
                    losses.append(float(self.loss(model, batch)) * self.size(batch))
                    count += self.size(batch)
                return {"loss": sum(losses) / count, "off_by": sum(losses) / count}
    """

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The first is the primary one, by which networks are selected and compared."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over a batch, to be differentiated."""
        ...

    def size(self, batch: Any) -> int:
        """Return the weight of a batch's mean: its examples, or tokens."""
        ...

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured | Mapping[str, float]:
        """Return `loss` and every metric over all of `batches`: not the mean of their means.

        It runs in evaluation mode and without gradients.
        """
        ...
