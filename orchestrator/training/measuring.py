"""Measure a stage's network: its metrics by split, its continuations of prompts, its multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from orchestrator.core.stage_kinds import KINDS
from orchestrator.training.loop.evaluation import evaluate, generated
from orchestrator.training.stage_inputs import StageInputs
from orchestrator.workloads.inspection import first, require_finite
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks.batch import arguments, moved
from orchestrator.workloads.tasks.task import Measured, TestInputs
from pruning.measure.macs import Macs, macs

Measure = Callable[[StageInputs, Split, TestInputs | None], Measured]


@dataclass(frozen=True)
class Measurements:
    """Measurements of a finished network."""

    final: Mapping[str, Measured]
    """Metrics of the selected weights by split."""
    generations: list[dict[str, str]]
    """Continuations of the task's prompts."""
    macs: Macs


def measure(stage: StageInputs, split: Split, inputs: TestInputs | None = None) -> Measured:
    """Return the metrics of the network on a split; with `inputs`, on a test split."""
    sizes = {"batch_size": stage.config["eval_batch_size"], "precision": stage.config["precision"]}
    return evaluate(stage.model, split, stage.task, device=stage.device, **sizes, inputs=inputs)


def measure_all(
    stage: StageInputs, dense: nn.Module | None, measured: Measure = measure, most_tokens: int | None = None
) -> Measurements:
    """Measure a finished network; only this function evaluates on the test splits.

    Args:
        stage: the stage.
        dense: its dense network, if it has one to compare with.
        measured: measures a split.
        most_tokens: largest number of tokens of a continuation; None: as many as the task asks for.
    """
    length = stage.data.input_shape[0] if stage.data.input_shape else 0
    size = stage.config["eval_batch_size"]
    inputs = TestInputs(stage.device, length, dense, stage.data.codec, batch_size=size)
    final = {"val": measured(stage, stage.data.val, None)}
    if KINDS[stage.spec.kind].reads_test:
        for name in ("test", *(f"{name} test" for name in stage.data.tests)):
            at = "test" if name == "test" else f"test_{name.removesuffix(' test')}"
            final[at] = _tested(stage, name, replace(inputs, further=at != "test"), measured)
    count = _macs(stage)
    few = inputs if most_tokens is None else replace(inputs, most_tokens=most_tokens)
    return Measurements(final, generated(stage.model, stage.task, few, stage.config["precision"]), count)


def _tested(stage: StageInputs, name: str, inputs: TestInputs, measured: Measure) -> Measured:
    """Return what the network achieves on a test split; raise `DataError` for data that are not finite."""
    split = stage.data.splits[name]
    found = measured(stage, split, inputs)
    if not math.isfinite(loss := found.figures.get("loss", 0.0)):
        require_finite({name: split}, stage.config["eval_batch_size"], stage.device, f"the {name} loss is {loss}")
    return found


def _macs(stage: StageInputs) -> Macs:
    example = moved(first(stage.data.train), stage.device)  # a real example, because tokens are integers
    given, named = arguments(stage.model, example, labels=False)
    return macs(stage.model, named or given, stage.network.masks)
