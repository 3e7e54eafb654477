"""Outcome of a sweep: its objectives for a search plugin, and the message for an incomplete one."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.compare.deployment_points import figures_of, headline
from orchestrator.config.schema import MATCHING, SIZES, ConfigError, objectives
from orchestrator.config.tracking_uri import DEFAULT_EXPERIMENT
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Decision, Failure, PastSearch, StageEvent
from orchestrator.core.file_names import DROPPABLE
from orchestrator.core.metrics import Metric, margin_fault
from orchestrator.core.records import Reached, StageRecord
from orchestrator.core.specs import Plan
from orchestrator.execution.interrupts import EXIT_INTERRUPTED
from orchestrator.planning.number_formats import counted, first_few
from orchestrator.sweep.search.building import search_digest


def objective(name: str | None, records: Sequence[StageRecord], measured: Mapping[str, float] | None = None) -> float:
    """Return the objective `name` of a trial; NaN if unknown.

    Metrics such as `val/loss`, and sizes such as `parameters/remaining`, are figures of the last round. None stands for
    the primary metric on the validation split. `matching_sparsity` is the largest sparsity of a round whose primary
    metric on that split is no worse than the dense network's; 0 if there is no such round.

    Args:
        name: name of the objective
        records: records of the trial's dense stage and of its rounds
        measured: figures of its deployed last network, such as `deploy/latency_ms`
    """
    dense, *rounds = records
    metric, floor = dense.primary, dense.figure("val")
    if name == MATCHING:
        return max((each.sparsity for each in rounds if metric.gain(each.figure("val"), floor) >= 0), default=0.0)
    known = {**records[-1].figures, **(measured or {})}
    return known.get(name or f"val/{metric.name}", math.nan)


def invalid_margin(plan: Plan, metric: Metric | None) -> Iterator[str]:
    """Yield a sentence if the margin of the sweep is not one of its primary metric."""
    margin = (plan.trials[0].config.get("compare") or {}).get("margin")
    if metric is not None and margin is not None and (fault := margin_fault(metric, float(margin))):
        yield f"`compare.margin` (={margin}) {fault}"


def unmeasured(names: Collection[str | None], figures: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each objective that is not among the `figures` of a task on the validation split."""
    for name in names:
        if name is None or name in (MATCHING, *SIZES) or name.startswith("deploy/"):
            continue
        if name not in (f"val/{figure}" for figure in figures):
            yield (
                f"`objective` (={name}) must be one of "
                f"{', '.join(f'val/{figure}' for figure in figures)}, {MATCHING}; pass null for the primary metric."
            )


Status = Literal["finished", "failed", "killed"]
NOT_THEIRS = (
    "site-packages",
    "dist-packages",
    '"<frozen ',
    f"{os.sep}lib{os.sep}python3.",  # the standard library of any worker's interpreter
    f"{os.sep}lib64{os.sep}python3.",
    str(Path(os.__file__).parent),
    *(str(Path(__file__).parents[2] / name) for name in ("orchestrator", "pruning")),
)
"""Parts of paths of code that is not custom code."""
EXIT_BEHIND = 3
"""Exit status if all trials finished, but the view is incomplete."""
SHOWN = 5
"""Maximum number of failures that are shown in full."""


class SweepIncomplete(OrchestratorError):
    """Sweep with unfinished trials, which the same command runs; or with an incomplete view."""


@dataclass
class Outcome:
    """Outcome of a sweep: its plan, its durable records, and the failures of stages."""

    plan: Plan
    records: dict[str, StageRecord]
    failures: dict[str, str] = field(default_factory=dict)
    causes: dict[str, Failure] = field(default_factory=dict)
    """Failures of stages that failed themselves, not because an input failed."""
    interrupted: bool = False
    killed: bool = False
    """Whether a stage was ended before it finished, by an interrupt or by `cluster.on_error=stop`."""
    reached: Mapping[str, Reached] = field(default_factory=dict)
    """Places of the checkpoints of an interrupted sweep, by stage."""
    behind: str = ""
    """Message with the command that completes the view; empty if the view is complete."""
    ran: bool = True
    decision: Decision | None = None
    """Last decision of the search; None without a search."""
    past: Mapping[str, PastSearch] = field(default_factory=dict)
    """Searches of the sweep before this run, by the digests of their settings."""

    @property
    def status(self) -> Status:
        """`killed` if interrupted, `failed` if a trial is incomplete, else `finished`."""
        if self.interrupted:
            return "killed"
        return "failed" if self.missing else "finished"

    @property
    def missing(self) -> list[int]:
        """Indices of the trials that have to be run and are incomplete."""
        return [trial for trial in range(len(self.plan.trials)) if not (self.complete(trial) or self.stopped(trial))]

    @property
    def settled(self) -> bool:
        """Whether every stage to run has finished or failed, so that an interrupt had no effect."""
        if self.decision is not None:
            return self.decision.ended
        return all(key in self.records or key in self.failures for key in self.plan.stages)

    @property
    def failing(self) -> frozenset[str]:
        """Stages that fail in the same way every time."""
        return frozenset(key for key, failure in self.causes.items() if failure.repeats)

    def stopped(self, trial: int) -> str:
        """Return the reason why an ended search does not run a trial; empty if it runs."""
        if self.decision is None or not self.decision.ended:
            return ""
        return self.decision.stopped.get(self.plan.trials[trial].name, "")

    @property
    def searches(self) -> Mapping[str, PastSearch]:
        """Searches of the sweep by the digests of their settings, with all that they have seen."""
        if self.decision is None:
            return self.past
        own = search_digest(self.plan.trials[0].config)
        return {**self.past, own: replace(self.past[own], seen=self.decision.seen)}

    def take(self, event: StageEvent) -> None:
        """Record one event."""
        if event.record is not None:
            self.records[event.key] = event.record
        self.killed = self.killed or event.kind == "killed"
        if event.kind == "failed" and event.failure is not None:
            self.failures[event.key] = event.failure.message
            if self.failures.keys().isdisjoint(self.plan.needs(event.key)):
                self.causes[event.key] = event.failure

    def without_weights(self, keys: Iterable[str]) -> None:
        """Remove the dropped weights of stages from their records."""
        for key in keys:
            files = {name: info for name, info in self.records[key].files.items() if name not in DROPPABLE}
            self.records[key] = replace(self.records[key], files=files)

    def complete(self, trial: int) -> bool:
        """Whether the store holds every stage of the trial."""
        return all(key in self.records for key in self.plan.work[trial])

    def require_measured(self) -> None:
        """Raise `ConfigError` for an objective that a finished trial did not measure, or an invalid margin."""
        for metric in {record.primary for record in self.records.values()}:
            for sentence in invalid_margin(self.plan, metric):
                raise ConfigError(sentence)
        for trial in self.plan.trials:
            if (record := self.records.get(trial.stages[-1])) is not None:
                figures = [*(metric.name for metric in record.metrics), "loss"]
                for sentence in unmeasured(objectives(trial.config["objective"]), figures):
                    raise ConfigError(sentence)

    def objective(self, trial: int) -> float | list[float]:
        """Return the value of the trial's `objective`; a list of values for a list."""
        spec = self.plan.trials[trial]
        records = [self.records[key] for key in (spec.dense, *spec.stages[1:])]
        found = (*figures_of(spec, self.records), *headline(spec, self.records))
        measured = {name: value for name, value, _ in found}
        given = spec.config["objective"]
        told = [objective(name, records, measured) for name in objectives(given)]
        return told if isinstance(given, list) else told[0]

    def incomplete(self) -> SweepIncomplete | None:
        """Return an error with the missing trials, their failures, and an incomplete view; None if all is complete."""
        missing = [self.plan.trials[trial].name for trial in self.missing]
        if not self.ran or not (missing or self.behind):
            return None
        lines = []
        if missing:
            if not self.interrupted:
                failed = self._failed(missing)
                lines.append(f"{len(failed)} of {len(self.plan.trials)} trials failed: {first_few(failed)}")
                lines += ["The search waits for them."] if self.decision is not None and not self.decision.ended else []
            elif self.causes:
                lines.append("Before the interrupt failed:")
            for key, failure in list(self.causes.items())[:SHOWN]:
                lines += self._told(key, failure)
            if len(self.causes) > SHOWN:
                lines.append(f"  and {len(self.causes) - SHOWN} more failures")
            again = any(failure.repeats for failure in self.causes.values())
            less = ", except stages that would fail again (retry_failed=true runs them, too)" if again else ""
            reached = sorted(place for place in self.reached.values() if place.number)
            places = ", ".join(map(str, reached))
            states = f", and a checkpoint of {counted(len(reached), 'stage')} (at {places})" if places else ""
            kept = "Interrupted; what finished is kept" if self.interrupted else "What finished is kept"
            lines.append(f"{kept}{states}: the same command runs the rest{less}.")
        error = SweepIncomplete("\n".join([*lines, self.behind] if self.behind else lines))
        error.exit_status = EXIT_INTERRUPTED if self.interrupted else 1 if missing else EXIT_BEHIND
        return error

    def _failed(self, missing: Sequence[str]) -> Sequence[str]:
        """Return the missing trials that failed; a search may have other trials that wait for these."""
        if self.decision is None:
            return missing
        failed = {index for key in self.failures for index in self.plan.trials_of.get(key, ())}
        return [trial.name for index, trial in enumerate(self.plan.trials) if index in failed and trial.name in missing]

    def _told(self, key: str, failure: Failure) -> list[str]:
        """Return lines with the stage and its failure, and the lines of custom code in the traceback."""
        first = self.plan.trials[self.plan.trials_of[key][0]].name
        more = f" and {len(self.plan.trials_of[key]) - 1} more" if len(self.plan.trials_of[key]) > 1 else ""
        stage = self.plan.stages[key]
        lines = [f"  {first}{more}, {stage.title}: {failure.message}"]
        lines += [f"      {line}" for line in own_frames(failure.traceback)]
        return lines + ([f"    log: {failure.log} on {failure.host}"] if failure.log else [])


def behind(
    names: Sequence[str], store: Mapping[str, Any], *, uri: str | None, experiment: str | None, **_: object
) -> str:
    """Return a sentence about incomplete views, and the command that completes them."""
    own = ["--uri", uri] if uri else []
    own += ["--experiment", experiment] if experiment and experiment != DEFAULT_EXPERIMENT else []
    lacking = "this sweep" if len(names) == 1 else f"{len(names)} sweeps"
    line = command("sync", names, store, own)
    return f"MLflow does not hold all of {lacking}; the store does. This completes it:\n\n    {line}"


def command(name: str, sweeps: Sequence[str], store: Mapping[str, Any], more: Sequence[str] = ()) -> str:
    """Return the command line of an orchestrator's command for some sweeps of a store."""
    words = ["python", "-m", f"orchestrator.{name}", *sweeps]
    words += ["--store", store["uri"]] if store["uri"] != "store" else []
    words += [word for key, value in store["options"].items() for word in ("--option", f"{key}={value}")]
    return shlex.join([*words, *more])


def own_frames(traceback: str) -> list[str]:
    """Return the lines of a traceback that belong to custom code."""
    shown, keep = [], False
    for line in traceback.splitlines():
        if line.startswith("  File "):
            keep = not any(folder in line for folder in NOT_THEIRS)
        elif not line.startswith("    "):
            keep = False
        if keep:
            shown.append(line[2:])
    return shown
