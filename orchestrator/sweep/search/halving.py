"""Search `halving`: the best of many settings at each sparsity, by rungs of more and more seeds, rounds or training.

All candidates of a rung are compared after equal training; the best go on to the next rung. The rungs are synchronous:
a rung is ranked when all its networks are finished, so the order in which they finish does not count. Rungs of seeds
end when one candidate is left, as more seeds would rank nothing; otherwise the last candidate is trained to its end.

Reference: Jamieson and Talwalkar 2016, arXiv 1502.07943 (successive halving).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from orchestrator.compare.statistics import LEVEL, estimate
from orchestrator.planning.number_formats import counted, first_few
from orchestrator.planning.round_parts import EPOCH, TRAINING, ladder
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.policy import Answer, Ask, Conclude, Figures, RuleOut, Seen, Strand, in_words, uneven
from orchestrator.sweep.search.quantities import are_worse

LEAST_FOR_INTERVAL = 2
"""Minimum number of seeds of an interval."""


@dataclass(frozen=True)
class Rungs:
    """Rungs of the candidates that compete with each other.

    Args:
        grows: `seeds` (each rung has more of the seeds), `rounds` (more of the rounds, of all seeds) or `training`
            (more of the last training, of all seeds)
        first: number of seeds, rounds, or epochs or steps, of the first rung
        factor: factor from rung to rung
        confidence: level of the intervals that rule out candidates; None for none
    """

    grows: str
    first: int
    factor: int
    confidence: float | None

    def refusals(self, space: SearchSpace, group: Sequence[Candidate]) -> Iterator[str]:
        """Yield the reasons why candidates cannot be compared by these rungs."""
        seeds = group[0].seeds
        yield from uneven(group, seeds)
        yield from self._beyond(group, len(seeds)) if self.grows != TRAINING else self._beyond_training(space, group)
        yield from self._without_spread(seeds)

    def _beyond(self, group: Sequence[Candidate], seeds: int) -> Iterator[str]:
        """Yield a sentence if the candidates have too few seeds or rounds, or differ in rounds."""
        last = min(candidate.rounds for candidate in group) if self.grows == "rounds" else seeds
        if self.grows == "rounds" and any(candidate.rounds != last for candidate in group):
            longer = max(group, key=lambda candidate: candidate.rounds)
            yield (
                f"search.rungs=rounds compares candidates after equally many rounds, and {longer.name} has "
                f"{longer.rounds}, others {last}; pass one schedule.rounds, or search.rungs=seeds."
            )
        elif self.first > last or (self.grows == "rounds" and last < 2):
            yield (
                f"search.first (={self.first}) is beyond the {counted(last, self.grows.removesuffix('s'))} of "
                f"{group[0].name}; pass search.first=1 and "
                f"{'schedule.rounds=4' if self.grows == 'rounds' else 'seed=range(5)'}, or more."
            )

    def _beyond_training(self, space: SearchSpace, group: Sequence[Candidate]) -> Iterator[str]:
        """Yield a sentence if the last trainings have no known length, differ in it, or are too short."""
        spans = [space.span(candidate) for candidate in group]
        first = spans[0]
        if None in spans or first is None:
            yield (
                f"search.rungs=training compares candidates within a training of a known length, and that of "
                f"{group[spans.index(None)].name} is a function of your own, or begins at a step while `epochs` gives "
                "its length; use the built-in loop, restart.rates in epochs as in 2ep, or search.rungs=seeds."
            )
        elif any(each is not None and (each.unit, each.length) != (first.unit, first.length) for each in spans):
            yield (
                "search.rungs=training compares candidates after equal training, and the last training of some is "
                "longer than that of others; pass one finetune.epochs or finetune.steps (train.epochs or train.steps "
                "where rounds restart), or search.rungs=seeds."
            )
        elif self.first >= first.length:
            less = "search.first=1, or " if min(self.first, first.length) > 1 else ""
            yield (
                f"search.first (={self.first}) is not before the end of the last training of {group[0].name}, which "
                f"has {_said(first.length, first.unit)}; pass {less}a longer {first.where}.{first.unit}s."
            )

    def _without_spread(self, seeds: Sequence[int]) -> Iterator[str]:
        whole = self.grows != "seeds"
        fewest = len(seeds) if whole else self.first
        if self.confidence is not None and fewest < LEAST_FOR_INTERVAL:
            remedy = "seed=range(5)" if whole else f"search.first={LEAST_FOR_INTERVAL}"
            yield (
                f"search.confidence (={self.confidence}) needs {LEAST_FOR_INTERVAL} or more seeds at the first rung, "
                f"which has {fewest}; pass {remedy}."
            )

    def amounts(self, space: SearchSpace, group: Sequence[Candidate]) -> list[float]:
        """Return the number of seeds, of rounds, or of epochs or steps, of each rung."""
        if self.grows == "rounds":
            return ladder(self.first, self.factor, group[0].rounds)
        if self.grows == "seeds":
            return ladder(self.first, self.factor, len(group[0].seeds))
        span = space.span(group[0])
        assert span is not None  # `refusals` names a training without a length
        return ladder(self.first, self.factor, span.length)

    def said(self, space: SearchSpace, group: Sequence[Candidate], amount: float) -> str:
        """Return an amount for people: 3 seeds, 2 rounds, 1 epoch."""
        span = space.span(group[0]) if self.grows == TRAINING else None
        return _said(amount, self.grows.removesuffix("s") if span is None else span.unit)

    def kept(self, count: int) -> int:
        """Return the number of candidates that rank alone lets go on."""
        return max(1, math.ceil(count / self.factor))

    def networks(self, space: SearchSpace, candidate: Candidate, amount: float) -> Sequence[Cell]:
        """Return the networks of a candidate at the rung with this amount, by seed."""
        if self.grows == "seeds":
            return [candidate.cells[seed] for seed in candidate.seeds[: int(amount)]]
        if self.grows == "rounds":
            reached = candidate if amount >= candidate.rounds else space.after(candidate, int(amount))
            return [reached.cells[seed] for seed in reached.seeds]
        span = space.span(candidate)
        if span is None or amount >= span.length:
            return [candidate.cells[seed] for seed in candidate.seeds]
        return space.within(candidate, amount)

    def cells(self, space: SearchSpace, group: Iterable[Candidate], amount: float) -> Iterator[Cell]:
        """Yield the networks of all candidates of a rung."""
        for candidate in group:
            yield from self.networks(space, candidate, amount)


def _said(amount: float, unit: str) -> str:
    whole = amount == int(amount)
    return counted(int(amount), unit) if whole else f"{amount:g} {EPOCH}s"


TIE = 1e-12
"""Difference of mean gains up to which candidates are tied; tied candidates stay together."""


@dataclass(frozen=True)
class Halving:
    """Successive halving among the candidates of each data set and sparsity.

    Args:
        rungs: `seeds` (each rung has more of the seeds), `rounds` (more of the rounds, of all seeds) or `training`
            (more of the last training, of all seeds)
        first: number of seeds, rounds, or epochs or steps of the first rung
        factor: factor from rung to rung, and the divisor of the number of candidates
        confidence: level of an interval that must exclude a candidate before the candidate is ruled out; None rules
            out by rank alone
    """

    rungs: str = "seeds"
    first: int = 1
    factor: int = 3
    confidence: float | None = None

    def refusals(self, space: SearchSpace) -> Iterator[str]:
        """Yield the reasons why candidates cannot be compared by rungs."""
        groups = _groups(space)
        if all(len(group) < 2 for group in groups.values()):
            yield (
                "search=halving compares candidates at one sparsity, and no sparsity has two; add an axis, as in "
                "method=l1_unstructured,random_unstructured."
            )
            return
        for group in groups.values():
            yield from self._rungs.refusals(space, group)

    @property
    def _rungs(self) -> Rungs:
        return Rungs(self.rungs, self.first, self.factor, self.confidence)

    def strands(self, space: SearchSpace) -> list[Strand]:
        """Return the race of each data set and sparsity."""
        chosen = (next(iter(each.cells.values())) for each in space.candidates)
        common = set.intersection(*({*space.plan.trials[cell.trial].overrides} for cell in chosen))
        return [self._race(space, label, group, common) for label, group in _groups(space).items()]

    def bounds(self, space: SearchSpace) -> tuple[Iterable[Cell], Iterable[Cell]]:
        """Return the networks without any tie, and with all candidates tied."""
        least, most = list[Cell](), list[Cell]()
        for group in _groups(space).values():
            left, amounts = len(group), self._rungs.amounts(space, group)
            alone = amounts[0] if self._ends_alone else amounts[-1]  # the only rung that a single candidate needs
            for amount in amounts:
                if left > 1 or amount == alone:
                    least += self._rungs.cells(space, group[:left], amount)
                if len(group) > 1 or amount == alone:
                    most += self._rungs.cells(space, group, amount)
                left = self._rungs.kept(left) if self.confidence is None else 1
        return dict.fromkeys(least), dict.fromkeys(most)

    @property
    def _ends_alone(self) -> bool:
        """Whether a race ends when one candidate is left, and is not trained to the end of its rungs."""
        return self.rungs == "seeds"

    def _race(self, space: SearchSpace, label: str, group: Sequence[Candidate], common: Collection[str]) -> Strand:
        rungs, standing = self._rungs, list(group)
        amounts = rungs.amounts(space, group)
        for number, amount in enumerate(amounts, start=1):
            if len(standing) == 1 and number < len(amounts) and not self._ends_alone:
                continue  # nothing is left to rank before the last rung
            what, after = f"rung {number} of {len(amounts)}{label}", rungs.said(space, group, amount)
            networks = {id(each): rungs.networks(space, each, amount) for each in standing}
            cells = tuple(chain.from_iterable(networks.values()))
            seen = yield Ask(f"{what}: {counted(len(standing), 'candidate')}, {after}", cells)
            gains = {name: _gains(each, seen) for name, each in networks.items()}
            means = {name: _mean(each) for name, each in gains.items()}
            ranked = sorted(standing, key=lambda each: means[id(each)], reverse=True)
            best, last = ranked[0], number == len(amounts)
            kept = [best] if last else self._survivors(ranked, gains, means)
            ends = last or (self._ends_alone and len(kept) == 1)
            going = "" if ends else f"{len(kept)} of {counted(len(ranked), 'candidate')} go on; "
            yield Conclude(f"{going}best: {best.name}")
            if not last:
                going_on = {id(each) for each in kept}
                lost = tuple(each for each in ranked if id(each) not in going_on)
                yield RuleOut(lost, f"ruled out after {after}{label}")
                if ends:
                    yield RuleOut((best,), f"the best{label} after {after}, when no other was left to rank")
            if ends:
                answer = _answer(label, ranked, networks[id(best)], gains, seen)
                yield replace(answer, text=answer.text + _rest(space, best, len(networks[id(best)]), common))
                return
            standing = kept

    def _survivors(
        self, ranked: Sequence[Candidate], gains: Mapping[int, Sequence[float]], means: Mapping[int, float]
    ) -> list[Candidate]:
        """Return the candidates of the next rung, from the best to the worst."""
        if self.confidence is not None:
            return _not_worse(ranked, gains, self.confidence)
        least = means[id(ranked[self._rungs.kept(len(ranked)) - 1])]
        return [each for each in ranked if means[id(each)] >= least - TIE]


def _groups(space: SearchSpace) -> dict[str, list[Candidate]]:
    """Return a label for people -> the candidates that compete: on one data set, at one sparsity."""
    found: dict[tuple[str, float | None], list[Candidate]] = {}
    for candidate in space.candidates:
        sparsity = None if candidate.sparsity is None else round(candidate.sparsity, 6)
        found.setdefault((candidate.data, sparsity), []).append(candidate)
    several = len({data for data, _ in found}) > 1
    labels = {}
    for (data, sparsity), group in found.items():
        at = "" if sparsity is None else f" at {sparsity:.2%}"
        labels[(at if len(found) > 1 else "") + (f" on {data}" if several else "")] = group
    return labels


def _gains(cells: Iterable[Cell], seen: Seen) -> list[float]:
    """Return the gains over dense by seed; minus infinity for a network that failed."""
    return [-math.inf if (each := seen[cell]) is None else each.gain for cell in cells]


def _mean(gains: Sequence[float]) -> float:
    return math.fsum(gains) / len(gains)


def _not_worse(ranked: Sequence[Candidate], gains: Mapping[int, Sequence[float]], level: float) -> list[Candidate]:
    """Return the candidates that no interval, paired by seed, shows to be worse than the first one."""
    rows = [gains[id(each)] for each in ranked]
    return [each for each, worse in zip(ranked, are_worse(rows, rows[0], level), strict=True) if not worse]


def _rest(space: SearchSpace, best: Candidate, finished: int, common: Collection[str]) -> str:
    """Return a clause with the command for the seeds of the best candidate that no rung needed; empty for none.

    Args:
        space: candidates of the plan
        best: the best candidate
        finished: number of its seeds that were run
        common: overrides of every trial
    """
    left = len(best.seeds) - finished
    if not left:
        return ""
    first, *others = (space.plan.trials[cell.trial].overrides for cell in best.cells.values())
    own = [each for each in first if each not in common and all(each in other for other in others)]
    told = shlex.join(["search=none", *own])
    return f"; to run {'its other seed' if left == 1 else f'its other {left} seeds'}, pass {told}"


def _answer(
    label: str, ranked: Sequence[Candidate], cells: Sequence[Cell], gains: Mapping[int, Sequence[float]], seen: Seen
) -> Answer:
    """Name the best candidate, with its networks, and those that the last rung does not tell from it."""
    best = ranked[0]
    found: list[Figures] = [figures for cell in cells if (figures := seen[cell]) is not None]
    if not found:
        return Answer(f"no candidate{label} has finished: every network of the last rung failed")
    others = [each.name for each in _not_worse(ranked, gains, LEVEL)[1:]]
    beside = f"; not told from it: {first_few(others)}" if others else ""
    rest = f" of {counted(len(best.seeds), 'seed')}" if len(cells) < len(best.seeds) else ""
    seeds = f"{len(found)}{rest}" if rest else counted(len(found), "seed")
    return Answer(
        f"best{label}: {best.name}, {in_words(estimate([each.difference for each in found]), found[0].metric)} against "
        f"dense on validation, {seeds}{beside}",
        tuple(cell.network for cell in cells),
    )
