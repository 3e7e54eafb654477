"""Launcher: jobs of Hydra to a sweep, and back to a `JobReturn` for each job."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from orchestrator.config.compose import compose_jobs, plain, several_deploys
from orchestrator.config.hydra_options import shadowed
from orchestrator.config.refusals.refused_settings import is_refusal
from orchestrator.config.schema import ConfigError
from orchestrator.core.specs import Job
from orchestrator.sweep.conductor import run
from orchestrator.sweep.outcome import EXIT_BEHIND, Outcome, SweepIncomplete

WORDS = ("override", "optional")
"""Words that may precede a group in `defaults`."""
BEHIND: list[SweepIncomplete] = []
"""Complete sweeps of this process with an incomplete view, to be reported at the end."""


def launch(loader: ConfigLoader, master: DictConfig, overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run the jobs of a multirun as one sweep; return the objective or the failure of each job.

    A job of a dry run returns nan. An incomplete view does not end a search: it is added to `BEHIND`.
    """
    _refuse_misspelled_words(master.hydra)
    jobs = list(compose_jobs(loader, master, overrides))
    outcome = run(jobs, preset=_preset(master))
    failure = outcome.incomplete()
    if failure is not None and outcome.interrupted:
        raise failure
    if failure is not None and failure.exit_status == EXIT_BEHIND:
        BEHIND.append(failure)
    return [_returned(job, outcome, index, failure) for index, job in enumerate(jobs)]


def run_single(config: DictConfig) -> None:
    """Run the single trial of a command without axes; raise if the trial did not finish."""
    master = OmegaConf.create({"hydra": HydraConfig.get()})
    _refuse_misspelled_words(master.hydra)
    if axes := _idle_axes(master.hydra):
        raise ConfigError(
            f"`hydra.sweeper.params` has the axes {', '.join(axes)}, which a single run ignores; add `mode: MULTIRUN` "
            "under `hydra` in the preset, or type -m; type hydra.mode=RUN to ignore the axes."
        )
    typed = OmegaConf.to_container(master.hydra.overrides.task)
    overrides = tuple(map(str, typed if isinstance(typed, list) else ()))
    try:
        told = several_deploys(overrides)
        job = Job(overrides, error=told) if told else Job(overrides, plain(config))
    except Exception as error:  # found only by resolving: explain as for the jobs of a sweep
        if not is_refusal(error):
            raise
        (job,) = compose_jobs(GlobalHydra.instance().config_loader(), master, [overrides])
    failure = run([job], preset=_preset(master)).incomplete()
    if failure is not None:
        raise failure


def _refuse_misspelled_words(hydra: DictConfig) -> None:
    """Raise `ConfigError` for a misspelled word in a chosen file, as in `overide /model: cnn`: Hydra drops the word.

    A file with the name of a built-in option is refused, too, chosen or not: Hydra does not list swept choices.
    """
    sources = hydra.runtime.config_sources
    conf = next(Path(each.path) for each in sources if each.provider == "main")
    folders = [Path(each.path) for each in sources if each.provider not in ("hydra", "main", "schema")]
    if told := [each for folder in folders for each in shadowed(folder, conf)]:
        raise ConfigError("\n".join(told))
    for (group, choice), folder in product(hydra.runtime.choices.items(), folders):
        file = folder / str(group).partition("@")[0] / f"{choice}.yaml"
        config = OmegaConf.load(file) if file.is_file() else None
        defaults = config.get("defaults") or () if isinstance(config, DictConfig) else ()
        for line in (str(key) for each in defaults if isinstance(each, DictConfig) for key in each):
            if odd := next((word for word in line.split()[:-1] if word not in WORDS), ""):
                meant = f"override /{line.split()[-1].lstrip('/')}"
                raise ConfigError(f"{file}: `{odd}` (in `{line}`) must be {' or '.join(WORDS)}; write `{meant}: ...`.")


def _idle_axes(hydra: DictConfig) -> list[str]:
    """Return the axes of a preset if neither the preset nor the command line sets the mode."""
    if "hydra.mode=RUN" not in hydra.overrides.hydra or "hydra.mode=RUN" in sys.argv:
        return []  # set by a preset or typed; Hydra adds hydra.mode=RUN if not set
    return [str(key) for key in OmegaConf.select(hydra, "sweeper.params") or ()]


def raise_for(results: Sequence[JobReturn]) -> None:
    """Raise the failure of a sweep if a trial did not finish."""
    for result in results:
        if isinstance(result._return_value, SweepIncomplete):
            raise result._return_value


def check_axes(overrides: Sequence[Override]) -> None:
    """Raise `ConfigError` for an axis without values, which would run no job, or with one twice, which adds no job."""
    for override in overrides:
        if override.is_sweep_override() and override.is_discrete_sweep():
            values = [*override.sweep_iterator()]
            if not values:
                raise ConfigError(_empty(override))
            twice, count = Counter(map(str, values)).most_common(1)[0]
            if count > 1:
                given = str(override.input_line).partition("=")[2]
                raise ConfigError(
                    f"`{override.key_or_group}` (={given}) has {twice} twice, and equal trials are trained once; leave "
                    "one out."
                )


def _empty(override: Override) -> str:
    value = override.value()
    text = str(override.input_line)
    rule = "a range needs stop above start" if isinstance(value, RangeSweep) else "it has no value"
    remedy = "a longer range, as in seed=range(3)" if isinstance(value, RangeSweep) else "some values"
    if isinstance(value, ChoiceSweep):
        rule = "it has no choice"
    return f"`{override.key_or_group}` (={text.partition('=')[2]}) is an empty axis: {rule}; pass {remedy}."


def _preset(master: DictConfig) -> str | None:
    choice = OmegaConf.select(master, "hydra.runtime.choices.sweep", default=None)
    return None if choice is None else str(choice)


class Stopped(float):
    """Return value of a job that a search did not run: nan, with the reason."""

    reason: str

    def __new__(cls, reason: str) -> Stopped:
        """Return nan with a reason."""
        made = super().__new__(cls, math.nan)
        made.reason = reason
        return made

    def __repr__(self) -> str:
        """Return the reason as text."""
        return f"Stopped({self.reason!r})"


def _returned(job: Job, outcome: Outcome, index: int, failure: SweepIncomplete | None) -> JobReturn:
    result = JobReturn(overrides=list(job.overrides))  # no config: it would cost 20 ms, and no sweeper reads it
    if outcome.ran and not outcome.complete(index) and (reason := outcome.stopped(index)):
        result.status, result.return_value = JobStatus.COMPLETED, Stopped(reason)
    elif outcome.ran and not outcome.complete(index):
        result.status, result.return_value = JobStatus.FAILED, failure
    else:
        result.status = JobStatus.COMPLETED
        result.return_value = outcome.objective(index) if outcome.ran else math.nan
    return result
