"""Prune a round by the choices of its method: a score on scoring data, and the engine's plan put in force."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from hydra.utils import get_object
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import pruning
from orchestrator.config.groups import SCORING
from orchestrator.config.parts.choices import as_typed, choices_of
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive, seeded
from orchestrator.training.scoring.examples import ScoringData, count
from orchestrator.workloads.data import Data, first
from orchestrator.workloads.models import Prunable
from orchestrator.workloads.targets import TargetError, failure
from orchestrator.workloads.tasks.batch import arguments
from orchestrator.workloads.tasks.task import Task
from pruning import MaskSet
from pruning.choices.axes import Control
from pruning.choices.combining import Choices
from pruning.selection.groups import Groups, groups_of

SPLIT = "train"
"""Which of the data's splits scores read; records say it."""


@dataclass(frozen=True)
class Read:
    """What a score may read: the data, of which it gets `SPLIT`, and the task whose loss it differentiates.

    `order` is what a shuffled control is drawn from.
    """

    data: Data
    task: Task
    order: torch.Generator


@dataclass(frozen=True)
class Scoring:
    """What the scores of a round took: `examples` that were drawn, `passes` of a batch through the loss."""

    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def held(self) -> list[Any]:
        """What a checkpoint holds of it: `Scoring(*held)` is it again."""
        return [dict(self.details), dict(self.seconds)]


def rank(
    model: nn.Module,
    chosen: Sequence[Prunable],
    fields: Mapping[str, Any],
    parent: MaskSet,
    read: Read,
) -> tuple[MaskSet, Scoring]:
    """Prune a plain model by the choices of a round, on top of the masks so far; return its masks and what it took.

    The model is left held by hooks. Of a shuffled control other units of each tensor are kept, drawn from all of them;
    of dependency groups, whose masks hold biases and norms too, from those that were left.

    Raises:
        OrchestratorError: a score lacks what it needs, a unit does not divide, or the target cannot be reached.
    """
    model.eval()  # ours choose the mode themselves; a score of the user's own must not move BatchNorm's statistics
    names = [each.name for each in chosen]
    choices = _choices(fields)
    device = getattr(chosen[0].module, chosen[0].parameter).device
    seed, inner = derive(fields["seed"], f"{fields['round']}/score"), choices.schedule.inner
    batches = ScoringData(getattr(read.data, SPLIT), fields.get("score", {}), seed, device).batches(inner)
    loss = _Counted(read.task.loss)
    generator = torch.Generator().manual_seed(derive(fields["seed"], f"{fields['round']}/mask"))
    given: dict[str, Any] = {"batches": batches, "loss": loss, "size": read.task.size, "generator": generator}
    spanning = choices.unit.kind == "group"  # biases and norms go with the weights
    before = {name: mask for name, mask in parent.items() if spanning or name in names}
    shuffles = fields.get("restart", {}).get("control") == "shuffle"
    if spanning:
        given["example"] = example_of(model, read.data)
        choices = replace(choices, control=Control("shuffle")) if shuffles else choices
    try:
        with nullcontext() if batches is None else seeded(seed, device):
            plan = pruning.plan(model, choices, **given, parameters=names, masks=before)
        if shuffles and not spanning:
            groups = _cut(chosen, fields, plan.details["units"])
            shuffled = groups.expand(pruning.shuffle(groups.alive(plan.masks), groups, read.order))
            plan = replace(plan, masks=MaskSet(shuffled), values={})
        pruning.commit(model, plan)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        said = " ".join(str(error).split())
        if batches is None and isinstance(cause := error.__cause__, TypeError | AttributeError):  # of an own score
            raise OrchestratorError(
                f"`score` (={_name(fields)}) failed by {type(cause).__name__}: {cause}; where it reads `batches`, pass "
                "score.examples=128 to give it examples of the training split."
            ) from error
        if isinstance(error, ValueError) and said.startswith("`"):
            raise OrchestratorError(_as_set(said)) from error
        score = fields.get("score", {})
        raise OrchestratorError(
            f"`score` (={score.get('kind') or score.get('_target_')}) cannot rank the network: {type(error).__name__}: "
            f"{said.rstrip('.')}; check its arguments, and the other choices."
        ) from error
    ones = {each.name: torch.ones_like(getattr(each.module, each.parameter), dtype=torch.bool) for each in chosen}
    masks = MaskSet({**{name: plan.masks.get(name, ones[name]) for name in names}, **plan.masks})
    drawn = sum(map(count, batches or ()))
    details = {"score": _name(fields), "examples": drawn, "passes": loss.calls, "rescorings": inner}
    details |= {"split": SPLIT} if drawn else {}
    details |= {name: plan.details[name] for name in ("units", "removed", "step") if name in plan.details}
    return masks, Scoring(details, dict(plan.seconds))


def example_of(model: nn.Module, known: Data) -> Any:
    """Return what a network is called with: the first training example, twice."""
    given, named = arguments(model, first(getattr(known, SPLIT)), labels=False)
    return tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf, named or given
    )


def short_of(fields: Mapping[str, Any], removed: float) -> str | None:
    """Say how dependency groups fall short of the budget that a round asks for; None where they do not."""
    if removed >= fields["target"] - 1e-6:
        return None
    budget = fields.get("scope", {}).get("budget", "channels")
    return f"achieved sparsity {removed:.6f} is not the requested {fields['target']:.6f} of the {budget}."


def off_target(
    chosen: Sequence[Prunable], fields: Mapping[str, Any], masks: MaskSet, names: Collection[str]
) -> str | None:
    """Say how masks fall short of the units of the tensors `names` that a round asks for; None where they do not."""
    groups, target = _cut(chosen, fields, names), fields["target"]
    total, kept = sum(groups.sizes.values()), sum(int(alive.sum()) for alive in groups.alive(masks).values())
    if abs(total - kept - target * total) <= _slack(groups) + 1e-6 * total:
        return None
    return (
        f"achieved sparsity {1 - kept / total:.6f} is not the requested {target:.6f}: {kept} of {total} units of kind "
        f"{groups.unit.kind} are left, where rounding allows {_slack(groups):g} more or fewer."
    )


def rounding_of_units(chosen: Sequence[Prunable], fields: Mapping[str, Any], scoring: Mapping[str, Any]) -> float:
    """Return by how much whole units may keep `removed` from what a round asks for; `scoring` as `Scoring.details`."""
    if fields["target"] is None:
        return 0.0
    if "step" in scoring:
        return float(scoring["step"])
    groups = _cut(chosen, fields, scoring.get("units") or [each.name for each in chosen])
    return _slack(groups) / max(1, sum(groups.sizes.values()))


def _cut(chosen: Sequence[Prunable], fields: Mapping[str, Any], names: Collection[str]) -> Groups:
    """Return the units of the tensors `names`, which are those that the engine counts."""
    choices = _choices(fields)
    shapes = {p.name: p.module.get_parameter(p.parameter).shape for p in chosen if p.name in names}
    return groups_of(shapes, replace(choices.unit, spare_last=False), choices.scope)


def _slack(groups: Groups) -> float:
    """Return by how many units, in all, rounding may keep a round from what it asks for."""
    scope = groups.scope
    if scope.kind == "row":
        return float(sum(layout.units // max(1, layout.pool) for layout in groups))
    return 0.5 * (len(groups.sizes) if scope.kind == "layer" and scope.allocation in ("each", "given") else 1)


def _choices(fields: Mapping[str, Any]) -> Choices:
    score, function = fields.get("score", {}), None
    if score.get("_target_"):
        try:
            function = get_object(score["_target_"])
        except (Exception, SystemExit) as error:  # its module raises
            raise TargetError(failure("score", score, error)) from error
        if not callable(function):
            raise OrchestratorError(
                f"`score._target_` (={score['_target_']}) must be a function (model, batches, loss) that returns name "
                "-> tensor of scores."
            )
    control = fields.get("restart", {}).get("control", "none")
    window = fields.get("scope", {}).get("kind") == "window"
    sparsity = None if window else fields["target"]
    try:
        return choices_of(fields, score=function, sparsity=sparsity, inner=fields.get("inner", 1), control=control)
    except (ValueError, TypeError) as error:
        raise OrchestratorError(str(error)) from error


def _as_set(said: str) -> str:
    """Return a refusal of the engine with its names as a user of a sweep types them, and a key that may be meant."""
    typed = as_typed(said)
    unknown = re.match(r"`score\.(\w+)` .* is not taken by", typed)
    near = get_close_matches(unknown[1], [option.name for option in SCORING], n=1) if unknown else []
    return f"{typed}{f' Did you mean `score.{near[0]}`?' if near else ''}"


def _name(fields: Mapping[str, Any]) -> str:
    score = fields.get("score", {"kind": "magnitude"})
    return str(score.get("kind") or score.get("_target_"))


class _Counted:
    """A loss that counts how often it is asked for."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss, self.calls = loss, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return self._loss(model, batch)
