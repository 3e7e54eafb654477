"""Short texts about a stage: its name, the figures of a finished stage, the progress of a running one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from orchestrator.core.metrics import Metric
from orchestrator.core.records import BLOCKS, BUSY, CurvePoint, Reached, StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.stage_kinds import KINDS, place_in_words
from orchestrator.planning.number_formats import byte_size, percent, ratio, whole_number


def named(plan: Plan, key: str) -> str:
    """Return a stage's name by trial and round, with the number of trials that share it."""
    spec = plan.stages.get(key)
    if spec is None:
        return key[:12]
    indices, kind = plan.trials_of[key], KINDS[spec.kind]
    trial = plan.trials[indices[0]] if indices else None
    shared = f" (shared by {len(indices)} trials)" if len(indices) > 1 else ""
    if not kind.trains:
        parent = plan.stages.get(spec.parent or "") or plan.finished.get(spec.parent or "")
        dense = "dense " if parent is not None and parent.parent is None else ""
        return f"{trial.name if trial else key[:12]}, {dense}{spec.title}{shared}"
    if not kind.prunes:
        until = spec.typed.until
        part = "" if until is None else f" up to {place_in_words(until)}"
        return f"{'dense' + part if until != 0 else 'initialisation'}, seed {spec.typed.seed}{shared}"
    rounds = len(trial.stages) - 1 if trial else "?"
    part = f" up to {place_in_words(spec.typed.until)}" if kind.part else ""
    return f"{trial.name if trial else key[:12]}, round {spec.round}/{rounds}{part}{shared}"


def figures(record: StageRecord) -> str:
    """Return the figures of a finished stage in a few words."""
    if not KINDS[record.kind].trains:
        if KINDS[record.kind].answers:  # its figures are those of test
            return f"{whole_number(record.measurements['documents'])} documents"
        text = measured(record.measurements, record.environment)
        return f"{text}, {validated(record)}" if record.after else text  # the format changes outputs
    text = validated(record)
    return text if not KINDS[record.kind].prunes else f"sparsity {percent(record.sparsity)}, {text}"


def measured(figures: Mapping[str, float], environment: Mapping[str, str]) -> str:
    """Return the size of a deployment, or its speed-up at each batch size."""
    ratios = {name.partition("/")[2]: value for name, value in figures.items() if name.startswith("speedup/")}
    if not ratios:
        return f"{whole_number(figures.get('parameters', 0))} parameters, {byte_size(figures.get('bytes', 0))}"
    text = ", ".join(
        f"{ratio(value)} as fast{_rivals(figures, environment, size)}{_token(figures, size)} at batch {size}"
        for size, value in ratios.items()
    )
    others = figures.get("others", 0.0)
    return text if others < BUSY else f"{text}, while {others:.1f} other processes ran"


def _token(figures: Mapping[str, float], size: str) -> str:
    """Return the speed-up of one more token; empty if it was not measured."""
    found = figures.get(f"token_speedup/{size}")
    return "" if found is None else f" ({ratio(found)} for a token)"


def _rivals(figures: Mapping[str, float], environment: Mapping[str, str], size: str) -> str:
    """Return the fastest dense runtime, and the speed-up over PyTorch; empty if dense is in the same format."""
    runtime, pytorch = environment.get(f"dense_runtime/{size}"), figures.get(f"speedup_pytorch/{size}")
    if runtime is None or pytorch is None:
        return ""
    int8 = figures.get(f"speedup_int8/{size}")
    more = "" if int8 is None else f", {ratio(int8)} as in {environment.get(f'int8_runtime/{size}', 'int8')}"
    return f" as dense in {runtime} ({ratio(pytorch)} as in PyTorch{more})"


def validated(record: StageRecord) -> str:
    """Return the primary metric on validation; the test split is not shown, so that nobody selects by it."""
    found = record.figure("val")
    return f"validation {record.primary.title} {record.primary.said(found) if math.isfinite(found) else '?'}"


def reached(spec: StageSpec, point: CurvePoint, metric: Metric) -> str:
    """Return the progress of a stage, as `34%, validation loss 0.4100`, or `pruned block 12/30`."""
    if BLOCKS in point.metrics:
        return f"pruned block {point.step}/{point.metrics[BLOCKS]:.0f}"
    done = share(spec, point.step, point.epoch)
    text = f"step {point.step}" if done is None else percent(done, 0)
    value = point.metrics.get(f"val/{metric.name}")
    return text if value is None else f"{text}, validation {metric.title} {metric.said(value)}"


def speed(spec: StageSpec, earlier: CurvePoint, point: CurvePoint) -> str:
    """Return the examples a second between two points, of all processes together; empty if unknown.

    (s_2 - s_1) batch_size accumulate / (t_2 - t_1) after s steps at time t, with the validations in between
    """
    training, steps, seconds = spec.training_config, point.step - earlier.step, point.time - earlier.time
    if BLOCKS in earlier.metrics or BLOCKS in point.metrics or steps <= 0 or seconds <= 0:
        return ""
    rate = steps * training.get("batch_size", 0) * training.get("accumulate", 1) / seconds
    return f"{whole_number(rate) if rate >= 10 else f'{rate:.1f}'} examples/s" if rate else ""


def checkpointed(spec: StageSpec, place: Reached, curve: Sequence[CurvePoint]) -> str:
    """Return the progress of a stage's checkpoint, as `round 2 is at step 120 (34%)`.

    Args:
        spec: the stage
        place: place of the checkpoint
        curve: training curve in the checkpoint
    """
    epoch = place.number * curve[-1].epoch / curve[-1].step if curve and curve[-1].step else None
    done = share(spec, place.number, epoch) if place.trains else None
    return f"{spec.title} is at {place}{'' if done is None else f' ({percent(done, 0)})'}"


def share(spec: StageSpec, step: int, epoch: float | None) -> float | None:
    """Return the fraction of a stage's training that is done at a step; None if its length is not known."""
    training, until = spec.training_config, spec.typed.until
    steps = training.get("steps") if until is None else until if isinstance(until, int) else None
    epochs = float(until.removesuffix("ep")) if isinstance(until, str) else training.get("epochs")
    since = spec.typed.restart.rates
    steps = steps and steps - (since if isinstance(since, int) else 0)
    if steps:
        return float(min(step / steps, 1))
    return min(epoch / epochs, 1) if epochs and epoch is not None else None
