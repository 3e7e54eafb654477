"""Building of the search that a configuration names, and the refusals of a plan that it cannot search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.catalogue.searches import BUDGET, SEARCHES
from orchestrator.config.schema import ConfigError
from orchestrator.core.events import PastSearch
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.specs import Key, Plan
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.policy import Budget, Policy
from orchestrator.sweep.search.replay import Replay
from orchestrator.workloads.targets import create

LIMITS = tuple(option.name for option in BUDGET)
"""Keys of the group that are not arguments of the class."""


@dataclass(frozen=True)
class PlannedSearch:
    """Search of a sweep, checked against its plan.

    Args:
        policy: the search
        space: candidates of the plan
        budget: limits of the search
    """

    policy: Policy
    space: SearchSpace
    budget: Budget

    def replay(self) -> Replay:
        """Return the search at its start."""
        return Replay(self.policy, self.space, self.budget)

    def bounds(self) -> tuple[set[Key], set[Key]]:
        """Return the stages that the search runs at least and at most, without regard to its budget."""
        least, most = self.policy.bounds(self.space)
        stages = self.space.stages
        return {key for cell in least for key in stages(cell)}, {key for cell in most for key in stages(cell)}


def searches(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names a search."""
    group = config.get("search") or {}
    return bool(group.get("_target_")) or group.get("kind", "none") != "none"


def search_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of the settings that decide what a search does; a larger budget is the same search."""
    settings = {name: value for name, value in config["search"].items() if name not in LIMITS}
    return digest(canonical_json([settings, config["compare"]]))


def planned_search(config: Mapping[str, Any], plan: Plan, past: Mapping[str, PastSearch]) -> PlannedSearch | None:
    """Return the search that `config` names; None for `search=none`.

    Args:
        config: configuration of the sweep
        plan: plan of the sweep
        past: searches of the sweep by the digests of their settings, this one among them

    Raises:
        ConfigError: the search cannot work on the plan; each reason names its remedy
    """
    group = config.get("search") or {}
    if not searches(config):
        return None
    policy: Policy = create("search", {k: v for k, v in group.items() if k not in LIMITS}, kinds=SEARCHES)
    space = SearchSpace(plan, past[search_digest(config)].excluded)
    if told := [*policy.refusals(space)]:
        raise ConfigError("\n".join(dict.fromkeys(told)))
    budget = Budget(**{name: group.get(name) for name in LIMITS})
    search = PlannedSearch(policy, space, budget)
    least = search.replay().trials_first
    if budget.trials is not None and budget.trials < least:
        raise ConfigError(
            f"`search.trials` (={budget.trials}) must be at least {least}, the trials of the first step; pass "
            f"search.trials={least}, or more."
        )
    return search
