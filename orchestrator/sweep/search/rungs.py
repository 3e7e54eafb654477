"""Rungs of a race: more and more seeds, rounds or training for the candidates that are left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.planning.number_formats import counted
from orchestrator.planning.round_parts import EPOCH, TRAINING, ladder
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.policy import uneven

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
