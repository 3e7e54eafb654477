"""A network without what masks have emptied, and how far what leaves is from the masked network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pruning
from orchestrator.deploy.formats.format import ExportError, call, difference, with_outputs_alone
from orchestrator.workloads.tasks.batch import outputs_of
from pruning.graph.tracing import Example
from pruning.measure.matrix_products import Watching

ROUNDINGS = 8
"""By so many roundings of the coarsest type that it computes in the outputs of a network may differ at least."""
FURTHEST = 1e6
"""Relative to the largest, by so much outputs may differ in any format; where some are not finite, they do by more."""


class OtherOutputs(ExportError):
    """A network that gives other outputs as it leaves than the masked one."""

    repeats = True


def shrunk(model: nn.Module, example: Example) -> nn.Module:
    """Return the network without what is empty, outputs alone; raise ExportError where it cannot be followed."""
    try:  # what else a network of transformers returns, such as its cache, torch.export may not know
        return pruning.shrink(with_outputs_alone(model, example), example)
    except (ValueError, TypeError) as error:
        raise ExportError(str(error)) from error


def hold(
    run: Callable[[Example], Any],
    model: nn.Module,
    examples: Iterable[Example],
    tolerance: float,
    *,
    name: str,
    remedy: str,
) -> float:
    """Return by how much outputs differ at most from the masked network's, relative to the largest.

    Args:
        run: the network as it leaves.
        model: the masked network, in evaluation.
        examples: what both are called with.
        tolerance: how far they may differ where the network computes in float32; in half precision so far as that
            rounds.
        name, remedy: what the network leaves as, and what to do if it cannot, for the error.

    Raises:
        OtherOutputs: they differ by more.
        ExportError: the network does not run.
    """
    worst, computed = 0.0, _Rounding()
    with torch.no_grad():
        for example in examples:
            with computed:
                expected = outputs_of(call(model, example))
            try:
                found = run(example)
            except Exception as error:  # whatever a runtime says to what it cannot run
                said = (str(error).strip().splitlines() or [""])[0][:200]
                raise ExportError(
                    f"the network as {name} does not run ({type(error).__name__}: {said}); {remedy}."
                ) from error
            worst = max(worst, difference(outputs_of(found), expected))
    tolerance = min(max(tolerance, ROUNDINGS * computed.coarsest), FURTHEST)
    if not worst <= tolerance:
        raise OtherOutputs(
            f"the outputs of the network as {name} differ from those of the masked one by {worst:.2g} of the largest, "
            f"and must not by more than {tolerance:g}; {remedy}."
        )
    return worst


class _Rounding(Watching):
    """While it is entered: by how much the coarsest type that something is computed in rounds, relative to a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute what is asked for, and note its type."""
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(each.dtype).eps)
        return result
