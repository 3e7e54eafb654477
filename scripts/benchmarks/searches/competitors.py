"""Races of methods by the schedulers of other libraries, with seeds as the resource.

Optuna and Syne Tune are imported where they are used, as the other figures need neither.
"""

from __future__ import annotations

import datetime
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Protocol

FACTOR = 3
"""Reduction factor of the rungs: after 1, 3 and 9 seeds."""


class Racer(Protocol):
    """Scheduler of another library."""

    def start(self) -> int:
        """Begin the next trial, and return its index."""
        ...

    def goes_on(self, trial: int, seeds: int, value: float) -> bool:
        """Report the mean gain of a trial over its first seeds, and return whether the trial goes on."""
        ...


Factory = Callable[[int, int, random.Random], Racer]
"""(number of methods, largest number of seeds, source of randomness) -> a scheduler at its start."""


def race(racer: Racer, gains: Sequence[Sequence[float]], budget: int, workers: int) -> int:
    """Return the index of the method with the best last report.

    Args:
        racer: scheduler
        gains: gains of each method by seed, methods in the order in which they start
        budget: largest number of networks
        workers: number of trials that run at a time; they report in turn
    """
    waiting, running, last = len(gains), deque[tuple[int, int]](), dict[int, float]()
    for _ in range(budget):
        while waiting and len(running) < workers:
            waiting -= 1
            running.append((racer.start(), 0))
        if not running:
            break
        trial, seeds = running.popleft()
        last[trial] = fmean(gains[trial][: seeds + 1])
        if racer.goes_on(trial, seeds + 1, last[trial]) and seeds + 1 < len(gains[trial]):
            running.append((trial, seeds + 1))
    return max(last, key=last.__getitem__)


class Hyperband:
    """Optuna's HyperbandPruner.

    Args:
        methods: number of methods
        seeds: largest number of seeds of a method
        draw: source of randomness
    """

    def __init__(self, methods: int, seeds: int, draw: random.Random) -> None:
        import optuna

        optuna.logging.set_verbosity(logging.ERROR)
        del methods
        self._pruned = optuna.trial.TrialState.PRUNED
        self._study: Any = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=draw.getrandbits(31)),
            pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=seeds, reduction_factor=FACTOR),
            study_name=str(draw.getrandbits(31)),
        )
        self._seeds, self._trials = seeds, list[Any]()

    def start(self) -> int:
        """Begin the next trial, and return its index."""
        self._trials.append(self._study.ask())
        return len(self._trials) - 1

    def goes_on(self, trial: int, seeds: int, value: float) -> bool:
        """Report the mean gain of a trial over its first seeds, and return whether the trial goes on."""
        running = self._trials[trial]
        running.report(value, seeds)
        if running.should_prune():
            self._study.tell(running, state=self._pruned)
            return False
        if seeds == self._seeds:
            self._study.tell(running, value)
        return True


class Asha:
    """Syne Tune's AsynchronousSuccessiveHalving.

    Args:
        methods: number of methods
        seeds: largest number of seeds of a method
        draw: source of randomness
    """

    def __init__(self, methods: int, seeds: int, draw: random.Random) -> None:
        from syne_tune.backend.trial_status import Trial
        from syne_tune.config_space import choice
        from syne_tune.optimizer.schedulers.asha import AsynchronousSuccessiveHalving
        from syne_tune.optimizer.schedulers.searchers.last_value_multi_fidelity_searcher import (
            LastValueMultiFidelitySearcher,
        )

        self._new, self._trials = Trial, list[Any]()
        order = [{"method": index} for index in range(methods)]
        space = {"method": choice([*range(methods)])}
        self._scheduler: Any = AsynchronousSuccessiveHalving(
            space,
            metric="gain",
            do_minimize=False,
            time_attr="seeds",
            max_t=seeds,
            reduction_factor=FACTOR,
            searcher=LastValueMultiFidelitySearcher(
                space, random_seed=draw.getrandbits(31), points_to_evaluate=order, searcher="random_search"
            ),
        )

    def start(self) -> int:
        """Begin the next trial, and return its index."""
        config = self._scheduler.suggest().config
        trial = self._new(len(self._trials), config, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
        self._trials.append(trial)
        self._scheduler.on_trial_add(trial)
        return int(config["method"])

    def goes_on(self, trial: int, seeds: int, value: float) -> bool:
        """Report the mean gain of a trial over its first seeds, and return whether the trial goes on."""
        decision = self._scheduler.on_trial_result(self._trials[trial], {"gain": value, "seeds": seeds})
        return bool(decision == "CONTINUE")


COMPETITORS: dict[str, Factory] = {"Optuna Hyperband": Hyperband, "Syne Tune ASHA": Asha}
