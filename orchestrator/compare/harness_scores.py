"""Scores of points on tasks of lm-evaluation-harness, compared with their dense networks document by document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.compare.statistics import Estimate, estimate, paired_difference
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import canonical_json
from orchestrator.core.records import Answers, StageRecord
from orchestrator.core.specs import NETWORK, Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS

if TYPE_CHECKING:
    from orchestrator.compare.comparison import Point

Pair = tuple[StageRecord, StageRecord]
"""Evaluations of a pruned network and of its own dense network, on the same task with the same settings."""


@dataclass(frozen=True)
class HarnessScore:
    """Figure of a task, of the networks of a point and of their own dense networks."""

    model: str
    data: str
    line: str
    round: int
    sparsity: float
    """Requested sparsity."""
    achieved: float
    task: str
    shots: int | None
    """Examples in each prompt; None for the number in the task's definition."""
    metric: Metric
    seeds: tuple[int, ...]
    score: Estimate
    """Mean over seeds."""
    dense: float
    """Mean of the dense networks."""
    difference: Estimate
    """Pruned minus dense, paired by seed."""
    documents: Estimate | None
    """Pruned minus dense, paired by document, with the interval over documents of the mean over seeds.

    None for a figure that is not a mean over documents.
    """

    @property
    def name(self) -> str:
        """Name of the task for people, with the number of examples in a prompt if the sweep sets it."""
        return self.task if self.shots is None else f"{self.task} ({self.shots}-shot)"


def harness_scores(plan: Plan, records: Mapping[str, StageRecord], points: Iterable[Point]) -> tuple[HarnessScore, ...]:
    """Return the scores of points, for each task and metric that their seeds have."""
    found: dict[str, dict[str, StageRecord]] = {}
    for key in dict.fromkeys(key for trial in plan.trials for key in trial.measured):
        spec = plan.stages[key]
        if key in records and KINDS[spec.kind].answers:
            found.setdefault(spec.inputs[NETWORK], {})[canonical_json(spec.fields["harness"])] = records[key]
    dense = {key: trial.dense for trial in plan.trials for key in trial.stages}
    scores = []
    for point in points:
        pairs: dict[str, dict[int, Pair]] = {}
        for seed, key in point.stage_of.items():
            theirs = found.get(dense[key], {})
            for asked, record in found.get(key, {}).items():
                if asked in theirs:
                    pairs.setdefault(asked, {})[seed] = record, theirs[asked]
        scores += [score for each in pairs.values() for score in _scores(point, each)]
    figures = list(dict.fromkeys((each.name, each.metric) for each in scores))
    return tuple(sorted(scores, key=lambda each: figures.index((each.name, each.metric))))


def _scores(point: Point, pairs: Mapping[int, Pair]) -> Iterator[HarnessScore]:
    first, _ = next(iter(pairs.values()))
    answers = {seed: [record.typed.answers for record in pair] for seed, pair in pairs.items()}
    metrics = {metric.name: metric for metric in first.metrics}
    for figure in first.after:
        task, _, name = figure.rpartition("/")
        both = {seed: pair for seed, pair in pairs.items() if all(figure in each.after for each in pair)}
        values, theirs = ({seed: pair[side].after[figure] for seed, pair in both.items()} for side in (0, 1))
        score, difference = estimate(list(values.values())), paired_difference(values, theirs)
        if name in metrics and score is not None and difference is not None:
            yield HarnessScore(
                *(point.model, point.data, point.line, point.round, point.asked_sparsity, point.sparsity),
                *(task, first.spec["fields"]["harness"].get("shots"), metrics[name], tuple(both)),
                *(score, fmean(theirs.values()), difference),
                paired_by_document([[each.get(figure) for each in answers[seed]] for seed in both]),
            )


def paired_by_document(pairs: Sequence[Sequence[Answers | None]]) -> Estimate | None:
    """Return the mean difference between two networks with its t interval over documents.

    The differences of each document are first averaged over seeds.

    Args:
        pairs: for each seed, the scores by one network and by the other one

    Returns:
        None if a network has no scores, or scores of other documents
    """
    known = [[each for each in pair if each is not None] for pair in pairs]
    if len({each.documents for pair in known for each in pair}) != 1 or any(len(pair) != 2 for pair in known):
        return None
    seeds = [[one - other for one, other in zip(*(each.scores for each in pair), strict=True)] for pair in known]
    return estimate([fsum(each) / len(seeds) for each in zip(*seeds, strict=True)])


def evaluated(trial: TrialSpec, records: Mapping[str, StageRecord]) -> list[tuple[str, float, float]]:
    """Return (name, value, Unix seconds) of each figure of a trial's last network, as `harness/arc_easy/acc`."""
    own = [records[key] for key in trial.measured if key in records and KINDS[records[key].kind].answers]
    return [
        (f"harness/{name}", value, record.ended)
        for record in own
        if record.inputs[NETWORK] == trial.stages[-1]
        for name, value in record.after.items()
    ]
