"""Replay of a search over committed records: every decision, from the first one on. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from orchestrator.compare.deployment_points import figures_of, headline
from orchestrator.compare.trial_rows import collector_paused
from orchestrator.core.events import Decision, Look
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Key, TrialSpec
from orchestrator.sweep.search.candidates import Cell, SearchSpace
from orchestrator.sweep.search.policy import Answer, Ask, Budget, Conclude, Figures, Policy, RuleOut, Seen, Strand
from orchestrator.sweep.search.quantities import machine, quantity

Records = Mapping[Key, StageRecord]
NOT_ASKED = "the search did not ask for it"


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
                seen = {cell: self._figures(cell, records) for cell in ask.cells}
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
                        self.space.plan.trials[cell.trial].stages[-1]: step.reason
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
        for key in list(self._asked)[self._counted :]:
            if key in records:
                self._steps += records[key].steps
                self._seconds += records[key].seconds
        self._counted = len(self._asked)
        wanted = self._trials_with(self._pending.values())
        if self._pending and (reached := self._budget.reached(wanted, self._steps, self._seconds)):
            self._ended = reached
            for index, ask in self._pending.items():
                self._answers[index].append(Answer(f"{ask.title}: not done, as {reached}"))
            self._pending = {}
        for index, ask in self._pending.items():
            self._look_of[index] = len(self._looks)
            self._looks.append(Look(ask.title, tuple(cell.network for cell in ask.cells), confirms=ask.confirms))
            for cell in ask.cells:
                self._trials.add(cell.trial)
                self._asked.update(dict.fromkeys(self.space.stages(cell)))

    def _trials_with(self, asks: Iterable[Ask]) -> int:
        return len(self._trials.union(cell.trial for ask in asks for cell in ask.cells))

    def _settled(self, records: Records, failed: frozenset[Key]) -> bool:
        """Whether each network that was asked for is finished, or cannot be because a stage fails every time."""
        if self._asked.keys() <= records.keys():
            return True
        pending = [self.space.stages(cell) for ask in self._pending.values() for cell in ask.cells]
        return all(not failed.isdisjoint(keys) or all(key in records for key in keys) for keys in pending)

    def _figures(self, cell: Cell, records: Records) -> Figures | None:
        """Return the figures of a network without the test split; None if it failed, or a figure is not finite."""
        record, dense = records.get(cell.network), records.get(cell.dense)
        if record is None or dense is None:
            return None
        value, reference = record.figure("val"), dense.figure("val")
        if not (math.isfinite(value) and math.isfinite(reference)):
            return None
        trial = self.space.plan.trials[cell.trial]
        margin = trial.config.get("compare", {}).get("margin")
        metric = record.primary if margin is None else replace(record.primary, margin=float(margin))
        at_end = record.key == trial.stages[-1]
        return Figures(
            metric,
            value,
            reference,
            read=partial(_without_test, record, trial if at_end else None, records),
            quantity=partial(quantity, self.space.plan, records, trial, record),
            machine=partial(machine, records, trial),
        )

    def _decision(self, records: Records) -> Decision:
        plan, ended = self.space.plan, not self._pending
        answers = [answer for each in self._answers.values() for answer in each]
        stopped = {}
        for index, trial in enumerate(plan.trials):
            reason = self._reasons.get(trial.stages[-1], self._ended or NOT_ASKED if ended else "")
            if reason and any(key not in self._asked and key not in records for key in plan.work[index]):
                stopped[trial.name] = reason
        return Decision(
            looks=tuple(self._looks),
            run=tuple(key for key in self._asked if key not in records),
            stopped=stopped,
            answers=tuple(answer.text for answer in answers),
            networks=tuple(key for answer in answers for key in answer.networks),
            ended=ended,
        )


def _without_test(record: StageRecord, deployed: TrialSpec | None, records: Records) -> dict[str, float]:
    """Return the figures of a network and of its deployments, without those of a test split.

    Args:
        record: record of the network
        deployed: trial that deploys the network; None for a network before the end of its trial
        records: stage key -> record
    """
    measured = () if deployed is None else (*figures_of(deployed, records), *headline(deployed, records))
    found = {**record.figures, **{name: each for name, each, _ in measured}}
    return {name: each for name, each in found.items() if not _is_of_test(name)}


def _is_of_test(figure: str) -> bool:
    """Whether a figure comes from a test split, as in `test/loss`, `test_NAME/loss` or `deploy/onnx_int8/test/loss`."""
    return any(part.startswith("test") for part in figure.split("/")[:-1])
