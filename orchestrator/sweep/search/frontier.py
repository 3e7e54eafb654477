"""Search `frontier`: the networks that no other network beats in validation figure and size at once, by rungs.

All candidates of a rung are compared by their means over the same seeds. A candidate that another one dominates, or
that breaks a constraint, stops; all others go on to the next rung. The rungs are synchronous, as in `halving`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import le

from orchestrator.core.plain_data import canonical_json
from orchestrator.planning.number_formats import counted
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.frontier_points import (
    ROUNDING,
    Objectives,
    Placed,
    answers,
    hypervolume,
    nondominated,
    nothing,
    placed,
)
from orchestrator.sweep.search.halving import Rungs
from orchestrator.sweep.search.policy import Ask, Conclude, RuleOut, Strand
from orchestrator.sweep.search.quantities import MEASURED, are_worse, lower_ends, place_of_measurement

ROOM = 0.1
"""Distance of the hypervolume's reference from the worst value of the first rung, as a fraction of the range."""


@dataclass(frozen=True)
class Frontier:
    """Non-dominated networks of each data set.

    Args:
        against: quantities to make small besides the loss of the validation figure
        within: largest mean loss against dense of a network in the answer, in the metric's own scale; None for any
        limits: quantity -> its largest mean in the answer
        rungs: `seeds` (each rung has more of the seeds), `rounds` (more of the rounds, of all seeds) or `training`
            (more of the last training, of all seeds)
        first: number of seeds, rounds, or epochs or steps of the first rung
        factor: factor from rung to rung
        confidence: level of an interval that must show a loss before a candidate is ruled out; None: means decide
    """

    against: Sequence[str] = field(default_factory=lambda: ["parameters"])
    within: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    rungs: str = "seeds"
    first: int = 1
    factor: int = 3
    confidence: float | None = None

    def refusals(self, space: SearchSpace) -> Iterator[str]:
        """Yield the reasons why the candidates have no frontier."""
        groups = self._groups(space)
        if all(len(group) < 2 for group in groups.values()):
            yield (
                "search=frontier compares networks, and no data set has two candidates; add an axis, as in "
                "schedule.sparsity=0.5,0.7,0.9."
            )
            return
        for group in groups.values():
            yield from self._rungs.refusals(space, group)
            trials = [space.plan.trials[cell.trial] for each in group for cell in each.cells.values()]
            if len({canonical_json(trial.config.get("task")) for trial in trials}) > 1:
                yield "search=frontier compares networks by one metric, and `task` differs; pass one task."
            places = {str(place_of_measurement(trial)): trial.name for trial in trials}
            yield from self._unmeasured(places)

    def _unmeasured(self, places: Mapping[str, str]) -> Iterator[str]:
        """Yield a sentence for a quantity that the plan does not measure, or not in one way."""
        measured = next((name for name in self._quantities if name in MEASURED), None)
        if measured is None:
            return
        key = "search.against" if measured in self.against else "search.limits"
        if "None" in places:
            yield (
                f"`{key}` names {measured}, which is measured on deployed networks, and {places['None']} deploys none; "
                f"pass deploy={'huggingface' if measured == 'token_latency' else 'shrink, or another format'}."
            )
        elif len(places) > 1:
            yield (
                f"`{key}` names {measured}, and `deploy` differs between trials; pass one first value of "
                "deploy.formats and deploy.batch_sizes, and one deploy.threads."
            )
        elif self.rungs != "seeds" and measured in self.against:
            yield f"`{key}` names {measured}, which is measured at the ends of trials; pass search.rungs=seeds."

    def strands(self, space: SearchSpace) -> list[Strand]:
        """Return the race of each data set."""
        return [self._race(space, label, group) for label, group in self._groups(space).items()]

    def bounds(self, space: SearchSpace) -> tuple[Iterable[Cell], Iterable[Cell]]:
        """Return the networks if the first rung leaves none, and if all rungs leave all."""
        least, most = list[Cell](), list[Cell]()
        for group in self._groups(space).values():
            amounts = self._rungs.amounts(space, group)
            if len(group) == 1:  # nothing is left to compare before the last rung
                amounts = amounts[-1:]
            least += self._rungs.cells(space, group, amounts[0])
            for amount in amounts:
                most += self._rungs.cells(space, group, amount)
        return dict.fromkeys(least), dict.fromkeys(most)

    @property
    def _rungs(self) -> Rungs:
        return Rungs(self.rungs, self.first, self.factor, self.confidence)

    @property
    def _quantities(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.against, *self.limits)))

    def _groups(self, space: SearchSpace) -> dict[str, list[Candidate]]:
        """Return a label for people -> the candidates of a data set.

        With rungs of seeds, networks before the ends of trials are candidates as in a comparison, unless a quantity is
        measured only at the ends.
        """
        ends = self.rungs != "seeds" or any(name in MEASURED for name in self._quantities)
        points = space.candidates if ends else [point for line in space.lines.values() for point in line]
        found: dict[str, list[Candidate]] = {}
        for point in points:
            found.setdefault(point.data, []).append(point)
        return {f" on {data}" if len(found) > 1 else "": group for data, group in found.items()}

    def _race(self, space: SearchSpace, label: str, group: Sequence[Candidate]) -> Strand:
        rungs, standing = self._rungs, list(group)
        box: tuple[Objectives, ...] = ()
        amounts = rungs.amounts(space, group)
        for number, amount in enumerate(amounts, start=1):
            last, after = number == len(amounts), rungs.said(space, group, amount)
            if len(standing) == 1 and not last:
                continue  # nothing is left to compare before the last rung
            quantities = self._quantities if last or self.rungs == "seeds" else self.against
            what = f"rung {number} of {len(amounts)}{label}: {counted(len(standing), 'candidate')}, {after}"
            networks = [rungs.networks(space, candidate, amount) for candidate in standing]
            seen = yield Ask(what, tuple(chain.from_iterable(networks)))
            each_placed = zip(standing, networks, strict=True)
            found = [each for pair in each_placed if (each := placed(*pair, seen, quantities, self.against))]
            allowed = self._allowed(found, last=last)
            front = self._front(allowed, last=last)
            box = box or _box([each.objectives for each in found])
            volume = _volume([each.objectives for each in front], box)
            going = f"{'is' if len(front) == 1 else 'are'} on the frontier" if last else "go on"
            yield Conclude(f"{len(front)} of {counted(len(standing), 'candidate')} {going}; hypervolume {volume:.3f}")
            sets = (standing, *([each.candidate for each in part] for part in (found, allowed, front)))
            reasons = ("failed or not measured", "outside of the constraints", "dominated")
            for before, left, reason in zip(sets, sets[1:], reasons, strict=False):
                yield RuleOut(_gone(space, before, left), f"{reason} after {after}{label}")
            standing = sets[-1]
            if not front:
                yield nothing(label, found, self.within, self.limits)
                return
        yield from answers(label, front, self.against, len(group), volume)

    def _allowed(self, found: Sequence[Placed], *, last: bool) -> list[Placed]:
        """Return the candidates that meet the constraints; those of rounds and trainings after the last rung only."""
        if not found or (self.rungs != "seeds" and not last):
            return [*found]
        limits, allowed = self.limits.items(), [*found]
        if self.within is not None:
            losses = [-each.gain for each in found]
            if self.confidence is not None and not last:
                losses = lower_ends([[-gain for gain in each.gains] for each in found], self.confidence)
            allowed = [each for each, loss in zip(found, losses, strict=True) if loss <= self.within + ROUNDING]
        return [each for each in allowed if all(each.mean(name) <= limit * (1 + ROUNDING) for name, limit in limits)]

    def _front(self, allowed: Sequence[Placed], *, last: bool) -> list[Placed]:
        """Return the candidates of the next rung, or of the answer."""
        front = [allowed[index] for index in nondominated([each.objectives for each in allowed])]
        if last or self.confidence is None:
            return front
        known = {id(each) for each in front}
        shown = _shown_dominated([each for each in allowed if id(each) not in known], front, self.confidence)
        return [each for each in allowed if id(each) not in shown]


def _shown_dominated(behind: Iterable[Placed], front: Iterable[Placed], confidence: float) -> set[int]:
    """Return the identities of candidates shown to be worse than one on the frontier that is no larger."""
    left, shown = [*behind], set[int]()
    for rival in sorted(front, key=lambda each: each.objectives):
        loss, *sizes = rival.objectives
        larger = [each for each in left if loss < each.objectives[0] and all(map(le, sizes, each.objectives[1:]))]
        if larger:
            worse = are_worse([each.goodness for each in larger], rival.goodness, confidence)
            shown |= {id(each) for each, is_worse in zip(larger, worse, strict=True) if is_worse}
            left = [each for each in left if id(each) not in shown]
    return shown


def _gone(space: SearchSpace, before: Iterable[Candidate], left: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that are no longer left, at the ends of their trials."""
    known = {id(each) for each in left}
    gone = ((each, next(iter(each.cells.values()))) for each in before if id(each) not in known)
    return tuple(each for each, cell in gone if cell.network == space.ends[cell.trial])


def _box(points: Collection[Objectives]) -> tuple[Objectives, ...]:
    """Return the best values and the reference of the hypervolume; empty without a point."""
    if not points:
        return ()
    best, worst = (tuple(map(choose, zip(*points, strict=True))) for choose in (min, max))
    reference = tuple(b + (ROOM * (b - a) if b > a else 1.0) for a, b in zip(best, worst, strict=True))
    return best, reference


def _volume(points: Iterable[Objectives], box: tuple[Objectives, ...]) -> float:
    """Return the hypervolume as a fraction of the box between the best values and the reference of the first rung."""
    if not box:
        return 0.0
    best, reference = box
    inside = [tuple(map(max, point, best)) for point in points]
    return hypervolume(inside, reference) / math.prod(b - a for a, b in zip(best, reference, strict=True))
