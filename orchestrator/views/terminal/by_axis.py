"""Progress of a sweep by the values of its axes, with the best trial of each value. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.terminal.tally import Tally

SEED = "seed"


@dataclass(frozen=True)
class Group:
    """Trials with one value of an axis: how many are done, how many there are, the best metric on validation."""

    value: str
    done: int
    all: int
    best: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.done}/{self.all}{f' {self.best}' if self.best else ''}"


class ByAxis:
    """Progress of a sweep along the axes that vary."""

    def __init__(self, plan: Plan, tally: Tally) -> None:
        self._plan, self._tally = plan, tally
        self._axes: dict[str, dict[str, list[int]]] = {}
        for index, trial in enumerate(plan.trials):
            for override in trial.overrides:
                key, equals, value = override.lstrip("+").partition("=")
                if equals:
                    self._axes.setdefault(key, {}).setdefault(value, []).append(index)
        self._axes = {key: values for key, values in self._axes.items() if len(values) > 1}

    def groups(self) -> Iterator[tuple[str, Sequence[Group]]]:
        """Yield each axis by the last part of its name, with the groups of its values; seeds have no best trial."""
        last = [key.rpartition(".")[2] for key in self._axes]
        for (key, values), name in zip(self._axes.items(), last, strict=True):
            label = name if last.count(name) == 1 else key
            yield (
                label,
                [
                    Group(value, self._done(trials), len(trials), "" if key == SEED else self._best(trials)[0])
                    for value, trials in values.items()
                ],
            )

    def best(self) -> str:
        """Return a line about the best trial so far on validation; empty if trials differ in their primary metric."""
        value, trial = self._best(range(len(self._plan.trials)))
        return f"best so far on validation: {value}, {trial}" if value else ""

    def _done(self, trials: Sequence[int]) -> int:
        return sum(self._tally.state(trial) == "done" for trial in trials)

    def _best(self, trials: Sequence[int]) -> tuple[str, str]:
        records: Mapping[str, StageRecord] = self._tally.records
        best: tuple[float, Metric, str] | None = None
        for trial in (self._plan.trials[index] for index in trials if self._tally.state(index) == "done"):
            record = records[trial.stages[-1]]
            metric, value = record.primary, record.figure("val")
            if not math.isfinite(value):
                continue
            if best is not None and metric.name != best[1].name:
                return "", ""
            if best is None or metric.gain(value, best[0]) > 0:
                best = value, metric, trial.name
        return ("", "") if best is None else (best[1].said(best[0]), best[2])
