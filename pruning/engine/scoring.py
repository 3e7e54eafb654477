"""Scoring: look up the score of a choice or control, check its options, and call it with the arguments it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruning.catalogue.reconstructions import SOLVERS
from pruning.catalogue.rows import refuse_unknown
from pruning.catalogue.scores import SCORES
from pruning.catalogue.scores import ScoreRow as ScoreRow
from pruning.choices.axes import Score
from pruning.dependencies.dependency_groups import DependencyGroups
from pruning.engine.pruning_units import batch_norms_after
from pruning.errors import RefusedValue
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.selection.selection_groups import Groups


def compute_scores(
    score: Score, given: ScoringInput, names: Sequence[str], dim: int | None = None
) -> Mapping[str, Tensor]:
    """Compute scores: name -> tensor with the shape of the parameter, or one score per unit for scores of units.

    Args:
        score: the score and its options.
        given: the network, pruned or not, and the scoring data.
        names: names of the parameters to score.
        dim: dimension of the channels; None if units are not channels.

    Raises:
        ValueError: the score is unknown, does not take an option, or lacks something it needs.
    """
    followers = batch_norms_after(given.model) if _reads_batch_norm(score) else {name: name for name in names}
    read = [followers[name] for name in names]
    given = replace(given, parameters=read)
    check_options(score)
    row = row_of(score)
    scores = _own_scores(score, given) if row is None else row.load()(given, **_options(row, score, dim))
    if not isinstance(scores, Mapping):
        raise ValueError(
            f"`score` ({_name(score)}) returned {type(scores).__name__}; it must return a mapping: name of a parameter "
            "-> tensor of scores."
        )
    if wrong := [name for name, values in scores.items() if not isinstance(values, Tensor)]:
        raise ValueError(
            f"`score` ({_name(score)}) returned {type(scores[wrong[0]]).__name__} for {wrong[0]!r}; it must return a "
            "mapping: name of a parameter -> tensor of scores; convert values with torch.as_tensor."
        )
    if scores and read and not any(name in scores for name in read):
        raise ValueError(
            f"`score` ({_name(score)}, which returned names such as {next(iter(scores))!r}) must return scores by the "
            f"names of the parameters to prune, such as {read[0]!r}."
        )
    return {name: scores[other] for name, other in zip(names, read, strict=True) if other in scores}


def _options(row: ScoreRow, score: Score, dim: int | None) -> Mapping[str, Any]:
    """Return the options of a built-in score, including the dimension of the channels if the score takes it."""
    if dim is None or "dim" not in row.unlisted:
        return score.options
    if score.options.get("dim", dim) != dim:
        raise RefusedValue("unit.dim", dim).because(
            f"must equal `dim` (={score.options['dim']!r}) of the score, which ranks along it; pass only unit.dim."
        )
    return {**score.options, "dim": dim}


def _own_scores(score: Score, given: ScoringInput) -> Any:
    """Call a custom score with the arguments that it takes."""
    function = cast(Callable[..., Any], score.kind)
    own = {name: getattr(given, name) for name in SHARED}
    taken = inspect.signature(function).parameters
    if not _takes_any(function):
        own = {name: value for name, value in own.items() if name in taken}
    try:
        return function(given.model, given.batches, given.loss, **{**own, **score.options})
    except (TypeError, AttributeError) as error:
        missing = [name for name in ("batches", "loss") if getattr(given, name) is None]
        if not missing:
            raise
        raise ValueError(
            f"`{missing[0]}` (=None) was passed to the score {_name(score)}, which failed with {type(error).__name__}: "
            f"{error}; pass `{'` and `'.join(missing)}` if the score reads them."
        ) from error


SHARED = ("size", "generator", "masks", "parameters")
"""Keyword arguments that every score may take, in addition to model, batches and loss."""


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def options_taken(score: Score) -> list[str]:
    """Return the names of the options that a score takes."""
    if row := row_of(score):
        return [*(option.name for option in row.options), *row.unlisted]
    function = cast(Callable[..., Any], score.kind)
    return [
        name for name in inspect.signature(function).parameters if name not in ("model", "batches", "loss", *SHARED)
    ]


def check_options(score: Score) -> None:
    """Raise ValueError for an option that a score does not take, or whose value breaks a rule."""
    if row := row_of(score):
        row.refuse(score.options, "score")
    elif not _takes_any(cast(Callable[..., Any], score.kind)):
        refuse_unknown(score.options, options_taken(score), f"score {_name(score)}", "score")


def check_channels(score: Score, cut: Groups, inputs_first: Container[str]) -> None:
    """Refuse a score of outputs if the units are channels along another dimension.

    Raises:
        ValueError: the dimensions differ; the message names the tensor.
    """
    row = row_of(score)
    if cut.unit.kind != "channel" or row is None or "dim" in row.unlisted:
        return
    if not row.units and score.options.get("form", "entry") == "entry":
        return
    for layout in cut:
        if layout.order[0] != (outputs := int(layout.name in inputs_first)):
            raise RefusedValue("unit.dim", cut.unit.dim).because(
                f"must be {outputs}, the dimension of the outputs of {layout.name!r}, which the score {_name(score)} "
                f"ranks; type {outputs}, or choose a score of entries."
            )


def generator_of(score: Score, generator: torch.Generator | None) -> torch.Generator | None:
    """Return the generator of a score; a random score without one gets a new generator, seeded by torch's default one.

    Without it, the score would not advance the default generator, and draw the same numbers at the next call.
    """
    if not isinstance(cast(object, generator), torch.Generator | None):
        raise TypeError(
            f"`generator` (={generator!r}) must be a torch.Generator, not {type(generator).__name__}; pass "
            "torch.Generator().manual_seed(seed)."
        )
    if generator is None and (row := row_of(score)) and row.draws:
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    return generator


def row_of(score: Score) -> ScoreRow | None:
    """Return the catalogue row of a built-in score, None for a custom function.

    Raises:
        ValueError: the name is unknown, or ranks only layer by layer.
    """
    if callable(score.kind):
        return None
    if score.kind in SOLVERS:
        raise no_plan(score)
    if score.kind not in SCORES:
        raise RefusedValue("score.kind", score.kind).because(f"must be a function, or one of {', '.join(SCORES)}.")
    return SCORES[score.kind]


def score_for(score: Score, unit: str) -> Score:
    """Return the score that ranks a unit in the place of `score`: some rank whole layers by another one."""
    row = row_of(score)
    return replace(score, kind=row.for_layers) if row is not None and row.for_layers and unit == "layer" else score


def no_plan(score: Score) -> ValueError:
    """Return the error for a method that prunes layer by layer, where one plan for all layers is asked for."""
    return RefusedValue("schedule.order", "sequential").because(
        f"prunes by {_name(score)} layer by layer, each with the pruned layers before it, so no plan comes first; call "
        f"pruning.layerwise(model, {_name(score)!r}, batches, sparsity=0.5) with batches that the model is called with."
    )


def names_to_score(model: nn.Module, score: Score, parameters: Iterable[str] | None) -> Iterable[str] | None:
    """Return the names of the parameters to prune; scores of BatchNorm need a layer that a BatchNorm follows."""
    if not _reads_batch_norm(score):
        return parameters
    followed = batch_norms_after(model)
    names = [name for name in (followed if parameters is None else parameters) if name in followed]
    if not names:
        raise RefusedValue("score.kind", score.kind).because(
            "ranks channels by the BatchNorm after their layer, but no layer is followed by one; choose another score, "
            "or other parameters."
        )
    return names


def _reads_batch_norm(score: Score) -> bool:
    row = row_of(score)
    return row is not None and (row.of_batch_norm or score.options.get("form") == "bn")


def _name(score: Score) -> str:
    return score.kind if isinstance(score.kind, str) else getattr(score.kind, "__name__", repr(score.kind))


def share(batches: Sequence[Any] | None, step: int, steps: int) -> Sequence[Any] | None:
    """Return the batches of re-scoring `step` of `steps`: an equal share, or one in turn if there are too few."""
    if batches is None or steps == 1 or not batches:
        return batches
    if len(batches) < steps:
        return [batches[step % len(batches)]]
    return batches[len(batches) * step // steps : len(batches) * (step + 1) // steps]


def shuffle(
    kept: Mapping[str, Tensor],
    groups: Groups | DependencyGroups,
    generator: torch.Generator | None = None,
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Permute at random which units are kept, within each tensor (or row, or window); counts do not change.

    Args:
        kept: name -> bool for each unit, as `select` returns.
        groups: layout of the units.
        generator: source of the permutations; None: torch's default generator.
        alive: name -> bool for each unit: only these units are permuted, so nested masks stay nested; None: all.
    """
    shuffled = {}
    for layout in groups:
        mask = kept[layout.name].view(-1, layout.pool)
        open_to = torch.ones_like(mask) if alive is None else alive[layout.name].view(-1, layout.pool)
        keys = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        # Survivors of a pool in their own order, and in a random order.
        places = torch.where(open_to, 0.0, 2.0).double().sort(dim=1, stable=True).indices
        drawn = torch.where(open_to, keys, 2.0).sort(dim=1, stable=True).indices
        values = mask.gather(1, places)
        shuffled[layout.name] = torch.zeros_like(mask).scatter_(1, drawn, values).view(-1)
    return shuffled


def inverted(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scores with opposite signs, so that the highest scores are pruned first; unsigned ones as float64."""
    return {name: -(values if values.dtype.is_signed else values.to(torch.float64)) for name, values in scores.items()}
