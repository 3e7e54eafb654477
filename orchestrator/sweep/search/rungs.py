"""Rungs of a race: more and more seeds or rounds for the candidates that are left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.planning.number_formats import counted
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.policy import uneven

LEAST_FOR_INTERVAL = 2
"""Minimum number of seeds of an interval."""


@dataclass(frozen=True)
class Rungs:
    """Rungs of the candidates that compete with each other.

    Args:
        grows: `seeds` (each rung has more of the seeds) or `rounds` (each rung has more of the rounds, and all seeds)
        first: number of seeds or rounds of the first rung
        factor: factor from rung to rung
        confidence: level of the intervals that rule out candidates; None for none
    """

    grows: str
    first: int
    factor: int
    confidence: float | None

    @property
    def unit(self) -> str:
        """Noun for the amount of a rung: `seed` or `round`."""
        return self.grows.removesuffix("s")

    def refusals(self, group: Sequence[Candidate]) -> Iterator[str]:
        """Yield the reasons why candidates cannot be compared by these rungs."""
        seeds = group[0].seeds
        yield from uneven(group, seeds)
        last = min(candidate.rounds for candidate in group) if self.grows == "rounds" else len(seeds)
        if self.grows == "rounds" and any(candidate.rounds != last for candidate in group):
            longer = max(group, key=lambda candidate: candidate.rounds)
            yield (
                f"search.rungs=rounds compares candidates after equally many rounds, and {longer.name} has "
                f"{longer.rounds}, others {last}; pass one schedule.rounds, or search.rungs=seeds."
            )
        elif self.first > last or (self.grows == "rounds" and last < 2):
            yield (
                f"search.first (={self.first}) is beyond the {counted(last, self.unit)} of {group[0].name}; pass "
                f"search.first=1 and {'schedule.rounds=4' if self.grows == 'rounds' else 'seed=range(5)'}, or more."
            )
        yield from self._without_spread(seeds)

    def _without_spread(self, seeds: Sequence[int]) -> Iterator[str]:
        fewest = len(seeds) if self.grows == "rounds" else self.first
        if self.confidence is not None and fewest < LEAST_FOR_INTERVAL:
            remedy = "seed=range(5)" if self.grows == "rounds" else f"search.first={LEAST_FOR_INTERVAL}"
            yield (
                f"search.confidence (={self.confidence}) needs {LEAST_FOR_INTERVAL} or more seeds at the first rung, "
                f"which has {fewest}; pass {remedy}."
            )

    def amounts(self, group: Sequence[Candidate]) -> list[int]:
        """Return the number of seeds, or of rounds, of each rung."""
        last = group[0].rounds if self.grows == "rounds" else len(group[0].seeds)
        found = [self.first]
        while found[-1] < last:
            found.append(min(last, found[-1] * self.factor))
        return found

    def kept(self, count: int) -> int:
        """Return the number of candidates that rank alone lets go on."""
        return max(1, math.ceil(count / self.factor))

    def networks(self, space: SearchSpace, candidate: Candidate, amount: int) -> list[Cell]:
        """Return the networks of a candidate at the rung with this amount, by seed."""
        if self.grows == "rounds":
            reached = candidate if amount >= candidate.rounds else space.after(candidate, amount)
            return [reached.cells[seed] for seed in reached.seeds]
        return [candidate.cells[seed] for seed in candidate.seeds[:amount]]

    def cells(self, space: SearchSpace, group: Iterable[Candidate], amount: int) -> Iterator[Cell]:
        """Yield the networks of all candidates of a rung."""
        for candidate in group:
            yield from self.networks(space, candidate, amount)
