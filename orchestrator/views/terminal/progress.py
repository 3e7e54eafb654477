"""Progress of a running sweep: a live display on a terminal, else one line for each event."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from orchestrator.config.parallel import processes
from orchestrator.core.events import Decision, StageEvent
from orchestrator.core.metrics import Metric
from orchestrator.core.records import NOWHERE, CurvePoint, Reached, StageRecord
from orchestrator.core.redact import shown
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import counted, duration, first_few, known_duration, percent
from orchestrator.planning.pace import Pace
from orchestrator.planning.preview import by_kind
from orchestrator.views.terminal.frame import MOST_RUNNING, ByAxis, Running, frame, with_speeds
from orchestrator.views.terminal.stage_lines import figures, named, reached, speed, validated
from orchestrator.views.terminal.tally import Tally, TimeLeft

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

BAR, LEAST_BAR = 40, 8
"""Maximum and minimum width of the progress bar in cells; without room for the minimum there is no bar."""

LONG = 100
"""Number of stages from which, without a display, only finished trials, dense trainings and failures get a line."""

REFRESHES_PER_SECOND = 4
QUIET = 60.0
"""Seconds without a line after which a log tells how far a stage has come."""


class Progress:
    """Display of a sweep's progress; a context manager.

    Args:
        plan: plan of the whole sweep
        finished: stage key -> record of the stages that need not run
        console: console to print on; None: standard output
        slots: number of stages that can run at once; None: the largest number seen running at once
        pace: durations of stages in earlier sweeps
        clock: function that returns Unix seconds
    """

    def __init__(
        self,
        plan: Plan,
        finished: Mapping[str, StageRecord],
        *,
        console: Console | None = None,
        slots: int | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if console is None:
            from orchestrator.views.terminal.standard_streams import Console

            console = Console(highlight=False)
        self._plan = plan
        self._console = console
        self._clock = clock
        self._begun = clock()
        self._tally = Tally(plan, finished)
        self._time_left = TimeLeft(plan, finished, slots, pace)
        self._axes = ByAxis(plan, self._tally)
        self._pause = 1.0
        self._last: tuple[float, tuple[str, str, str, Mapping[str, Sequence[str]]]] = (-1.0, ("", "", "", {}))
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._points: dict[str, tuple[CurvePoint, Metric]] = {}
        """Key of a running stage -> last point of its curve."""
        self._speeds: dict[str, str] = {}
        """Key of a running stage -> its examples a second between its last two points."""
        self._spoken = clock()
        """Time of the last line about stages."""
        self._interrupted = False
        self._asked: set[str] | None = None
        """Stages that a search has asked for; None without a search."""
        self._concluded = 0
        """Number of conclusions of the search that were printed."""
        self._reasons = {""}
        """Reasons of killed stages that were printed; a stage that never began gets no line for a printed reason."""

    def __enter__(self) -> Self:
        if self._console.is_interactive and not os.environ.get("CI"):
            from rich.live import Live

            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def point(self, key: str, point: CurvePoint, metric: Metric) -> None:
        """Update the progress of a running stage; without a live display, print that of a stage once a minute."""
        with self._lock:
            if key in self._points:
                self._speeds[key] = speed(self._plan.stages[key], self._points[key][0], point)
            self._points[key] = (point, metric)
            now, far = self._clock(), self._figure(key)
        if self._live is None and now - self._spoken >= QUIET:
            self.say(f"{duration(now - self._begun):>8}  working   {named(self._plan, key)}  {far}")

    def opening(
        self, sweep: str, places: Mapping[str, str], reached: Mapping[str, Reached] | None = None, search: str = ""
    ) -> None:
        """Print what will run, what is done already, and where to find things.

        Args:
            sweep: name of the sweep
            places: label -> place, for example {"MLflow": "mlflow ui", ...}
            reached: stage key -> place of the checkpoint that the stage resumes from
            search: sentence about the search; empty without a search
        """
        stages, tally = self._plan.stages, self._tally
        saved = sum(map(len, self._plan.work)) - sum(not KINDS[spec.kind].part for spec in stages.values())
        self.say(
            f"Sweep {sweep}: {counted(len(self._plan.trials), 'trial')}, {counted(len(stages), 'stage')} "
            f"({by_kind(self._plan)}), {saved} saved by sharing."
        )
        if tally.records:
            done = f"{counted(len(tally.records), 'stage')}, {counted(tally.trials()['done'], 'trial')}"
            left = "" if search else f"; {counted(self._to_run(), 'stage')} to run"
            self.say(f"Done already: {done}{left}.")
        if search:
            self.say(search)
        if resumed := [f"{named(self._plan, key)} from {place}" for key, place in (reached or {}).items()]:
            self.say(f"Resumed from checkpoints: {first_few(resumed, 3)}.")
        several = sorted({processes(each.config) for each in self._plan.trials if "parallel" in each.config})
        if several and several[-1] > 1:
            self.say(f"Each trial trains in {' or '.join(map(str, several))} processes (`parallel.processes`).")
        if self._live is None and len(stages) >= LONG:
            self.say("One line follows for each finished trial, each finished dense training and each failure.")
        self._say_places(places)

    def closing(self, places: Mapping[str, str]) -> None:
        """Print the outcome of the sweep, and where the results are."""
        trials = self._tally.trials()
        outcome = f"{trials['done']} of {len(self._plan.trials)} trials done"
        if stopped := trials["stopped"]:
            outcome += f", {stopped} stopped by the search"
        if failed := trials["failed"]:
            outcome += f", {failed} {self._lost_are}"
        self.say(f"{outcome}, in {duration(self._clock() - self._begun)}.")
        self._say_places(places)

    def decided(self, decision: Decision) -> None:
        """Show the last decision of a search: each conclusion once, and at the end the stages that it saved."""
        with self._lock:
            self._asked = (set(self._tally.records) if self._asked is None else self._asked) | set(decision.run)
            self._tally.stop(decision.stopped)
            self._time_left.due(key for key in decision.run if key not in self._tally.records)
            self._last = (-1.0, self._last[1])
        concluded = [look for look in decision.looks if look.concluded]
        for look in concluded[self._concluded :]:
            self.say(f"Search: {look.title}: {look.concluded}.")
        self._concluded = len(concluded)
        if decision.ended:
            saved = len(self._plan.stages) - self._tally.settled
            self.say(f"Search ended: {saved} of {counted(len(self._plan.stages), 'stage')} need not run.")

    def event(self, event: StageEvent) -> None:
        """Show one event."""
        with self._lock:
            known = event.key in self._tally.lost
            reason = event.failure.message if event.failure else ""
            began = event.kind != "killed" or event.key in self._tally.running
            printed = event.kind == "killed" and reason in self._reasons
            idle = printed and not began
            known = known or self._is_below_a_failure(event)
            if event.kind == "killed":
                self._interrupted = True
                self._reasons.add(reason)
            self._tally.take(event)
            self._points.pop(event.key, None)
            self._speeds.pop(event.key, None)
            if event.kind == "started":
                self._time_left.started(event.key, event.time)
            elif event.record is not None:
                self._time_left.finished(event.key, event.time, event.record)
            elif event.kind in ("failed", "killed"):
                self._time_left.dropped(event.key)
        if (self._live is None and not idle and self._has_line(event)) or (
            event.kind in ("failed", "retried") and not known
        ):
            self.say(self._line(event, named(self._plan, event.key) if began else "", printed=printed))
        for text in event.record.warnings if event.record is not None else ():
            self.say(f"Warning of {named(self._plan, event.key)}: {text}.")

    def _has_line(self, event: StageEvent) -> bool:
        """Whether an event gets a line if there is no display; in a long sweep not every event does."""
        if len(self._plan.stages) < LONG or event.kind not in ("started", "finished"):
            return True
        ends = any(self._tally.state(index) == "done" for index in self._plan.trials_of.get(event.key, ()))
        return event.kind == "finished" and (ends or not KINDS[self._plan.stages[event.key].kind].prunes)

    def say(self, text: str) -> None:
        """Print a line, above the live display if there is one."""
        from rich.text import Text

        self._spoken = self._clock()
        self._console.print(Text(shown(text)), soft_wrap=True)

    def _say_places(self, places: Mapping[str, str]) -> None:
        width = max(map(len, places), default=0)
        for name, place in places.items():
            self.say(f"  {name.ljust(width)}  {place}")

    @property
    def _lost_are(self) -> str:
        return "to be finished" if self._interrupted else "failed"

    def _to_run(self) -> int:
        return self._total - self._tally.settled

    @property
    def _total(self) -> int:
        """Number of stages; with a search, of those that it has asked for."""
        return len(self._plan.stages) if self._asked is None else len(self._asked)

    def _line(self, event: StageEvent, name: str, *, printed: bool) -> str:
        """Format an event as a line of text.

        Args:
            event: event of a stage
            name: name of the stage; empty for a stage that never began
            printed: whether the reason was printed before; it is printed once
        """
        word = "stopped" if event.kind == "killed" else event.kind
        parts = [f"{duration(event.time - self._begun):>8}", f"{word:<8}", *([name] if name else [])]
        if event.record is not None:
            parts.append(figures(event.record))
        if self._is_below_a_failure(event):
            parts.append("not run, because the stage before it failed")
        elif event.failure is not None and not printed:
            parts.append(event.failure.message.strip().partition("\n")[0])
            if event.failure.log:
                parts.append(f"log: {event.failure.log}")
        if event.kind == "retried":
            parts.append(f"attempt {event.attempt}{f', from {event.reached}' if event.reached != NOWHERE else ''}")
        if event.kind == "finished":
            parts.append(f"[{self._tally.settled}/{self._total}{self._seen()[0]}]")
        return "  ".join(parts)

    def _is_below_a_failure(self, event: StageEvent) -> bool:
        """Whether a stage failed because a stage that it needs failed."""
        spec = self._plan.stages.get(event.key)
        return (
            event.kind == "failed" and spec is not None and not self._tally.lost.isdisjoint(self._plan.needs(event.key))
        )

    def _seen(self) -> tuple[str, str, str, Mapping[str, Sequence[str]]]:
        """Return time left, trials by state, best trial and progress of each axis, all at one moment.

        The values are refreshed every second, or less often if refreshing is slow.
        """
        now = self._clock()
        if now - self._last[0] >= self._pause:
            begun = time.process_time()
            left = self._time_left.seconds(now)
            seconds = known_duration(left.known, bool(left.unknown)) if left.known else ""
            remaining = f", {seconds} left" if seconds else ""
            found = {shown(name): [shown(group) for group in groups] for name, groups in self._axes.groups()}
            self._last = now, (remaining, self._trials(), shown(self._axes.best()), found)
            self._pause = max(1.0, 20 * (time.process_time() - begun))
        remaining, trials, best, axes = self._last[1]
        return remaining if self._to_run() else "", trials, best, axes

    def _trials(self) -> str:
        """Return the number of trials in each state, failures first, because a narrow terminal cuts the end."""
        count = self._tally.trials()
        failed = [f"{count['failed']} {self._lost_are}"] if count["failed"] else []
        failed += [f"{count['stopped']} stopped"] if count["stopped"] else []
        return ", ".join([*failed, *(f"{count[state]} {state}" for state in ("waiting", "running", "done"))])

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width, height = self._console.size
        with self._lock:
            tally = self._tally
            settled, all_stages = len(tally.records) if self._interrupted else tally.settled, self._total
            left, trials, best, axes = self._seen()
            head = [f"{settled}/{all_stages} stages{left}", f"trials: {trials}; in use: {self._in_use()}"]
            head += [best] if best else []
            keys = list(islice(tally.running, MOST_RUNNING))
            speeds = [self._speeds.get(key, "") for key in keys]
            running = with_speeds([self._running(key) for key in keys], speeds, width)
            more = len(tally.running) - len(running)
            counts, *lines = frame(head, axes, running, width, height - 1, more) or [""]
        bar, room = Table.grid(padding=(0, 1)), min(BAR, width - len(counts) - 1)
        cells = [ProgressBar(total=max(1, all_stages), completed=settled, width=room)] if room >= LEAST_BAR else []
        bar.add_row(*cells, Text(counts, no_wrap=True))
        return Group(bar, *(Text(line, no_wrap=True, overflow="crop") for line in lines))

    def _running(self, key: str) -> Running:
        """Return a running stage's name, state and time."""
        spec = self._plan.stages[key]
        parent = self._tally.records.get(spec.parent or "")
        target = spec.typed.target
        figure = "" if target is None else f"to {percent(target)}"
        if parent is not None:
            figure += f" from {percent(parent.sparsity)}"
        if parent is not None and key not in self._points:
            figure += f", which had {validated(parent)}"
        if key in self._points:
            figure = self._figure(key) + ("; " if figure else "") + figure
        time = duration(self._clock() - self._tally.running[key])
        return shown(named(self._plan, key)), shown(figure.strip()), time

    def _figure(self, key: str) -> str:
        return reached(self._plan.stages[key], *self._points[key])

    def _in_use(self) -> str:
        """Return the CPUs and GPUs that running stages have reserved; all trials of a sweep take equally many."""
        cluster, running = self._plan.trials[0].config.get("cluster", {}), len(self._tally.running)
        cpus = running * (cluster.get("cpus_per_trial", 1) or 0)
        gpus = running * (cluster.get("gpus_per_trial", 0) or 0)
        return f"{cpus:g} CPU" + (f", {gpus:g} GPU" if gpus else "")
