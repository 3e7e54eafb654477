"""Flow of a sweep: plan, run the stages that the store lacks in portions, track, compare, report."""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.compare.statistics import LEVEL, t_quantile
from orchestrator.config.cluster import Cluster, submission_violations
from orchestrator.config.parallel import processes
from orchestrator.config.schema import ConfigError
from orchestrator.config.tracking_uri import resolve_experiment, resolve_uri, ui_hint
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.events import SweepInfo, Tracker
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact, redact_argument
from orchestrator.core.specs import Job, Plan
from orchestrator.core.work_order import Report
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.interrupts import Interruptible
from orchestrator.execution.on_ray.ray_executor import RayExecutor, executor_of
from orchestrator.execution.placement import beyond_this_machine
from orchestrator.planning.forecast import in_words
from orchestrator.planning.number_formats import counted
from orchestrator.planning.pinned_content import too_short
from orchestrator.planning.plan import make_plan
from orchestrator.planning.preview import preview
from orchestrator.store import retention
from orchestrator.store.leases import Leases
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.sweep.earlier_sweeps import (
    continuing,
    earlier_forecast,
    edited_sources,
    estimated,
    past_searches,
)
from orchestrator.sweep.first_checks import environment, preflight, probing
from orchestrator.sweep.outcome import Outcome, behind, command
from orchestrator.sweep.search.building import PlannedSearch, planned_search
from orchestrator.views.report.figures import drawing
from orchestrator.views.terminal.progress import Progress
from orchestrator.views.terminal.standard_streams import Console, say

FEW = 2
"""Number of trials up to which the audit that a run prints leaves out what only a comparison can pass."""


class Portions:
    """Portions of a sweep; each follows from the records of all portions before.

    Args:
        outcome: state of the sweep; `next` sets its `decision`
        search: the search; None runs all stages in one portion
    """

    def __init__(self, outcome: Outcome, search: PlannedSearch | None) -> None:
        self._outcome, self._search, self._begun = outcome, search, False
        self._replay = None if search is None else search.replay()
        if search is not None:
            t_quantile(LEVEL, 1)  # imports SciPy now, which takes longer than a decision

    def next(self) -> Plan:
        """Return the plan of the stages to run now; a plan without stages if none are left, or all left have failed."""
        outcome, plan = self._outcome, self._outcome.plan
        if outcome.killed:  # interrupted, or the first failure ends the sweep
            return plan.without(plan.stages)
        if self._replay is None:
            begun, self._begun = self._begun, True
            return plan.without(plan.stages if begun else set(outcome.records))
        decision = outcome.decision = self._replay.next(outcome.records, outcome.failing)
        return plan.without(plan.stages.keys() - (set(decision.run) - outcome.failures.keys()))

    def again(self) -> Plan:
        """Return the first portion anew, after finished stages have lost their weights."""
        self._begun, self._replay = False, None if self._search is None else self._search.replay()
        return self.next()

    def most(self) -> Plan:
        """Return the plan with only the stages of the longest search."""
        plan = self._outcome.plan
        return plan if self._search is None else plan.without(plan.stages.keys() - self._search.bounds()[1])

    def told(self) -> str:
        """Return a sentence with the stages that the search runs at least and at most; empty without a search."""
        if self._search is None:
            return ""
        least, most = self._search.bounds()
        return f"The search runs {len(least)} to {len(most)} of {counted(len(self._outcome.plan.stages), 'stage')}."


def search_preview(search: PlannedSearch | None, store: Store, finished: Mapping[str, StageRecord]) -> list[str]:
    """Return lines with the least and the most that a search runs; the preview has the whole grid."""
    if search is None:
        return []
    plan, lines = search.space.plan, []
    for name, keys in zip(("at least", "at most"), search.bounds(), strict=True):
        part = plan.without(plan.stages.keys() - keys)
        left = counted(sum(key not in finished for key in keys), "stage")
        made = in_words(estimated(store, part, finished)[1])
        lines.append(f"{name} {counted(len(keys), 'stage')}, {left} to run{f': {made}' if made else ''}")
    return [*lines, f"the figures above are those of all {len(plan.stages)} stages"]


REPORT = "comparison/report.html"
SWEEP_WIDE = ("name", "search", "cluster", "compare", "tracking", "store", "dry_run", "retry_failed")
"""Parts of the configuration that are the same for all trials, and so cannot be axes."""


def run(jobs: Sequence[Job], *, preset: str | None = None) -> Outcome:
    """Plan `jobs` and run them as one sweep; stages in the store are not run again.

    Raises:
        ConfigError: a trial cannot be planned, or the cluster can never run it; nothing was started.
    """
    with _nothing_started():
        plan = make_plan(jobs)
        config = _sweep_wide(plan)
        impossible = [*submission_violations(config), beyond_this_machine(Cluster(**config["cluster"]))]
        texts = {repr(data): data for trial in plan.trials if (data := trial.config["data"]).get("kind") == "text"}
        impossible += [said for data in texts.values() for said in too_short(data)]
        if refused := "\n".join(filter(None, impossible)):
            raise ConfigError(refused)
        info = _info(plan, config, preset)
        store = Store(**config["store"], read_only=config["dry_run"]).opened()
        past = past_searches(store, info.name, config)
        plan = continuing(store, info.name, plan) if past else plan
        search = planned_search(config, plan, past)
        if config["dry_run"]:
            finished = store.resumable(plan)
            dense: tuple[str, ...] = ()
            if not config["cluster"]["gpus_per_trial"]:  # this machine may have no GPU
                here = InlineExecutor(Cluster(**config["cluster"]), store)
                dense = preflight(here, store, plan, finished, info.environment, own_only=True)
            made, told = estimated(store, plan, finished)[1], search_preview(search, store, finished)
            edited = edited_sources(store, info.name, plan, finished)
            say(preview(info.name, plan, finished, store.failures.known(), made, told, edited, dense))
            return Outcome(plan, {}, ran=False)
    return _run(Outcome(plan, {}, past=past), info, store, config, search)


@contextmanager
def _nothing_started() -> Iterator[None]:
    """Give every error the exit status of a refusal."""
    try:
        yield
    except OrchestratorError as error:
        error.exit_status = ConfigError.exit_status
        raise


def _run(
    outcome: Outcome, info: SweepInfo, store: Store, config: Mapping[str, Any], search: PlannedSearch | None
) -> Outcome:
    from orchestrator.compare.audit.checklist import audit  # not needed for a dry run
    from orchestrator.compare.compare_trials import compare_trials
    from orchestrator.views.report.answers import answer_lines
    from orchestrator.views.report.report_files import kept, report, write
    from orchestrator.views.report.tables import print_audit, print_comparison, print_forecast

    plan, console, folder = outcome.plan, Console(), Path("outputs") / info.name
    with Interruptible() as interrupt, ExitStack() as stack:
        with _nothing_started():
            outcome.records = store.resumable(plan)
            outcome.require_measured()
            portions = Portions(outcome, search)
            pace, made = estimated(store, portions.most(), outcome.records)
        info = replace(info, forecast=made if made.stages else earlier_forecast(store, info.name))
        progress = Progress(plan, dict(outcome.records), console=console, slots=made.slots, pace=pace)
        for line in edited_sources(store, info.name, plan, outcome.records):
            progress.say(f"{line}.")
        tracker = stack.enter_context(_tracker(config["tracking"], store, progress.say))  # starts together with Ray
        with progress:
            _train(outcome, portions, info, store, config, (tracker, progress), interrupt, stack)
        if made.stages:
            info = replace(info, forecast=replace(made, ended=time.time()))
        _save(outcome, info, store)
        comparison = compare_trials(plan, outcome.records, outcome.failures, search=outcome.decision)
        print_comparison(comparison, console, failures=False)  # `Outcome.incomplete` lists failures
        if not outcome.interrupted:
            if outcome.records:
                whole = "" if len(plan.trials) > FEW else command("compare", [info.name], config["store"])
                print_audit(audit(plan, outcome.records, comparison), console, whole)
            print_forecast(info, plan, outcome.records, console)
            files = kept(folder, comparison) or report(info, plan, outcome.records, comparison, store.read)
            try:
                write(folder, files)
            except OSError as error:
                progress.say(_unwritten(info.name, error))
            tracker.finish(outcome.status, files)
        places = _places(config, store, info.name)
        progress.closing({what: place for what, place in places.items() if what != "report" or not outcome.interrupted})
        for line in answer_lines(comparison):
            progress.say(line)
        if not tracker.complete:
            outcome.behind = behind([info.name], config["store"], **config["tracking"])
    return outcome


def _save(outcome: Outcome, info: SweepInfo, store: Store) -> None:
    """Save the outcome of a sweep, and remove the weights that no stage needs any more."""
    plan = outcome.plan
    try:
        store.save_sweep(info.name, manifest(info, plan, outcome.failures, outcome.decision, outcome.searches))
        outcome.reached = store.checkpoints.places(plan.stages.keys()) if outcome.interrupted else {}
        outcome.without_weights(retention.prune_sweep(store, plan, outcome.records))
        retention.limit(store, plan)
    except StoreError as error:  # finished stages are durable, so show the results all the same
        say(error, amiss=True)


def _unwritten(name: str, error: OSError) -> str:
    return (
        f"The report could not be written to outputs/{name}: {error.strerror}. "
        f"`python -m orchestrator.compare {name} --output FOLDER` writes it elsewhere."
    )


def _train(
    outcome: Outcome,
    portions: Portions,
    info: SweepInfo,
    store: Store,
    config: Mapping[str, Any],
    views: tuple[Tracker, Progress],
    interrupt: Interruptible,
    later: ExitStack,
) -> None:
    """Run the missing stages and pass events to the views; `later` waits for work that may end during the report."""
    tracker, progress = views
    todo = portions.next()
    places = _places(config, store, info.name)
    if not todo.stages:
        progress.opening(info.name, places, search=portions.told())
        tracker.start(info, outcome.plan, outcome.records)
        _decided(outcome, views)
        return
    with ExitStack() as stack:
        leases, held = store.leases(), stack.enter_context(ExitStack())  # released after the executor has ended
        most = max(processes(trial.config) for trial in outcome.plan.trials)
        executor = _executor(config["cluster"], store, info.name, leases, progress.point, most)
        progress.say(_starting(config["cluster"]))
        executor.prestart()
        with _nothing_started():
            stack.enter_context(_running(executor, outcome, later))
            known = outcome.plan, outcome.records, info.environment
            for sentence in preflight(executor, store, *known, say=progress.say):  # before any write
                progress.say(f"{sentence}.")
            held.enter_context(leases)
            _save_decision(outcome, info, store)  # first, as the weights of a saved sweep are kept
            retention.limit(store, outcome.plan)
            todo = _still_missing(outcome, todo, portions, store)
            if config["retry_failed"]:
                store.failures.drop_all(outcome.plan.without(set(outcome.records)).stages)
        progress.opening(info.name, places, store.checkpoints.places(todo.stages.keys()), portions.told())
        executor.on_every_node(stack.enter_context(probing(store)))
        tracker.start(info, outcome.plan, outcome.records)
        interrupt.works(executor.cancel)
        if isinstance(executor, RayExecutor):  # inline stages run in this process: no imports beside them
            preparing = threading.Thread(target=drawing.prepare, name="drawing", daemon=True)
            preparing.start()
            stack.callback(preparing.join)  # an import that is cut off when Python ends aborts the process
        try:
            while todo.stages:
                if outcome.decision is not None:
                    _save_decision(outcome, info, store)
                    _decided(outcome, views)
                for event in executor.run(todo):
                    outcome.take(event)
                    tracker.record(event)
                    progress.event(event)
                todo = portions.next()
            _decided(outcome, views)
        except OrchestratorError:  # for example, no node is left
            tracker.finish("failed", {})
            if not tracker.complete:
                progress.say(behind([info.name], config["store"], **config["tracking"]))
            raise
        outcome.interrupted = interrupt.worked() and not outcome.settled
        if outcome.interrupted:  # before Ray ends: `ray job stop` leaves three seconds
            tracker.finish(outcome.status, {})


def _decided(outcome: Outcome, views: tuple[Tracker, Progress]) -> None:
    """Show the last decision of a search."""
    if outcome.decision is not None:
        for view in views:
            view.decided(outcome.decision)


def _save_decision(outcome: Outcome, info: SweepInfo, store: Store) -> None:
    """Save the sweep with the last decision of its search, before the stages of the decision run."""
    store.save_sweep(info.name, manifest(info, outcome.plan, None, outcome.decision, outcome.searches))


def _still_missing(outcome: Outcome, todo: Plan, portions: Portions, store: Store) -> Plan:
    """Return the plan of missing stages, and of stages whose weights another sweep has dropped in the meantime."""
    needed = {key for spec in todo.stages.values() for key in spec.inputs.values()} - todo.stages.keys()
    found = store.finished(needed)
    if any(key not in found or WEIGHTS not in found[key].files for key in needed):
        outcome.records = store.resumable(outcome.plan)
        return portions.again()
    return todo


@contextmanager
def _running(executor: RayExecutor | InlineExecutor, outcome: Outcome, later: ExitStack) -> Iterator[None]:
    """Start the executor, and close it afterwards in a thread, as Ray takes a second; `later` waits for the thread."""
    closing = threading.Thread(target=executor.close, name="closing")
    try:
        executor.start()
        yield
    except BaseException:
        executor.close()
        raise
    closing.start()
    if outcome.interrupted:  # a killed stage may still be alive, and hold its lease
        closing.join()
    later.callback(closing.join)


def _executor(
    cluster: Mapping[str, Any], store: Store, name: str, leases: Leases, watch: Report, most: int
) -> RayExecutor | InlineExecutor:
    logs = Path("outputs") / name / "logs"
    settings = Cluster(**cluster)
    return executor_of(settings)(settings, store, logs=logs, claims=leases, watch=watch, processes=most)


def _starting(cluster: Mapping[str, Any]) -> str:
    """Return a line for the seconds without any other output."""
    if cluster["kind"] == "inline":
        return "Importing torch."
    ray = f"Connecting to Ray at {cluster['address']}" if cluster["address"] else "Starting Ray"
    return f"{ray} and importing torch, about 10 s."


def _tracker(tracking: Mapping[str, Any], store: Store, say: Callable[[str], None]) -> AbstractContextManager[Tracker]:
    if tracking["kind"] == "none":
        return nullcontext(Tracker())
    from orchestrator.views.tracking.process import TrackerProcess
    from orchestrator.views.tracking.view_writer import ViewWriter

    uri, experiment = resolve_uri(tracking["uri"]), resolve_experiment(tracking["experiment"])
    reading = partial(ViewWriter, read=store.read, curve=store.checkpoints.curve, leases=store.leases)
    make = partial(reading, uri=uri, experiment=experiment)
    return TrackerProcess(make, say, server=redact(uri) if uri.startswith("http") else None)


def _places(config: Mapping[str, Any], store: Store, name: str) -> dict[str, str]:
    """Return the places of all results, to show at the start and the end of a sweep."""
    folder = Path("outputs") / name
    places = {"store": store.uri, "report": str(folder / REPORT)}
    if config["cluster"]["kind"] != "inline":
        places["logs"] = str(folder / "logs")
    if config["tracking"]["kind"] == "mlflow":
        places["MLflow"] = f"{ui_hint(resolve_uri(config['tracking']['uri']))} (choose Model training there)"
    return places


def _sweep_wide(plan: Plan) -> Mapping[str, Any]:
    """Return the configuration that all trials share; raise ConfigError if a shared part differs."""
    first = plan.trials[0].config
    typed = (each.lstrip("+").partition("=") for trial in plan.trials for each in trial.overrides)
    presets = dict.fromkeys(value for key, _, value in typed if key == "sweep")
    if len(presets) > 1:
        raise ConfigError(
            f"`+sweep` (={','.join(presets)}) must be one preset, as a sweep has one name and one set of axes; run a "
            "command for each preset."
        )
    for part in SWEEP_WIDE:
        if any(trial.config[part] != first[part] for trial in plan.trials):
            raise ConfigError(
                f"`{part}` differs between trials, but must be the same in a sweep; set it once, without an axis."
            )
    return first


def _info(plan: Plan, config: Mapping[str, Any], preset: str | None) -> SweepInfo:
    """Describe the sweep. Its name consists of the preset and a digest: equal trials are the same sweep."""
    name = config["name"] or _file_name(preset) or ("trial" if len(plan.trials) == 1 else "sweep")
    content = digest(canonical_json([trial.stages for trial in plan.trials]))
    command = shlex.join(["python", "-m", "orchestrator", *map(redact_argument, sys.argv[1:])])
    return SweepInfo(f"{name}-{content[:8]}", config, command, environment())


def _file_name(preset: str | None) -> str:
    """Return a preset's name for file names: a preset in a folder has a slash."""
    return re.sub(r"[^\w.-]+", "-", preset or "", flags=re.ASCII).strip("-.")
