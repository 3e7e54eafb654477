"""Candidates of a search: the networks of a plan, grouped by settings, line and seed. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from orchestrator.compare.panels import Position, positions
from orchestrator.core.specs import Key, Plan
from orchestrator.planning.number_formats import percent
from orchestrator.planning.round_parts import Span, span_of


class Cell(NamedTuple):
    """One network that a search can ask for: a trial after one of its rounds, or within its last training."""

    trial: int
    """Index of the trial in the plan."""
    seed: int
    network: Key
    """Key of the stage whose result is the network."""
    dense: Key
    """Key of the dense training of the same seed."""


@dataclass(frozen=True)
class Candidate:
    """Networks with equal settings, one for each seed."""

    name: str
    """Name for people: the line and the sparsity."""
    line: str
    """Label of the line, unique in the plan."""
    data: str
    """Name of the data set."""
    sparsity: float | None
    """Requested overall sparsity; None if none was requested as a fraction."""
    rounds: int
    """Number of rounds before the network."""
    cells: Mapping[int, Cell]
    """Seed -> network."""

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds in increasing order."""
        return tuple(sorted(self.cells))


class SearchSpace:
    """Candidates of a plan.

    Args:
        plan: plan of the whole sweep
        seen: networks that earlier searches have seen
    """

    def __init__(self, plan: Plan, seen: Collection[Key] = ()) -> None:
        self.plan, self.seen = plan, frozenset(seen)
        known = positions(plan)
        self._several = len({position.panel for position in known}) > 1
        grouped: dict[Any, list[int]] = {}
        for index, position in enumerate(known):
            grouped.setdefault(position.point, []).append(index)
        self.candidates = tuple(self._candidate(known, indices) for indices in grouped.values())
        """Candidates at the ends of trials, in the order of the plan."""
        self.ends = tuple(trial.stages[-1] for trial in plan.trials)
        """Network at the end of each trial."""

    @cached_property
    def lines(self) -> Mapping[str, tuple[Candidate, ...]]:
        """Label of a line -> its candidates, in order of sparsity; candidates without a sparsity come first.

        A line whose trials all end at one sparsity has a candidate after every round, as in a comparison.
        """
        found: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.line, []).append(candidate)
        return {
            line: tuple(sorted(self._on_the_way(each) if len(each) == 1 else each, key=_sparsity))
            for line, each in found.items()
        }

    def after(self, candidate: Candidate, rounds: int) -> Candidate:
        """Return the networks of a candidate's trials after an earlier round."""
        trials = self.plan.trials
        cells = {
            seed: Cell(cell.trial, seed, trials[cell.trial].stages[rounds], cell.dense)
            for seed, cell in candidate.cells.items()
        }
        sparsity = self._sparsity_after(next(iter(cells.values())).network, rounds)
        return Candidate(
            _named(candidate.line, sparsity, rounds), candidate.line, candidate.data, sparsity, rounds, cells
        )

    def within(self, candidate: Candidate, amount: float) -> tuple[Cell, ...]:
        """Return the networks of a candidate after an amount of its last training, by seed."""
        plan, found = self.plan, []
        for seed in candidate.seeds:
            cell = candidate.cells[seed]
            span = span_of(plan.stages[cell.network])
            assert span is not None
            until = span.place(amount)
            parts = plan.trials[cell.trial].parts
            found.append(cell._replace(network=next(key for key in parts if plan.stages[key].fields["until"] == until)))
        return tuple(found)

    def span(self, candidate: Candidate) -> Span | None:
        """Return the last training of a candidate, as `span_of`."""
        return span_of(self.plan.stages[next(iter(candidate.cells.values())).network])

    def stages(self, cell: Cell) -> tuple[Key, ...]:
        """Return the stages that a network needs, inputs first; at a trial's end all stages of the trial."""
        if cell.network == self.ends[cell.trial]:
            return self.plan.work[cell.trial]
        return self.plan.with_inputs((cell.dense, cell.network))

    def _candidate(self, known: tuple[Position, ...], indices: list[int]) -> Candidate:
        trials, first = self.plan.trials, known[indices[0]]
        cells: dict[int, Cell] = {}
        for index in indices:
            seed, trial = known[index].seed, trials[index]
            cells.setdefault(seed, Cell(index, seed, trial.stages[-1], trial.dense))
        line = f"{first.line} ({first.panel[0]} on {first.panel[1]})" if self._several else first.line
        rounds = len(trials[indices[0]].stages) - 1
        sparsity = self._sparsity_after(trials[indices[0]].stages[-1], rounds)
        return Candidate(_named(line, sparsity), line, first.panel[1], sparsity, rounds, cells)

    def _sparsity_after(self, network: Key, rounds: int) -> float | None:
        """Return the sparsity that was requested of a network: by its target, or by amounts of the survivors."""
        fields = self.plan.stages[network].fields
        if (target := fields.get("target")) is not None:
            return float(target)
        amount = fields.get("amount")
        return 1 - (1 - amount) ** rounds if isinstance(amount, float) else None

    def _on_the_way(self, only: list[Candidate]) -> list[Candidate]:
        return [self.after(only[0], rounds) for rounds in range(1, only[0].rounds)] + only


def _named(line: str, sparsity: float | None, rounds: int = 0) -> str:
    if sparsity is not None:
        return f"{line} at {percent(sparsity)}"
    return f"{line} after round {rounds}" if rounds else line


def _sparsity(candidate: Candidate) -> float:
    return -1.0 if candidate.sparsity is None else candidate.sparsity
