"""Published importance scores of weight entries or layer units, as pure functions of a model.

    scores = pruning.scores.snip(model, batches, loss)          # {"conv1.weight": tensor, ...}

The lowest score is pruned first; signed scores keep their sign. A score changes nothing: parameters, buffers,
gradients, modes and global generators keep their exact values. Dropout is off. `SCORES` lists what each score needs.

Every score is called as `score(model, batches, loss, *, size, generator, masks, parameters)`, plus its own keywords:

- `model`: a dense or pruned network. Scores use its values v = m w, with m the masks that this package or torch holds
  in the model, and `masks`.
- `batches`: an iterable of the batches that `loss` takes; None for a score that reads no data.
- `loss`: (model, batch) -> mean loss of the batch, computed by the model passed to it; None if the score needs no loss.
- `size`: (batch) -> its weight in means over all batches; None takes the length of the batch's first tensor.
- `generator`: the generator of random scores.
- `masks`: name -> tensor (a `MaskSet`, for example), nonzero where an entry is kept; applied on top of the masks that
  the model already holds.
- `parameters`: names of the parameters to score; None takes the weights of layers, each tied weight once, but no
  embeddings, heads tied to them and routers.
- `batch_norm`, for some scores: "train" normalises by the statistics of each batch, for a network at initialisation;
  a batch of 1 example is then refused, and so are several batches, except by `taylor`. "eval" normalises by the running
  statistics, for a trained network.

Scores return qualified name -> tensor of the parameter's shape, float64 if data or sums enter the score. They raise
`ValueError` for missing data, for names that are not in the model, for masks of another shape, and for an option that
breaks its rule in `SCORES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pruning.catalogue.rows import Row
from pruning.catalogue.scores import SCORES
from pruning.scores.curvature import FisherMatrix
from pruning.scores.curvature import fisher_matrix as _fisher_matrix
from pruning.scores.readings.network import Masks
from pruning.scores.readings.scoring_data import Batches, Loss, ScoringInput, Size


class Call(Protocol):
    """(model, batches, loss, *, size, generator, masks, parameters, **options) -> {name of a parameter: its scores}."""

    def __call__(
        self,
        model: nn.Module,
        batches: Batches = None,
        loss: Loss = None,
        *,
        size: Size = None,
        generator: torch.Generator | None = None,
        masks: Masks | None = None,
        parameters: Iterable[str] | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """Return the scores; see `pruning.scores`."""


def public_call(function: Callable[..., Any], row: Row | None = None) -> Callable[..., Any]:
    """Wrap a function of a `ScoringInput` so that it takes the fields of the `ScoringInput` as arguments.

    Args:
        function: (given, **options).
        row: the catalogue row whose rules the options must keep; the call raises `ValueError` for the first one broken.
    """

    def call(
        model: nn.Module,
        batches: Batches = None,
        loss: Loss = None,
        *,
        size: Size = None,
        generator: torch.Generator | None = None,
        masks: Masks | None = None,
        parameters: Iterable[str] | None = None,
        **options: Any,
    ) -> Any:
        if row is not None:
            row.refuse_broken(options)
        return function(ScoringInput(model, batches, loss, size, masks, generator, parameters), **options)

    shared = [*inspect.signature(call).parameters.values()][:-1]
    signature = inspect.signature(function)
    own = [*signature.parameters.values()][1:]
    update_wrapper(call, function)
    call.__module__ = __name__  # where pickle finds the function
    call.__name__ = call.__qualname__ = function.__name__ if row is None else row.name
    del call.__wrapped__  # type: ignore[attr-defined]  # `inspect` would show its signature, which takes `given`
    call.__doc__ = f"{inspect.getdoc(function)}\n\nSee `pruning.scores` for the arguments and errors of all scores."
    call.__signature__ = signature.replace(parameters=[*shared, *own])  # type: ignore[attr-defined]  # shown by `help`
    return call


fisher_matrix: Callable[..., FisherMatrix] = public_call(_fisher_matrix)

__all__ = ["SCORES", "FisherMatrix", "fisher_matrix"]
__all__ += list(SCORES)


def __getattr__(name: str) -> Call:
    if name not in SCORES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    score: Call = public_call(SCORES[name].load(), SCORES[name])
    globals()[name] = score
    return score


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
