"""Plans and records whose validation figures are given by hand, and a driver that runs a search on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from factories import make_plan, make_record

from orchestrator.core.events import Decision
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.round_parts import parts_of
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.policy import Budget, Policy
from orchestrator.sweep.search.replay import Replay

SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Loss = Callable[[str, float, int], float]
"""(method, sparsity, seed) -> loss of accuracy against dense."""


def grid(
    methods: Sequence[str] = ("l1_unstructured",),
    sparsities: Sequence[float] = SPARSITIES,
    seeds: int = 8,
    rounds: int = 1,
) -> Plan:
    """Return the plan of a full grid."""
    return make_plan(methods, sparsities, range(seeds), rounds)


def in_parts(plan: Plan, **search: Any) -> Plan:
    """Return a plan whose last rounds have the parts of a search by rungs of their training."""
    stages, trials = dict(plan.stages), []
    for trial in plan.trials:
        begun = parts_of(last := plan.stages[trial.stages[-1]], {"rungs": "training", **search})
        keys = tuple(spec.key for spec in begun)
        stages |= {spec.key: spec for spec in begun} | {last.key: replace(last, starts_from=keys)}
        trials.append(replace(trial, parts=keys))
    return Plan(stages, tuple(trials))


def records_of(plan: Plan, loss: Loss) -> dict[str, StageRecord]:
    """Return a record for every stage, with validation accuracies of 0.9 minus the loss; those on test are wrong."""
    found = {}
    for key, spec in plan.stages.items():
        lost = 0.0
        if spec.kind in ("round", "part"):
            lost = loss(spec.fields["method"]["name"], spec.fields["target"], spec.fields["seed"])
        after = {"val/accuracy": 0.9 - lost, "test/accuracy": random.Random(key).random()}
        found[key] = replace(made := make_record(plan, key), after=after)
        if spec.kind == "part":  # an epoch has 25 steps
            steps = int(25 * float(spec.fields["until"].removesuffix("ep")))
            found[key] = replace(found[key], steps=steps, measurements={"seconds": steps / 100}, curve=made.curve[:1])
    return found


def noisy(key: object) -> float:
    """Return a loss between -0.001 and 0.001 that depends on `key` alone."""
    return random.Random(repr(key)).uniform(-0.001, 0.001)


def crossing(at: float) -> Loss:
    """Return a loss that grows with sparsity, and is the margin of a point at `at`."""
    return lambda method, sparsity, seed: 0.01 * (sparsity / at) ** 4 + noisy((method, sparsity, seed))


def run_search(
    policy: Policy,
    plan: Plan,
    records: Mapping[str, StageRecord],
    *,
    budget: Budget | None = None,
    failed: Collection[str] = (),
    shuffle: random.Random | None = None,
    seen: Collection[str] = (),
    kills: bool = False,
) -> tuple[list[Decision], dict[str, StageRecord]]:
    """Run a search as a driver would; return its decisions, and the records of the stages that it ran.

    Args:
        policy: the search
        plan: plan of the sweep
        records: records of all stages
        budget: limits
        failed: stages that fail every time
        shuffle: commits in random order, asking for a decision after each commit
        seen: networks that earlier searches have seen
        kills: begin the search anew after each commit
    """
    space, limits = SearchSpace(plan, seen), budget or Budget()
    replay, held, decisions = Replay(policy, space, limits), dict[str, StageRecord](), list[Decision]()
    while True:
        decision = replay.next(held, failed)
        if not decisions or decision.looks != decisions[-1].looks or decision.ended:
            decisions.append(decision)
        left = [key for key in decision.run if key not in failed]
        if decision.ended or not left:
            return decisions, held
        if shuffle is None:
            held |= {key: records[key] for key in left}
        else:
            ready = [key for key in left if all(each in held for each in plan.stages[key].inputs.values())]
            held |= {key: records[key] for key in [shuffle.choice(ready)]}
        if kills:
            replay = Replay(policy, space, limits)


def titles(decision: Decision) -> list[str]:
    """Return the titles of a decision's looks."""
    return [look.title for look in decision.looks]


def settings(**changes: Any) -> dict[str, Any]:
    """Return a sweep's configuration with a search."""
    return {"search": changes, "compare": {"margin": None}}
