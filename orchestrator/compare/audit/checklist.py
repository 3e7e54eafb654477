"""The checklist that a pruning comparison should pass, computed from the sweep itself. Pure.

After Blalock, Gonzalez Ortiz, Frankle and Guttag, "What is the State of Neural Network Pruning?", arXiv 2003.03033, and
the ways in which such comparisons go wrong silently: sparsities that were not reached, dead layers, unpaired seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.compare.audit import lines, rounds
from orchestrator.compare.audit.answers import Verdict
from orchestrator.compare.comparison import Comparison
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    rule: str
    verdict: Verdict
    reason: str


def audit(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Finding, ...]:
    """Hold a sweep to the checklist: each rule passes, fails or does not apply, with its reason."""
    points, finished = comparison.operating_points, {key: records[key] for key in plan.stages if key in records}
    known = {key: record for key, record in finished.items() if KINDS[record.kind].trains}
    answers = {
        f"{lines.LEAST_POINTS} or more operating points on every line": lines.operating_points(comparison),
        "compression and theoretical speed-up, both": lines.both_measures(
            points, deploys=any(trial.measured for trial in plan.trials)
        ),
        "a random control": lines.random_control(plan, comparison),
        "a magnitude baseline": lines.magnitude_baseline(plan, comparison),
        "a control of masks that are found before training, or trained from an earlier step": rounds.mask_control(plan),
        f"{lines.LEAST_SEEDS} or more seeds at every point": lines.seeds([*comparison.dense, *points]),
        f"{lines.LEAST_PANELS} or more pairs of data set and network": lines.panels(comparison),
        "the dense network's figures": lines.dense(comparison),
        "the same seeds for dense and pruned, and for every line": lines.paired(comparison),
        "the initialisation that was scored is the one that is trained": rounds.same_initialisation(plan, known),
        "compared after equal training": lines.equally_trained(comparison),
        "a gain over dense is one over dense trained as long": lines.gained(comparison),
        "methods prune when their papers do": rounds.when_published(plan),
        "matching is a test against a stated margin": lines.matching(comparison),
        "achieved sparsity is the requested one": rounds.achieved(plan, known),
        "no dead layer": rounds.dead(plan, known),
        "chosen on validation, test read once": rounds.test_once(plan, known),
        "scores read no test data": rounds.scored_apart(plan, known),
        "one kind of processor, one release of torch": rounds.one_kind(finished),
        "every trial finished": lines.finished(comparison),
    }
    return tuple(Finding(rule, verdict, reason) for rule, (verdict, reason) in answers.items())
