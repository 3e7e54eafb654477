"""The scores of a choice: looked up, and given what they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruning.choices.axes import Score
from pruning.engine.followers import batch_norms_after
from pruning.scores.data import Loss, Size
from pruning.scores.network import Masks
from pruning.scores.table import SCORES
from pruning.selection.groups import Groups


def scored(
    model: nn.Module,
    score: Score,
    names: Sequence[str],
    *,
    batches: Sequence[Any] | None = None,
    loss: Loss = None,
    size: Size = None,
    generator: torch.Generator | None = None,
    masks: Masks | None = None,
    dim: int | None = None,
) -> Mapping[str, Tensor]:
    """Return name -> scores, of the shape of the parameter or, for scores by unit, of its units.

    Args:
        model: as it is, or held pruned.
        score: its function gets those of these arguments that it takes, and its options.
        names: of the parameters to score.
        batches, loss, size, generator, masks: see `pruning.scores`.
        dim: along which channels are cut; None where none are.

    Raises:
        ValueError: the score is unknown, or does not take an option, or lacks what it needs.
    """
    function = function_of(score)
    followers = batch_norms_after(model) if _is_of_batch_norm(score) else {name: name for name in names}
    read = [followers[name] for name in names]
    given: dict[str, Any] = {"size": size, "generator": generator, "masks": masks, "parameters": read}
    taken = inspect.signature(function).parameters
    if dim is not None and "dim" in taken and is_named(score):
        if score.options.get("dim", dim) != dim:
            raise ValueError(
                f"`score.options['dim']` (={score.options['dim']!r}) must be `unit.dim` (={dim}), along which channels "
                "are cut; pass unit.dim alone."
            )
        given["dim"] = dim
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        given = {name: value for name, value in given.items() if name in taken}
        check_options(score)
    try:
        scores = function(model, batches, loss, **{**given, **score.options})
    except (TypeError, AttributeError) as error:
        missing = [name for name, value in (("batches", batches), ("loss", loss)) if value is None]
        if is_named(score) or not missing:
            raise
        raise ValueError(
            f"`{missing[0]}` (=None) was given to the score {_name(score)}, which failed by {type(error).__name__}: "
            f"{error}; pass `{'` and `'.join(missing)}` if it reads them."
        ) from error
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


_COMMON = frozenset({"model", "batches", "loss", "size", "generator", "masks", "parameters"})


def check_options(score: Score) -> None:
    """Refuse options that a score does not take; `ValueError` names the first."""
    taken = inspect.signature(function_of(score)).parameters
    if unknown := [name for name in score.options if name not in taken]:
        raise ValueError(
            f"`score.options[{unknown[0]!r}]` (={score.options[unknown[0]]!r}) is not taken by the score "
            f"{_name(score)}, which takes {', '.join(name for name in taken if name not in _COMMON) or 'none'}."
        )


def check_channels(score: Score, cut: Groups, inputs_first: Container[str]) -> None:
    """Refuse scores of outputs where the units are channels along another dimension.

    Raises:
        ValueError: the tensor is named.
    """
    if cut.unit.kind != "channel" or not is_named(score) or "dim" in inspect.signature(function_of(score)).parameters:
        return
    if not SCORES[str(score.kind)].units and score.options.get("form", "entry") == "entry":
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
    if generator is None and function_of(score) is SCORES["random"].function:
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
    return generator


def is_named(score: Score) -> bool:
    """Whether a score is one of `pruning.scores`, and none of the user's own."""
    return isinstance(score.kind, str) and score.kind in SCORES


def function_of(score: Score) -> Callable[..., Any]:
    """Return the function that a score names, or is."""
    if callable(score.kind):
        return score.kind
    if score.kind not in SCORES:
        raise ValueError(f"`score.kind` (={score.kind!r}) must be a function, or one of {', '.join(SCORES)}.")
    return SCORES[score.kind].function


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
    return score.kind == "bn_scale" or score.options.get("form") == "bn"


def _name(score: Score) -> str:
    return score.kind if isinstance(score.kind, str) else getattr(score.kind, "__name__", repr(score.kind))


def share(batches: Sequence[Any] | None, step: int, steps: int) -> Sequence[Any] | None:
    """Return the batches of re-scoring `step` of `steps`: each gets an equal part, or, of too few, one in turn."""
    if batches is None or steps == 1 or not batches:
        return batches
    if len(batches) < steps:
        return [batches[step % len(batches)]]
    return batches[len(batches) * step // steps : len(batches) * (step + 1) // steps]
