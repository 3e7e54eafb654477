"""Task protocol: a loss to train with, and metrics to measure with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.data_sets.text import TextCodec


@dataclass(frozen=True)
class Measured:
    """Metrics of a network on a split."""

    figures: Mapping[str, float]
    """`loss`, and each of the task's metrics by name."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other results, as JSON; `hits` and `of` count, per class, the correct cases and all cases, or `rates` has the
    fraction that a class achieves; `constant` is the primary metric of the best answer that is the same for every
    example."""


@dataclass(frozen=True)
class TestInputs:
    """Inputs of a measurement on test splits besides the network and the split."""

    device: torch.device
    length: int
    """Tokens of an example, for data that are a text; else the first size of an example."""
    dense: nn.Module | None = None
    """Dense network of the trial, in evaluation mode; None for that network itself, and if no task asks for it."""
    codec: TextCodec | None = None
    """Conversion between a text and its tokens; None if the data have none."""
    most_tokens: int | None = None
    """Maximum number of tokens of a continuation; None for the number that the task asks for."""
    batch_size: int = 1
    """Number of examples in a batch of the test split."""
    further: bool = False
    """Whether the split is a further test split; measurements without a split of their own come with the first one."""
    most_passages: int | None = None
    """Maximum number of passages whose last words are predicted; None for all."""


@runtime_checkable
class MeasuresTests(Protocol):
    """Task that measures more on the test splits of a finished stage than during its training."""

    def measure_test(self, model: nn.Module, batches: Iterable[Any], inputs: TestInputs) -> Measured:
        """Return `loss` and every metric over all of `batches`; metrics beside the primary one may be missing."""
        ...

    def generations(self, model: nn.Module, inputs: TestInputs) -> list[dict[str, str]]:
        """Return `prompt` and `text`, its continuation, for each prompt of the task."""
        ...


class Task(Protocol):
    """Loss and metrics that a network is trained and measured with.

    Batches have the form that the data set gives them, on the device. A class of your own needs these members and no
    base:

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
        """Metrics of the task; the first is the primary one, by which networks are selected and compared."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the differentiable mean loss over a batch."""
        ...

    def size(self, batch: Any) -> int:
        """Return the weight of a batch's mean: its number of examples, or of tokens."""
        ...

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured | Mapping[str, float]:
        """Return `loss` and every metric over all of `batches`, not the mean of the batches' means.

        The network is in evaluation mode, and gradients are off.
        """
        ...


Sums = TypeVar("Sums")
"""Type of the totals of a split, which `+` adds and a call without arguments makes empty."""


class Summed(ABC, Generic[Sums]):
    """Base of tasks whose totals over parts of a split add up to those of the split, so that processes share it."""

    @abstractmethod
    def totals(self, model: nn.Module, batches: Iterable[Any]) -> Sums:
        """Return the totals over some batches."""

    @abstractmethod
    def figures(self, totals: Sums) -> Mapping[str, float]:
        """Return `loss` and the metrics."""

    @abstractmethod
    def details(self, totals: Sums) -> Mapping[str, Any]:
        """Return results other than single numbers."""

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured:
        """Return `loss` and every metric over all of `batches`."""
        totals = self.totals(model, batches)
        return Measured(self.figures(totals), self.details(totals))
