"""Portions of a sweep that run one after another: all stages at once, or what a search decides to run next."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.compare.statistics import LEVEL, t_quantile
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.estimates.forecast import in_words
from orchestrator.planning.number_formats import counted
from orchestrator.store.store import Store
from orchestrator.sweep.earlier_sweeps import estimated
from orchestrator.sweep.outcome import Outcome
from orchestrator.sweep.search.building import PlannedSearch


class Portions:
    """Portions of a sweep; each follows from the records of all portions before.

    Args:
        outcome: state of the sweep; `next` sets its `decision`
        search: the search; None runs all stages in one portion
    """

    def __init__(self, outcome: Outcome, search: PlannedSearch | None) -> None:
        self._outcome, self._search, self._begun = outcome, search, False
        self._replay = None if search is None else search.replay()
        if search is not None:
            t_quantile(LEVEL, 1)  # imports SciPy now, which takes longer than a decision

    def next(self) -> Plan:
        """Return the plan of the stages to run now; a plan without stages if none are left, or all left have failed."""
        outcome, plan = self._outcome, self._outcome.plan
        if outcome.killed:  # interrupted, or the first failure ends the sweep
            return plan.without(plan.stages)
        if self._replay is None:
            begun, self._begun = self._begun, True
            return plan.without(plan.stages if begun else set(outcome.records))
        decision = outcome.decision = self._replay.next(outcome.records, outcome.failing)
        return plan.without(plan.stages.keys() - (set(decision.run) - outcome.failures.keys()))

    def again(self) -> Plan:
        """Return the first portion anew, after finished stages have lost their weights."""
        self._begun, self._replay = False, None if self._search is None else self._search.replay()
        return self.next()

    def most(self) -> Plan:
        """Return the plan with only the stages of the longest search."""
        plan = self._outcome.plan
        return plan if self._search is None else plan.without(plan.stages.keys() - self._search.bounds()[1])

    def told(self) -> str:
        """Return a sentence with the stages that the search runs at least and at most; empty without a search."""
        if self._search is None:
            return ""
        least, most = self._search.bounds()
        return f"The search runs {len(least)} to {len(most)} of {counted(len(self._outcome.plan.stages), 'stage')}."


def search_preview(search: PlannedSearch | None, store: Store, finished: Mapping[str, StageRecord]) -> list[str]:
    """Return lines with the least and the most that a search runs; the preview has the whole grid."""
    if search is None:
        return []
    plan, lines = search.space.plan, []
    for name, keys in zip(("at least", "at most"), search.bounds(), strict=True):
        part = plan.without(plan.stages.keys() - keys)
        left = counted(sum(key not in finished for key in keys), "stage")
        made = in_words(estimated(store, part, finished)[1])
        lines.append(f"{name} {counted(len(keys), 'stage')}, {left} to run{f': {made}' if made else ''}")
    return [*lines, f"the figures above are those of all {len(plan.stages)} stages"]
