"""Rules of the audit that look at the rounds of trials, as they were planned and recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from orchestrator.compare.audit.answers import Answer, held, some
from orchestrator.compare.chosen import budget_of, reached_of
from orchestrator.config.parts.choices import published_at_start
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import REWIND, Plan
from orchestrator.core.stage_fields import Restart
from orchestrator.core.stage_kinds import KINDS

TOLERANCE = 0.005
"""Largest distance of what was achieved from what was requested where no more is due to rounding to whole channels."""


def mask_control(plan: Plan) -> Answer:
    rounds = [spec.typed.restart for spec in plan.stages.values() if KINDS[spec.kind].prunes]
    found = {restart.control for restart in rounds} - {"none"}
    found |= {"reinit" for restart in rounds if restart.weights == "reinit" and restart.control != "small"}
    faults = [] if found else ["none of restart.control=shuffle, reinit, invert, small"]
    none = "every network is trained, pruned and fine-tuned"
    return held([restart for restart in rounds if restart != Restart()], faults, ", ".join(sorted(found)), none)


def same_initialisation(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    """Hold rounds that prune before training to one initialisation; new weights are a control, and left out.

    It is what the start recorded, what a round scored and went back to, and by settings and seed the dense network's.
    """
    early: dict[str, str] = {}
    for trial in plan.trials:
        start, dense = plan.stages[trial.stages[0]], plan.stages[trial.dense]
        settings = {name: value for name, value in start.fields.items() if name != "until"}
        for key in trial.stages[1:] if start.kind == "start" else ():
            spec, found = plan.stages[key], known.get(start.key)
            if key not in known or spec.typed.restart.weights == "reinit":
                continue
            if found is None or known[key].started_from != found.weights_digest:
                early[key] = "scored other weights than its start recorded"
            elif spec.inputs.get(REWIND, start.key) != start.key:
                early[key] = "trained other weights than it scored"
            else:
                early[key] = "" if settings == dense.fields else "has a dense network of another seed or other settings"
    faults = [f"{_name(plan, key)} {fault}" for key, fault in early.items() if fault]
    reason = (
        f"{len(early)} rounds scored and trained what their start recorded, by the dense network's settings and seed"
    )
    return held(early, faults, reason, "nothing was pruned before training")


def when_published(plan: Plan) -> Answer:
    """Hold methods that are published for the network as it is initialised to that."""
    early = [trial.config for trial in plan.trials if published_at_start(trial.config)]
    names = dict.fromkeys(config["method"]["name"] for config in early)
    late = dict.fromkeys(config["method"]["name"] for config in early if config["schedule"].get("at") != "start")
    faults = (f"{name} ranks the trained network (schedule.at=trained), and its paper the initial one" for name in late)
    none = "no method here is published for networks before training"
    return held(names, faults, f"{', '.join(names)} before training (schedule.at=start)", none)


def achieved(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    """Hold each round to its target in what that is a fraction of, beside what whole units of it allow."""
    asked = {key: record.requested_sparsity for key, record in known.items() if record.requested_sparsity is not None}
    budgets = {key: budget_of(plan.stages[key].typed) for key in asked}
    found = {key: reached_of(budget, known[key]) for key, budget in budgets.items()}
    reached = {key: share for key, share in found.items() if share is not None}
    due = {key: max(TOLERANCE, known[key].details.get("rounding", 0.0)) for key in reached}
    gaps = {key: abs(share - asked[key]) for key, share in reached.items()}
    wrong = (
        f"{_name(plan, key)}: {asked[key]:.2%} of {budgets[key]} requested, {reached[key]:.2%} achieved"
        for key, gap in gaps.items()
        if gap > due[key]
    )
    said = []
    for budget in dict.fromkeys(budgets[key] for key in reached):
        of = [key for key in reached if budgets[key] == budget]
        gap, most = (100 * max(values[key] for key in of) for values in (gaps, due))
        allowed = f", where whole channels allow {most:.2f}" if most > 100 * TOLERANCE else ""
        said.append(f"{gap:.2f} of the {budget}{allowed}")
    none = "amounts were given, no sparsity was requested"
    if asked:
        none = f"what is gone of the {some(dict.fromkeys(budgets.values()))} is not recorded"
    return held(gaps, wrong, f"largest difference in points: {'; '.join(said)}", none)


def dead(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    pruned = {key: record.tensor_sparsity for key, record in known.items() if KINDS[record.kind].prunes}
    dead = (f"{_name(plan, key)}: {name}" for key, each in pruned.items() for name in each if each[name] >= 1.0)
    return held(pruned, dead, f"every tensor keeps entries in all {len(pruned)} rounds")


def test_once(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    faults = []
    for key, record in known.items():
        trained_by = set(record.before).union(*(point.metrics for point in record.curve))
        if any(name.startswith("test") for name in trained_by):
            faults.append(f"{_name(plan, key)} evaluates on test while it trains")
        elif not math.isfinite(record.figure("val")):
            faults.append(f"{_name(plan, key)} has no validation {record.primary.title}")
    reason = "curves and selection use the validation split; each stage has one test figure"
    return held(known, faults, reason, "nothing has finished")


def scored_apart(plan: Plan, known: Mapping[str, StageRecord]) -> Answer:
    scoring = {key: record.details.get("scoring", {}) for key, record in known.items()}
    reading = {key: each.get("split") for key, each in scoring.items() if each.get("examples")}
    faults = (
        f"{_name(plan, key)} scored {f'the {split} split' if split else 'examples of a split that is not recorded'}"
        for key, split in reading.items()
        if split not in ("train", "val")
    )
    own = sorted({scoring[key]["score"] for key in reading if "." in scoring[key].get("score", "")})
    reason = (
        f"{len(reading)} rounds scored examples of the {' or '.join(sorted({str(s) for s in reading.values()}))} split"
    )
    given = f"; what {', '.join(own)} reads besides is not recorded" if own else ""
    return held(reading, faults, reason + given, "no score read examples")


def one_kind(known: Mapping[str, StageRecord]) -> Answer:
    environments = [record.environment for record in known.values()]
    kinds = {name: sorted({each.get(name, "not recorded") for each in environments}) for name in ("processor", "torch")}
    mixed = some(f"{name}: {' and '.join(found)}" for name, found in kinds.items() if len(found) > 1)
    faults = [f"the same stage may have other bits on each: {mixed}"] if mixed else []
    return held(known, faults, ", ".join(found for kind in kinds.values() for found in kind), "nothing has finished")


def _name(plan: Plan, key: str) -> str:
    indices = plan.trials_of.get(key, ())
    trial = plan.trials[indices[0]].name if indices else key[:12]
    return f"{trial}, round {plan.stages[key].round}"
