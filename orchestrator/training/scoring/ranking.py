"""Prune one round with the engine: parse its choices, draw scoring data, plan the masks and commit them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Self

import torch
from hydra.utils import get_object
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import pruning
from orchestrator.config.config_groups import SCORING
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import Component, StageFields
from orchestrator.training.scoring.examples import CountedLoss, ScoringData, SharedStatistics, count
from orchestrator.trial.choices import choices_of, is_by_class, sentence
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import first
from orchestrator.workloads.model_building import Prunable
from orchestrator.workloads.targets import TargetError, failure
from orchestrator.workloads.tasks.batch import arguments
from orchestrator.workloads.tasks.task import Task
from pruning import BasePruningMethod, MaskSet
from pruning.choices import axes
from pruning.choices.combining import Choices
from pruning.dynamics.changing_masks import Dynamics
from pruning.engine.classes import with_unit_of_class
from pruning.layouts import layout_of
from pruning.refused import Refused, UnknownOption, unfit_call
from pruning.selection.selection_groups import Groups, groups_of

SPLIT = "train"
"""Split that scores read; records name it."""


@dataclass(frozen=True)
class Read:
    """Data and task of a score: it reads the split `SPLIT` and the task's loss.

    `order` is the generator that draws the masks of a shuffled control. With a `source` (see `shared_statistics`), the
    rounds of a node share statistics.
    """

    data: Data
    task: Task
    order: torch.Generator
    source: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Scoring:
    """Costs of scoring a round: `examples` drawn, `passes` of a batch through the loss, and seconds."""

    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def held(self) -> list[Any]:
        """Return plain data for a checkpoint; `Scoring(*held)` is equal to this object."""
        return [dict(self.details), dict(self.seconds)]


@dataclass(frozen=True)
class Round:
    """Round as a worker runs it: its fields, and its choices with functions and classes in place of names."""

    fields: StageFields
    choices: Choices

    @classmethod
    def of(cls, fields: StageFields) -> Self:
        """Parse the choices in the fields of a round.

        Raises:
            OrchestratorError: a target of the user's own cannot be imported, or is not a score or a class, or the
                choices contradict each other.
        """
        try:
            choices = choices_of(fields)
            if fields.method._target_:
                choices = replace(choices, select=_own_class(fields.method))
            if fields.score._target_ and choices.select is None:
                own_score = _own_score(fields.score, fields.order)
                choices = replace(choices, score=replace(choices.score, kind=own_score))
            if fields.dynamics._target_:
                choices = replace(choices, dynamics=replace(choices.dynamics, kind=_own_dynamics(fields.dynamics)))
            return cls(fields, with_unit_of_class(choices))
        except Refused as error:
            raise OrchestratorError(sentence(error, by_class=is_by_class(fields))) from error

    @property
    def spans(self) -> bool:
        """Return whether units are dependency groups, whose masks also cover biases and norms."""
        return self.choices.unit.spans

    @property
    def counts_experts(self) -> bool:
        """Return whether the target is a fraction of experts, whose number is rounded to the nearest."""
        return axes.counts_experts(self.choices.unit, self.choices.scope)

    @property
    def shuffles(self) -> bool:
        """Return whether the round is a control with shuffled masks."""
        return self.fields.restart.control_row.shuffles

    @property
    def prunes_first(self) -> bool:
        """Return whether the round prunes to its target before its training."""
        row = self.choices.dynamics.row
        return not row.in_training or row.keeps_counts

    @property
    def before_training(self) -> Self:
        """Return the pruning of the round before its training, in which masks may change."""
        if not self.choices.dynamics.row.in_training:
            return self
        return replace(self, choices=replace(self.choices, dynamics=axes.Dynamics()))

    @property
    def named(self) -> str:
        """Return the name of the score that ranks, or of the method class that decides."""
        return self.fields.score.named if self.choices.select is None else self.fields.method.named

    def cut(self, chosen: Sequence[Prunable], names: Collection[str]) -> Groups:
        """Return the units of the tensors `names`, as the engine counts them."""
        cut = [each for each in chosen if each.name in names]
        shapes = {each.name: each.module.get_parameter(each.parameter).shape for each in cut}
        layouts = {each.name: layout_of(each.module, each.parameter) for each in cut}
        return groups_of(shapes, replace(self.choices.unit, spare_last=False), self.choices.scope, layouts)


def rank(
    model: nn.Module, chosen: Sequence[Prunable], asked: Round, parent: MaskSet, read: Read
) -> tuple[MaskSet, Scoring]:
    """Prune a plain model by a round's choices on top of the masks so far; return the new masks and the scoring costs.

    The model is left with its masks held by hooks. A shuffled control keeps the same number of units of each tensor,
    drawn from all units; with dependency groups, drawn from the units that were still there.

    Raises:
        OrchestratorError: a score lacks an input, a unit does not divide a tensor, or the target cannot be reached.
    """
    model.eval()  # built-in scores set the mode; a score of the user's own must not move BatchNorm's statistics
    fields, choices, names = asked.fields, asked.choices, [each.name for each in chosen]
    device = getattr(chosen[0].module, chosen[0].parameter).device
    seed, inner, by_score = derive(fields.seed, f"{fields.round}/score"), choices.schedule.inner, choices.select is None
    batches = ScoringData(getattr(read.data, SPLIT), fields.score, seed, device).batches(inner)
    loss = CountedLoss(read.task.loss)
    generator = torch.Generator("cpu" if by_score else device)  # a class draws on the device of its tensors
    generator.manual_seed(derive(fields.seed, f"{fields.round}/mask"))
    inputs: dict[str, Any] = {"batches": batches, "loss": loss, "size": read.task.size, "generator": generator}
    if read.source is not None:
        inputs["remember"] = SharedStatistics(read.source, batches, loss, device)
    before = {name: mask for name, mask in parent.items() if asked.spans or name in names}
    if asked.spans or choices.unit.kind == "channel":
        inputs["example"] = example_of(model, read.data)
    if asked.spans:
        choices = replace(choices, control=axes.Control("shuffle")) if asked.shuffles else choices
    try:
        with nullcontext() if batches is None else seeded(seed, device):
            plan = pruning.plan(model, choices, **inputs, parameters=names, masks=before)
        if asked.shuffles and not asked.spans:
            groups = asked.cut(chosen, plan.details["units"])
            shuffled = groups.expand(pruning.shuffle(groups.alive(plan.masks), groups, read.order))
            plan = replace(plan, masks=MaskSet(shuffled), values={})
        pruning.commit(model, plan)
    except OrchestratorError:
        raise
    except Exception as error:
        if by_score and not isinstance(error, ValueError | TypeError | RuntimeError | IndexError):
            raise
        raise engine_refusal(asked, error) from error
    ones = {each.name: torch.ones_like(getattr(each.module, each.parameter), dtype=torch.bool) for each in chosen}
    masks = MaskSet({**{name: plan.masks.get(name, ones[name]) for name in names}, **plan.masks})
    recorded = ("unit", "units", "removed", "step", "limits", "tokens")
    details = {name: plan.details[name] for name in recorded if name in plan.details}
    if by_score:
        drawn = sum(map(count, batches or ()))
        details |= {"score": asked.named, "examples": drawn, "passes": loss.calls, "rescorings": inner}
        details |= {"split": SPLIT} if drawn else {}
    return masks, Scoring(details, dict(plan.seconds))


def engine_refusal(asked: Round, error: Exception) -> OrchestratorError:
    """Return the error to raise for an error of the engine, of a score or of a method class."""
    fields, by_class, said = asked.fields, asked.choices.select is not None, " ".join(str(error).split()).rstrip(".")
    blamed = fields.method.said("method") if by_class else fields.score.said("score")
    if isinstance(error, Refused) and error.key == "arguments":
        return OrchestratorError(f"{blamed} cannot be built: {error.__cause__}; set its arguments under `method`.")
    if isinstance(error, Refused):
        return OrchestratorError(sentence(error, by_class=by_class) + _meant(error))
    if by_class:
        where = [note.removeprefix("while pruning ") for note in getattr(error, "__notes__", ())]
        return OrchestratorError(
            f"{blamed} cannot prune {where[0] if where else 'the network'}: {type(error).__name__}: {said}; check its "
            "arguments under `method` and the amount under `schedule`."
        )
    if isinstance(error, ValueError):
        return OrchestratorError(f"{blamed} cannot rank the network: {said}.")
    return OrchestratorError(
        f"{blamed} cannot rank the network: {type(error).__name__}: {said}; check its arguments and the other choices."
    )


def _meant(error: Refused) -> str:
    """Return a hint to the key of scoring data that a user may have misspelled as an option of a score."""
    unknown = [error.key.removeprefix("score.")] if isinstance(error, UnknownOption) else []
    near = [each for name in unknown for each in get_close_matches(name, [option.name for option in SCORING], n=1)]
    return f" Did you mean `score.{near[0]}`?" if near else ""


def example_of(model: nn.Module, known: Data) -> Any:
    """Return the arguments to call a network with: the first training example, repeated twice."""
    given, named = arguments(model, first(getattr(known, SPLIT)), labels=False)
    return tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf, named or given
    )


def _own_score(score: Component, order: str) -> Callable[..., Any]:
    function, arguments = _imported("score", score), SIGNATURES[order]
    if not callable(function):
        raise OrchestratorError(
            f"{score.said('score')} must be a function ({', '.join(arguments)}) that returns "
            f"{'a Solution' if order == 'sequential' else 'name -> tensor of scores'}."
        )
    return _naming_itself(function, score, arguments)


def _own_class(component: Component) -> type[BasePruningMethod]:
    method, named = _imported("method", component), component.said("method")
    if not (isinstance(method, type) and issubclass(method, BasePruningMethod)):
        raise OrchestratorError(
            f"{named} must be a class derived from pruning.BasePruningMethod, with a "
            f"`compute_mask`{'' if isinstance(method, type) else ', not a function'}."
        )
    applied = next(each for each in method.__mro__ if "apply" in vars(each))
    if not applied.__module__.startswith("pruning."):
        raise OrchestratorError(
            f"{named} replaces `apply`, which a sweep does not call; move what it does to `compute_mask`."
        )
    if missing := sorted(method.__abstractmethods__):
        raise OrchestratorError(f"{named} lacks `{missing[0]}`; define it in the class.")
    return method


def _own_dynamics(dynamics: Component) -> type[Dynamics]:
    made = _imported("dynamics", dynamics)
    if not (isinstance(made, type) and issubclass(made, Dynamics)):
        raise OrchestratorError(
            f"{dynamics.said('dynamics')} must be a class derived from pruning.dynamics.Dynamics"
            f"{'' if isinstance(made, type) else ', not a function'}."
        )
    return made


def _imported(where: str, component: Component) -> Any:
    try:
        return get_object(component.named)
    except (Exception, SystemExit) as error:  # any error in the user's module
        raise TargetError(failure(where, component.given, error)) from error


SIGNATURES = {"at_once": ("model", "batches", "loss"), "sequential": ("problem",)}
"""Order in which layers are pruned -> arguments of a score of the user's own."""


def _naming_itself(function: Callable[..., Any], score: Component, arguments: Sequence[str]) -> Callable[..., Any]:
    """Wrap a score of the user's own so that its errors name it, and say how to get examples if it read `batches`."""

    @wraps(function)
    def named(*values: Any, **options: Any) -> Any:
        if unfit := unfit_call(function, *values, **options):
            raise OrchestratorError(
                f"{score.said('score')} is called with ({', '.join((*arguments, *options))}), but {unfit}; change its "
                "parameters, or its keys under `score`."
            )
        try:
            return function(*values, **options)
        except OrchestratorError:
            raise
        except (Exception, SystemExit) as error:
            said = (" ".join(str(error).split()) or "(no message)").rstrip(".")
            remedy = "fix the function, or change its arguments under `score`"
            if any(each is None for each in values) and "NoneType" in said:
                remedy = (
                    "if it reads `batches`, pass score.examples=128 to give it examples of the training split; else "
                    "fix the function"
                )
            raise OrchestratorError(
                f"{score.said('score')} failed with {type(error).__name__}: {said}; {remedy}."
            ) from error

    named.__name__ = score.named  # the engine names a score in its messages
    return named
