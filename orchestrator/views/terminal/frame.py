"""Texts fitted into a terminal's width and height, among them progress by the values of a sweep's axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.terminal.tally import Tally

MOST_RUNNING, LEAST_RUNNING, MOST_OF_AN_AXIS = 12, 3, 4
"""Maximum and minimum number of lines for running stages; maximum number of lines for an axis with many values."""

Running = tuple[str, str, str]
"""Running stage: its name, its state, its running time."""


def frame(
    head: Sequence[str],
    axes: Mapping[str, Sequence[str]],
    running: Sequence[Running],
    width: int,
    height: int,
    more: int = 0,
) -> list[str]:
    """Return the lines of a display: at most `height` lines of at most `width` cells.

    Args:
        head: first lines; the last of them are dropped if there is no room
        axes: name of an axis -> progress of each value; one line each, several if there is room
        running: running stages, MOST_RUNNING of them if there are more; those without room are counted in a last line
        width: cells of a line
        height: number of lines
        more: number of other running stages, which are only counted
    """
    least = min(len(running), LEAST_RUNNING)
    lines = [fitted(text, width) for text in head[: max(1, height - least)]][: max(0, height)]
    shown = list(axes.items())[: max(0, height - len(lines) - least)]
    room = height - len(lines) - len(shown)
    stages = columns(running, width, min(MOST_RUNNING, room), more)
    each = 1 + (room - len(stages)) // len(shown) if shown else 1
    label = max((cell_len(name) for name, _ in shown), default=0)
    for name, texts in shown:
        lines += row(f"{name}{' ' * (label - cell_len(name))}", texts, width, min(each, MOST_OF_AN_AXIS))
    return lines + stages


def with_speeds(running: Sequence[Running], speeds: Sequence[str], width: int) -> Sequence[Running]:
    """Return running stages with their speeds in their states, if nothing is cut for that."""
    longer = [
        (name, f"{text}; {speed}" if speed else text, time)
        for (name, text, time), speed in zip(running, speeds, strict=True)
    ]
    wide = 4 + sum(max((cell_len(each[part]) for each in longer), default=0) for part in range(3))
    return longer if wide <= width else running


def fitted(text: str, width: int) -> str:
    """Fit a text into one line of at most `width` cells; `..` marks a cut."""
    text = " ".join(text.split("\n"))
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 2) + ".." if width > 2 else set_cell_size(text, max(0, width))


def abridged(text: str, width: int) -> str:
    """Fit a text into one line of at most `width` cells, cut in the middle, because names differ at the end."""
    text = " ".join(text.split("\n"))
    if cell_len(text) <= width or width < 6:
        return fitted(text, width)
    end = text[-(most := 2 * (width - 2) // 3) :]
    while cell_len(end) > most:
        end = end[1:]
    return f"{set_cell_size(text, width - 2 - cell_len(end))}..{end}"


def row(label: str, texts: Sequence[str], width: int, lines: int) -> list[str]:
    """Return texts side by side after a label, on at most `lines` lines; texts that do not fit are counted."""
    indent = cell_len(label) + 2
    left, found = list(texts), list[str]()
    while left and len(found) < lines:
        count, line = 1, fitted(left[0], width - indent)
        for taken in range(1, len(left) + 1):
            text = "  ".join(left[:taken])
            if cell_len(text) > width - indent:
                break
            rest = f"  and {len(left) - taken} more" if len(found) == lines - 1 and taken < len(left) else ""
            if cell_len(text + rest) <= width - indent:
                count, line = taken, text + rest
        left = left[count:]
        found.append(fitted(f"{' ' * indent if found else f'{label}  '}{line}", width))
    return found


def columns(running: Sequence[Running], width: int, lines: int, more: int = 0) -> list[str]:
    """Return running stages in columns, on at most `lines` lines; the state is cut first, the time never."""
    if lines < len(running) + more:
        count = len(running) + more - max(0, lines - 1)
        others = f"and {count} more run" if lines > 1 else f"{count} stages run"
        return [*columns(running[: lines - 1], width, lines), fitted(others, width)] if lines > 0 else []
    time_room = max((cell_len(time) for _, _, time in running), default=0)
    room = max(0, width - time_room - 4)
    longest, most = (max((cell_len(each[part]) for each in running), default=0) for part in (0, 1))
    name_room = min(longest, max(room - most, room // 2))
    text_room = min(most, room - name_room)
    found = []
    for name, text, time in running:
        time = " " * (time_room - cell_len(time)) + time
        line = f"{_cell(abridged(name, name_room), name_room)}  {_cell(text, text_room)}  {time}"
        found.append(fitted(line, width))
    return found


def _cell(text: str, room: int) -> str:
    return set_cell_size(fitted(text, room), room)


SEED = "seed"


@dataclass(frozen=True)
class AxisGroup:
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

    def groups(self) -> Iterator[tuple[str, Sequence[AxisGroup]]]:
        """Yield each axis by the last part of its name, with the groups of its values; seeds have no best trial."""
        last = [key.rpartition(".")[2] for key in self._axes]
        for (key, values), name in zip(self._axes.items(), last, strict=True):
            label = name if last.count(name) == 1 else key
            groups = []
            for value, trials in values.items():
                done = sum(self._tally.state(trial) == "done" for trial in trials)
                groups.append(AxisGroup(value, done, len(trials), "" if key == SEED else self._best(trials)[0]))
            yield label, groups

    def best(self) -> str:
        """Return a line about the best trial so far on validation; empty if trials differ in their primary metric."""
        value, trial = self._best(range(len(self._plan.trials)))
        return f"best so far on validation: {value}, {trial}" if value else ""

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
