"""Public signatures of scores: the arguments documented in `pruning.scores`, passed on as one `ScoringInput`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pruning.catalogue.rows import Row
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
    call.__module__ = __package__  # where pickle finds the function
    call.__name__ = call.__qualname__ = function.__name__ if row is None else row.name
    del call.__wrapped__  # type: ignore[attr-defined]  # `inspect` would show its signature, which takes `given`
    call.__doc__ = f"{inspect.getdoc(function)}\n\nSee `pruning.scores` for the arguments and errors of all scores."
    call.__signature__ = signature.replace(parameters=[*shared, *own])  # type: ignore[attr-defined]  # shown by `help`
    return call
