"""Steps of several batches: what an optimizer that accumulates gradients takes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from orchestrator.workloads.splits import Batch, Batches


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of an epoch, `accumulate` batches each; the last one takes what is left."""

    batches: Batches
    accumulate: int

    def __len__(self) -> int:
        return -(-len(self.batches) // self.accumulate)

    def after(self, step: int) -> Iterator[Sequence[Batch]]:
        """Yield the batches of each step of all epochs after the first `step` ones."""
        epoch, start = divmod(step, len(self))
        for number in count(epoch):
            batches = self.batches.epoch(number, start * self.accumulate)
            while together := list(islice(batches, self.accumulate)):
                yield together
            start = 0
