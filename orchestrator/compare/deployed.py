"""What was measured of deployed networks: by operating point, format, batch size and kind of machine. Pure.

Figures of unlike machines are never averaged: each kind of machine has entries of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from orchestrator.compare.statistics import Estimate, ratio
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
        hardware = ", ".join(record.environment.get(name, "?") for name in HARDWARE)
        for size in _sizes(record):
            groups.setdefault((record.spec["fields"]["format"], size, hardware), []).append(record)
    return tuple(_summary(*group, each) for group, each in groups.items())


def figures_of(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return (name, value, Unix seconds) of what was measured of a trial's last network, by its formats and then
    by its batch sizes, as `deploy/onnx/64/speedup`; nothing before all is measured.
    """
    found = [records[key] for key in trial.measured if all(each in records for each in trial.measured)]
    return [
        (f"deploy/{record.spec['fields']['format']}/{size}/{name}", record.measurements[key], record.ended)
        for record in found
        for size in _sizes(record)
        for name, key in (("latency_ms", f"latency_ms/{size}"), ("speedup", f"speedup/{size}"), ("bytes", "bytes"))
    ]


def headline(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return the same for people: those in the first format at its first batch size are `deploy/speedup` and such."""
    found = figures_of(trial, records)
    first = found[0][0].rpartition("/")[0] if found else ""
    return [(name.replace(f"{first}/", "deploy/"), value, at) for name, value, at in found]


def _sizes(record: StageRecord) -> list[int]:
    return list(record.spec["fields"]["measure"]["batch_sizes"])


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
    )
