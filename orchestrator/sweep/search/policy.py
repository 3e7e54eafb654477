"""The interface of a search: what a policy asks for, sees and concludes; and the budget that ends it.

A policy is a class with three methods. `strands` returns generators that run side by side. A generator yields `Ask` for
networks and receives their validation figures; it yields `Conclude`, `RuleOut` and `Answer` to say what follows. It
sees nothing that it did not ask for, so its decisions depend on the figures alone: not on their order, the workers, or
other results in the store.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.compare.statistics import Estimate, has_spread
from orchestrator.core.metrics import Metric
from orchestrator.core.specs import Key
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.quantities import Finished


@dataclass(frozen=True)
class Ask:
    """A look: networks to train, if they are not finished, and to compare on validation."""

    title: str
    cells: tuple[Cell, ...]
    confirms: bool = False
    """Whether the look tests a claim."""


@dataclass(frozen=True)
class Conclude:
    """Conclusion of the last look, as a sentence."""

    text: str


@dataclass(frozen=True)
class RuleOut:
    """Candidates that the search will not ask for again, and the reason."""

    candidates: tuple[Candidate, ...]
    reason: str


@dataclass(frozen=True)
class Answer:
    """Answer of a strand, as a sentence, and the stages of its networks."""

    text: str
    networks: tuple[Key, ...] = ()


class Figures:
    """Figures of a finished network without the test split, and the primary metric of its own dense network.

    Args:
        metric: primary metric, with the margin of the sweep
        value: primary metric on validation
        dense: the same of the dense network of the seed
        finished: the network, from whose records the other figures are read when they are asked for
    """

    __slots__ = ("_finished", "dense", "metric", "value")

    def __init__(self, metric: Metric, value: float, dense: float, finished: Finished | None = None) -> None:
        self.metric, self.value, self.dense, self._finished = metric, value, dense, finished

    @property
    def others(self) -> Mapping[str, float]:
        """All figures of the record except those of the test split, and measurements of the deployed network."""
        return {} if self._finished is None else self._finished.figures()

    def quantity(self, name: str) -> float | None:
        """Return a quantity of the network, see `Finished.quantity`; None if it was not measured."""
        return None if self._finished is None else self._finished.quantity(name)

    def machine(self) -> str:
        """Return the hardware on which the deployed network was measured; empty if it was not."""
        return "" if self._finished is None else self._finished.machine()

    @property
    def difference(self) -> float:
        """Value minus the dense network's."""
        return self.value - self.dense

    @property
    def gain(self) -> float:
        """How much better the network is than its dense network; negative for a loss."""
        return self.metric.gain(self.value, self.dense)


Step = Ask | Conclude | RuleOut | Answer
Seen = Mapping[Cell, Figures | None]
"""Network -> its figures; None for a network whose training fails every time."""
Strand = Generator[Step, Seen, None]


class Policy(Protocol):
    """Interface of a search. A class of your own takes its settings as keyword arguments."""

    def refusals(self, space: SearchSpace) -> Iterable[str]:
        """Yield a sentence with the remedy for each reason why the search cannot work on a plan."""
        ...

    def strands(self, space: SearchSpace) -> Sequence[Strand]:
        """Return the searches, which run side by side and share no figures."""
        ...

    def bounds(self, space: SearchSpace) -> tuple[Iterable[Cell], Iterable[Cell]]:
        """Return the networks that the search asks for at least and at most."""
        ...


@dataclass(frozen=True)
class Budget:
    """Limits after which a search asks for nothing more; None for no limit.

    Args:
        trials: number of trials that the search asks for
        steps: optimizer steps of the committed stages that it asked for
        seconds: seconds of these stages, one after the other
    """

    trials: int | None = None
    steps: int | None = None
    seconds: float | None = None

    @property
    def counts(self) -> bool:
        """Whether a limit needs the steps or the seconds of finished stages."""
        return self.steps is not None or self.seconds is not None

    def reached(self, trials: int, steps: int, seconds: float) -> str:
        """Return the sentence that names the limit that is reached; empty if none is."""
        if self.trials is not None and trials > self.trials:
            return f"search.trials={self.trials} is too small for the next step, which brings the trials to {trials}"
        if self.steps is not None and steps >= self.steps:
            return f"search.steps={self.steps} is spent: {steps} steps"
        if self.seconds is not None and seconds >= self.seconds:
            return f"search.seconds={self.seconds:g} is spent: {seconds:.0f} s"
        return ""


def uneven(candidates: Iterable[Candidate], seeds: Sequence[int]) -> Iterator[str]:
    """Yield a sentence if a candidate lacks a seed that others have."""
    known = [*candidates]
    every = sorted({*seeds}.union(*(each.cells for each in known)))
    lacking = next((each for each in known if len(each.cells) < len(every)), None)
    if lacking is not None:
        absent = ", ".join(str(seed) for seed in every if seed not in lacking.cells)
        yield (
            f"`seed` has no value {absent} for {lacking.name}, and a search pairs candidates by seed; give all "
            "candidates the same seeds, as in seed=range(8)."
        )


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric's differences after a space; empty if it has none."""
    return " points" if metric.scale != 1 else f" {metric.unit}" if metric.unit else ""


def in_words(found: Estimate | None, metric: Metric) -> str:
    """Return a difference with its interval, in the metric's unit."""
    if found is None:
        return "unknown"
    unit = unit_of(metric)
    if found.low is None or found.high is None or not has_spread(found):
        return f"{metric.written(found.mean, '+')}{unit}"
    low, high = (metric.written(each, "+") for each in (found.low, found.high))
    return f"{metric.written(found.mean, '+')} [{low}, {high}]{unit}"
