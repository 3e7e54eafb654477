"""Plans of a pruning: what a method decides, as plain data; the network is not changed."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from torch import Tensor, nn

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.rows import load
from pruning.choices.axes import FAMILY_UNITS, SIZES, Schedule, Score, Unit
from pruning.choices.combining import Choices
from pruning.dependencies.dependency_groups import (
    DependencyGroups,
    check_reachable,
    fraction_without,
    gone,
    kept_channels,
    largest_step,
    most_removable,
)
from pruning.engine.classes import masks_of_class, with_unit_of_class
from pruning.engine.scoring import (
    Cut,
    check_options,
    check_outputs,
    compute_scores,
    cut_of,
    generator_of,
    groups_of_weights,
    inverted,
    names_by_choices,
    names_to_score,
    no_plan,
    row_of,
    score_for,
    scored_names,
    share,
    shuffle,
)
from pruning.holding.parameter import check_has_values, check_prunable, pruned_names
from pruning.holding.reparam import stored
from pruning.masks.mask_set import MaskSet
from pruning.measure.matrix_weights import considered
from pruning.refused import RefusedValue
from pruning.schedule import targets
from pruning.scores.curvature import FisherMatrix, fisher_matrix
from pruning.scores.readings.network import Masks, weights_of
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.selection.allocation import allocate
from pruning.selection.selection_groups import Groups, select


@dataclass(frozen=True)
class PruningPlan:
    """Masks and values that `commit` applies to a network.

    Args:
        masks: mask of every parameter that is pruned.
        values: name in a plain model -> new values of a parameter or buffer, computed by the repair.
        details: the decisions in JSON types: units kept in each tensor, dead tensors, number of re-scorings, the
            fraction `considered` of the network's matrix weights, and the fraction `removed` of all units. For
            dependency groups, `removed` is a fraction of the budget, and `step` is the largest fraction of the budget
            that the last step of a group removed, and `on_request` are matrices of no layer that have groups, but are
            pruned only where they are named. `limits` says what cannot be pruned, or was not; `tokens` are those of
            each expert that a score has read.
        seconds: time spent in "scoring" (including the loss), "selection" and "repair"; not part of a result.
    """

    masks: MaskSet
    values: Mapping[str, Tensor] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def plan_choices(choices: Choices, given: ScoringInput, example: Any) -> PruningPlan:
    """Plan the pruning of a network to `choices.schedule.sparsity`, as `pruning.plan` does for a call."""
    choices = with_unit_of_class(choices)
    if choices.dynamics.row.in_training:
        raise RefusedValue("dynamics.kind", choices.dynamics.kind).because(
            "changes masks within a training, which a pruning is not; attach "
            f"pruning.dynamics.{choices.dynamics.kind}(...) to an optimizer, or use dynamics.kind='nested'."
        )
    if choices.schedule.order == "sequential":
        raise no_plan(choices.score)
    given = replace(given, parameters=names_by_choices(given.model, choices, given.parameters, example))
    made = (_in_turns if choices.unit.parts else _planned)(choices, given, example)
    return replace(made, details={**made.details, "considered": considered(given.model, made.masks).share})


def _planned(choices: Choices, given: ScoringInput, example: Any, *, alone: bool = False) -> PruningPlan:
    """Plan the pruning of one unit, as `plan_choices`; `alone` counts costs as if no other unit had been removed."""
    choices = replace(choices, score=score_for(choices.score, choices.unit.kind))
    given = replace(given, parameters=names_to_score(given.model, choices.score, given.parameters))
    cut, before = _cut(choices, given, example, alone=alone)
    model = _with_full_masks(given.model) if choices.dynamics.kind == "free" else given.model
    if isinstance(cut, DependencyGroups) and choices.schedule.sparsity is not None:
        nested = choices.dynamics.kind == "nested"
        check_reachable(cut, choices.schedule.sparsity, cut.alive(before) if nested else None)
    drawn, listed = generator_of(choices.score, given.generator), cast(list[Any] | None, given.batches)
    steps = list(_steps(choices.schedule, cut, before))
    remember = given.remember if len(steps) == 1 else None
    names = scored_names(cut, model, given.parameters)
    run = _PlannedRun(choices, replace(given, model=model, generator=drawn, parameters=names, remember=remember))
    now: dict[str, Tensor] = before
    for step, (sparsity, step_cut) in enumerate(steps):
        now = run.step(step_cut, sparsity, now, share(listed, step, len(steps)), last=step == len(steps) - 1)
    if choices.control.kind == "shuffle":
        shuffled = cut.expand(shuffle(cut.alive(now), cut, given.generator, cut.alive(before)))
        now = {n: mask & before[n] if n in before else mask for n, mask in shuffled.items()}
    return PruningPlan(MaskSet(now), run.repaired(now), _details(cut, now, choices.schedule, given.noted), run.seconds)


def _in_turns(choices: Choices, given: ScoringInput, example: Any) -> PruningPlan:
    """Plan the pruning of several units in turns, each under the masks of those before it."""
    sizes, plans = choices.unit.sizes, list[PruningPlan]()
    if choices.unit.kind == "sizes" and not sizes:
        raise RefusedValue("unit.kind", "sizes").because(
            "keeps as many layers, experts, heads, hidden units and channels as are asked for; pass one or more of "
            f"{', '.join(f'unit.{name}' for name in SIZES.values())}."
        )
    kinds = [*(sizes or choices.unit.parts)]
    for kind in kinds:
        own = replace(choices, unit=Unit(kind, reduce=choices.unit.reduce))
        if kind in sizes:
            own = _to_size(own, sizes[kind], given, example)
            if not own.schedule.sparsity and (plans or kind != kinds[-1]):
                continue  # as many as there are
        elif not plans:
            own = _to_share(own, choices.unit.by_layers, given, example)
        plans.append(_planned(own, given, example, alone=not plans))
        given = replace(given, masks={**(given.masks or {}), **plans[-1].masks}, remember=None)
    counts = {
        name: {group: n for each in plans for group, n in each.details[name].items()} for name in ("units", "kept")
    }
    step = max(each.details["step"] for each in plans)
    details = {**plans[-1].details, "unit": choices.unit.kind, **counts, "step": step}
    if sizes:  # their plans count units, not the budget
        cut, masks = _cut(replace(choices, unit=Unit(kinds[-1])), given, example)
        assert isinstance(cut, DependencyGroups)
        details |= {"removed": gone(cut, cut.alive(masks)), "step": largest_step(cut, cut.alive(masks))}
    seconds = {name: sum(each.seconds[name] for each in plans) for name in plans[0].seconds}
    return PruningPlan(
        MaskSet({name: mask for each in plans for name, mask in each.masks.items()}), {}, details, seconds
    )


def _to_share(choices: Choices, share: float, given: ScoringInput, example: Any) -> Choices:
    """Return the choices of the first of two units, which makes up a share of what is removed, or what it can.

    Rounding and floors of a scope are for the second unit.
    """
    choices = replace(choices, scope=replace(choices.scope, round_to=1, min_kept=0, uniform=False))
    if (target := choices.schedule.sparsity) is None:
        return choices
    cut, before = _cut(choices, given, example, alone=True)
    assert isinstance(cut, DependencyGroups)
    sparsity = min(max(target * share, gone(cut, cut.alive(before))), most_removable(cut, cut.alive(before)))
    return replace(choices, schedule=replace(choices.schedule, sparsity=sparsity))


def _to_size(choices: Choices, size: int, given: ScoringInput, example: Any) -> Choices:
    """Return the choices of a unit of which every layer keeps `size`."""
    choices = replace(choices, scope=replace(choices.scope, budget="channels"))
    cut, before = _cut(choices, given, example)
    assert isinstance(cut, DependencyGroups)
    sparsity = fraction_without(cut, size, cut.alive(before))
    return replace(choices, schedule=replace(choices.schedule, sparsity=sparsity))


def _cut(choices: Choices, given: ScoringInput, example: Any, *, alone: bool = False) -> tuple[Cut, dict[str, Tensor]]:
    """Return the units, and name -> mask so far of each pruned tensor that has a mask; bool on the CPU."""
    cut: Cut
    for name, weight in given.weights().items() if not choices.unit.of_transformer else ():
        check_prunable(name, weight.parameter, reader="dependency groups" if choices.unit.spans else "")
    if choices.unit.spans:
        cut = groups_of_weights(given.model, choices, example, given.parameters)
        weights = weights_of(given.model, given.masks, cut.parameters)
        if cut.others and not alone:
            members = {m.tensor for group in cut.others for m in group.members if cut.tensors[m.tensor].trained}
            found = weights_of(given.model, given.masks, members).items()
            cut = cut.beside({name: weight.kept for name, weight in found if weight.kept is not None})
    else:
        weights = given.weights()
        for name, weight in weights.items():
            check_has_values(name, weight.parameter)
        cut = cut_of(weights, choices.unit, choices.scope)
    check_outputs(choices.score, cut, weights)
    names = cut.sizes if isinstance(cut, Groups) else cut.parameters
    return cut, {n: kept.cpu() for n in names if (kept := weights[n].kept) is not None}


class _Session(Protocol):
    """Score of one network that is prepared once for several re-scorings."""

    def scores(self, masks: Masks | None = None) -> Mapping[str, Tensor]:
        """Return the scores under masks that are nested in those of the last call."""


@dataclass
class _PlannedRun:
    """Inner re-scorings of one plan."""

    choices: Choices
    given: ScoringInput
    session: _Session | None = None
    matrix: FisherMatrix | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"scoring": 0.0, "selection": 0.0})

    def step(
        self,
        cut: Cut,
        sparsity: float | None,
        before: Mapping[str, Tensor],
        batches: Sequence[Any] | None,
        *,
        last: bool,
    ) -> dict[str, Tensor]:
        """Score and select once; return name -> mask, bool of the parameter's shape.

        Only the `last` step raises an error if a tensor has too few survivors for its target. Tensors that were pruned
        unevenly before reach their targets in different steps.
        """
        choices, ranking = self.choices, ALLOCATIONS[self.choices.scope.allocation].ranking
        given = replace(self.given, batches=batches, masks={**(self.given.masks or {}), **before})
        nested = choices.dynamics.kind == "nested"
        begin = time.perf_counter()
        scores = None
        if choices.select is None or choices.score != Score():  # a class sees the weights themselves, signed
            scores = self._scores(choices.score, cut, given)
        ranked = self._scores(Score(ranking), cut, replace(given, batches=None)) if ranking else scores
        scored_at = time.perf_counter()
        alive = cut.alive(before) if nested else None
        if isinstance(cut, DependencyGroups):
            assert scores is not None
            assert sparsity is not None
            kept = cut.expand(kept_channels(cut, sparsity, self._reduced(cut, scores), alive))
        elif choices.select is not None:
            weights = weights_of(given.model, given.masks, cut.sizes)
            kept = masks_of_class(choices, cut, sparsity, weights, scores, given.generator, capped=not last)
        else:
            assert scores is not None
            assert ranked is not None
            units = self._reduced(cut, scores)
            by = units if ranked is scores else _by_unit(cut, ranked)
            kept = cut.expand(select(units, cut, allocate(cut, sparsity, by, alive, capped=not last), alive))
        self.seconds["scoring"] += scored_at - begin
        self.seconds["selection"] += time.perf_counter() - scored_at
        return {n: mask & before[n] if nested and n in before else mask for n, mask in kept.items()}

    def repaired(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> new values that the repair computes for the network under the final masks."""
        row, score = REPAIRS[self.choices.repair.kind], self.choices.score
        if not row.code:
            return {}
        options: dict[str, Any] = {}
        if row.takes_fisher_matrix and score.kind == "obs":  # equal options give the Fisher matrix of the score
            options = {name: score.options[name] for name in ("damping", "block") if name in score.options}
        options |= {name: value for name, value in self.choices.repair.options.items() if value is not None}
        if self.matrix is not None:
            options["matrix"] = self.matrix
        begin = time.perf_counter()
        values: dict[str, Tensor] = row.load()(replace(self.given, parameters=list(kept)), kept, **options)
        self.seconds["repair"] = time.perf_counter() - begin
        return values

    def _scores(self, score: Score, cut: Cut, given: ScoringInput) -> Mapping[str, Tensor]:
        choices, row = self.choices, row_of(score)
        check_options(score)
        score = _with_block_form(score, cut)
        if row is not None and row.session and choices.schedule.inner > 1 and choices.dynamics.kind == "nested":
            if self.session is not None:
                return self.session.scores(given.masks)
            session: _Session = load(row.session)(given, **score.options)
            self.session = session
            return session.scores()
        if _shares_fisher_matrix(score, choices):
            own = {name: score.options[name] for name in ("damping", "block") if name in score.options}
            self.matrix = fisher_matrix(given, **own)
            score = replace(score, options={**score.options, "matrix": self.matrix})
        names = [*(given.parameters or ())]
        return compute_scores(score, given, names, cut.unit.dim if cut.unit.kind == "channel" else None)

    def _reduced(self, cut: Cut, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of the units, inverted for the control "invert"; a random block has one draw."""
        row = row_of(self.choices.score)
        if row is not None and row.draws and isinstance(cut, Groups) and cut.unit.kind == "block":
            scores = {part.name: part.by_unit(scores[part.name])[:, 0] for part in cut}
        units = _by_unit(cut, scores)
        return inverted(units) if self.choices.control.kind == "invert" else units


def _by_unit(cut: Cut, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.cpu() for name, values in cut.reduce(scores).items()}


def _shares_fisher_matrix(score: Score, choices: Choices) -> bool:
    """Return whether the repair can reuse the score's Fisher matrix, which lacks entries that return."""
    row, repair = row_of(score), choices.repair
    if row is None or not (row.takes_fisher_matrix and REPAIRS[repair.kind].takes_fisher_matrix):
        return False
    same = repair.options.get("damping") in (None, score.options.get("damping"))
    return same and choices.dynamics.kind == "nested" and choices.schedule.inner == 1


def _with_block_form(score: Score, cut: Cut) -> Score:
    """Make OBS score whole blocks, like oBERT, if the blocks of its Fisher matrix are the pruned blocks.

    Those of the matrix run along the rows of a weight; in convolutions with larger kernels the pruned ones do not.
    """
    if score.kind != "obs" or not isinstance(cut, Groups) or cut.unit.kind != "block":
        return score
    size = score.options.get("block")
    if any(
        part.entries != size or part.padding or part.rows > 1 or (part.index.flatten().diff() < 0).any() for part in cut
    ):
        return score
    return replace(score, options={"form": "block", **score.options})


def _steps(schedule: Schedule, cut: Cut, before: Masks) -> Iterator[tuple[float | None, Cut]]:
    """Yield (sparsity, units) of each inner re-scoring; sparsity None if the densities in `cut.scope` set it."""
    if isinstance(cut, DependencyGroups):
        if schedule.sparsity is None:
            raise RefusedValue("sparsity", None).because(
                f"must be a fraction in [0, 1) of the {cut.scope.budget}, because dependency groups take no `amount`; "
                "pass a fraction."
            )
        removed = gone(cut, cut.alive(before))
    elif schedule.sparsity is None:
        if cut.scope.kind == "window" and schedule.inner > 1:
            raise RefusedValue("schedule.inner", schedule.inner).because(
                "must be 1 for windows, which have no densities in between; type 1."
            )
        for step in range(1, schedule.inner + 1):
            densities = {name: d ** (step / schedule.inner) for name, d in cut.scope.densities.items()}
            yield None, replace(cut, scope=replace(cut.scope, densities=densities))
        return
    else:
        total, alive = sum(cut.sizes.values()), sum(int(kept.sum()) for kept in cut.alive(before).values())
        removed = (total - alive) / max(1, total)
    start = min(removed, schedule.sparsity)
    yield from ((each, cut) for each in targets("geometric", schedule.sparsity, schedule.inner, start))


def _with_full_masks(model: nn.Module) -> nn.Module:
    """Return a copy whose masks keep every entry, with the stored values, so that entries may return."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        for leaf in pruned_names(module):
            stored(module, leaf)[1].fill_(1)
    return copied


def _details(cut: Cut, kept: Mapping[str, Tensor], schedule: Schedule, noted: Mapping[str, Any]) -> dict[str, Any]:
    alive = cut.alive(kept)
    units = {name: int(each.sum()) for name, each in alive.items()}
    passes = cut.unit.kind in FAMILY_UNITS  # the residual stream goes around a removed layer and its heads
    dead = [name for name, count in units.items() if cut.sizes[name] and not count and not passes]
    counts = {"units": dict(cut.sizes), "kept": units, "dead": dead, "inner": schedule.inner}
    details = {"unit": cut.unit.kind, **counts, **noted}
    said = [cut.limits, noted.get("limits", "")]
    if isinstance(cut, DependencyGroups):
        details |= {"removed": gone(cut, alive), "step": largest_step(cut, alive)}
        details |= {"on_request": [*cut.on_request]} if cut.on_request else {}
        if cut.to_nearest and schedule.sparsity and sum(units.values()) == sum(cut.sizes.values()):
            said.append(NO_EXPERT.format(schedule.sparsity, max(cut.sizes.values()), details["step"]))
    else:
        details["removed"] = 1 - sum(units.values()) / max(1, sum(cut.sizes.values()))
    return details | ({"limits": ". ".join(filter(None, said))} if any(said) else {})


NO_EXPERT = (
    "no expert is removed, because a sparsity of {:g} takes half an expert or less of the {} of each layer, or of each "
    "group of experts that its router chooses first; type {:g}"
)
