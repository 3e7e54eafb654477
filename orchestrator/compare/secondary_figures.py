"""What a point shows beside its primary figure: further test sets, and the classes that pruning harms most. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from orchestrator.compare.statistics import Estimate, estimate, paired_difference
from orchestrator.core.records import StageRecord

HARMED = 3
"""Classes that are named."""


@dataclass(frozen=True)
class Further:
    """The primary metric on a further test set, as `Point.test` and `Point.difference` are on the test split."""

    name: str
    test: Estimate | None
    difference: Estimate | None


_SHOWN = 4
"""Decimals of a fraction that are shown as percent."""


@dataclass(frozen=True)
class Harm:
    """By how much less of a class is right than by the dense network, a fraction, mean over seeds."""

    label: int
    loss: float


def further(stages: Mapping[str, str], records: Mapping[str, StageRecord]) -> tuple[Further, ...]:
    """Return the figures of the test sets that all `stages` have.

    Args:
        stages: key of each seed's stage -> that of its dense network
    """
    first = records[next(iter(stages))]
    if not any(name.startswith("test_") for name in first.after):
        return ()
    each = [{name.split("/")[0] for name in records[key].after if name.startswith("test_")} for key in stages]
    found = []
    for split in sorted(set.intersection(*each)):
        values = {key: records[key].figure(split) for key in stages}
        dense = {key: records[start].figure(split) for key, start in stages.items()}
        name = split.removeprefix("test_")
        if f"{split}/{first.primary.name}" in first.after:
            found.append(Further(name, estimate(list(values.values())), paired_difference(values, dense)))
    return tuple(found)


def harmed(stages: Mapping[str, str], records: Mapping[str, StageRecord]) -> tuple[Harm, ...]:
    """Return the classes of which pruning loses most on the test split, the worst first, but for losses shown as 0."""
    losses: dict[int, list[float]] = {}
    for key, start in stages.items():
        after, before = (_rates(records[each]) for each in (key, start))
        for label in after.keys() & before.keys():
            losses.setdefault(label, []).append(before[label] - after[label])
    means = {label: fmean(values) for label, values in losses.items() if len(values) == len(stages)}
    worst = sorted(means, key=lambda label: (-means[label], label))[:HARMED]
    return tuple(Harm(label, means[label]) for label in worst if round(means[label], _SHOWN) > 0)


def _rates(record: StageRecord) -> dict[int, float]:
    """Return what fraction of each class is right on the test split, of the classes that are there."""
    found: Mapping[str, Sequence[int]] = record.details.get("measured", {}).get("test", {})
    if not found:
        return {}
    pairs = zip(found.get("hits", ()), found.get("of", ()), strict=False)
    return {label: hits / of for label, (hits, of) in enumerate(pairs) if of}
