"""What a round was told to choose, what scoring took, and which layers died, as the columns of a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import StageSpec

WEIGHTS, CHANNELS = "weights", "channels"
"""What a sparsity may be a fraction of, beside the parameters, MACs and bytes of a whole network."""
WHOLE_CHANNELS = ("random_structured", "ln_structured")
"""Classes that remove a fraction of the channels of each layer."""


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


def chosen(fields: Mapping[str, Any], record: StageRecord) -> Chosen:
    """Return what the `fields` of a round say, and its `record`."""
    if not record.round:
        return _NOTHING
    given, scope = fields.get("restart", {}), fields.get("scope", {})
    budget = budget_of(fields)
    scoring = record.details.get("scoring", {})
    plain = Chosen(
        scope=_kind(fields, "scope"),
        budget=budget,
        reached=reached_of(budget, record),
        restart=" ".join(f"{name}={value}" for name, value in given.items()) or "keep",
        dead_layers=" ".join(record.details.get("dead_tensors", ())),
    )
    if not scoring:
        return plain
    allocation = "" if scope.get("allocation", "each") == "each" else f" by {scope['allocation']}"
    return plain._replace(
        score=scoring.get("score", ""),
        unit=_kind(fields, "unit"),
        scope=plain.scope + allocation,
        dynamics=_kind(fields, "dynamics"),
        repair=_kind(fields, "repair"),
        scored_examples=scoring.get("examples"),
        scoring_passes=scoring.get("passes"),
        rescorings=scoring.get("rescorings"),
        scoring_seconds=record.measurements.get("scoring"),
        selection_seconds=record.measurements.get("selection"),
    )


def budget_of(fields: Mapping[str, Any]) -> str:
    """Return what the target in the `fields` of a round is a fraction of, as `Chosen.budget`."""
    return CHANNELS if fields.get("method", {}).get("kind") in WHOLE_CHANNELS else held_in(fields)


def held_in(fields: Mapping[str, Any]) -> str:
    """Return in what a round is held to its target: a class that decides by itself is in weights."""
    unit = "entry" if fields.get("target") is None else _kind(fields, "unit")
    budget = fields.get("scope", {}).get("budget", CHANNELS) if unit == "group" else CHANNELS
    return {"channel": CHANNELS, "group": budget.replace("macs", "MACs")}.get(unit, WEIGHTS)


def reached_of(budget: str, record: StageRecord) -> float | None:
    """Return the fraction of the budget of a round that is gone, as `Chosen.reached`."""
    found: float | None = record.details.get("scoring", {}).get("removed")
    return record.sparsity if found is None and budget == WEIGHTS else found


def scoring_steps(spec: StageSpec, record: StageRecord) -> float:
    """Return what the score of a round took in steps of its training: passes over as many examples as a step reads.

    A pass evaluates the loss on a batch; a score that never does, as SynFlow, is counted as passing once.
    """
    scoring, train = record.details.get("scoring", {}), spec.fields.get(spec.training, {})
    examples, size = scoring.get("examples", 0), (train.get("batch_size") or 0) * (train.get("accumulate") or 1)
    if not examples or not size:
        return 0.0
    rescorings = scoring.get("rescorings") or 1
    each = examples / rescorings
    batches = rescorings * math.ceil(each / (spec.fields.get("score", {}).get("batch_size") or each))
    return float(examples * max(1.0, scoring.get("passes", 0) / batches) / size)


def _kind(fields: Mapping[str, Any], name: str) -> str:
    return str(fields.get(name, {}).get("kind", ""))
