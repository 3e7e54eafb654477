"""The ranks that follow rank 0: they take part in its trainings, and wait for it in between."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.core.work_order import WorkOrder
from orchestrator.training.stage_networks import initialised
from orchestrator.training.state.checkpointing import Checkpointing
from orchestrator.training.state.train_state import TrainState
from orchestrator.training.training_stages import Stage
from orchestrator.training.ways import Ways
from pruning import MaskSet


class _Follows(Ways):
    """Ways of a rank whose weights and states come from rank 0."""

    def restart(self, stage: Stage, masks: MaskSet) -> None:
        """Leave the weights: those of rank 0 come with the training."""

    def onward(self, stage: Stage, masks: Sequence[Tensor | None]) -> TrainState | None:
        """Return None: the state of rank 0 comes with the training."""
        del stage, masks
        return None


def follow(order: WorkOrder) -> None:
    """Take part in every training that rank 0 begins, until it says that the work has ended.

    Raises:
        RankLost: another rank failed.
        training_loop.Cancelled: rank 0 was asked to end within a training.
    """
    ranks, specs = order.ranks, {spec.key: spec for spec in order.specs}
    root, network = (*order.lineage, *order.specs)[0], None
    while (said := ranks.hear()) is not None:
        spec = specs[said["stage"]]
        network = network or initialised(root, spec, order)
        nothing_saved = Checkpointing(order.store.checkpoints, spec.key)
        Stage(spec, network, order, nothing_saved, _Follows()).follow(ranks.bytes_of_leader(None))
