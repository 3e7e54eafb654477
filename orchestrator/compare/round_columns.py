"""Table columns of a round's choices: score, unit, scope, budget, cost of scoring, dead layers. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import RestartFields, StageFields, StageSpec
from pruning.catalogue.methods import METHODS
from pruning.choices.axes import SPANNING

WEIGHTS, BLOCKS, CHANNELS, EXPERTS = "weights", "blocks", "channels", "experts"
"""Budgets that a sparsity can be a fraction of, besides the parameters, MACs and bytes of a whole network;
experts are `CHANNELS` of their unit."""

COUNTED = {"heads": "heads", "mlp": "hidden units", "layer": "layers", "expert": EXPERTS}
"""Unit -> its plural, for units whose budget `CHANNELS` are not channels."""


class Chosen(NamedTuple):
    """Choices of one round; empty for a dense network. A method class has no score and no unit."""

    score: str = ""
    """Name of the score, or the function that `score._target_` names."""
    unit: str = ""
    """Kind of unit that is pruned, as `unit.kind`."""
    scope: str = ""
    """Kind of scope and its allocation: `layer by erk`."""
    dynamics: str = ""
    repair: str = ""
    budget: str = ""
    """Quantity that the requested sparsity is a fraction of: `weights`; `blocks`; for whole channels `channels`; or
    `parameters`, `MACs` or `bytes` of the whole network."""
    reached: float | None = None
    """Removed fraction of the budget; None if the record does not have it."""
    restart: str = ""
    """Weights and settings that a round trains on from: `keep`, or `weights=step rates=0 step=0 control=shuffle`."""
    scored_examples: int | None = None
    """Examples drawn for the score."""
    scoring_passes: int | None = None
    """Evaluations of the loss on a batch of the scored examples."""
    rescorings: int | None = None
    scoring_seconds: float | None = None
    selection_seconds: float | None = None
    dead_layers: str = ""
    """Names of tensors whose entries are all pruned."""


_NOTHING = Chosen()


def chosen(fields: StageFields, record: StageRecord) -> Chosen:
    """Return the choices of a round, from its fields and its record."""
    if not record.round:
        return _NOTHING
    budget = budget_of(fields)
    details = record.typed
    scoring = details.scoring
    plain = Chosen(
        scope=fields.scope.kind,
        budget=budget,
        reached=reached_of(budget, record),
        restart=_restart_text(fields.restart),
        dead_layers=" ".join(details.dead_tensors),
    )
    if not scoring.score:
        return plain
    allocation = "" if fields.scope.allocation == "each" else f" by {fields.scope.allocation}"
    return plain._replace(
        score=scoring.score,
        unit=fields.unit.kind,
        scope=plain.scope + allocation,
        dynamics=fields.dynamics.named,
        repair=fields.repair.kind or "",
        scored_examples=scoring.examples,
        scoring_passes=scoring.passes,
        rescorings=scoring.rescorings,
        scoring_seconds=record.measurements.get("scoring"),
        selection_seconds=record.measurements.get("selection"),
    )


def _restart_text(restart: RestartFields) -> str:
    """Return a restart as settings; "keep" if the round fine-tunes its pruned network."""
    plain = {} if restart.rates is not None else vars(RestartFields())
    given = {name: value for name, value in vars(restart).items() if value not in (None, "none")}
    return " ".join(f"{name}={value}" for name, value in given.items() if plain.get(name) != value) or "keep"


def budget_of(fields: StageFields) -> str:
    """Return the quantity that a round's target is a fraction of, as `Chosen.budget`."""
    row = METHODS.get(fields.method.kind or "")
    if row is not None and row.channels:
        return CHANNELS
    unit = "entry" if fields.target is None else fields.unit.kind
    if unit in SPANNING:
        return fields.scope.budget.replace("macs", "MACs").replace("_", " ")
    return {"channel": CHANNELS, "block": BLOCKS}.get(unit, WEIGHTS)


def in_words(budget: str, unit: str) -> str:
    """Return a budget by the unit that it counts: `heads` in place of channels."""
    return COUNTED.get(unit, budget) if budget == CHANNELS else budget


def reached_of(budget: str, record: StageRecord) -> float | None:
    """Return the removed fraction of a round's budget, as `Chosen.reached`."""
    found = record.typed.scoring.removed
    return record.sparsity if found is None and budget == WEIGHTS else found


def scoring_steps(spec: StageSpec, record: StageRecord) -> float:
    """Return the cost of a round's score in steps of its training.

    cost = examples * max(1, loss evaluations / batches) / examples per step

    A score that never evaluates the loss, for example SynFlow, counts as one pass over its examples.
    """
    scoring = record.typed.scoring
    train = spec.typed.finetune if spec.training == "finetune" else spec.typed.train
    examples, size = scoring.examples or 0, (train.batch_size or 0) * (train.accumulate or 1)
    if not examples or not size:
        return 0.0
    rescorings = scoring.rescorings or 1
    each = examples / rescorings
    batches = rescorings * math.ceil(each / (spec.typed.score.batch_size or each))
    return float(examples * max(1.0, (scoring.passes or 0) / batches) / size)
