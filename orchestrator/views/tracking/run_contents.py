"""A sweep as tracked runs: the identity, parameters, metric points, tags, files and status of each trial. Pure.

Trackers keep what this module says. Points carry the worker's time, so replaying a record changes nothing.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from orchestrator.config.settings import as_typed, name_of, settings_of, varying
from orchestrator.core.canonical import canonical_json, digest
from orchestrator.core.events import Failure, StageEvent, SweepInfo
from orchestrator.core.file_names import METRICS_FILE, NOTE_FILE
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact, redact_tree
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.views.tracking.mask_picture import mask_picture
from orchestrator.views.tracking.saved_views import links, saved_views

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

SWEEP_TAG, TRIAL_TAG, LOGGED_TAG = "pruning.sweep", "pruning.trial", "pruning.logged"
PLAN_TAG, AXES_TAG, OVERRIDES_TAG = "pruning.plan", "pruning.axes", "pruning.overrides"
COMMAND_TAG = "pruning.command"
ATTEMPTS_TAG, FAILURE_TAG, WARNINGS_TAG = "pruning.attempts", "pruning.failure", "pruning.warnings"
NOTE_TAG = "mlflow.note.content"

MASKS_PICTURE = "masks/summary.svg"
FAILURE_FILE = "failure.txt"

FIRST = ("test/accuracy", "val/accuracy")
"""Metrics written first: MLflow lists them so, and plots the first one where nobody has chosen."""

_OWN_LINK = re.compile(r"\]\((?!comparison/)")
"""A link of the note to a file beside it; an older release wrote links from the folder above."""
_ODD = re.compile(r"[^/\w.\- ]")


class Point(NamedTuple):
    """One point of a metric; `time` is in milliseconds of Unix time."""

    key: str
    value: float
    step: int
    time: int


@dataclass
class Content:
    """What is to be written to one run: everything, or what came since `logged`."""

    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """File of the run -> key of the stage whose masks it holds."""
    files: dict[str, bytes] = field(default_factory=dict)
    status: Status = "RUNNING"
    start: int | None = None
    """Milliseconds of Unix time at which the run began."""
    end: int | None = None
    """Milliseconds of Unix time at which the run ended."""


def milliseconds(seconds: float) -> int:
    """Return Unix seconds as whole milliseconds."""
    return round(seconds * 1000)


def sweep_tag(name: str) -> str:
    """Return the tag that the runs of the sweep called `name` have."""
    return digest(canonical_json(["sweep", name]))[:32]


def trial_ids(sweep: SweepInfo, trials: Iterable[TrialSpec]) -> tuple[str, ...]:
    """Return the tag by which each trial's run is found again: a digest of the sweep's name and its stage keys."""
    seen: dict[tuple[str, ...], int] = {}
    ids = []
    for trial in trials:
        seen[trial.stages] = seen.get(trial.stages, 0) + 1
        ids.append(digest(canonical_json(["trial", sweep.name, trial.stages, seen[trial.stages]]))[:32])
    return tuple(ids)


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a trial's settings as flat text parameters, `schedule.sparsity` -> `0.9`."""
    return {name: as_typed(value) for name, value in settings_of(config).items()}


def round_points(record: StageRecord) -> Iterator[Point]:
    """Yield a stage's figures with step = round: the same keys for every trial of one network."""
    values: dict[str, float] = {
        **{name: record.after[name] for name in FIRST if name in record.after},
        **record.after,
        **{f"{name}_before": value for name, value in record.before.items()},
        "sparsity/overall": record.sparsity,
        **{f"sparsity/{name}": value for name, value in record.tensor_sparsity.items()},
        "parameters/remaining": record.remaining_parameters,
        "parameters/compression": record.parameters / max(1, record.remaining_parameters),
        "macs/remaining": record.macs_remaining,
        "seconds": record.seconds,
        "steps": record.steps,
    }
    if record.macs_remaining > 0:
        values["macs/speedup"] = record.macs / record.macs_remaining
    if record.requested_sparsity is not None:
        values["sparsity/requested"] = record.requested_sparsity
    time = milliseconds(record.started + record.seconds)
    for name, value in values.items():
        yield Point(_ODD.sub("_", name), float(value), record.round, time)


def curve_points(record: StageRecord, offset: int) -> Iterator[Point]:
    """Yield a stage's training curve as `curve/...`, its steps counted on from the `offset` steps of earlier stages."""
    for point in record.curve:
        for name, value in point.metrics.items():
            yield Point(_ODD.sub("_", f"curve/{name}"), float(value), offset + point.step, milliseconds(point.time))


def logged_tag(chain: Sequence[StageRecord]) -> str:
    """Return how many stages a run holds, and a digest that tells these executions of them from any others."""
    marks = [[record.key, record.started, record.weights_digest] for record in chain]
    return f"{len(chain)} {digest(canonical_json(marks))[:16]}"


class SweepView:
    """What is known of a sweep so far; says what each run should hold. Safe to use from two threads."""

    def __init__(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        self.sweep = sweep
        self.plan = plan
        self.ids = trial_ids(sweep, plan.trials)
        self.id = sweep_tag(sweep.name)
        """The tag by which the parent run is found again."""
        self._records = dict(finished)
        self._failures: dict[str, tuple[Status, Failure, float]] = {}
        self._attempts: dict[str, int] = {}
        self._outcome: Status = "RUNNING"
        self._report: Mapping[str, bytes] = {}
        self._lock = threading.Lock()
        self._trials_of: dict[str, list[int]] = {}
        for index, trial in enumerate(plan.trials):
            for key in trial.stages:
                self._trials_of.setdefault(key, []).append(index)

    def take(self, event: StageEvent) -> list[int]:
        """Take an event; return the indices of the trials whose runs it changes."""
        if event.kind == "started":
            return []
        with self._lock:
            if event.kind in ("finished", "retried"):
                self._failures.pop(event.key, None)
                if event.record is not None:
                    self._records[event.key] = event.record
            else:
                status: Status = "KILLED" if event.kind == "killed" else "FAILED"
                failure = event.failure or Failure("interrupted" if status == "KILLED" else "no reason was given")
                self._failures[event.key] = (status, failure, event.time)
            if event.attempt > 1:
                self._attempts[event.key] = event.attempt
        return self._trials_of.get(event.key, [])

    def close(self, outcome: Status, report: Mapping[str, bytes]) -> None:
        """End the sweep: from now on a trial that has neither finished nor failed counts as killed."""
        with self._lock:
            self._outcome, self._report = outcome, report

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The parameters that differ between trials; a class whose name differs too goes by that."""
        found = varying(params_of(trial.config) for trial in self.plan.trials)
        return tuple(name for name in found if name_of(name) not in found)

    def saved_views(self, parent: str) -> dict[str, str]:
        """Return the views of the trials below the run `parent` that the interface offers: key -> state."""
        names = [set(params_of(trial.config)) for trial in self.plan.trials]
        return saved_views(self.sweep.name, self.id, parent, self.axes, set.intersection(*names) if names else set())

    def opening(self) -> Content:
        """Return what the parent run holds from the start."""
        settings = [params_of(trial.config) for trial in self.plan.trials]
        differ = varying(settings)
        params, classes = self._split({k: v for k, v in settings[0].items() if k not in differ} if settings else {})
        content = Content(
            params={**params, "sweep": self.sweep.name},
            tags={**self._common_tags(), **classes, AXES_TAG: ", ".join(self.axes), NOTE_TAG: self._note()},
            status=self._outcome,
        )
        content.tags[PLAN_TAG] = digest(canonical_json(self.ids))[:16]
        content.files["plan.json"] = canonical_json(redact_tree(self.plan.to_json())).encode()
        content.files["config.yaml"] = as_yaml(redact_tree(self.sweep.config))
        content.files["environment.json"] = as_json(redact_tree(self.sweep.environment))
        return content

    def closing(self) -> Content:
        """Return what the parent run holds at the end: the report, its headline figures, the counts of trials.

        An interrupted sweep has no figures yet: a point of a metric cannot be taken back when it goes on.
        """
        with self._lock:
            ends = [record.started + record.seconds for record in self._records.values()]
            ends += [time for _, _, time in self._failures.values()]
            outcome, report = self._outcome, dict(self._report)
        counts = Counter(self.status(index) for index in range(len(self.plan.trials)))
        values = {f"trials/{status.lower()}": counts[status] for status in ("FINISHED", "FAILED", "KILLED")}
        values |= json.loads(report.get(METRICS_FILE, b"{}"))
        content = Content(files=report, status=outcome, end=milliseconds(max(ends, default=0.0)) or None)
        if outcome != "KILLED":
            end = content.end or 0
            content.points = [Point(_ODD.sub("_", key), float(value), 0, end) for key, value in values.items()]
        if NOTE_FILE in report:
            content.tags[NOTE_TAG] = self._note(_OWN_LINK.sub("](comparison/", report[NOTE_FILE].decode()))
        return content

    def content(self, index: int, logged: str = "") -> Content | None:
        """Return what the run of trial `index` lacks; `logged` is the tag that says which stages it holds already.

        None: it holds another execution of one of these stages, whose points cannot be taken back.
        """
        trial, chain = self.plan.trials[index], self.chain(index)
        held = int(logged.partition(" ")[0] or 0)
        if len(chain) < held:  # records that the store has lost; the run keeps its own until they are made again
            chain = []
        elif logged_tag(chain[:held]) != (logged or logged_tag([])):
            return None
        content = Content(tags=self._tags(trial, chain), start=milliseconds(chain[0].started) if chain else None)
        if not held:
            params, classes = self._split(params_of(trial.config))
            content.params = {**params, "sweep": self.sweep.name}
            content.tags |= classes
            content.files["config.yaml"] = as_yaml(redact_tree(trial.config))
        offset = 0
        for position, record in enumerate(chain):
            if position >= held:
                content.files[f"records/round_{record.round}.json"] = canonical_json(
                    redact_tree(record.to_json())
                ).encode()
                content.points += [*round_points(record), *curve_points(record, offset)]
                if record.kind == "round":
                    content.masks[f"masks/round_{record.round}.npz"] = record.key
            offset += record.steps
        if content.masks:
            content.files[MASKS_PICTURE] = mask_picture(chain)
            content.tags[NOTE_TAG] = f"![sparsity of each tensor after each round]({MASKS_PICTURE})"
        self._conclude(content, index, chain)
        return content

    def is_current(self, index: int, logged: str, status: str) -> bool:
        """Whether a run that holds `logged` and has `status` lacks nothing."""
        return status == self.status(index) and logged == logged_tag(self.chain(index))

    def chain(self, index: int) -> list[StageRecord]:
        """Return the records of a trial's finished stages, from the dense one on without a gap."""
        with self._lock:
            found = [self._records.get(key) for key in self.plan.trials[index].stages]
        return [record for record in takewhile(lambda record: record is not None, found) if record is not None]

    def status(self, index: int) -> Status:
        """Return the status of a trial's run."""
        stages = self.plan.trials[index].stages
        with self._lock:
            if all(key in self._records for key in stages):
                return "FINISHED"
            failed = next((self._failures[key][0] for key in stages if key in self._failures), None)
            return failed or ("RUNNING" if self._outcome == "RUNNING" else "KILLED")

    def _split(self, settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return settings as parameters, and the classes among them that go by a name, which are better as tags."""
        named = {name for name in settings if settings.get(name_of(name), "null") != "null" and name not in self.axes}
        params = {name: value for name, value in settings.items() if name not in named}
        return params, {name: settings[name] for name in settings if name in named}

    def _conclude(self, content: Content, index: int, chain: list[StageRecord]) -> None:
        content.status = self.status(index)
        if content.status == "FINISHED" and chain:
            content.end = milliseconds(chain[-1].started + chain[-1].seconds)
            return
        with self._lock:
            stages = self.plan.trials[index].stages
            failed = next((self._failures[key] for key in stages if key in self._failures), None)
        if failed is not None:
            _, failure, time = failed
            content.end = milliseconds(time)
            content.tags[FAILURE_TAG] = redact(failure.message)
            content.files[FAILURE_FILE] = redact(failure_text(failure)).encode()

    def _tags(self, trial: TrialSpec, chain: list[StageRecord]) -> dict[str, str]:
        tags = {**self._common_tags(), OVERRIDES_TAG: redact(" ".join(trial.overrides))}
        if chain:
            tags[LOGGED_TAG] = logged_tag(chain)
        with self._lock:
            attempts = max((self._attempts.get(key, 1) for key in trial.stages), default=1)
        if attempts > 1:
            tags[ATTEMPTS_TAG] = str(attempts)
        warnings = [f"round {record.round}: {text}" for record in chain for text in record.warnings]
        if warnings:
            tags[WARNINGS_TAG] = "\n".join(warnings)
        return tags

    def _common_tags(self) -> dict[str, str]:
        tags = {SWEEP_TAG: self.id, "sweep": self.sweep.name, COMMAND_TAG: redact(self.sweep.command)}
        tags |= {"mlflow.source.name": "python -m orchestrator", "mlflow.source.type": "LOCAL"}
        if commit := self.sweep.environment.get("git_commit"):
            tags["mlflow.source.git.commit"] = commit
        return tags

    def _note(self, results: str = "") -> str:
        views = [f"[{label}](views/{self.id}-{view})" for view, label in links(self.axes).items()]
        lines = [f"In this interface: {' · '.join(views)}\n"] if views else []
        lines += [results] if results else []
        lines += [f"**{self.sweep.name}**: {len(self.plan.trials)} trials, {len(self.plan.stages)} stages.\n"]
        lines += [f"Run it again, or resume it, with\n\n    {redact(self.sweep.command)}\n"]
        return "\n".join(lines)


def failure_text(failure: Failure) -> str:
    """Return a failure in full: message, host, log and the remote traceback."""
    lines = [failure.message]
    lines += [f"host: {failure.host}"] if failure.host else []
    lines += [f"log: {failure.log}"] if failure.log else []
    return "\n".join([*lines, "", failure.traceback])


def as_json(data: Any) -> bytes:
    """Return `data` as indented JSON."""
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def as_yaml(data: Any) -> bytes:
    """Return `data` as YAML in its own order."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True)).encode()
