"""The kinds of stages: a row of one table each, and what is read of the fields of any. Ask here what a kind is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.core.plain_data import Count, Margin


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

    def named(self, fields: Mapping[str, Any]) -> str:
        """Return what people are told of a stage with these fields."""
        return self.title.format(round=fields.get("round", 0), format=fields.get("format"))


KINDS: Mapping[str, StageKind] = {
    "start": StageKind(
        "orchestrator.training.stages:train_dense",
        "start of the training",
        prunes=False,
        reads_test=False,
        keeps="while_needed",
    ),
    "dense": StageKind("orchestrator.training.stages:train_dense", "dense training", prunes=False),
    "round": StageKind(
        "orchestrator.training.stages:prune_and_finetune", "round {round}", prunes=True, keeps="at_branches"
    ),
    "deploy": StageKind(
        "orchestrator.export.stages:deploy", "deployment as {format}", prunes=False, own_task=True, trains=False
    ),
    "measure": StageKind(
        "orchestrator.export.stages:measure",
        "latency as {format}",
        prunes=False,
        own_task=True,
        reads_test=False,
        trains=False,
        alone=True,
    ),
}


@dataclass(frozen=True)
class _Training:
    """What code reads of how a stage trains, or of the batches that a score reads."""

    batch_size: Count | None = None
    accumulate: Count | None = None
    epochs: Margin | None = None
    steps: Count | None = None


@dataclass(frozen=True)
class _Scope:
    budget: Literal["channels", "parameters", "macs", "bytes"] = "channels"


@dataclass(frozen=True)
class _Measure:
    batch_sizes: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Fields:
    """What code reads of any stage's fields."""

    round: Count = 0
    train: _Training = _Training()
    finetune: _Training = _Training()
    score: _Training = _Training()
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    restart: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)
    scope: _Scope = _Scope()
    unit: Mapping[str, Any] = field(default_factory=dict)
    dynamics: Mapping[str, Any] = field(default_factory=dict)
    repair: Mapping[str, Any] = field(default_factory=dict)
    format: str = ""
    measure: _Measure = _Measure()
