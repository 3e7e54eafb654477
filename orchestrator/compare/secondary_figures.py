"""Secondary figures of a point: further test sets and metrics, classes most harmed, and windows of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.catalogue.tasks import ASKED_METRICS
from orchestrator.compare.statistics import Estimate, estimate, paired_difference, ratio_of_sums
from orchestrator.core.metrics import Metric
from orchestrator.core.records import SplitCounts, StageRecord
from orchestrator.core.specs import Plan

if TYPE_CHECKING:
    from orchestrator.compare.comparison import Point

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
    """Return class -> rate on test, or fraction of right examples; classes without examples are left out."""
    found = record.typed.measured.get("test", SplitCounts())
    pairs = zip(found.hits, found.of, strict=False)
    counted = {label: hits / of for label, (hits, of) in enumerate(pairs) if of}
    return counted or {label: rate for label, rate in enumerate(found.rates) if rate is not None}


REFERENCES = 8
"""Maximum number of lines that another line of the same level is compared with."""
DENSE = "dense"

StageOfSeed = Mapping[int, str]
"""Seed -> key of a stage."""


@dataclass(frozen=True)
class WindowDifference:
    """Cross-entropy of a line minus that of a reference, in nats per token, on the same windows of text.

    Both prune the same dense networks, seed by seed, to the same sparsity.
    """

    model: str
    data: str
    text: str
    """`test`, or the name of a further test set."""
    line: str
    reference: str
    """Another line, or `dense`."""
    sparsity: float
    """Requested sparsity."""
    achieved: float
    """Achieved sparsity of the prunable weights of `line`, mean over its seeds."""
    seeds: tuple[int, ...]
    windows: Estimate
    """Interval over windows, of the mean over seeds."""
    draws: Estimate
    """Spread over seeds: draws of the calibration data, and of the training."""


def window_differences(
    plan: Plan, records: Mapping[str, StageRecord], points: Sequence[Point]
) -> tuple[WindowDifference, ...]:
    """Return the differences of each point from dense, and from the points of other lines at its level.

    Args:
        plan: plan of the sweep
        records: stage key -> record
        points: operating points
    """
    dense = {key: trial.dense for trial in plan.trials for key in trial.stages}
    known = [point for point in points if any(_texts(records[key]) for key in point.stages)]
    found = [
        each
        for point in known
        for name, reference in _references(point, known, dense)
        for each in _differences(point, name, reference, dense, records)
    ]
    pairs = list(dict.fromkeys((each.line, each.reference, each.text) for each in found))
    return tuple(sorted(found, key=lambda each: pairs.index((each.line, each.reference, each.text))))


def _references(point: Point, points: Sequence[Point], dense: Mapping[str, str]) -> Iterator[tuple[str, StageOfSeed]]:
    """Yield name and stages of the dense networks, and of the earlier points at the level."""
    yield DENSE, {seed: dense[key] for seed, key in point.stage_of.items()}
    level = [other for other in points if other.level == point.level]
    for other in level[: level.index(point)][:REFERENCES]:
        yield other.line, other.stage_of


def _differences(
    point: Point, name: str, reference: StageOfSeed, dense: Mapping[str, str], records: Mapping[str, StageRecord]
) -> Iterator[WindowDifference]:
    pairs = {
        seed: (records[key], records[reference[seed]])
        for seed, key in point.stage_of.items()
        if seed in reference and reference[seed] in records and _same_dense(key, reference[seed], dense, records)
    }
    for text in dict.fromkeys(text for record, _ in pairs.values() for text in _texts(record)):
        by_seed, tokens = _by_seed(pairs, text)
        if not by_seed or len(tokens) < 2 or not sum(tokens):
            continue
        means = [fsum(each) / len(by_seed) for each in zip(*by_seed.values(), strict=True)]
        windows, draws = ratio_of_sums(means, tokens), estimate([fsum(each) / sum(tokens) for each in by_seed.values()])
        if windows is not None and draws is not None:
            yield WindowDifference(
                *(point.model, point.data, text.removeprefix("test_"), point.line, name, point.asked_sparsity),
                point.sparsity,
                *(tuple(by_seed), windows, draws),
            )


def _by_seed(
    pairs: Mapping[int, tuple[StageRecord, StageRecord]], text: str
) -> tuple[dict[int, list[float]], Sequence[int]]:
    """Return the differences of losses by seed and window, and the tokens of the windows.

    Seeds are left out whose windows have other tokens than those of the first.
    """
    tokens: Sequence[int] = ()
    found: dict[int, list[float]] = {}
    for seed, (record, other) in pairs.items():
        (losses, own), (theirs, others) = record.windows(text), other.windows(text)
        if losses and own == others and (own == tokens or not found):
            tokens = own
            found[seed] = [mine - their for mine, their in zip(losses, theirs, strict=True)]
    return found, tokens


def _same_dense(key: str, other: str, dense: Mapping[str, str], records: Mapping[str, StageRecord]) -> bool:
    """Whether two stages prune the same network and are measured on the same text."""
    one, two = (records.get(dense.get(each, each)) for each in (key, other))
    if one is None or two is None:
        return False
    return one.weights_digest == two.weights_digest and one.spec["fields"]["data"] == two.spec["fields"]["data"]


def _texts(record: StageRecord) -> list[str]:
    return [text for text in record.typed.measured if text.startswith("test") and record.windows(text)[0]]
