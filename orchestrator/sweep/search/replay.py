"""Replay of a search over committed records: every decision, from the first one on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

from orchestrator.core.events import Decision, Look
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Key
from orchestrator.sweep.search.candidates import Cell, SearchSpace
from orchestrator.sweep.search.policy import Answer, Ask, Budget, Conclude, Figures, Policy, RuleOut, Seen, Strand
from orchestrator.sweep.search.quantities import Finished
from pruning.measure.garbage_collection import collector_paused

Records = Mapping[Key, StageRecord]
NOT_ASKED = "the search did not ask for it"
_EMPTY: Mapping[str, float | None] = {}


def decide(policy: Policy, space: SearchSpace, budget: Budget, records: Records, failed: Collection[Key]) -> Decision:
    """Return the decision that follows from committed records.

    Args:
        policy: the search
        space: candidates of the sweep
        budget: limits of the search
        records: stage key -> record of the finished stages
        failed: keys of stages that fail every time
    """
    return Replay(policy, space, budget).next(records, failed)


class Replay:
    """Search that goes on from decision to decision.

    All strands wait until every network of their looks is finished; then all of them go on. Equal records therefore
    give equal decisions, in whatever order they came, and a new `Replay` reaches the same state.

    Args:
        policy: the search
        space: candidates of the sweep
        budget: limits of the search
    """

    def __init__(self, policy: Policy, space: SearchSpace, budget: Budget) -> None:
        self.space, self._budget = space, budget
        self._names = [trial.name for trial in space.plan.trials]
        self._margins = [(trial.config.get("compare") or _EMPTY).get("margin") for trial in space.plan.trials]
        self._strands: list[Strand] = list(policy.strands(space))
        self._pending: dict[int, Ask] = {}
        self._looks: list[Look] = []
        self._look_of: dict[int, int] = {}
        self._answers: dict[int, list[Answer]] = {index: [] for index in range(len(self._strands))}
        self._reasons: dict[int, str] = {}
        self._asked: dict[Key, None] = {}
        self._trials: set[int] = set()
        self._figures: dict[Key, Figures] = {}
        self._ended, self._steps, self._seconds, self._spent = "", 0, 0.0, list[Key]()
        for index in range(len(self._strands)):
            self._advance(index, None)
        self.trials_first = self._trials_with(self._pending.values())
        """Number of trials of the first looks."""
        self._open({})

    @collector_paused()
    def next(self, records: Records, failed: Collection[Key] = ()) -> Decision:
        """Go on as far as the records reach, and return the decision."""
        failed = frozenset(failed)
        while self._pending and self._settled(records, failed):
            pending, self._pending = self._pending, {}
            for index, ask in pending.items():
                seen = self._seen(ask, records)
                values = {cell[2]: None if found is None else found.value for cell, found in seen.items()}
                look = self._looks[self._look_of[index]]
                self._looks[self._look_of[index]] = Look(look.title, look.asked, values, confirms=look.confirms)
                self._advance(index, seen)
            self._open(records)
        return self._decision(records)

    def _advance(self, index: int, seen: Seen | None) -> None:
        """Run a strand to its next look."""
        strand = self._strands[index]
        try:
            step = next(strand) if seen is None else strand.send(seen)
            while not isinstance(step, Ask):
                if isinstance(step, Conclude):
                    look = self._looks[self._look_of[index]]
                    known = Look(look.title, look.asked, look.seen, step.text, look.confirms)
                    self._looks[self._look_of[index]] = known
                elif isinstance(step, RuleOut):
                    trials = [cell[0] for each in step.candidates for cell in each.cells.values()]
                    self._reasons |= dict.fromkeys(trials, step.reason)
                elif isinstance(step, Answer):
                    self._answers[index].append(step)
                step = next(strand)
            self._pending[index] = step
        except StopIteration:
            return

    def _open(self, records: Records) -> None:
        """Begin the next looks, unless a limit of the budget is reached."""
        self._count(records)
        wanted = self._trials_with(self._pending.values())
        if self._pending and (reached := self._budget.reached(wanted, self._steps, self._seconds)):
            self._ended = reached
            for index, ask in self._pending.items():
                self._answers[index].append(Answer(f"{ask.title}: not done, as {reached}"))
            self._pending = {}
        for index, ask in self._pending.items():
            self._look_of[index] = len(self._looks)
            self._looks.append(Look(ask.title, tuple([cell.network for cell in ask.cells]), confirms=ask.confirms))
        asked, stages = self._asked, self.space.stages
        cells = [cell for ask in self._pending.values() for cell in ask.cells if cell[2] not in asked]
        new = [key for cell in cells for key in stages(cell) if key not in asked]
        asked |= dict.fromkeys(new)
        self._spent = [*dict.fromkeys(new)] if self._budget.counts else []
        self._trials.update([cell[0] for cell in cells])

    def _count(self, records: Records) -> None:
        """Add the work of the stages that were asked for since the last count; a round adds to its parts."""
        new, plan = [key for key in self._spent if key in records], self.space.plan
        parts = (part for key in new for part in plan.stages[key].starts_from if part in self._asked)
        near = {*new, *(part for part in parts if part in records)}
        steps = plan.added({key: records[key].steps for key in near})
        seconds = plan.added({key: records[key].seconds for key in near})
        self._steps += round(sum(steps[key] for key in new))
        self._seconds += math.fsum(seconds[key] for key in new)

    def _trials_with(self, asks: Iterable[Ask]) -> int:
        return len(self._trials.union([cell.trial for ask in asks for cell in ask.cells]))

    def _settled(self, records: Records, failed: frozenset[Key]) -> bool:
        """Whether each network that was asked for is finished, or cannot be because a stage fails every time."""
        if self._asked.keys() <= records.keys():
            return True
        pending = [self.space.stages(cell) for ask in self._pending.values() for cell in ask.cells]
        return all(not failed.isdisjoint(keys) or all(key in records for key in keys) for keys in pending)

    def _seen(self, ask: Ask, records: Records) -> dict[Cell, Figures | None]:
        """Return the figures of the networks that a look asked for, without the test split.

        A network has none if it failed, or if its primary metric or that of its dense network is not finite.
        """
        found, dense_values, known = dict[Cell, Figures | None](), dict[Key, float](), self._figures
        plan, margins, get, isfinite = self.space.plan, self._margins, records.get, math.isfinite
        trials = plan.trials
        for cell in ask.cells:
            index, _, network, dense = cell
            if network in known:
                found[cell] = known[network]
                continue
            found[cell] = None
            if (record := get(network)) is None:
                continue
            if dense not in dense_values:
                dense_values[dense] = records[dense].figure("val") if dense in records else math.nan
            metric, margin, reference = record.metrics[0], margins[index], dense_values[dense]
            value = record.after.get(f"val/{metric.name}", math.nan)
            if isfinite(value - reference):
                metric = metric if margin is None else _of_margin(metric, float(margin))
                figures = Figures(metric, value, reference, Finished(plan, records, trials[index], record))
                found[cell] = known[network] = figures
        return found

    def _decision(self, records: Records) -> Decision:
        answers = [answer for each in self._answers.values() for answer in each]
        return Decision(
            looks=tuple(self._looks),
            run=tuple([key for key in self._asked if key not in records]),
            stopped=self._stopped(records),
            answers=tuple([answer.text for answer in answers]),
            networks=tuple([key for answer in answers for key in answer.networks]),
            ended=not self._pending,
        )

    def _stopped(self, records: Records) -> dict[str, str]:
        """Return name -> reason for the trials that the search does not run to their ends."""
        ends, work, asked, names = self.space.ends, self.space.plan.work, self._asked, self._names
        reasons: Iterable[tuple[int, str]] = self._reasons.items()
        if not self._pending:
            other = self._ended or NOT_ASKED
            reasons = [(index, self._reasons.get(index, other)) for index in range(len(ends))]
        return {
            names[index]: reason
            for index, reason in reasons
            if not ((end := ends[index]) in asked or end in records)
            or not all(key in asked or key in records for key in work[index])
        }


@cache
def _of_margin(metric: Metric, margin: float) -> Metric:
    return replace(metric, margin=margin)
