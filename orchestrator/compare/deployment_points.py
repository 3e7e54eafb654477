"""What was measured of deployed networks: by operating point, format, batch size and kind of machine. Pure.

Figures of unlike machines are never averaged: each kind of machine has entries of its own.
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

HARDWARE = ("processor", "threads", "runtime")
"""Of a measurement's environment, what its figures depend on."""


@dataclass(frozen=True)
class Deployed:
    """A point's networks in a format at a batch size, over its seeds: geometric means of times, means of bytes."""

    format: str
    batch_size: int
    hardware: str
    latency_ms: float
    dense_ms: float
    speedup: Estimate
    """How many times as fast as dense in the same format; of one seed the interval is that of the measurement."""
    bytes: float
    dense_bytes: float
    memory: float | None
    """Bytes at most while it runs, with its weights; None where a system did not say."""
    dense_memory: float | None
    val: Estimate | None = None
    """The primary metric on validation of what was deployed, where the format changes outputs: a trial's own else."""
    test: Estimate | None = None
    """The same on test."""
    dense_test: float | None = None
    """The mean of the deployed dense networks' on test, where it changes them."""


def by_network(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, list[StageRecord]]:
    """Return stage -> the finished measurements of the network that it left."""
    found: dict[str, list[StageRecord]] = {}
    for key in dict.fromkeys(key for trial in plan.trials for key in trial.measured):
        if key in records:
            network = plan.stages[plan.stages[key].inputs[NETWORK]].inputs[NETWORK]
            found.setdefault(network, []).append(records[key])
    return found


def deployed(stages: Iterable[str], measurements: Mapping[str, Sequence[StageRecord]]) -> tuple[Deployed, ...]:
    """Return what was measured of the networks that these stages left, given `by_network`."""
    groups: dict[tuple[str, int, str], list[StageRecord]] = {}
    for record in (record for stage in stages for record in measurements.get(stage, ())):
        for size in _sizes(record):
            groups.setdefault((_format(record), size, hardware_of(record)), []).append(record)
    return tuple(_summary(*group, each) for group, each in groups.items())


def measured_figures(record: StageRecord) -> dict[str, float]:
    """Return what a measurement found, by the one name that each figure has everywhere: by batch size, in their order,
    `deploy/onnx/64/latency_ms` and `deploy/onnx/64/speedup`, and `deploy/onnx/bytes`; where the format changes outputs
    also what the network achieves in it, as `deploy/onnx_int8/test/rmse`.
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
    """Return (name, value, Unix seconds) of what was measured of a trial's last network, by its formats in their order;
    nothing before all is measured.
    """
    found = [records[key] for key in trial.measured if all(each in records for each in trial.measured)]
    return [
        (name, value, record.ended)
        for record in found
        for name, value in (measured_figures(record) | _further(record)).items()
    ]


def _further(record: StageRecord) -> dict[str, float]:
    """Return what no gate holds: the peak memory at each batch size that a system said, which is too rough for that,
    and all else that the network achieves in a format that changes outputs.
    """
    place, found = f"deploy/{_format(record)}", record.measurements
    peaks = {f"{size}/memory": found[f"memory/{size}"] for size in _sizes(record) if f"memory/{size}" in found}
    return {f"{place}/{name}": value for name, value in {**peaks, **record.after}.items()}


def headline(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return the same for people: those in the first format at its first batch size are `deploy/speedup` and such."""
    found = [(*name.rpartition("/")[::2], value, at) for name, value, at in figures_of(trial, records)]
    first = (found[0][0], found[0][0].rpartition("/")[0]) if found else ()
    return [(f"{'deploy' if place in first else place}/{name}", value, at) for place, name, value, at in found]


def hardware_of(record: StageRecord) -> str:
    """Return on what it was measured."""
    return ", ".join(f"{name} {record.environment.get(name, '?')}" for name in HARDWARE)


def _format(record: StageRecord) -> str:
    return str(record.spec["fields"]["format"])


def _sizes(record: StageRecord) -> list[int]:
    return list(record.spec["fields"]["measure"]["batch_sizes"])


def _mean(found: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean of a figure, None where some measurement lacks it."""
    return fmean(each[name] for each in found) if all(name in each for each in found) else None


def _summary(name: str, size: int, hardware: str, records: Sequence[StageRecord]) -> Deployed:
    found = [record.measurements for record in records]
    speedup = ratio([math.log(each[f"speedup/{size}"]) for each in found])
    assert speedup is not None
    if len(found) == 1:
        ends = (found[0][f"speedup_low/{size}"], found[0][f"speedup_high/{size}"])
        speedup = Estimate(1, speedup.mean, None, *ends)
    return Deployed(
        format=name,
        batch_size=size,
        hardware=hardware,
        latency_ms=math.exp(fmean(math.log(each[f"latency_ms/{size}"]) for each in found)),
        dense_ms=math.exp(fmean(math.log(each[f"dense_ms/{size}"]) for each in found)),
        speedup=speedup,
        bytes=fmean(each["bytes"] for each in found),
        dense_bytes=fmean(each["dense_bytes"] for each in found),
        memory=_mean(found, f"memory/{size}"),
        dense_memory=_mean(found, f"dense_memory/{size}"),
        **_achieved(records),
    )


def _achieved(records: Sequence[StageRecord]) -> dict[str, Any]:
    """Return the primary metric of what was deployed, and of dense; nothing of a format that changes no outputs."""
    if not all(record.after for record in records):
        return {}
    name = records[0].primary.name
    return {
        "val": estimate([record.figure("val") for record in records]),
        "test": estimate([record.figure("test") for record in records]),
        "dense_test": _mean([record.details.get("dense", {}) for record in records], f"test/{name}"),
    }
