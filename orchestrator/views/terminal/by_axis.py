"""How far a sweep is along each of its axes, and how good the best of its trials is there. Pure."""

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
    """The trials that have one value of an axis: those done, all, and the best of them on the validation split."""

    value: str
    done: int
    all: int
    best: str = ""

    def __str__(self) -> str:
        return f"{self.value} {self.done}/{self.all}{f' {self.best}' if self.best else ''}"


class ByAxis:
    """Follows a sweep along the axes that vary."""

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
        """Yield each axis by the last part of its name, with the groups of its values; of seeds no best."""
        last = [key.rpartition(".")[2] for key in self._axes]
        for (key, values), name in zip(self._axes.items(), last, strict=True):
            told = name if last.count(name) == 1 else key
            yield (
                told,
                [
                    Group(value, self._done(trials), len(trials), "" if key == SEED else self._best(trials)[0])
                    for value, trials in values.items()
                ],
            )

    def best(self) -> str:
        """Say which trial is the best so far, on the validation split; empty where several metrics are compared."""
        told, trial = self._best(range(len(self._plan.trials)))
        return f"best so far on validation: {told}, {trial}" if told else ""

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
