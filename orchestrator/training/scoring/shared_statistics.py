"""Statistics of a score's examples, computed once on a node for all sparsities of a draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.specs import StageSpec
from orchestrator.training.state.stage_environment import environment
from orchestrator.workloads import node_cache
from orchestrator.workloads.splits import Batch
from orchestrator.workloads.tasks.batch import tensors
from orchestrator.workloads.weight_files import state_digest

FIELDS = ("seed", "round", "score", "task", "sources")
"""Fields of a round that decide the statistics under its score, besides the network, the masks and the examples."""
VERSIONS = ("training", "round", "score/", "task/")
"""Beginnings of the names of components whose versions decide them."""
PASSES = ":passes"
"""Name of the number of passes beside the statistics, which are named by parameters."""


class CountedLoss:
    """Loss that counts its calls."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss, self.calls = loss, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return self._loss(model, batch)


@dataclass(frozen=True)
class SharedStatistics:
    """The argument `remember` of `pruning.plan`: statistics that the processes of a node share.

    The calls of the loss are counted as if the statistics had been computed, so that records of equal keys are equal.

    Args:
        source: result of `source_of`.
        batches: the examples of the score.
        loss: the loss that computes the statistics.
        device: device of the network.
    """

    source: Mapping[str, Any]
    batches: Sequence[Batch] | None
    loss: CountedLoss
    device: torch.device

    def __call__(self, key: Sequence[str], make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the result of `make`, or an equal one of an earlier call."""
        earlier = self.loss.calls

        def counted() -> dict[str, Tensor]:
            made = {name: each.cpu().contiguous() for name, each in make().items()}
            return made | {PASSES: torch.tensor(self.loss.calls - earlier)}

        examples = state_digest(
            {
                f"{batch}/{place}": tensor
                for batch, each in enumerate(self.batches or ())
                for place, tensor in enumerate(tensors(each))
            }
        )
        source = {**self.source, "statistics": [*key], "examples": examples}
        found = dict(node_cache.shared(source, counted, node_cache.STATISTICS))
        self.loss.calls = earlier + int(found.pop(PASSES))
        return {name: each.to(self.device) for name, each in found.items()}


def source_of(spec: StageSpec, weights: str, data: str, device: torch.device) -> dict[str, Any] | None:
    """Return JSON values that, with the examples, determine the statistics of a round; None if they are not shared.

    The values are those of the stage's key without the values that only decide how many weights are pruned: the key of
    the parent stage covers the network, its masks so far and the data set. A loss or a task of the user's own may hold
    state that the passes change, so its statistics are not shared.

    Args:
        spec: the round.
        weights: digest of the committed weights that the round starts from; empty in a rehearsal, which shares nothing.
        data: digest of the user's own data.
        device: device of the network.
    """
    loss, task = spec.training_config.get("loss"), spec.fields.get("task")
    if not weights or spec.parent is None or "_target_" in (loss or {}) or "_target_" in (task or {}):
        return None
    fields = {name: spec.fields[name] for name in FIELDS if name in spec.fields}
    versions = {name: each for name, each in spec.fields.get("versions", {}).items() if name.startswith(VERSIONS)}
    return {
        "parent": [spec.parent, weights, data],
        "fields": fields | {"versions": versions, "loss": loss},
        "environment": environment(str(device)) | {"threads": torch.get_num_threads()},
    }
