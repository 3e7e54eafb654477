"""What a round was told to choose, what scoring took, and which layers died, as the columns of a table. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_fields import Restart, StageFields
from pruning.catalogue.methods import METHODS

WEIGHTS, CHANNELS = "weights", "channels"
"""What a sparsity may be a fraction of, beside the parameters, MACs and bytes of a whole network."""


class Chosen(NamedTuple):
    """Of one round; empty for a network that is not pruned. A class that decides by itself has no score and no unit."""

    score: str = ""
    """Its name, or the function that `score._target_` names."""
    unit: str = ""
    scope: str = ""
    """Its kind, and by what allocation: `layer by erk`."""
    dynamics: str = ""
    repair: str = ""
    budget: str = ""
    """What the requested sparsity is a fraction of: `weights`; of whole channels `channels`; or of the whole network
    `parameters`, `MACs` or `bytes`."""
    reached: float | None = None
    """The fraction of it that is gone; None where a record does not say."""
    restart: str = ""
    """What a round trains on from: `keep`, or as in `weights=step rates=0 step=0 control=shuffle`."""
    scored_examples: int | None = None
    """Examples that were drawn for the score."""
    scoring_passes: int | None = None
    """Evaluations of the loss on a batch of them."""
    rescorings: int | None = None
    scoring_seconds: float | None = None
    selection_seconds: float | None = None
    dead_layers: str = ""
    """Names of the tensors without an entry left."""


_NOTHING = Chosen()


def chosen(fields: StageFields, record: StageRecord) -> Chosen:
    """Return what a round chose, by its fields and its record."""
    if not record.round:
        return _NOTHING
    budget = budget_of(fields)
    scoring = record.details.get("scoring", {})
    plain = Chosen(
        scope=fields.scope.kind,
        budget=budget,
        reached=reached_of(budget, record),
        restart=_said(fields.restart),
        dead_layers=" ".join(record.details.get("dead_tensors", ())),
    )
    if "score" not in scoring:
        return plain
    allocation = "" if fields.scope.allocation == "each" else f" by {fields.scope.allocation}"
    return plain._replace(
        score=scoring["score"],
        unit=fields.unit.kind,
        scope=plain.scope + allocation,
        dynamics=fields.dynamics.kind,
        repair=fields.repair.kind or "",
        scored_examples=scoring.get("examples"),
        scoring_passes=scoring.get("passes"),
        rescorings=scoring.get("rescorings"),
        scoring_seconds=record.measurements.get("scoring"),
        selection_seconds=record.measurements.get("selection"),
    )


def _said(restart: Restart) -> str:
    """Return a restart as settings, "keep" where a round fine-tunes what it has pruned."""
    plain = {} if restart.rates is not None else vars(Restart())
    given = {name: value for name, value in vars(restart).items() if value not in (None, "none")}
    return " ".join(f"{name}={value}" for name, value in given.items() if plain.get(name) != value) or "keep"


def budget_of(fields: StageFields) -> str:
    """Return what the target of a round is a fraction of, as `Chosen.budget`."""
    row = METHODS.get(fields.method.kind or "")
    if row is not None and row.channels:
        return CHANNELS
    unit = "entry" if fields.target is None else fields.unit.kind
    budget = fields.scope.budget if unit == "group" else CHANNELS
    return {"channel": CHANNELS, "group": budget.replace("macs", "MACs")}.get(unit, WEIGHTS)


def reached_of(budget: str, record: StageRecord) -> float | None:
    """Return the fraction of the budget of a round that is gone, as `Chosen.reached`."""
    found: float | None = record.details.get("scoring", {}).get("removed")
    return record.sparsity if found is None and budget == WEIGHTS else found


def scoring_steps(spec: StageSpec, record: StageRecord) -> float:
    """Return what the score of a round took in steps of its training: passes over as many examples as a step reads.

    A pass evaluates the loss on a batch; a score that never does, as SynFlow, is counted as passing once.
    """
    scoring = record.details.get("scoring", {})
    train = spec.typed.finetune if spec.training == "finetune" else spec.typed.train
    examples, size = scoring.get("examples", 0), (train.batch_size or 0) * (train.accumulate or 1)
    if not examples or not size:
        return 0.0
    rescorings = scoring.get("rescorings") or 1
    each = examples / rescorings
    batches = rescorings * math.ceil(each / (spec.typed.score.batch_size or each))
    return float(examples * max(1.0, scoring.get("passes", 0) / batches) / size)
