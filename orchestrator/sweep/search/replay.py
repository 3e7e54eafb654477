"""Replay of a search over committed records: every decision, from the first one on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

from orchestrator.compare.trial_rows import collector_paused
from orchestrator.core.events import Decision, Look
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Key
from orchestrator.sweep.search.candidates import Cell, SearchSpace
from orchestrator.sweep.search.policy import Answer, Ask, Budget, Conclude, Figures, Policy, RuleOut, Seen, Strand
from orchestrator.sweep.search.quantities import Finished

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
        self._strands: list[Strand] = list(policy.strands(space))
        self._pending: dict[int, Ask] = {}
        self._looks: list[Look] = []
        self._look_of: dict[int, int] = {}
        self._answers: dict[int, list[Answer]] = {index: [] for index in range(len(self._strands))}
        self._reasons: dict[Key, str] = {}
        self._asked: dict[Key, None] = {}
        self._trials: set[int] = set()
        self._ended, self._steps, self._seconds, self._counted = "", 0, 0.0, 0
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
                values = {cell.network: None if found is None else found.value for cell, found in seen.items()}
                self._looks[self._look_of[index]] = replace(self._looks[self._look_of[index]], seen=values)
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
                    last = self._look_of[index]
                    self._looks[last] = replace(self._looks[last], concluded=step.text)
                elif isinstance(step, RuleOut):
                    self._reasons |= {
                        self.space.ends[cell.trial]: step.reason
                        for each in step.candidates
                        for cell in each.cells.values()
                    }
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
        cells, stages = [cell for ask in self._pending.values() for cell in ask.cells], self.space.stages
        self._asked |= dict.fromkeys([key for cell in cells for key in stages(cell)])
        self._trials.update([cell.trial for cell in cells])

    def _count(self, records: Records) -> None:
        """Add the work of the stages that were asked for since the last count; a round adds to its parts."""
        new = [key for key in list(self._asked)[self._counted :] if key in records]
        stages = self.space.plan.stages
        near = {
            *new,
            *(part for key in new for part in stages[key].starts_from if part in self._asked),
        } & records.keys()
        steps = self.space.plan.added({key: records[key].steps for key in near})
        seconds = self.space.plan.added({key: records[key].seconds for key in near})
        self._steps += round(sum(steps[key] for key in new))
        self._seconds += math.fsum(seconds[key] for key in new)
        self._counted = len(self._asked)

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
        plan, found, dense_values = self.space.plan, dict[Cell, Figures | None](), dict[Key, float]()
        get, trials, isfinite = records.get, plan.trials, math.isfinite
        for cell in ask.cells:
            index, _, network, dense = cell
            record = get(network)
            if dense not in dense_values:
                dense_values[dense] = records[dense].figure("val") if dense in records else math.nan
            value, reference = math.nan if record is None else record.figure("val"), dense_values[dense]
            if record is None or not (isfinite(value) and isfinite(reference)):
                found[cell] = None
                continue
            trial, metric = trials[index], record.metrics[0]
            margin = trial.config.get("compare", _EMPTY).get("margin")
            metric = metric if margin is None else _with_margin(metric, float(margin))
            found[cell] = Figures(metric, value, reference, Finished(plan, records, trial, record))
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
        plan, reasons = self.space.plan, self._reasons
        other = "" if self._pending else self._ended or NOT_ASKED
        if not (reasons or other):
            return {}
        known = {*self._asked, *records}.issuperset
        return {
            plan.trials[index].name: reason
            for index, end in enumerate(self.space.ends)
            if (reason := reasons.get(end, other)) and not known(plan.work[index])
        }


@cache
def _with_margin(metric: Metric, margin: float) -> Metric:
    return replace(metric, margin=margin)
