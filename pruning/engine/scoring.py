"""The scores of a choice: looked up, and given what they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruning.catalogue.scores import SCORES
from pruning.catalogue.scores import Score as ScoreRow
from pruning.choices.axes import Score
from pruning.engine.followers import batch_norms_after
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.selection.selection_groups import Groups


def scored(score: Score, given: ScoringInput, names: Sequence[str], dim: int | None = None) -> Mapping[str, Tensor]:
    """Return name -> scores, of the shape of the parameter or, for scores by unit, of its units.

    Args:
        score: the score and its options.
        given: the network, as it is or held pruned, and the scoring data.
        names: of the parameters to score.
        dim: dimension along which channels are cut; None where units are no channels.

    Raises:
        ValueError: the score is unknown, does not take an option, or lacks what it needs.
    """
    followers = batch_norms_after(given.model) if _is_of_batch_norm(score) else {name: name for name in names}
    read = [followers[name] for name in names]
    given = replace(given, parameters=read)
    check_options(score)
    row = row_of(score)
    scores = _own_scores(score, given) if row is None else row.load()(given, **_options(row, score, dim))
    if not isinstance(scores, Mapping):
        raise ValueError(
            f"`score` ({_name(score)}, which returned {type(scores).__name__}) must return name -> tensor of scores."
        )
    if wrong := [name for name, values in scores.items() if not isinstance(values, Tensor)]:
        raise ValueError(
            f"`score` ({_name(score)}, which returned {type(scores[wrong[0]]).__name__} for {wrong[0]!r}) must return "
            "name -> tensor of scores; convert it by torch.as_tensor."
        )
    return {name: scores[other] for name, other in zip(names, read, strict=True) if other in scores}


def _options(row: ScoreRow, score: Score, dim: int | None) -> Mapping[str, Any]:
    """Return the options of a built-in score, with the dimension of the channels where it takes that."""
    if dim is None or "dim" not in row.unlisted:
        return score.options
    if score.options.get("dim", dim) != dim:
        raise ValueError(
            f"`score.options['dim']` (={score.options['dim']!r}) must be `unit.dim` (={dim}), along which channels "
            "are cut; pass unit.dim alone."
        )
    return {**score.options, "dim": dim}


def _own_scores(score: Score, given: ScoringInput) -> Any:
    """Call a score of the user's own with those arguments that it takes."""
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
            f"`{missing[0]}` (=None) was given to the score {_name(score)}, which failed by {type(error).__name__}: "
            f"{error}; pass `{'` and `'.join(missing)}` if it reads them."
        ) from error


SHARED = ("size", "generator", "masks", "parameters")
"""Arguments that every score may take by name, beside the model, the batches and the loss."""


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
        row.refuse(score.options, "`score.options[{!r}]`")
    elif not _takes_any(cast(Callable[..., Any], score.kind)):
        taken = options_taken(score)
        if unknown := [name for name in score.options if name not in taken]:
            raise ValueError(
                f"`score.options[{unknown[0]!r}]` (={score.options[unknown[0]]!r}) is not taken by the score "
                f"{_name(score)}, which takes {', '.join(taken) or 'no options'}."
            )


def check_channels(score: Score, cut: Groups, inputs_first: Container[str]) -> None:
    """Refuse scores of outputs where the units are channels along another dimension.

    Raises:
        ValueError: the tensor is named.
    """
    row = row_of(score)
    if cut.unit.kind != "channel" or row is None or "dim" in row.unlisted:
        return
    if not row.units and score.options.get("form", "entry") == "entry":
        return
    for layout in cut:
        if layout.order[0] != (outputs := int(layout.name in inputs_first)):
            raise ValueError(
                f"`unit.dim` (={cut.unit.dim}) must be that of the outputs of {layout.name!r}, {outputs}, which the "
                f"score {_name(score)} ranks; choose this, or a score of entries."
            )


def drawn_from(score: Score, generator: torch.Generator | None) -> torch.Generator | None:
    """Return what a score draws from: where it is random and has no generator, one that torch's default one seeds.

    The score by itself would leave that as it is, and draw the same at the next call.
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
    """Return the row of a built-in score, None for a function of the user's own; raise ValueError for other names."""
    if callable(score.kind):
        return None
    if score.kind not in SCORES:
        raise ValueError(f"`score.kind` (={score.kind!r}) must be a function, or one of {', '.join(SCORES)}.")
    return SCORES[score.kind]


def names_to_score(model: nn.Module, score: Score, parameters: Iterable[str] | None) -> Iterable[str] | None:
    """Return the names of what is pruned: for scores of BatchNorm's scales, those of layers that one follows."""
    if not _is_of_batch_norm(score):
        return parameters
    followed = batch_norms_after(model)
    names = [name for name in (followed if parameters is None else parameters) if name in followed]
    if not names:
        raise ValueError(
            f"`score.kind` (={score.kind!r}) ranks channels by the BatchNorm after their layer, and none of the layers "
            "has one; choose another score, or other parameters."
        )
    return names


def _is_of_batch_norm(score: Score) -> bool:
    row = row_of(score)
    return row is not None and (row.of_batch_norm or score.options.get("form") == "bn")


def _name(score: Score) -> str:
    return score.kind if isinstance(score.kind, str) else getattr(score.kind, "__name__", repr(score.kind))


def share(batches: Sequence[Any] | None, step: int, steps: int) -> Sequence[Any] | None:
    """Return the batches of re-scoring `step` of `steps`: each gets an equal part, or, of too few, one in turn."""
    if batches is None or steps == 1 or not batches:
        return batches
    if len(batches) < steps:
        return [batches[step % len(batches)]]
    return batches[len(batches) * step // steps : len(batches) * (step + 1) // steps]
