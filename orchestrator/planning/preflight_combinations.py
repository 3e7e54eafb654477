"""Preflights: the distinct combinations of a sweep's parts, each of which is tried once before training.

A combination is a network and its data with a training, or with a method, its parameters and a fine-tuning. Seeds,
round numbers and the sparsity of built-in methods do not affect whether it can run, so it stands for many stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.models import MODELS
from orchestrator.config import sources
from orchestrator.config.schema import MATCHING, objectives
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.specs import Plan, PruneFields, StageSpec
from orchestrator.core.stage_kinds import KINDS
from pruning.choices.axes import SPANNING

RELEASES = ("orchestrator", "python", "torch", "numpy")
"""Packages whose releases affect whether a combination can run."""


@dataclass(frozen=True)
class Combination:
    """Stages that can run if `specs` can run: the dense stage, and the most demanding round if there is one."""

    key: str
    specs: tuple[StageSpec, ...]
    trials: tuple[str, ...]
    """Names of the trials with these stages."""
    objectives: tuple[str, ...] = ()
    """Objectives of these trials."""


def combinations(
    plan: Plan, finished: Collection[str], environment: Mapping[str, str], *, own_only: bool = False
) -> list[Combination]:
    """Return the combinations to try for the unfinished stages of a plan.

    Args:
        plan: the plan
        finished: keys of finished stages
        environment: package -> release; a combination's key depends on `RELEASES`
        own_only: leave out stages without custom code, and without patterns for a network that needs no files
    """
    releases = [environment.get(package) for package in RELEASES]
    dense: dict[str, tuple[StageSpec, str]] = {}
    groups: dict[str, list[StageSpec]] = {}
    for key, spec in plan.stages.items():
        if spec.parent is None:
            dense[key] = spec, canonical_json([releases, _less(spec.fields, "seed", "train")])
        else:
            dense[key] = dense[spec.parent]
        root, network = dense[key]
        if not KINDS[spec.kind].trains or KINDS[spec.kind].part:  # the round shows as much as its parts
            continue
        if key in finished or (own_only and not (_has_own_code(spec) or _names_parameters(spec, root))):
            continue
        part = spec.fields["train"] if spec is root else _less(spec.fields, "seed", "round", "target", "amount")
        groups.setdefault(canonical_json([network, spec.kind, part, _asked(spec)]), []).append(spec)
    found = []
    for group, specs in groups.items():
        most = max(specs, key=_demand)
        root = dense[most.key][0]
        concerned = sorted({index for spec in specs for index in plan.trials_of[spec.key]})
        named = {
            name or MATCHING for index in concerned for name in objectives(plan.trials[index].config.get("objective"))
        }
        told = tuple(sorted(named - {MATCHING}))
        chain = (root,) if most is root else (root, most)
        found.append(
            Combination(
                digest(group + canonical_json([_reach(most), *told])),
                chain,
                tuple(plan.trials[index].name for index in concerned),
                told,
            )
        )
    return found


def _has_own_code(spec: StageSpec) -> bool:
    """Return whether a stage runs code of the user's own, of other packages or of files; libraries that a built-in part
    needs do not count.
    """
    ours = sources.OURS | sources.VERSIONED
    found = {target.partition(".")[0] for target in sources.targets(dict(spec.fields))}
    return bool(found - ours) or bool(spec.typed.sources.modules or spec.typed.sources.files)


def _names_parameters(spec: StageSpec, root: StageSpec) -> bool:
    """Return whether a stage prunes by patterns for names, and its network and data are built without files."""
    if not KINDS[spec.kind].prunes or replace(spec.typed.prune, types=(), holding=PruneFields.holding) == PruneFields():
        return False
    rows = {"model": MODELS, "data": DATA}
    found = [rows[part].get(str(root.fields[part].get("kind"))) for part in rows]
    return all(row is not None and not {"path", "root"} & {each.name for each in row.options} for row in found)


def _less(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _asked(spec: StageSpec) -> list[Any]:
    """Return the part of the request that can fail: any value for custom code, only a count for a built-in method."""
    if not KINDS[spec.kind].prunes:
        return []
    typed = spec.typed
    name, value = ("target", typed.target) if typed.amount is None else ("amount", typed.amount)
    own = bool(typed.method._target_ or typed.score._target_)
    return [name, value if own or isinstance(value, int) else None]


def _reach(spec: StageSpec) -> float:
    """Return the part of a round's demand that may be out of reach: a count, or a fraction of units of many tensors."""
    count, fraction = _demand(spec)
    return fraction if spec.typed.unit.kind in SPANNING else count


def _demand(spec: StageSpec) -> tuple[int, float]:
    """Sort key for rounds: the entries pruned up to the round if the request is a count, else the sparsity."""
    asked = spec.typed.target or spec.typed.amount or 0.0
    return (asked * spec.round, 0.0) if isinstance(asked, int) else (0, asked)
