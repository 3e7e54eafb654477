"""Secondary figures of a point: further test sets and metrics, and the classes that pruning harms most. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from orchestrator.catalogue.tasks import ASKED_METRICS
from orchestrator.compare.statistics import Estimate, estimate, paired_difference
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord

HARMED = 3
"""Maximum number of classes named."""


@dataclass(frozen=True)
class FurtherTestSet:
    """Primary metric on a further test set, and its difference from dense, as `Point.test` and `Point.difference`."""

    name: str
    test: Estimate | None
    difference: Estimate | None
    best: bool = False
    """Whether the mean is the best of several lines at this sparsity, on this test set."""


@dataclass(frozen=True)
class AskedFigure:
    """Metric that an option of the task asks for, over seeds."""

    split: str
    """`test`, or the name of a further test set."""
    metric: Metric
    test: Estimate | None


_SHOWN = 4
"""Decimals of a fraction that is shown as a percentage."""


@dataclass(frozen=True)
class Harm:
    """Class with its loss: the fraction right under dense minus that when pruned, mean over seeds."""

    label: int
    loss: float


def further_test_sets(stages: Mapping[str, str], records: Mapping[str, StageRecord]) -> tuple[FurtherTestSet, ...]:
    """Return the primary metric on the further test sets that all stages have.

    Args:
        stages: key of each seed's stage -> key of its dense network's stage
        records: stage key -> record
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
            found.append(FurtherTestSet(name, estimate(list(values.values())), paired_difference(values, dense)))
    return tuple(found)


def asked_figures(stages: Iterable[str], records: Mapping[str, StageRecord]) -> tuple[AskedFigure, ...]:
    """Return the metrics that options of the task ask for, on each test split on which all stages have them."""
    seeds = [records[key] for key in stages]
    metrics = [metric for metric in seeds[0].metrics if metric.name in ASKED_METRICS]
    splits = dict.fromkeys(name.split("/")[0] for name in seeds[0].after if name.startswith("test")) if metrics else ()
    return tuple(
        AskedFigure(split.removeprefix("test_"), metric, estimate([each.after[name] for each in seeds]))
        for split in splits
        for metric in metrics
        if all((name := f"{split}/{metric.name}") in each.after for each in seeds)
    )


def harmed(stages: Mapping[str, str], records: Mapping[str, StageRecord]) -> tuple[Harm, ...]:
    """Return the classes with the largest losses on the test split, the worst first; losses shown as 0 are left out."""
    losses: dict[int, list[float]] = {}
    for key, start in stages.items():
        after, before = (_rates(records[each]) for each in (key, start))
        for label in after.keys() & before.keys():
            losses.setdefault(label, []).append(before[label] - after[label])
    means = {label: fmean(values) for label, values in losses.items() if len(values) == len(stages)}
    worst = sorted(means, key=lambda label: (-means[label], label))[:HARMED]
    return tuple(Harm(label, means[label]) for label in worst if round(means[label], _SHOWN) > 0)


def _rates(record: StageRecord) -> dict[int, float]:
    """Return class -> fraction of its test examples that are right; classes without test examples are left out."""
    found: Mapping[str, Sequence[int]] = record.details.get("measured", {}).get("test", {})
    if not found:
        return {}
    pairs = zip(found.get("hits", ()), found.get("of", ()), strict=False)
    return {label: hits / of for label, (hits, of) in enumerate(pairs) if of}
