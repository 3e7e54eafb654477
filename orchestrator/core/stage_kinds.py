"""The kinds of stages: a row of one table each. A module that asks what a kind is asks this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StageKind:
    """What is known of all stages of a kind."""

    run: str
    """`module:function` of run(spec, inputs, context) -> Result; named, so that planning stays free of torch."""
    title: str
    """What people are told of such a stage; `{round}` is its round."""
    prunes: bool
    """Whether it has masks of its own."""
    own_task: bool = False
    """Whether it runs in a task of its own, and not in that of the stage whose network it goes on from."""
    reads_test: bool = True
    """Whether it reads the test split."""
    keeps: Literal["always", "at_branches", "while_needed"] = "always"
    """How long a store holds its weights: while a stage that needs them is unfinished; besides where none or several
    need them, for sweeps to come; or always."""


KINDS: Mapping[str, StageKind] = {
    "start": StageKind(
        "orchestrator.training.stages:train_start",
        "start of the training",
        prunes=False,
        reads_test=False,
        keeps="while_needed",
    ),
    "dense": StageKind("orchestrator.training.stages:train_dense", "dense training", prunes=False),
    "round": StageKind(
        "orchestrator.training.stages:prune_and_finetune", "round {round}", prunes=True, keeps="at_branches"
    ),
}
