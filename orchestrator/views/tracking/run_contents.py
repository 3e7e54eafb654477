"""Contents of tracked runs: identity, parameters, metric points, tags and files, as MLflow accepts them. Pure.

Points have the worker's time, so writing a record again changes nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from itertools import takewhile
from typing import Any, NamedTuple

from orchestrator.compare.deployment_points import headline
from orchestrator.compare.harness_scores import evaluated
from orchestrator.compare.panels import SettingsOfEach, as_typed, name_of, varying
from orchestrator.core.events import Decision, Failure, StageEvent, SweepInfo
from orchestrator.core.file_names import METRICS_FILE, NOTE_FILE
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.redact import html, markdown, shown, shown_json
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.configuration_text import as_yaml
from orchestrator.planning.number_formats import in_points, whole_number
from orchestrator.views.tracking.view_database import links, saved_views

ROW, CELL, LETTER = 22, 74, 6.6
"""Pixels: height of a row, width of a cell, width of a letter."""


def mask_picture(chain: Sequence[StageRecord]) -> bytes:
    """Return an SVG grid with a row for each tensor and a column for each round; sparser cells are darker."""
    rounds = [record for record in chain if KINDS[record.kind].prunes]
    names = list(dict.fromkeys(name for record in rounds for name in record.tensor_sparsity))
    sizes = {name: size for record in rounds for name, size in record.tensor_sizes.items()}
    labels = {name: f"{name} ({whole_number(sizes.get(name, 0))})" for name in names}
    left = round(LETTER * max(map(len, (*labels.values(), "overall")))) + 16
    width, height = left + CELL * len(rounds) + 8, ROW * (len(names) + 2) + 8
    parts = [_text(left - 8, 1, "sparsity in %", "end")]
    parts += [_text(left + CELL * (i + 0.5), 1, f"round {record.round}") for i, record in enumerate(rounds)]
    for line, name in enumerate((*names, None)):
        parts.append(_text(left - 8, line + 2, "overall" if name is None else labels[name], "end"))
        for column, record in enumerate(rounds):
            value = record.sparsity if name is None else record.tensor_sparsity.get(name)
            if value is not None:
                parts.append(_cell(left + CELL * column, line + 1, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    ).encode()


def _cell(x: float, line: int, sparsity: float) -> str:
    shade = round(255 - 205 * sparsity)
    ink = "white" if shade < 140 else "black"
    grey = f"rgb({shade},{shade},{shade})"
    box = f'<rect x="{x}" y="{ROW * line + 5}" width="{CELL - 2}" height="{ROW - 2}" fill="{grey}"/>'
    return box + _text(x + CELL / 2, line + 1, in_points(sparsity), ink=ink)


def _text(x: float, line: int, text: str, anchor: str = "middle", ink: str = "black") -> str:
    return f'<text x="{x:g}" y="{ROW * line - 2}" text-anchor="{anchor}" fill="{ink}">{html(text)}</text>'


_ODD = re.compile(r"[^/\w.\- ]")


class MetricPoint(NamedTuple):
    """One point of a metric; `time` is in Unix seconds."""

    key: str
    value: float
    time: float
    step: int


@dataclass
class Content:
    """Content to write to one run: everything, or what the run lacks. Times are in Unix seconds."""

    status: str = "RUNNING"
    points: list[MetricPoint] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """File of the run -> key of the stage with its masks."""
    start: float | None = None
    end: float | None = None
    new_run: bool = False
    """Whether a new run is needed: the old one holds another execution of a stage, and points cannot be deleted."""

    def shown(self) -> Content:
        """Return the content with texts made safe to display and names that MLflow accepts."""
        params, tags = ({key_of(name): shown(text) for name, text in of.items()} for of in (self.params, self.tags))
        return replace(self, params=params, tags=tags)


def key_of(name: str) -> str:
    """Return a name as MLflow accepts it for a parameter, a tag or a metric."""
    return _ODD.sub("_", shown(name))


DENSE, ROUNDS = "dense/", "rounds/"
"""Prefixes of the figures of networks other than the trial's last."""
LAYOUT = 2
"""Version of the names of a run's metrics. Runs of another version are written anew, as metrics cannot be deleted."""
SWEEP_TAG, TRIAL_TAG, LOGGED_TAG = "pruning.sweep", "pruning.trial", "pruning.logged"
PLAN_TAG, AXES_TAG, OVERRIDES_TAG = "pruning.plan", "pruning.axes", "pruning.overrides"
COMMAND_TAG, NOTE_TAG = "pruning.command", "mlflow.note.content"
ATTEMPTS_TAG, FAILURE_TAG, WARNINGS_TAG = "pruning.attempts", "pruning.failure", "pruning.warnings"
STOPPED_TAG = "pruning.stopped"
STOPPED = "SCHEDULED"
"""Status of the run of a trial that a search does not run: a wider search may run it later."""
MASKS_PICTURE, FAILURE_FILE, SEARCH_FILE = "masks/summary.svg", "failure.txt", "search.json"


def sweep_tag(name: str) -> str:
    """Return the tag of the runs of the sweep `name`."""
    return digest(canonical_json(["sweep", name]))[:32]


def trial_ids(sweep: SweepInfo, trials: Iterable[TrialSpec]) -> tuple[str, ...]:
    """Return the tag that identifies each trial's run: a digest of the sweep's name and the trial's stage keys."""
    seen: Counter[tuple[str, ...]] = Counter()
    ids = []
    for trial in trials:
        seen[trial.stages] += 1
        ids.append(digest(canonical_json(["trial", sweep.name, trial.stages, seen[trial.stages]]))[:32])
    return tuple(ids)


def points_of(record: StageRecord, prefixes: Iterable[str] = ("",)) -> Iterator[MetricPoint]:
    """Yield a stage's figures with step = round, once under each prefix.

    The primary metric comes first, because MLflow lists metrics in this order, and by default plots the first.
    """
    first = (f"test/{record.primary.name}", f"val/{record.primary.name}")
    figures = {name: record.figures[name] for name in first if name in record.figures} | record.figures
    for prefix in prefixes:
        for name, value in figures.items():
            yield MetricPoint(key_of(f"{prefix}{name}"), value, record.ended, record.round)


def _prefixes(record: StageRecord, trial: TrialSpec) -> list[str]:
    """Return the prefixes of a stage's figures in its trial's run.

    Only the trial's last network has figures without a prefix: sorting and averaging by `test/accuracy` then never
    compares it with dense networks or earlier rounds of other trials. All rounds of several stand under `rounds/`.
    """
    own = [""] if record.key == trial.stages[-1] else []
    if not KINDS[record.kind].prunes:
        return own or [DENSE]
    return [*own, *([ROUNDS] if sum(key != record.key for key in trial.stages) > 1 else [])]


def _curve_points(curve: Iterable[CurvePoint], offset: int) -> Iterator[MetricPoint]:
    for point in curve:
        for name, value in point.metrics.items():
            yield MetricPoint(key_of(f"curve/{name}"), float(value), point.time, offset + point.step)


def logged_tag(chain: Sequence[StageRecord], curve: Sequence[CurvePoint] = ()) -> str:
    """Return a run's tag: its number of finished stages, and a digest that changes if one of them is executed again.

    If the run also holds points of the next stage's `curve`, their number and digest follow.
    """
    marks = [[record.key, record.started, record.weights_digest] for record in chain]
    times = [point.time for point in curve]
    running = f" {len(curve)} {digest(canonical_json(times))[:16]}" if curve else ""
    return f"{len(chain)} {digest(canonical_json([LAYOUT, *marks]))[:16]}{running}"


class SweepView:
    """State of a sweep so far, from which the content of each run follows."""

    def __init__(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        self.sweep, self.plan, self.outcome = sweep, plan, "RUNNING"
        self.ids = trial_ids(sweep, plan.trials)
        self._records = dict(finished)
        self._failures: dict[str, tuple[str, Failure, float]] = {}
        self._attempts: dict[str, int] = {}
        self.running: set[str] = set()
        """Keys of the running stages."""
        self._curves: dict[str, Sequence[CurvePoint]] = {}
        """Key of an unfinished stage -> its curve in the last checkpoint."""
        self._report: Mapping[str, bytes] = {}
        self._decision: Decision | None = None
        self._settings = SettingsOfEach((trial.config for trial in plan.trials), _as_text)
        """Settings of each trial as flat text: `schedule.sparsity` -> `0.9`."""

    def take(self, event: StageEvent) -> Sequence[int]:
        """Update the state by an event; return the indices of the trials whose runs it changes."""
        if event.kind == "started":
            self.running.add(event.key)
            return ()
        if event.kind != "retried":
            self.running.discard(event.key)
        if event.record is not None:
            spec = self.plan.stages.get(event.key)
            self._records[event.key] = event.record if spec is None else event.record.sharing(spec)
        if event.kind in ("finished", "retried"):
            self._failures.pop(event.key, None)
        else:
            failure = event.failure or Failure("no reason was given")
            self._failures[event.key] = (event.kind.upper(), failure, event.time)
        if event.attempt > 1:
            self._attempts[event.key] = event.attempt
        return self.plan.trials_of.get(event.key, ())

    def decide(self, decision: Decision) -> Sequence[int]:
        """Update the state by the last decision of a search; return the indices of the trials that it stops or runs."""
        before, self._decision = self._decision or Decision(), decision
        changed = before.stopped.keys() ^ decision.stopped.keys()
        return [index for index, trial in enumerate(self.plan.trials) if trial.name in changed]

    def reach(self, key: str, curve: Sequence[CurvePoint]) -> Sequence[int]:
        """Update the curve of a running stage from its checkpoint; return the indices of the trials it changes."""
        if not curve or curve == self._curves.get(key):
            return ()
        self._curves[key] = curve
        return self.plan.trials_of.get(key, ())

    def close(self, outcome: str, report: Mapping[str, bytes]) -> None:
        """End the sweep: a trial that has neither finished nor failed then counts as killed."""
        self.outcome, self._report = outcome.upper(), report

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Parameters that differ between trials; if a class and its name both differ, only the name."""
        found = varying(self._settings)
        return tuple(name for name in found if name_of(name) not in found)

    def saved_views(self, parent: str) -> dict[str, str]:
        """Return the saved views of the trials below the run `parent`: key -> state.

        The dict is empty until a stage has finished, because the metric comes from its record.
        """
        if not self._records:
            return {}
        metric = next(iter(self._records.values())).primary
        first = set(next(iter(self._settings), {}))
        everywhere = reduce(lambda names, each: names & each.keys(), self._settings, first)
        return saved_views(self.sweep.name, sweep_tag(self.sweep.name), parent, self.axes, everywhere, metric)

    def opening(self) -> Content:
        """Return the parent run's content at the start."""
        differ = varying(self._settings)
        first = next(iter(self._settings), {})
        content = self._described(
            {name: value for name, value in first.items() if name not in differ}, self.sweep.config
        )
        content.tags |= {AXES_TAG: ", ".join(self.axes), NOTE_TAG: self._note()}
        content.tags[PLAN_TAG] = digest(canonical_json(self.ids))[:16]
        content.files["plan.json"] = _json(self.plan.to_json())
        content.files["environment.json"] = _json(self.sweep.environment)
        return content

    def closing(self) -> Content:
        """Return the parent run's content at the end; figures only if all is done, because points cannot be deleted."""
        ends = [record.ended for record in self._records.values()]
        end = max([*ends, *(time for _, _, time in self._failures.values())], default=0.0)
        content = Content(self.outcome, files=dict(self._report), end=end or None)
        if self.outcome == "FINISHED":
            values = {"trials/finished": len(self.plan.trials), **json.loads(self._report.get(METRICS_FILE, b"{}"))}
            content.points = [MetricPoint(key_of(key), float(value), end, 0) for key, value in values.items()]
        if self._decision is not None:
            content.files[SEARCH_FILE] = _json(asdict(self._decision))
        if NOTE_FILE in self._report:
            content.tags[NOTE_TAG] = self._note(self._report[NOTE_FILE].decode().replace("](", "](comparison/"))
        return content

    def content(self, index: int, logged: str = "", status: str = "") -> Content | None:
        """Return the content that the run of trial `index` lacks; None if it lacks nothing.

        Args:
            index: index of the trial
            logged: the run's `LOGGED_TAG`, which identifies the stages that it holds; empty for a new run
            status: status of the run
        """
        trial, chain = self.plan.trials[index], self.chain(index)
        ending, failure, time = self._ending(index)
        curve = next((self._curves.get(key, ()) for key in trial.stages[len(chain) :][:1]), ())
        held, _, points, *_ = [*map(_number, logged.split()), 0, 0, 0]
        stands, current = _standing(logged, held, points, chain, curve)
        if logged == current and status == ending:
            return None
        content, new_run = Content(), bool(logged) and not stands
        if not logged or new_run:
            held, points, content = 0, 0, self._described(self._settings[index], trial.config)
            content.tags[OVERRIDES_TAG] = " ".join(trial.overrides)
        content.status, content.new_run = ending, new_run
        if held <= len(chain):  # else the store has lost records, and the run keeps its own until they are made again
            content.tags[LOGGED_TAG] = current
        offset = 0
        for position, record in enumerate(chain):
            if position >= held:
                content.files[f"records/round_{record.round}.json"] = _json(record.to_json())
                content.points += points_of(record, _prefixes(record, trial))
                content.points += _curve_points(record.curve[points if position == held else 0 :], offset)
                if KINDS[record.kind].prunes:
                    content.masks[f"masks/round_{record.round}.npz"] = record.key
            offset += record.steps
            content.start, content.end = content.start or record.started, record.ended
        if held <= len(chain):
            content.points += _curve_points(curve[points if held == len(chain) else 0 :], offset)
        for key in {*self.plan.work[index], *trial.parts} - {*trial.stages}:  # the dense network, starts, parts
            if key in self._records:
                content.files[f"records/{key[:16]}.json"] = _json(self._records[key].to_json())
        content.points += [
            MetricPoint(key_of(name), value, at, len(trial.stages) - 1)
            for figures in (self._difference(trial), headline(trial, self._records), evaluated(trial, self._records))
            for name, value, at in figures
        ]
        if len(chain) == len(trial.stages):  # MLflow compares runs by the metric that was written first
            content.points.sort(key=lambda point: point.key.startswith((DENSE, ROUNDS, "curve/")))
        if content.masks:
            content.files[MASKS_PICTURE] = mask_picture(chain)
            content.tags[NOTE_TAG] = f"![sparsity of each tensor after each round]({MASKS_PICTURE})"
        if attempts := max((self._attempts.get(key, 0) for key in self.plan.work[index]), default=0):
            content.tags[ATTEMPTS_TAG] = str(attempts)
        if warnings := [f"round {record.round}: {text}" for record in chain for text in record.warnings]:
            content.tags[WARNINGS_TAG] = "\n".join(warnings)
        if failure is not None:
            content.end, content.tags[FAILURE_TAG] = time, failure.message
            text = f"{failure.message}\nhost: {failure.host}\nlog: {failure.log}\n\n{failure.traceback}"
            content.files[FAILURE_FILE] = text.encode()
        if ending == STOPPED and self._decision is not None:
            content.tags[STOPPED_TAG] = self._decision.stopped[trial.name]
        return content

    def _difference(self, trial: TrialSpec) -> Iterator[tuple[str, float, float]]:
        """Yield (name, value, Unix seconds) of the loss or gain against the trial's own dense network on test."""
        last, dense = (self._records.get(key) for key in (trial.stages[-1], trial.dense))
        if last is not None and dense is not None and last is not dense:
            name = f"test/{last.primary.name}"
            if name in last.after and name in dense.after:
                yield f"difference/{name}", last.after[name] - dense.after[name], max(last.ended, dense.ended)

    def chain(self, index: int) -> list[StageRecord]:
        """Return the records of a trial's finished stages, from the first stage up to the first gap."""
        return [self._records[key] for key in takewhile(self._records.__contains__, self.plan.trials[index].stages)]

    def _ending(self, index: int) -> tuple[str, Failure | None, float]:
        """Return the status of a trial's run; for a failed or killed stage also the failure and its time."""
        stages, trial = self.plan.work[index], self.plan.trials[index]
        if all(key in self._records for key in stages):
            return "FINISHED", None, 0.0
        status = "RUNNING" if self.outcome == "RUNNING" else "KILLED"
        if self._decision is not None and trial.name in self._decision.stopped:
            status = STOPPED
        failed = (self._failures[key] for key in (*stages, *trial.parts) if key in self._failures)
        return next(failed, (status, None, 0.0))

    def _described(self, settings: Mapping[str, str], config: Mapping[str, Any]) -> Content:
        """Return the content of every run: settings as parameters, tags for settings of named classes, and files."""
        tags = {"sweep": self.sweep.name, COMMAND_TAG: self.sweep.command}
        tags |= {"mlflow.source.name": "python -m orchestrator", "mlflow.source.type": "LOCAL"}
        if commit := self.sweep.environment.get("git_commit"):
            tags["mlflow.source.git.commit"] = commit
        named = {name for name in settings if settings.get(name_of(name), "null") != "null" and name not in self.axes}
        params = {name: value for name, value in settings.items() if name not in named} | {"sweep": self.sweep.name}
        tags |= {name: settings[name] for name in named}
        return Content(params=params, tags=tags, files={"config.yaml": as_yaml(config)})

    def _note(self, results: str = "") -> str:
        tag = sweep_tag(self.sweep.name)
        views = " · ".join(f"[{label}](views/{tag}-{view})" for view, label in links(self.axes).items())
        trials, stages = len(self.plan.trials), len(self.plan.stages)
        what = f"**{markdown(self.sweep.name)}**: {trials} trials, {stages} stages."
        command = self.sweep.command.replace("\n", "\n    ")
        lines = [f"In this interface: {views}" if views else "", results, what, "Run it again, or resume it, with"]
        return "\n\n".join([*filter(None, lines), f"    {command}\n"])


def _standing(
    logged: str, held: int, points: int, chain: Sequence[StageRecord], curve: Sequence[CurvePoint]
) -> tuple[bool, str]:
    """Return whether a run's tag fits these executions, as far as is known, and the tag that the run should have.

    Args:
        logged: tag of the run
        held: number of stages in the tag
        points: number of points of the next stage's curve in the tag
        chain: records of the finished stages
        curve: curve of the stage after them
    """
    if held > len(chain):
        return True, logged_tag(chain, curve)
    if held == len(chain) and points > len(curve):  # the stage ran under an earlier driver, or starts again
        stands = logged.startswith(f"{logged_tag(chain)} ")
        return stands, logged if stands else logged_tag(chain, curve)
    following = chain[held].curve if held < len(chain) else curve
    return logged == logged_tag(chain[:held], following[:points]), logged_tag(chain, curve)


def _as_text(settings: dict[str, Any]) -> dict[str, str]:
    return {key_of(name): as_typed(value) for name, value in settings.items()}


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _json(data: Any) -> bytes:
    return shown_json(data, sort_keys=True, separators=(",", ":")).encode()
