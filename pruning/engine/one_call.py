"""`pruning.plan` and `pruning.prune`: plan or prune by a published or custom method in one call; plans committed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.catalogue.presets import SCOPES, UNITS, Preset
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import Score
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED
from pruning.engine.classes import class_of, with_unit_of_class
from pruning.engine.plans import PruningPlan, plan_choices
from pruning.engine.scoring import options_taken, pruned_if_named, row_of
from pruning.holding.parameter import check_masks, plain_modules, plain_tensors
from pruning.holding.reparam import held
from pruning.layouts import has_plain_forward
from pruning.masks.mask_set import MaskSet
from pruning.measure.matrix_weights import considered, shortened
from pruning.measure.report import unreached
from pruning.refused import UnknownOption
from pruning.scores.readings.network import Masks, computed_weights, weights_of
from pruning.scores.readings.scoring_data import Batches, Loss, Remember, ScoringInput, Size
from pruning.scores.weight_scores import synflow


def commit(model: nn.Module, plan: PruningPlan) -> None:
    """Apply a plan to a network: all masks and values, or none if an error is raised.

    The parameters are stored as by `torch.nn.utils.prune`: `name_orig` keeps all values, `name_mask` is the mask.

    Args:
        model: the network that the plan was made for, or one with equal names and shapes.
        plan: its masks replace the masks before.

    Raises:
        ValueError: a parameter or buffer is missing or has another shape; the message names it, and nothing is changed.
    """
    found = plain_tensors(plain_modules(model))
    for name, value in plan.values.items():
        if name not in found or found[name].shape != value.shape:
            actual = f"the tensor has shape {tuple(found[name].shape)}" if name in found else "the tensor is missing"
            raise ValueError(
                f"`plan.values[{name!r}]` of shape {tuple(value.shape)} does not fit {type(model).__name__}, where "
                f"{actual}; make the plan for this model."
            )
    before = {name: found[name].detach().clone() for name in plan.values}
    with torch.no_grad():
        try:
            for name, value in plan.values.items():
                found[name].copy_(value)
            plan.masks.apply(model, replace=True)
        except BaseException:
            for name, value in before.items():
                found[name].copy_(value)
            raise
    for module, reparam in held(model):
        reparam.refresh_between(module)


def sparsity(model: nn.Module) -> float:
    """Return the fraction of prunable weights that are masked, or exactly 0 in a tensor without a mask.

    Prunable are the weights that `prune` takes by default (those of layers, not embeddings, heads tied to them and
    routers), and all other tensors that have a mask; a tied tensor counts once. Matrix weights that are neither do not
    count: `details["considered"]` of a plan is the share of the matrix weights that it considers. `prune` counts only
    masks, so the target given to `prune` may be lower than this fraction for a network with zeros but no masks. The
    sparsity of a network without entries is 0.
    """
    names = dict.fromkeys([*weights_of(model), *MaskSet.collect(model)])
    weights = weights_of(model, parameters=names).values()
    kept = {id(w.parameter): (w.stored != 0) if w.kept is None else w.kept for w in weights}
    total = sum(mask.numel() for mask in kept.values())
    return (total - sum(int(mask.sum()) for mask in kept.values())) / max(1, total)


def effective_sparsity(model: nn.Module, batches: Batches = None, *, masks: Masks | None = None) -> float:
    """Return the fraction of prunable weights that are pruned, 0, or on a dead path.

    An entry v is alive if its score in SynFlow's network of magnitudes is positive: |v| dR/d|v| > 0.

    Args:
        model: pruned or not; its functions must scale with their input, see `pruning.scores.synflow`.
        batches: give the shape of an input; needed if the first layer is not linear.
        masks: masks in addition to those of the model.
    """
    flows = synflow(ScoringInput(model, batches, masks=masks))
    total = sum(weight.parameter.numel() for weight in weights_of(model, masks).values())
    return (total - sum(int((flow > 0).sum()) for flow in flows.values())) / max(1, total)


TRAINING_KEYS = ("rounds", "at", "restart", "step", "rates")
"""Keys of a sweep that schedule training between pruning rounds."""
_TRAINING_KEY_REFUSED = (
    "`{}` must not be passed to `plan` or `prune`: it schedules training between rounds, and both prune once without "
    "training; leave it out, train yourself, and call `prune` again with the next `sparsity`."
)
AXES = [each.name for each in fields(Choices) if each.name not in ("score", "repair", "select", "arguments")]
"""Choices whose fields may be passed directly as options."""


def plan(  # thirteen parameters: the data of a score, each of which a caller may leave out, are arguments of their own
    model: nn.Module,
    method: str | Choices | type | Callable[..., Any] = "magnitude",
    *,
    sparsity: float | None = None,
    batches: Batches = None,
    loss: Loss = None,
    size: Size = None,
    generator: torch.Generator | None = None,
    parameters: Iterable[str] | None = None,
    masks: Masks | None = None,
    example: Any = None,
    remember: Remember = None,
    **options: Any,
) -> PruningPlan:
    """Plan the pruning of a network by a method, without changing the network; `commit` applies the plan.

        pruning.plan(model, "snip", sparsity=0.9, batches=[(images, labels)], loss=loss)
        pruning.plan(model, "grasp", sparsity=0.9, batches=batches, loss=loss, temperature=1)
        pruning.plan(model, "magnitude", sparsity=0.9, scope="global", min_kept=10)
        pruning.plan(model, "n_m", n=1, m=4)
        pruning.plan(model, "magnitude", sparsity=0.5, unit="group", budget="macs", example=images)

    With n inner re-scorings from density d0 to d, the density after re-scoring t is d0 (d / d0)^(t/n). Each re-scoring
    scores the network under the masks so far, on an equal share of the batches (on one batch in turn if there are fewer
    batches than re-scorings).

    Args:
        model: plain, or pruned before; only survivors are pruned further, unless the dynamics let entries return.
        method: a name of `pruning.PUBLISHED`; `Choices`; a subclass of `BasePruningMethod`; or a custom score, a
            function `(model, batches, loss, **_) -> {name: tensor}`.
        sparsity: fraction of all units pruned in the end, including units pruned before; None if the method sets it.
        batches: iterable of batches that `loss` takes, read once into a list; None if the score reads no data.
        loss: (model, batch) -> mean loss of the batch; None if the score needs no loss.
        size: (batch) -> weight of the batch; None: length of the batch's first tensor.
        generator: source of random draws; None: torch's default generator.
        parameters: names of the parameters to prune; None: as in `groups`. For dependency groups: weights whose outputs
            may be removed.
        masks: name -> tensor, nonzero where an entry is kept so far; in addition to the masks of the model.
        example: input of the network, a batch of 2 or more; for dependency groups.
        remember: (key, make) -> the result of `make()`, name -> tensor, or an equal one from an earlier plan with an
            equal key, network, masks and batches, at any sparsity. Wanda asks it for the norms of its inputs. With
            several re-scorings, whose masks and batches differ, it is not called.
        options: any of the seven choices, as an object, the name of its kind, or a dict of fields to change; options
            of the score (or arguments of the class), such as `temperature`; if the method is a score, also a field
            that only one choice has, such as `inner`.

    Raises:
        ValueError: the method is unknown, lacks something it needs, or cannot reach the sparsity; a unit does not
            divide a tensor; `options` contain a key of training, such as `rounds`; or a weight has no values (on the
            meta device).
        TypeError: `batches` is no iterable, or `generator` is no torch.Generator.
    """
    choices = chosen(method, options)
    if sparsity is not None:
        choices = replace(choices, schedule=replace(choices.schedule, sparsity=sparsity))
    check_masks({} if masks is None else masks)
    names = parameters if parameters is None or isinstance(parameters, str) else [*parameters]
    given = ScoringInput(model, _listed(batches), loss, size, dict(masks or {}), generator, names, remember)
    return plan_choices(choices, given, example)


def prune(  # the parameters of `plan`
    model: nn.Module,
    method: str | Choices | type | Callable[..., Any] = "magnitude",
    *,
    sparsity: float | None = None,
    batches: Batches = None,
    loss: Loss = None,
    size: Size = None,
    generator: torch.Generator | None = None,
    parameters: Iterable[str] | None = None,
    masks: Masks | None = None,
    example: Any = None,
    remember: Remember = None,
    **options: Any,
) -> PruningPlan:
    """Prune a network in place by a method, and return the plan that was applied: `plan`, then `commit`.

        pruning.prune(model, "magnitude", sparsity=0.9, scope="global")

    The caller trains between rounds and rewinds weights: call `prune` again with the next sparsity. Only masked entries
    count as pruned. Weights that are 0 without a mask, for example after `remove_all`, are ranked like all others. A
    tensor with no entry left causes a warning, and so do weights that are computed from other parameters, and matrix
    weights that stay dense by default, if they hold more than a tenth of the entries.

    Args:
        model: plain, or pruned before. Afterwards its parameters are stored as by `torch.nn.utils.prune`; `remove_all`
            makes the pruning permanent.
        method, sparsity, batches, loss, size, generator, parameters, masks, example, remember, options: see `plan`.

    Raises:
        ValueError, TypeError: as in `plan`; nothing is changed.
    """
    parameters = parameters if parameters is None or isinstance(parameters, str) else [*parameters]
    data: dict[str, Any] = {"batches": batches, "loss": loss, "size": size, "generator": generator}
    more: dict[str, Any] = {"parameters": parameters, "masks": masks, "example": example, "remember": remember}
    decided = plan(model, method, sparsity=sparsity, **data, **more, **options)
    commit(model, decided)
    choices = with_unit_of_class(chosen(method, options))
    if parameters is None and not choices.unit.of_transformer:
        left = considered(model, [*([] if choices.unit.kind == "group" else weights_of(model)), *decided.masks])
        named = decided.details.get("on_request") or pruned_if_named(model, choices, left.dense)
        if said := left.sentence(named):
            warnings.warn(f"{said}.", stacklevel=2)
    if parameters is None and (made := computed_weights(model)):
        warnings.warn(COMPUTED_FROM_OTHERS.format(", ".join(made)), stacklevel=2)
    by_name = weights_of(model, None, parameters) if parameters is not None and choices.unit.kind == "group" else {}
    if whole := [name for name in by_name if name not in decided.masks]:
        warnings.warn(IN_NO_GROUP.format(shortened(whole)), stacklevel=2)
    if limits := decided.details.get("limits"):
        warnings.warn(limits, stacklevel=2)
    if dead := decided.details["dead"]:
        warnings.warn(
            f"every entry of {', '.join(dead)} is pruned, so nothing passes through; pass a lower `sparsity`, or "
            "`min_kept`.",
            stacklevel=2,
        )
    own = any("forward" in vars(module) or not has_plain_forward(module) for module in model.modules())
    if own and example is not None and (said := unreached(model, example)):
        warnings.warn(said, stacklevel=2)
    return decided


IN_NO_GROUP = (
    "`parameters` names {}, which stay whole: no dependency group that can lose channels holds them, or not all "
    "weights whose outputs go together are named; to prune their entries, leave out `unit`."
)
COMPUTED_FROM_OTHERS = (
    "{} stays dense, because it is computed from other parameters, as by weight_norm; call "
    "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or remove_spectral_norm first to prune it."
)


def chosen(method: str | Choices | type | Callable[..., Any], options: Mapping[str, Any] | None = None) -> Choices:
    """Return the choices of a method, changed by `options`; see `plan`."""
    choices, given = _choices_of(method), dict(options or {})
    score = _changed(choices.score, given.pop("score", {}), {})
    repair = _changed(choices.repair, given.pop("repair", {}), {})
    kind = class_of(choices)
    taken = options_taken(score) if kind is None else [*inspect.signature(kind).parameters]
    repairs = {option.name for option in REPAIRS[repair.kind].options}
    own: dict[str, Any] = {}
    of_repair: dict[str, Any] = {}
    of_axis: dict[str, dict[str, Any]] = {axis: {} for axis in AXES}
    for name, value in given.items():
        homes = [axis for axis in AXES if name in {each.name for each in fields(getattr(choices, axis))}]
        if name in AXES:
            continue
        if name in TRAINING_KEYS and name not in taken:
            raise ValueError(_TRAINING_KEY_REFUSED.format(name))
        # The engine passes `unit.dim` to a built-in score that takes one.
        if name in taken and not (name == "dim" and kind is None and row_of(score)):
            own[name] = value
        elif kind is None and name in repairs:
            of_repair[name] = value
        elif kind is None and len(homes) == 1:
            of_axis[homes[0]][name] = value
        else:
            if kind is None and row_of(score) and not homes:
                _refuse_misspelt(name, value, [*taken, *repairs])
            own[name] = value
    # Change all choices together: a value may be valid only with the new value of another choice.
    changed = {axis: _changed(getattr(choices, axis), given.get(axis, {}), of_axis[axis]) for axis in AXES}
    changed["repair"] = replace(repair, options={**repair.options, **of_repair})
    if kind is not None:
        return replace(choices, score=score, arguments={**choices.arguments, **own}, **changed)
    return replace(choices, score=replace(score, options={**score.options, **own}), **changed)


def _refuse_misspelt(name: str, value: Any, options: Iterable[str]) -> None:
    """Refuse an option that no choice takes by the name that was meant, if one is alike."""
    of_axes = (each.name for axis in AXES for each in fields(getattr(Choices(), axis)))
    if close := get_close_matches(name, [*inspect.signature(plan).parameters, *options, *AXES, *of_axes], 1, 0.75):
        raise UnknownOption(name, value).because(f"is no argument; did you mean `{close[0]}`?")


def _choices_of(method: str | Choices | type | Callable[..., Any]) -> Choices:
    if isinstance(method, Choices):
        return method
    if isinstance(method, type) and issubclass(method, torch_prune.BasePruningMethod):
        return Choices(select=method)
    if isinstance(method, str):
        if method not in PUBLISHED:
            if row := SCORES.get(method):
                unit = row.of_units[0] if row.of_units else ""
                of_unit = (name for name, each in SCORES.items() if unit in each.of_units)
                asked = next((name for name in of_unit if SCORES[name].for_units.get(unit) == method), method)
                said = f"score={asked!r}" + (f", unit={unit!r}" if unit else "")
                raise ValueError(f"`method` (={method!r}) is a score and no method; type {said}.")
            raise ValueError(f"`method` (={method!r}) must be one of {', '.join(PUBLISHED)}; or a function or a class.")
        return PUBLISHED[method].choices
    if callable(method):
        return Choices(Score(method))
    raise ValueError(f"`method` (={method!r}) must be a name, `Choices`, a class, or a function.")


def _changed(choice: Any, given: Any, single: Mapping[str, Any]) -> Any:
    """Return a choice changed to `given`.

    Args:
        choice: one of the seven choices.
        given: another object of the choice's class, the name of a kind or of a sweep's preset, or a dict of fields;
            keys of the dict that are no fields are options of the score or the repair.
        single: other fields to change, with their values.
    """
    title, names = type(choice).__name__, [each.name for each in fields(choice)]
    if isinstance(given, type(choice)):
        return replace(given, **single)
    if isinstance(given, Mapping):
        known = {name: value for name, value in given.items() if name in names}
        others = {name: value for name, value in given.items() if name not in names}
        if "options" in names:
            known["options"] = {**(known.get("options") or ({} if "kind" in given else choice.options)), **others}
        elif others:
            wrong = next(iter(others))
            if wrong in TRAINING_KEYS:
                raise ValueError(_TRAINING_KEY_REFUSED.format(wrong))
            raise ValueError(f"`{title.lower()}` has no field {wrong!r}; its fields are {', '.join(names)}.")
        return replace(choice, **{**known, **single})
    presets: Mapping[str, Preset] = {"Unit": UNITS, "Scope": SCOPES}.get(title, {})
    if isinstance(given, str) and given in presets and presets[given].sets["kind"] != given:
        return replace(type(choice)(), **{**presets[given].sets, **single})
    if "kind" in names and (isinstance(given, str) or (callable(given) and isinstance(choice, Score))):
        return replace(type(choice)(), kind=given, **single)
    a_kind = "the name of its kind, " if "kind" in names else ""
    raise ValueError(f"`{title.lower()}` (={given!r}) must be a {title}, {a_kind}or a dict of its fields.")


def _listed(batches: Batches) -> list[Any] | None:
    if batches is None:
        return None
    readable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Tensor | Mapping | str) or not readable:
        raise TypeError(f"`batches` (a {type(batches).__name__}) must be a list of batches; pass [(inputs, labels)].")
    return list(batches)
