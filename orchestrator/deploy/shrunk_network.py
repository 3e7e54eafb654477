"""Shrink a masked network, and check the outputs of a deployed network against it."""

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
from pruning.measure.macs import Watching

ROUNDINGS = 8
"""Allowed difference of outputs, in units of the rounding error of the coarsest dtype that the network computes in."""
FURTHEST = 1e6
"""Upper limit of any tolerance, relative to the largest output; outputs that are not finite exceed it."""


class OtherOutputs(ExportError):
    """The outputs of a deployed network differ from those of the masked network."""

    repeats = True


def shrunk(model: nn.Module, example: Example) -> nn.Module:
    """Return the network without empty channels and units, and with outputs as its only return value.

    Other return values, such as the cache of a network of transformers, may be unknown to torch.export.

    Raises:
        ExportError: the network cannot be traced
    """
    try:
        return pruning.shrink(with_outputs_alone(model, example), example)
    except (ValueError, TypeError) as error:
        raise ExportError(str(error)) from error


def check_outputs(
    run: Callable[[Example], Any],
    model: nn.Module,
    examples: Iterable[Example],
    tolerance: float,
    *,
    name: str,
    remedy: str,
) -> float:
    """Return the largest difference from the masked network's outputs, relative to the largest output.

    Args:
        run: the deployed network.
        model: the masked network, in evaluation.
        examples: inputs for both networks.
        tolerance: allowed difference in float32; a coarser dtype allows `ROUNDINGS` of its rounding errors.
        name, remedy: name of the format and advice, for the error.

    Raises:
        OtherOutputs: the outputs differ by more.
        ExportError: the deployed network does not run.
    """
    worst, computed = 0.0, _Rounding()
    with torch.no_grad():
        for example in examples:
            with computed:
                expected = outputs_of(call(model, example))
            try:
                found = run(example)
            except Exception as error:  # each runtime raises its own types
                said = (str(error).strip().splitlines() or [""])[0][:200]
                raise ExportError(
                    f"the network as {name} does not run ({type(error).__name__}: {said}); {remedy}."
                ) from error
            worst = max(worst, difference(outputs_of(found), expected))
    tolerance = min(max(tolerance, ROUNDINGS * computed.coarsest), FURTHEST)
    if not worst <= tolerance:
        raise OtherOutputs(
            f"the outputs of the network as {name} differ from those of the masked network by {worst:.2g} of the "
            f"largest output, and must differ by at most {tolerance:g}; {remedy}."
        )
    return worst


class _Rounding(Watching):
    """Context that records the rounding error (eps) of the coarsest dtype that operations compute in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record the dtype of its results."""
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(each.dtype).eps)
        return result
