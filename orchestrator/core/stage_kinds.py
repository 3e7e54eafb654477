"""The kinds of stages: a row of one table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.core.stage_fields import StageFields


@dataclass(frozen=True)
class StageKind:
    """What is known of all stages of a kind."""

    run: str
    """`module:function` of run(spec, inputs, context) -> Result; named, so that planning stays free of torch."""
    title: str
    """What people are told of such a stage; `{round}` is its round, `{format}` that in which it deploys."""
    prunes: bool
    """Whether it has masks of its own."""
    own_task: bool = False
    """Whether it runs in a task of its own, and not in that of the stage whose network it goes on from."""
    reads_test: bool = True
    """Whether it reads the test split."""
    keeps: Literal["always", "at_branches", "while_needed"] = "always"
    """How long a store holds its weights: while a stage that needs them is unfinished; besides where none or several
    need them, for sweeps to come; or always."""
    trains: bool = True
    """Whether it makes a network; else it takes a finished one, and changes nothing of it."""
    alone: bool = False
    """Whether nothing else of a sweep runs meanwhile: such stages follow in a row at its end."""

    def named(self, fields: StageFields) -> str:
        """Return what people are told of a stage with these fields."""
        return self.title.format(round=fields.round, format=fields.format)


KINDS: Mapping[str, StageKind] = {
    "start": StageKind(
        "orchestrator.training.training_stages:train_dense",
        "start of the training",
        prunes=False,
        reads_test=False,
        keeps="while_needed",
    ),
    "dense": StageKind("orchestrator.training.training_stages:train_dense", "dense training", prunes=False),
    "round": StageKind(
        "orchestrator.training.training_stages:prune_and_finetune", "round {round}", prunes=True, keeps="at_branches"
    ),
    "deploy": StageKind(
        "orchestrator.deploy.deployment_stages:deploy",
        "deployment as {format}",
        prunes=False,
        own_task=True,
        trains=False,
    ),
    "measure": StageKind(
        "orchestrator.deploy.deployment_stages:measure",
        "latency as {format}",
        prunes=False,
        own_task=True,
        reads_test=False,
        trains=False,
        alone=True,
    ),
}
