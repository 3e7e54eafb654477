"""Rules about rounds: what they start from, when they prune, and what they leave."""

from __future__ import annotations

from orchestrator.compare.audit.rule import Audited, AuditRule, RuleAnswer, held, some
from orchestrator.compare.round_columns import budget_of, in_words, reached_of
from orchestrator.core.specs import REWIND
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import counted, in_points, percent
from orchestrator.trial.names import published_at_start

TOLERANCE = 0.005
"""Largest distance between the achieved and the requested sparsity; rounding to whole channels may allow more."""


def _same_initialisation(sweep: Audited) -> RuleAnswer:
    """Check that rounds that prune before training use one initialisation; rounds with new weights are left out.

    The initialisation must be the one that the start stage recorded and that the round scored and went back to. It
    must also be the dense network's, by settings and seed.
    """
    plan, known, early = sweep.plan, sweep.trained, dict[str, str]()
    for trial in plan.trials:
        start, dense = plan.stages[trial.stages[0]], plan.stages[trial.dense]
        settings = {name: value for name, value in start.fields.items() if name != "until"}
        for key in trial.stages[1:] if start is not dense else ():
            spec, found = plan.stages[key], known.get(start.key)
            if key not in known or spec.typed.restart.weights_row.control:
                continue
            if found is None or known[key].started_from != found.weights_digest:
                early[key] = "did not score the weights that its start recorded"
            elif spec.inputs.get(REWIND, start.key) != start.key:
                early[key] = "did not train the weights that it scored"
            else:
                early[key] = "" if settings == dense.fields else "differs from its dense network in seed or settings"
    faults = [f"{sweep.name(key)} {fault}" for key, fault in early.items() if fault]
    reason = (
        f"{len(early)} rounds scored and trained the weights of their start, with the dense network's settings and seed"
    )
    return held(early, faults, reason, "nothing was pruned before training")


def _when_published(sweep: Audited) -> RuleAnswer:
    """Check that methods that are published for pruning at initialisation prune before training."""
    early = [trial.config for trial in sweep.plan.trials if published_at_start(trial.config)]
    names = dict.fromkeys(config["method"]["name"] for config in early)
    late = dict.fromkeys(config["method"]["name"] for config in early if config["schedule"].get("at") == "trained")
    faults = (f"{name} ranks the trained network (schedule.at=trained), but its paper the initial one" for name in late)
    none = "no method here is published for pruning before training"
    return held(names, faults, f"{', '.join(names)} before training (schedule.at=start)", none)


def _achieved(sweep: Audited) -> RuleAnswer:
    """Compare each round's achieved and requested sparsity of its budget, with a tolerance for whole units."""
    plan, known = sweep.plan, sweep.trained
    asked = {key: record.requested_sparsity for key, record in known.items() if record.requested_sparsity is not None}
    budgets = {key: budget_of(plan.stages[key].typed) for key in asked}
    found = {key: reached_of(budget, known[key]) for key, budget in budgets.items()}
    units = {key: in_words(budget, plan.stages[key].typed.unit.kind) for key, budget in budgets.items()}
    reached = {key: share for key, share in found.items() if share is not None}
    due = {key: max(TOLERANCE, known[key].typed.rounding) for key in reached}
    gaps = {key: abs(share - asked[key]) for key, share in reached.items()}
    wrong = (
        f"{sweep.name(key)}: {percent(asked[key])} of {units[key]} requested, {percent(reached[key])} achieved"
        for key, gap in gaps.items()
        if gap > due[key]
    )
    said = []
    for unit in dict.fromkeys(units[key] for key in reached):
        of = [key for key in reached if units[key] == unit]
        gap, most = (max(values[key] for key in of) for values in (gaps, due))
        allowed = f", where whole units allow {in_points(most)}" if most > TOLERANCE else ""
        said.append(f"{in_points(gap)} of the {unit}{allowed}")
    none = "amounts were given, no sparsity was requested"
    if asked:
        none = f"the removed fraction of the {some(dict.fromkeys(units.values()))} is not recorded"
    return held(gaps, wrong, f"largest difference in points: {'; '.join(said)}", none)


def _dead(sweep: Audited) -> RuleAnswer:
    """Look for tensors without an entry left, apart from those that units of a transformer remove on purpose.

    The residual stream goes around a removed part.
    """
    rounds = {key: each for key, each in sweep.trained.items() if KINDS[each.kind].prunes}
    emptied = {key: [name for name, s in each.tensor_sparsity.items() if s >= 1] for key, each in rounds.items()}
    meant = {key for key in rounds if sweep.plan.stages[key].typed.unit.of_transformer}
    removed = {name for key in meant for name in emptied[key]}
    apart = (
        f"{counted(len(meant), 'round')} removed units of a transformer on purpose, "
        f"{counted(len(removed), 'tensor')} whole"
    )
    checked = rounds.keys() - meant
    dead = (f"{sweep.name(key)}: {name}" for key, names in emptied.items() if key in checked for name in names)
    reason = f"every tensor keeps entries in all {len(checked)} rounds{f'; {apart}' if meant else ''}"
    return held(checked, dead, reason, apart if meant else "nothing was pruned")


RULES = (
    AuditRule("the initialisation that was scored is the one that is trained", _same_initialisation),
    AuditRule("methods prune when their papers do", _when_published),
    AuditRule("achieved sparsity is the requested one", _achieved),
    AuditRule("no dead layer", _dead),
)
