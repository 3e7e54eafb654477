"""Measurements of deployed networks, by operating point, format, batch size and kind of machine. Pure.

Measurements from different kinds of machines are never averaged: each kind has entries of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from orchestrator.compare.statistics import Estimate, estimate, ratio
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS

HARDWARE = ("processor", "threads", "runtime")
"""Environment entries that affect a measurement."""


@dataclass(frozen=True)
class DeployedPoint:
    """Deployed networks of a point in one format at one batch size: over seeds, geometric mean times and mean bytes."""

    format: str
    batch_size: int
    hardware: str
    latency_ms: float
    dense_ms: float
    speedup: Estimate
    """Dense latency / pruned latency; with one seed the interval is the measurement's own.

    The dense network is in the same format, or in the fastest of `dense_runtimes`.
    """
    bytes: float
    dense_bytes: float
    memory: float | None
    """Peak memory of a run with the weights, in bytes; None if the system does not report it."""
    dense_memory: float | None
    val: Estimate | None = None
    """Primary metric of the deployed network on validation; None if the format does not change outputs."""
    test: Estimate | None = None
    """Primary metric of the deployed network on test; None if the format does not change outputs."""
    speedup_pytorch: Estimate | None = None
    """Speed-up over dense in PyTorch; None for a format whose dense network is in the same format."""
    speedup_int8: Estimate | None = None
    """Speed-up over dense in 8 bits in its fastest runtime; None for a format in float32."""
    dense_runtimes: tuple[str, ...] = ()
    """Fastest runtime of the dense network, for each seed that has another one; empty if the format is the same."""
    dense_test: float | None = None
    """Mean primary metric of the deployed dense networks on test; None if the format does not change outputs."""
    token_ms: float | None = None
    """Latency of one more token of a network that generates; None for other networks and formats."""
    dense_token_ms: float | None = None
    token_speedup: Estimate | None = None


def by_network(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, list[StageRecord]]:
    """Return stage key -> finished measurements of the stage's network."""
    found: dict[str, list[StageRecord]] = {}
    for key in dict.fromkeys(key for trial in plan.trials for key in trial.measured):
        if key in records and KINDS[plan.stages[key].kind].times:
            network = plan.stages[plan.stages[key].inputs[NETWORK]].inputs[NETWORK]
            found.setdefault(network, []).append(records[key])
    return found


def deployed(stages: Iterable[str], measurements: Mapping[str, Sequence[StageRecord]]) -> tuple[DeployedPoint, ...]:
    """Summarise the measurements of these stages' networks, as `by_network` returns them."""
    groups: dict[tuple[str, int, str], list[StageRecord]] = {}
    for record in (record for stage in stages for record in measurements.get(stage, ())):
        for size in _sizes(record):
            groups.setdefault((_format(record), size, hardware_of(record)), []).append(record)
    return tuple(_summary(*group, each) for group, each in groups.items())


def measured_figures(record: StageRecord) -> dict[str, float]:
    """Return the figures of a measurement, by the name that each figure has everywhere.

    For each batch size, in order: `deploy/onnx/64/latency_ms` and `deploy/onnx/64/speedup`; then `deploy/onnx/bytes`.
    A format that changes outputs also has the primary metric on test, as `deploy/onnx_int8/test/rmse`.
    """
    place, found = f"deploy/{_format(record)}", record.measurements
    by_size = {
        f"{place}/{size}/{name}": found[f"{name}/{size}"]
        for size in _sizes(record)
        for name in ("latency_ms", "speedup")
    }
    achieved = {name: record.after[name] for name in [f"test/{record.primary.name}"] if name in record.after}
    return {**by_size, f"{place}/bytes": found["bytes"], **{f"{place}/{name}": each for name, each in achieved.items()}}


def figures_of(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return (name, value, Unix seconds) of each figure measured on a trial's last network, by format in order.

    The list is empty until all measurements have finished.
    """
    ended = all(key in records for key in trial.measured)
    found = [records[key] for key in trial.measured if ended and KINDS[records[key].kind].times]
    return [
        (name, value, record.ended)
        for record in found
        for name, value in (measured_figures(record) | _ungated_figures(record)).items()
    ]


def _ungated_figures(record: StageRecord) -> dict[str, float]:
    """Return the figures that no gate checks: by batch size, and the format's other metrics.

    Peak memory is too rough for a gate, and `speedup` is the stricter speed-up than the one over dense in PyTorch. Only
    a format that changes outputs has metrics.
    """
    place, found = f"deploy/{_format(record)}", record.measurements
    sized = {
        f"{size}/{name}": found[f"{name}/{size}"]
        for name in ("memory", "speedup_pytorch", "speedup_int8", "token_ms", "token_speedup")
        for size in _sizes(record)
        if f"{name}/{size}" in found
    }
    return {f"{place}/{name}": value for name, value in {**sized, **record.after}.items()}


def headline(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return `figures_of` with short names, as `deploy/speedup`, for the first format at its first batch size."""
    found = [(*name.rpartition("/")[::2], value, at) for name, value, at in figures_of(trial, records)]
    first = (found[0][0], found[0][0].rpartition("/")[0]) if found else ()
    return [(f"{'deploy' if place in first else place}/{name}", value, at) for place, name, value, at in found]


def hardware_of(record: StageRecord) -> str:
    """Return the hardware of a measurement: processor, threads and runtime."""
    return ", ".join(f"{name} {record.environment.get(name, '?')}" for name in HARDWARE)


def _format(record: StageRecord) -> str:
    return str(record.spec["fields"]["format"])


def _sizes(record: StageRecord) -> list[int]:
    return list(record.spec["fields"]["measure"]["batch_sizes"])


def _mean(found: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a figure, None if a measurement lacks it."""
    return fmean(each[name] for each in found) if all(name in each for each in found) else None


def _speedup(found: Sequence[Mapping[str, float]], name: str, size: int) -> Estimate | None:
    """Return the geometric mean of a speed-up; None if a measurement lacks it."""
    if not all(f"{name}{end}/{size}" in each for each in found for end in ("", "_low", "_high")):
        return None
    mean = ratio([math.log(each[f"{name}/{size}"]) for each in found])
    if mean is not None and len(found) == 1:
        return Estimate(1, mean.mean, None, found[0][f"{name}_low/{size}"], found[0][f"{name}_high/{size}"])
    return mean


def _summary(name: str, size: int, hardware: str, records: Sequence[StageRecord]) -> DeployedPoint:
    found = [record.measurements for record in records]
    speedup = _speedup(found, "speedup", size)
    assert speedup is not None
    runtimes = [record.environment.get(f"dense_runtime/{size}", "") for record in records]
    return DeployedPoint(
        format=name,
        batch_size=size,
        hardware=hardware,
        latency_ms=_time([each[f"latency_ms/{size}"] for each in found]),
        dense_ms=_time([each[f"dense_ms/{size}"] for each in found]),
        speedup=speedup,
        bytes=fmean(each["bytes"] for each in found),
        dense_bytes=fmean(each["dense_bytes"] for each in found),
        memory=_mean(found, f"memory/{size}"),
        dense_memory=_mean(found, f"dense_memory/{size}"),
        speedup_pytorch=_speedup(found, "speedup_pytorch", size),
        speedup_int8=_speedup(found, "speedup_int8", size),
        dense_runtimes=tuple(dict.fromkeys(filter(None, runtimes))),
        **_achieved(records),
        **_tokens(found, size),
    )


def _time(milliseconds: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(fmean(map(math.log, milliseconds)))


def _tokens(found: Sequence[Mapping[str, float]], size: int) -> dict[str, Any]:
    """Return the figures of one more token; empty if a measurement lacks them."""
    speedup = _speedup(found, "token_speedup", size)
    if speedup is None:
        return {}
    times = {name: _time([each[f"{name}/{size}"] for each in found]) for name in ("token_ms", "dense_token_ms")}
    return {**times, "token_speedup": speedup}


def _achieved(records: Sequence[StageRecord]) -> dict[str, Any]:
    """Return the primary metric of the deployed networks and of dense; empty if the format does not change outputs."""
    if not all(record.after for record in records):
        return {}
    name = records[0].primary.name
    return {
        "val": estimate([record.figure("val") for record in records]),
        "test": estimate([record.figure("test") for record in records]),
        "dense_test": _mean([record.typed.dense for record in records], f"test/{name}"),
    }
