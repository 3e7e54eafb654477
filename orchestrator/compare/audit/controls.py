"""Rules about controls: lines that show what the method adds to random, magnitude, or static masks."""

from __future__ import annotations

from orchestrator.compare.audit.rule import Audited, AuditRule, RuleAnswer, held
from orchestrator.compare.panels import positions
from orchestrator.config.training import row_of
from orchestrator.core.restart_kinds import CONTROLS, control_of
from orchestrator.core.specs import Plan, RestartFields, StageFields
from orchestrator.core.stage_kinds import KINDS
from orchestrator.trial.choices import decides_itself
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.rows import BaselineRole
from pruning.catalogue.scores import SCORES

STATIC = frozenset(name for name, row in DYNAMICS.items() if row.is_control)
"""Dynamics that control those whose masks change within a training."""
CONTROL = f"dynamics={' or '.join(sorted(STATIC))}"


def _random_control(sweep: Audited) -> RuleAnswer:
    """Look for a line whose method or score prunes at random."""
    return _baseline(sweep, "random")


def _magnitude_baseline(sweep: Audited) -> RuleAnswer:
    """Look for a line whose method or score prunes the smallest weights."""
    return _baseline(sweep, "magnitude")


def _baseline(sweep: Audited, baseline: BaselineRole) -> RuleAnswer:
    """Look for a line by the method or score that ranks, not by its name; shuffled or inverted masks do not count."""
    comparison = sweep.comparison
    choosing, search = trials_by(sweep.plan, baseline), comparison.search
    pruned = [row for row in comparison.rows if row.round]
    found = "; ".join(dict.fromkeys(row.line for row in pruned if row.trial in choosing))
    among = "; ".join(dict.fromkeys(row.line for row in pruned))
    why = ": the search has stopped it" if search and not choosing.isdisjoint(search.stopped) else ""
    return held(pruned, [] if found else [f"none among {among}{why}"], found)


def trials_by(plan: Plan, baseline: BaselineRole) -> set[str]:
    """Return the trials that rank by a score, or prune by a method, whose row is this baseline."""
    found = set()
    for trial in plan.trials:
        own = decides_itself(trial.config["method"])
        node = trial.config["method"] if own else trial.config.get("score", {"kind": "magnitude"})
        row = (METHODS if own else SCORES).get(str(node.get("kind")))
        changed = (control := control_of(trial.config)).inverts or control.shuffles
        moving = baseline == "random" and _changes_masks(plan.stages[trial.stages[-1]].typed)
        if row is not None and row.baseline == baseline and not changed and not moving:
            found.add(trial.name)
    return found


def _mask_control(sweep: Audited) -> RuleAnswer:
    """Look for a control by `restart`; masks that change within a training are controlled by static ones.

    Rounds whose masks change refuse `restart.control`, so a line with dynamics=static on their panel is their control.
    Static masks that are drawn at random need no control.
    """
    rounds = [spec.typed for spec in sweep.plan.stages.values() if KINDS[spec.kind].prunes]
    restarts = [each.restart for each in rounds]
    controls = {each.control for each in restarts if each.control != "none"}
    controls |= {each.weights for each in restarts if each.weights_row.control and not each.control_row.weights}
    restarted = [each for each in rounds if each.restart != RestartFields()]
    fixed = [each for each in restarted if not _changes_masks(each) and not _is_drawn(each)]
    among = ", ".join(name for name in CONTROLS if name != "none")
    faults = [f"none of restart.control={among}"] if fixed and not controls else []
    changing = _sparse_trainings(sweep.plan) if any(map(_changes_masks, restarted)) else {}
    faults += [
        f"{model} on {data} has no line with {CONTROL}, the control of dynamics={', '.join(sorted(kinds))}"
        for (model, data), kinds in changing.items()
        if kinds.isdisjoint(STATIC)
    ]
    found = [*sorted(controls), *([CONTROL] if changing else [])]
    none = "masks are drawn at random and stay" if restarted else "every network is trained, pruned and fine-tuned"
    return held([*fixed, *changing], faults, ", ".join(found), none)


def _changes_masks(fields: StageFields) -> bool:
    """Whether a round's masks change within its training."""
    return _is_in_training(fields) and fields.dynamics.named not in STATIC


def _is_drawn(fields: StageFields) -> bool:
    """Whether a round draws its masks at random and keeps them."""
    row = SCORES.get(fields.score.kind or "")
    return fields.dynamics.named in STATIC and row is not None and row.draws


def _is_in_training(fields: StageFields) -> bool:
    """Whether a round's dynamics belongs to its training, as `static` and `rigl` do."""
    row = row_of(vars(fields.dynamics))
    return row is not None and row.in_training


def _sparse_trainings(plan: Plan) -> dict[tuple[str, str], set[str]]:
    """Return panel -> names of the dynamics of its trainings from a step, for panels on which masks change in one."""
    found: dict[tuple[str, str], set[str]] = {}
    for trial, position in zip(plan.trials, positions(plan), strict=True):
        for fields in (plan.stages[key].typed for key in trial.stages):
            if fields.restart != RestartFields() and _is_in_training(fields):
                found.setdefault(position.panel, set()).add(fields.dynamics.named)
    return {panel: kinds for panel, kinds in found.items() if not kinds <= STATIC}


RULES = (
    AuditRule("a random control", _random_control, of_many=True),
    AuditRule("a magnitude baseline", _magnitude_baseline, of_many=True),
    AuditRule(
        "a control of masks that are found before training, or trained from an earlier step",
        _mask_control,
        of_many=True,
    ),
)
