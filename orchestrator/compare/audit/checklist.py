"""Checklist that a pruning comparison should pass, computed from the sweep itself. Pure.

The rules follow Blalock, Gonzalez Ortiz, Frankle and Guttag, "What is the State of Neural Network Pruning?", arXiv
2003.03033, and cover silent errors of such comparisons: sparsities that were not reached, dead layers, unpaired seeds.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.compare.audit import compared_points, controls, data_splits, rounds
from orchestrator.compare.audit.rule import Audited, Finding
from orchestrator.compare.comparison import Comparison
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

RULES = (*compared_points.RULES, *controls.RULES, *rounds.RULES, *data_splits.RULES)


def audit(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Finding, ...]:
    """Check a sweep against every rule: each passes, fails or does not apply, with a reason."""
    sweep = Audited(plan, records, comparison)
    rules = (rule for rule in RULES if comparison.search is not None or not rule.searches_only)
    return tuple(Finding(rule.title, *rule.check(sweep), of_many=rule.of_many) for rule in rules)
