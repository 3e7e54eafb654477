"""Write the smaller network in a format, and check the outputs against those of the masked network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import pruning
from orchestrator.catalogue.formats import FORMATS, FormatRow
from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import ScoreFields, StageSpec
from orchestrator.deploy.formats.format import (
    Codec,
    ExportError,
    Run,
    call,
    call_values,
    called_with,
    cut,
    difference,
    first_line,
    resized,
    running_as,
    with_outputs_alone,
)
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks import task_building
from orchestrator.workloads.tasks.batch import outputs_of
from pruning.graph.tracing import Example
from pruning.measure.macs import Watching

CODECS: Mapping[str, Codec] = {name: replace(row.load(), row=row) for name, row in FORMATS.items() if row.code}
"""Name of a format with files -> its codec."""
ROUNDINGS = 8
"""Allowed difference of outputs, in units of the rounding error of the coarsest dtype that the network computes in."""
CPU = torch.device("cpu")
BATCH, BATCHES = 64, 4
"""Batch size and number of batches of the test split on which outputs are compared."""
TOKENS = 2048
"""Maximum number of tokens in all these batches, if a batch of two examples has no more: logits are large."""
FURTHEST = 1e6
"""Upper limit of any tolerance, relative to the largest output; outputs that are not finite exceed it."""


class OtherOutputs(ExportError):
    """The outputs of a deployed network differ from those of the masked network."""

    repeats = True


@dataclass(frozen=True)
class Masked:
    """Masked network in evaluation mode on the CPU, whose outputs a deployed network must have, and its data.

    Args:
        spec: stage that trained the network; gives the seed, the task and the batch size of evaluations.
        batch_sizes: batch sizes that deployed networks will run; none: 1 and that of the example.
    """

    model: nn.Module
    data: Data
    spec: StageSpec
    batch_sizes: tuple[int, ...] = ()

    @cached_property
    def inputs(self) -> list[Example]:
        """The network's inputs for some batches of the test split, and for a single example."""
        shape = self.data.input_shape
        size = BATCH if len(shape) != 1 else max(2, min(BATCH, TOKENS // shape[0]))
        count = BATCHES if len(shape) != 1 else max(1, min(BATCHES, TOKENS // (size * shape[0])))
        batches = islice(self.data.test.batches(size, device=CPU), count)
        first, *others = [called_with(self.model, batch) for batch in batches]
        return [first if len(call_values(first)[0]) > 1 else resized(first, 2), *others, cut(first, 1)]

    def example(self, calibration: int) -> Example:
        """Return inputs to write the network with: those of `calibration` training examples, without augmentation."""
        if not calibration:
            return self.inputs[0]
        seed = derive(self.spec.typed.seed, "calibration")
        with seeded(seed):  # a Dataset may draw random numbers
            batches = ScoringData(self.data.train, ScoreFields(examples=calibration), seed, CPU).batches(1)
        assert batches is not None
        return called_with(self.model, batches[0])  # the only batch has all examples

    def metrics_of(self, run: Run) -> dict[str, float]:
        """Return the finite metrics of the outputs of `run` on the validation and test splits, such as `val/rmse`."""
        task, size = task_building.build(self.spec.typed.task), self.spec.training_config["eval_batch_size"]
        found: dict[str, float] = {}
        for split, examples in (("val", self.data.val), ("test", self.data.test)):
            measured = evaluate(running_as(self.model, run), examples, task, device=CPU, batch_size=size)
            found |= {f"{split}/{metric.name}": measured.figures.get(metric.name, math.nan) for metric in task.metrics}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def checked(self, run: Run, network: nn.Module, row: FormatRow, remedy: str) -> tuple[float, Mapping[str, float]]:
        """Check a deployed network; return the largest difference of outputs, and its metrics if outputs must differ.

        Args:
            run: the deployed network.
            network: the smaller network in PyTorch.
            row: the format.
            remedy: advice for the error.

        Raises:
            ExportError: the outputs differ by more than the format allows, or the deployed network does not run.
        """
        differs = bool(other_outputs(network))
        limit = math.inf if differs else row.tolerance
        worst = check_outputs(run, self.model, self.inputs, limit, name=row.name, remedy=remedy)
        return worst, self.metrics_of(run) if differs or row.changes_outputs else {}


@dataclass(frozen=True)
class Deployed:
    """Network that was written in a format and checked.

    Args:
        format: the format.
        network: the network that was written.
        bytes: size of its files.
        difference: largest difference from the masked network's outputs, relative to the largest output.
        achieved: its metrics by split, such as `val/rmse`, if its outputs must differ; else empty.
        whole: whether it has its full size, with zeros, because the format cannot express the smaller one.
    """

    format: Codec
    network: nn.Module
    bytes: int
    difference: float
    achieved: Mapping[str, float]
    whole: bool = False


def write_checked(
    masked: Masked, smaller: nn.Module, chosen: Codec, folder: Path, *, threads: int, remedy: str
) -> Deployed:
    """Write the smaller network in a format, and check what was written.

    Args:
        masked: the masked network.
        smaller: the shrunk network, or the one that the format builds itself.
        chosen: the format.
        folder: where the files are written.
        threads: threads of the written network.
        remedy: advice for errors.

    Raises:
        ExportError: the network cannot be written in the format, or its outputs differ.
    """
    network = (
        smaller
        if hasattr(smaller, "resized")
        else smaller_for(chosen, masked.model, masked.example(0), lambda: smaller)
    )
    own, removed = getattr(network, "resized", None), getattr(getattr(smaller, "shrunk", None), "removed", None)
    chosen.write(network, masked.example(chosen.calibration), folder, batch_sizes=masked.batch_sizes)
    difference, achieved = masked.checked(chosen.load(folder, threads), network, chosen.row, remedy)
    size = sum((folder / name).stat().st_size for name in chosen.files)
    whole = network is not smaller and bool(removed) and not (own and own.config)
    return Deployed(chosen, network, size, difference, achieved, whole)


def smaller_for(chosen: Codec | None, model: nn.Module, example: Example, shrink: Callable[[], nn.Module]) -> nn.Module:
    """Return the smaller network for a format: the one that the format builds without a trace, or the shrunk one."""
    return shrink() if chosen is None or chosen.smaller is None else chosen.smaller(model, example)


def other_outputs(network: nn.Module) -> tuple[str, ...]:
    """Return why a smaller network computes other outputs than the masked one, besides rounding."""
    found: tuple[str, ...] = getattr(getattr(network, "resized", None), "differs", ())
    return found


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
                raise ExportError(f"the network as {name} does not run ({first_line(error)}); {remedy}.") from error
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
