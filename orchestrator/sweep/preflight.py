"""Refuse a sweep of which a part cannot run, before anything trains; what passed once is not tried again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from orchestrator.config.schema import ConfigError
from orchestrator.core.events import Failure
from orchestrator.core.specs import Plan
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.ray_executor import RayExecutor
from orchestrator.planning.plan import refusal
from orchestrator.planning.preflights import combinations
from orchestrator.store.store import Store
from orchestrator.sweep.objective import unmeasured
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
    """Try on the executor what is still to run of a plan, each combination of its parts once.

    What may pass by itself (a connection, memory) is left to the retries of the trials.

    Args:
        finished: stages that need not run
        environment: package -> release
        own_only: of a dry run, which writes nothing: try only what has parts of the user's own; built-in parts are
            held to the rules of the configuration

    Raises:
        ConfigError: what cannot run, each reason once with the trials concerned
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
            for sentence in unmeasured(each.objectives, outcome.figures):
                wrong[sentence] = [*dict.fromkeys([*wrong.get(sentence, ()), *each.trials])]
            if len(each.specs) > 1:
                unmatched.append(set(outcome.unmatched))
        elif not outcome.transient:
            misfits.append((each, outcome))
    told: set[str] = set()  # trials whose dense network does not work: their rounds say it again
    for each, outcome in sorted(misfits, key=lambda misfit: len(misfit[0].specs)):
        if len(each.specs) > 1 and told.issuperset(each.trials):
            continue
        told.update(each.trials if len(each.specs) == 1 else ())
        frames = "".join(f"\n      {line}" for line in own_frames(outcome.traceback))
        wrong.setdefault(f"{outcome.message}{frames}", []).extend(each.trials)
    if len(left) == len(found) and not wrong:  # of several networks, a pattern may be for one
        for key, pattern in sorted(set.intersection(*unmatched) if unmatched else ()):
            sentence = f"`prune.{key}` (={pattern!r}) matches no parameter of the network; check the spelling or leave"
            wrong[f"{sentence} it out."] = [trial.name for trial in plan.trials]
    if wrong:
        raise ConfigError(refusal(wrong, len(plan.trials), "cannot run; nothing was trained"))
    if left and not own_only:
        store.save_preflights(each.key for each in left if each.key in passed)
