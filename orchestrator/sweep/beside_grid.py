"""Answer of a search beside the answer of the whole grid by the same rule, and why they differ. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from orchestrator.config.schema import ConfigError
from orchestrator.core.events import Decision
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Key, Plan
from orchestrator.planning.number_formats import counted
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.sweep.search.building import planned_search, search_digest, searches
from orchestrator.sweep.search.candidates import Candidate, SearchSpace
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.sweep.search.policy import Budget, Policy
from orchestrator.sweep.search.replay import decide

Records = Mapping[Key, StageRecord]


def beside_grid(
    sweep: SavedSweep, records: Records, failed: Collection[Key] = (), margin: float | None = None
) -> Iterator[str]:
    """Yield lines with both answers and the reasons of their differences; none if there is nothing to compare.

    The rule of the whole grid is that of the search with all seeds and rounds at once: `matching` tests every sparsity
    from the smallest upwards, `halving` and `frontier` compare all candidates at a single rung.

    Args:
        sweep: sweep whose search has ended
        records: stage key -> record of all stages of the grid
        failed: keys of stages that fail every time
        margin: largest loss that counts as a match, for both; the answer of the search is then the one that it would
            have given. None for the answer that it gave, with the margin of the sweep
    """
    ours, config = sweep.search, sweep.info.config
    plan = sweep.plan if margin is None else _with_margin(sweep.plan, margin)
    if ours is None or not ours.ended or not searches(config) or search_digest(config) not in sweep.searches:
        return
    if (config.get("search") or {}).get("_target_"):
        return
    try:
        search = planned_search(config, plan, sweep.searches)
    except ConfigError as error:
        yield f"The search cannot be set beside the whole grid: {error}"
        return
    assert search is not None
    whole = decide(_at_once(search.policy, search.space), SearchSpace(plan), Budget(), records, failed)
    if not whole.ended:
        missing = len(plan.stages.keys() - records.keys() - {*failed})
        yield (
            f"The answer of the search cannot be set beside the whole grid: {missing} of {len(plan.stages)} stages "
            "have not finished; run the same command with search=none."
        )
        return
    if margin is not None:
        ours = search.replay().next(records, failed)
    asked = plan.with_inputs(dict.fromkeys(key for look in ours.looks for key in look.asked))
    ended = search.replay().next({key: records[key] for key in asked if key in records}, failed)
    yield _head(plan, records, asked, margin)
    yield from (f"  search: {answer}" for answer in ours.answers)
    yield from (f"  grid:   {answer}" for answer in whole.answers)
    yield from _differences(search.space, (ours, whole), ended)


def _head(plan: Plan, records: Records, asked: Iterable[Key], margin: float | None) -> str:
    """Return the line above both answers, with the part of the grid's steps that the search took."""
    spent, full = (sum(records[key].steps for key in keys if key in records) for keys in (asked, plan.stages))
    at = "" if margin is None else f" with a margin of {margin:g}"
    cost = f", for {spent / full:.0%} of the grid's steps" if full else ""
    return f"The search beside the whole grid, by the same rule on validation{at}{cost}:"


def _with_margin(plan: Plan, margin: float) -> Plan:
    """Return the plan with another margin of its comparison."""
    configs = (
        {**each.config, "compare": {**(each.config.get("compare") or {}), "margin": margin}} for each in plan.trials
    )
    return Plan(
        plan.stages, tuple(replace(each, config=config) for each, config in zip(plan.trials, configs, strict=True))
    )


def _at_once(policy: Policy, space: SearchSpace) -> Policy:
    """Return the search that sees all networks before it decides."""
    if isinstance(policy, Matching):
        return Matching(explore=0)
    assert isinstance(policy, Halving | Frontier)
    amounts = (each.rounds if policy.rungs == "rounds" else len(each.seeds) for each in space.candidates)
    return replace(policy, first=max(amounts))


def _differences(space: SearchSpace, answers: tuple[Decision, Decision], ended: Decision) -> Iterator[str]:
    """Yield a line for each candidate that is in one of the answers only.

    Args:
        space: candidates of the search
        answers: decision of the search, and that of the whole grid
        ended: decision of the search without records of stages that it did not ask for
    """
    ours, theirs = ({*each.networks} for each in answers)
    every = (*space.candidates, *(point for line in space.lines.values() for point in line))
    same = True
    for keys, each in {frozenset(cell.network for cell in each.cells.values()): each for each in every}.items():
        if keys & theirs and not keys & ours:
            same = False
            yield f"  only in the grid's answer: {each.name}: {_why_not(space.plan, each, ended)}"
        elif keys & ours and not keys & theirs:
            same = False
            yield f"  only in the search's answer: {each.name}; the grid: {_why_not(space.plan, each, answers[1])}"
    if same:
        yield "  Both answers name the same candidates."


def _why_not(plan: Plan, candidate: Candidate, decision: Decision) -> str:
    """Return why a decision has not named a candidate: not asked for, ruled out, or its last look's conclusion."""
    cells = candidate.cells.values()
    asked = {key: look for look in decision.looks for key in look.asked}
    looks = [asked[cell.network] for cell in cells if cell.network in asked]
    reason = next(filter(None, (decision.stopped.get(plan.trials[cell.trial].name) for cell in cells)), "")
    if not looks:
        return reason or "the search did not ask for it"
    last = max(looks, key=decision.looks.index)
    told = reason or f"{last.title}: {last.concluded}"
    return (
        f"{told} (the search saw {len(looks)} of {counted(len(cells), 'network')})" if len(looks) < len(cells) else told
    )
