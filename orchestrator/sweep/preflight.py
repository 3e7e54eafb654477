"""Preflight of a sweep: refuse it before training if a part cannot run; passed combinations are not tried again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.config.schema import ConfigError
from orchestrator.core.events import Failure
from orchestrator.core.specs import Plan
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from orchestrator.planning.plan import refusal
from orchestrator.planning.preflights import combinations
from orchestrator.store.store import Store
from orchestrator.sweep.objective import invalid_margin, unmeasured
from orchestrator.sweep.outcome import own_frames


def preflight(
    executor: RayExecutor | InlineExecutor,
    store: Store,
    plan: Plan,
    finished: Collection[str],
    environment: Mapping[str, str],
    *,
    own_only: bool = False,
) -> None:
    """Try each combination of parts of the unfinished stages once, on the executor.

    Transient failures (a connection, memory) are left to the retries of the trials.

    Args:
        executor: executor of the sweep
        store: store that remembers passed combinations
        plan: plan of the sweep
        finished: keys of stages that need not run
        environment: package -> release
        own_only: for a dry run, which writes nothing: try only combinations with custom code, as the rules of the
            configuration cover built-in parts

    Raises:
        ConfigError: a combination cannot run; each reason appears once with its trials
    """
    found = combinations(plan, finished, environment, own_only=own_only)
    passed = store.preflights() if found else set()
    left = [each for each in found if each.key not in passed]
    wrong: dict[str, list[str]] = {}
    unmatched, misfits = [], []
    for index, outcome in executor.preflight([each.specs for each in left]):
        each = left[index]
        if not isinstance(outcome, Failure):
            passed.add(each.key)
            sentences = [*unmeasured(each.objectives, outcome.figures), *invalid_margin(plan, outcome.primary)]
            for sentence in sentences:
                wrong[sentence] = [*dict.fromkeys([*wrong.get(sentence, ()), *each.trials])]
            if len(each.specs) > 1:
                unmatched.append(set(outcome.unmatched))
        elif not outcome.transient:
            misfits.append((each, outcome))
    told: set[str] = set()  # trials with a failed dense network: their rounds would repeat it
    for each, outcome in sorted(misfits, key=lambda misfit: len(misfit[0].specs)):
        if len(each.specs) > 1 and told.issuperset(each.trials):
            continue
        told.update(each.trials if len(each.specs) == 1 else ())
        frames = "".join(f"\n      {line}" for line in own_frames(outcome.traceback))
        wrong.setdefault(f"{outcome.message}{frames}", []).extend(each.trials)
    if len(left) == len(found) and not wrong:  # a pattern may match only one of several networks
        for key, pattern in sorted(set.intersection(*unmatched) if unmatched else ()):
            sentence = f"`prune.{key}` (={pattern!r}) matches no parameter of the network; check the spelling or leave"
            wrong[f"{sentence} it out."] = [trial.name for trial in plan.trials]
    if wrong:
        raise ConfigError(refusal(wrong, len(plan.trials), "cannot run; nothing was trained"))
    if left and not own_only:
        store.save_preflights(each.key for each in left if each.key in passed)
