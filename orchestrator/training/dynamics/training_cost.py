"""Multiply-accumulates of a training, counted in each step under the masks of that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.training.dynamics.sparse_training import SparseTraining
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import first
from orchestrator.workloads.tasks.batch import arguments, moved
from pruning import MaskSet
from pruning.measure.macs import WeightMacs, weight_macs

DENSE, SPARSE, SPARSE_FORWARD = "dense", "sparse", "sparse_forward"
"""Phases: no weight is masked; forward and backward under masks; forward under masks, gradients of all weights."""
COUNTS = ("steps", "examples", "forward", "backward")
"""Counts of a phase; `forward` and `backward` are multiply-accumulates."""


class TrainingCost:
    """Sums of a training's multiply-accumulates, by phase.

    An example of a step under masks that leave R of D multiply-accumulates costs R in the forward pass. The backward
    pass costs R for the gradients of inputs; and R for those of weights, or D where the step reads the gradients of all
    weights. A step that replaces an update of the weights, as in RigL, is counted like any other.

    Args:
        weights: multiply-accumulates of one example, by weight.
        masks: returns the masks of now; a mask that did not change is the same tensor.
        reads_all: returns whether the next step reads the gradients of all weights.
    """

    def __init__(
        self,
        weights: WeightMacs,
        masks: Callable[[], Mapping[str, Tensor]],
        reads_all: Callable[[], bool] = lambda: False,
    ) -> None:
        self._weights, self._masks, self._reads_all = weights, masks, reads_all
        self._counted: dict[str, Tensor] = {}
        self._remaining: float | Tensor = float(weights.total)
        """A number where that needs no waiting for a device."""
        self._is_dense = True
        self._sums: dict[str, list[Any]] | None = {}

    def step(self, examples: int) -> None:
        """Count a step with this number of examples; call it before the masks may change."""
        if self._sums is None:
            return
        all_read = self._reads_all()
        self._count_masks(sync=not all_read)
        phase = SPARSE_FORWARD if all_read else DENSE if self._is_dense else SPARSE
        sums = self._sums.setdefault(phase, [0, 0, 0.0, 0.0])
        forward = examples * self._remaining
        weights = examples * self._weights.total if all_read else forward
        for index, more in enumerate((1, examples, forward, forward + weights)):
            sums[index] = sums[index] + more

    def state(self) -> dict[str, dict[str, int]] | None:
        """Return the sums: phase -> count -> int; None if an earlier part of the training was not counted."""
        if self._sums is None:
            return None
        return {
            phase: dict(zip(COUNTS, map(round, map(float, sums)), strict=True)) for phase, sums in self._sums.items()
        }

    def go_on(self, state: Mapping[str, Mapping[str, int]] | None) -> None:
        """Continue from a state; None: an earlier part was not counted, so that the sums stay unknown."""
        self._sums = (
            None if state is None else {phase: [sums[name] for name in COUNTS] for phase, sums in state.items()}
        )

    def _count_masks(self, *, sync: bool) -> None:
        """Count the multiply-accumulates that remain if the masks changed; `sync`: find out whether none is masked."""
        masks = self._masks()
        if masks.keys() != self._counted.keys() or any(masks[name] is not held for name, held in self._counted.items()):
            self._counted = dict(masks)
            remaining = self._weights.remaining(masks)
            self._remaining = float(remaining) if sync or remaining.device.type == "cpu" else remaining
            self._is_dense = sync and float(remaining) == self._weights.total


def cost_of(
    model: nn.Module, data: Data, device: torch.device, masks: MaskSet, sparse: SparseTraining | None
) -> TrainingCost:
    """Return the empty cost of a training of `model`, under masks that stay or masks that change."""
    example = moved(first(data.train), device)  # a real example, because tokens are integers
    given, named = arguments(model, example, labels=False)
    weights = weight_macs(model, named or given)
    if sparse is None:
        return TrainingCost(weights, lambda: masks)
    return TrainingCost(weights, lambda: sparse.kept, lambda: sparse.reads_all)
