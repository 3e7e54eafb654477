"""Data classes of a comparison: rows, operating points, costs. Plain frozen data, made by `compare_trials`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from orchestrator.compare.deployment_points import DeployedPoint
from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.compare.round_columns import EXPERTS, WEIGHTS, Chosen, in_words
from orchestrator.compare.secondary_figures import AskedFigure, FurtherTestSet, Harm, WindowDifference
from orchestrator.compare.statistics import Estimate, Match
from orchestrator.core.metrics import Metric

V = TypeVar("V")
LEAST_SKILL = 0.05
"""Smallest fraction of the way from a constant answer to a perfect one of a network that has learned its task."""
TrialStatus = Literal["finished", "failed", "unfinished", "unmeasured", "stopped"]
"""`stopped`: a search does not run the trial."""


class TrialRow(NamedTuple):  # a sweep can have tens of thousands
    """One trial after one round (0 is the dense network).

    Values are in their metric's own scale; fractions lie between 0 and 1.
    """

    trial: str
    model: str
    data: str
    line: str
    method: str
    schedule: str
    seed: int
    round: int
    final: bool
    """Whether this is the trial's last round."""
    requested_sparsity: float | None
    sparsity: float
    metric: str
    """Name of the primary metric."""
    test: float
    """Primary metric on the test split; `val` and `val_before` are the same metric on validation."""
    test_loss: float
    val: float
    val_loss: float
    val_before: float | None
    """Value before fine-tuning; None for the dense network and a round that trains from the start."""
    val_loss_before: float | None
    """Value before fine-tuning; None for the dense network and a round that trains from the start."""
    early_step: int | None
    """Step of this stage with the smallest validation loss, where early stopping would end; None if not recorded."""
    early_val: float | None
    """Primary metric on validation at `early_step`, whatever `train.select` has chosen."""
    parameters: int
    remaining_parameters: int
    active_parameters: int | None
    """Remaining parameters that one token uses in a mixture of experts; None without one, or if not recorded."""
    compression: float
    """All parameters / remaining parameters."""
    macs: int
    macs_remaining: float
    speedup: float | None
    """Theoretical speed-up, see `StageRecord.macs_speedup`."""
    steps: int
    seconds: float
    total_steps: int
    """Optimizer steps from the initialisation to this round, in shared stages too."""
    total_cost: float
    """`total_steps` plus the cost of scoring, in steps of the scored rounds: see `scoring_steps`."""
    total_seconds: float
    own_steps: int
    """Steps of the stages that no other trial of the sweep shares."""
    own_seconds: float
    training_macs: int | None
    """Multiply-accumulates of this stage's training, forward and backward; None if they are not recorded."""
    total_training_macs: int | None
    """Multiply-accumulates of all training from the initialisation to this round; None if a part is not recorded."""
    stage: str
    chosen: Chosen
    others: Mapping[str, float]
    """Other metrics, by split and name: `test/top5`, or `test_NAME/loss` on a further test set."""


LineKey = tuple[str, str, str]
"""Model, data set and label of the line; a label is unique within its model and data set."""
Level = tuple[str, str, str, str, float]
"""Model, data set, primary metric, budget and sparsity: lines are compared with each other at equal levels."""


@dataclass(frozen=True)
class Point:
    """One operating point: trials that differ only in the seed, after the same round."""

    model: str
    data: str
    line: str
    method: str
    schedule: str
    round: int
    final: bool
    requested_sparsity: float | None
    sparsity: float
    seeds: tuple[int, ...]
    stages: tuple[str, ...]
    """Key of each seed's stage, in the order of `seeds`."""
    metric: Metric
    """Primary metric, with the margin that `matching` was tested with."""
    test: Estimate | None
    """Primary metric on the test split, for the model selected on validation."""
    val: Estimate | None
    val_before: Estimate | None
    difference: Estimate | None
    """`test` minus the value of the trial's own dense network, paired by seed."""
    compression: float
    macs: float
    """Multiply-accumulates of the dense network; 0 if they are not counted."""
    macs_remaining: float
    speedup: float | None
    """Mean theoretical speed-up, see `StageRecord.macs_speedup`; None if a seed has none."""
    total_steps: float
    total_cost: float
    total_seconds: float
    own_steps: float
    own_seconds: float
    remaining_parameters: float = 0.0
    active_parameters: float | None = None
    """Mean of `Row.active_parameters`; None if a seed has none."""
    training_macs: float | None = None
    """Mean of `Row.training_macs`; None if a seed has none."""
    total_training_macs: float | None = None
    """Mean of `Row.total_training_macs`; None if a seed has none."""
    dense_training_macs: float | None = None
    """Mean of `training_macs` of the seeds' own dense networks; None if a seed has none."""
    further: tuple[FurtherTestSet, ...] = ()
    """`test` and `difference` on further test sets."""
    asked: tuple[AskedFigure, ...] = ()
    """Metrics that options of the task ask for."""
    harmed: tuple[Harm, ...] = ()
    """Classes that pruning harms most, the worst first."""
    deployed: tuple[DeployedPoint, ...] = ()
    """Measurements of the deployed networks; empty for dense points."""
    unit: str = ""
    """Kind of unit that is pruned, as `Chosen.unit`."""
    budget: str = WEIGHTS
    """Quantity that the sparsity is a fraction of, as `Chosen.budget`."""
    reached: float | None = None
    """Mean of `Chosen.reached` over seeds."""
    considered: float | None = None
    """Mean of `StageRecord.considered` over seeds; None if a seed has none."""
    best: bool = False
    """Whether the mean on test is the best of several lines at this sparsity."""
    matching: Match | None = None
    """Whether the loss against dense is shown to be below the margin, see `matches`; None for dense points."""
    stopped: int = 0
    """Number of seeds that a search did not run; such a point is not tested and not the best."""
    answer: bool = False
    """Whether a search names the point's networks in its answer."""
    constant: float | None = None
    """Primary metric on test of the best answer that is the same for every example; None if it is not recorded."""

    @property
    def skill(self) -> float | None:
        """Fraction of the way from a constant answer to a perfect one; None if a constant answer is not recorded."""
        if self.constant is None or self.test is None or (self.metric.better == "higher" and self.metric.scale == 1):
            return None
        perfect = 1.0 if self.metric.better == "higher" else 0.0
        way = self.metric.gain(perfect, self.constant)
        return self.metric.gain(self.test.mean, self.constant) / way if way > 0 else None

    @property
    def panel(self) -> tuple[str, str]:
        """Model and data set."""
        return self.model, self.data

    @property
    def stage_of(self) -> dict[int, str]:
        """Seed -> key of its stage."""
        return dict(zip(self.seeds, self.stages, strict=True))

    def by_seed(self, values: Mapping[str, V]) -> dict[int, V]:
        """Return seed -> value, from the values of stages."""
        return {seed: values[stage] for seed, stage in self.stage_of.items()}

    def on(self, text: str) -> Estimate | None:
        """Return the primary metric on `test`, or on a further test set by its name; None if there is none."""
        return self.test if text == "test" else next((each.test for each in self.further if each.name == text), None)

    @property
    def line_key(self) -> LineKey:
        """Model, data set and line."""
        return self.model, self.data, self.line

    @property
    def best_on_all(self) -> bool:
        """Whether the mean is the best on test and on each further test set."""
        return self.best and all(each.best for each in self.further)

    @property
    def macs_left(self) -> float | None:
        """Fraction of the dense network's multiply-accumulates that remains; None if they are not counted."""
        if not self.macs:
            return None
        return self.macs_remaining / self.macs if self.speedup is None else 1 / self.speedup

    @property
    def training_ratio(self) -> float | None:
        """`total_training_macs` / `dense_training_macs`; None if one is not recorded, or dense was not trained."""
        total, dense = self.total_training_macs, self.dense_training_macs
        return total / dense if total is not None and dense else None

    @property
    def asked_sparsity(self) -> float:
        """Requested sparsity, else the achieved one; rounded, because machines differ in its last digits."""
        return round(self.sparsity if self.requested_sparsity is None else self.requested_sparsity, 6)

    @property
    def asked_of(self) -> str:
        """Quantity that `asked_sparsity` is a fraction of, with the unit: a group is more than one layer's channel."""
        return f"{self.budget} (unit={self.unit})" if self.unit and self.budget != WEIGHTS else self.budget

    @property
    def compared_by(self) -> str:
        """Quantity of which lines with equal sparsities are compared: weights for experts that are as large a part."""
        is_equal = round(self.sparsity, 6) == self.asked_sparsity
        return WEIGHTS if is_equal and in_words(self.budget, self.unit) == EXPERTS else self.asked_of

    @property
    def level(self) -> Level:
        """Level at which the point is compared with other lines."""
        return self.model, self.data, self.metric.name, self.compared_by, self.asked_sparsity


@dataclass(frozen=True)
class StoppedPoint:
    """Point at the end of trials that a search did not run for all seeds."""

    line_key: LineKey
    sparsity: float | None
    """Requested sparsity; None if none was requested as a fraction."""
    finished: int
    """Number of seeds that were run, out of `seeds`."""
    seeds: int
    reason: str
    begun: bool = False
    """Whether a stage after the dense training was run, for example a part of the last training."""


@dataclass(frozen=True)
class Search:
    """Search that chose the trials of a sweep."""

    answers: tuple[str, ...]
    looks: int
    """Number of times that the search looked at validation figures, and of these the number of tests."""
    tests: int
    ended: bool
    stopped: Mapping[str, str]
    """Trial that was not run -> the reason."""
    points: tuple[StoppedPoint, ...]
    networks: tuple[str, ...] = ()
    """Stages of the networks in the answers."""
    against: tuple[str, ...] = ()
    """Quantities of a frontier, besides the primary metric on validation; empty for another search."""


@dataclass(frozen=True)
class Cost:
    """Cost of a sweep's finished training, and the cost if no trial shared a stage."""

    steps: int
    seconds: float
    unshared_steps: int
    unshared_seconds: float


@dataclass(frozen=True)
class Comparison:
    """Results of a sweep; every number comes from a record."""

    rows: tuple[TrialRow, ...]
    dense: tuple[Point, ...]
    """One point for each dense configuration, over its seeds."""
    points: tuple[Point, ...]
    """Every round of every line, sorted by panel, line, sparsity."""
    trials: Mapping[str, TrialStatus]
    failures: Mapping[str, str]
    """Trial -> why it failed."""
    cost: Cost
    windows: tuple[WindowDifference, ...] = ()
    """Differences paired by window of held-out text, of language models."""
    harness: tuple[HarnessScore, ...] = ()
    """Scores on tasks of lm-evaluation-harness, paired by document with the dense network."""
    search: Search | None = None
    """Search that chose what was run; None if all trials were to be run."""
    warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Warning in records of finished stages -> these stages, as a trial's name and the kind of stage."""

    @cached_property
    def operating_points(self) -> tuple[Point, ...]:
        """Points at which lines are compared.

        A line whose trials end at several sparsities has a point at the end of each trial. A line whose trials all
        end at one sparsity has a point after every round.
        """
        ends: dict[LineKey, int] = {}
        for point in self.points:
            ends[point.line_key] = ends.get(point.line_key, 0) + point.final
        return tuple(point for point in self.points if point.final or ends[point.line_key] == 1)

    @property
    def shown(self) -> tuple[Point, ...]:
        """Dense points and operating points."""
        return (*self.dense, *self.operating_points)

    @property
    def whole_points(self) -> tuple[Point, ...]:
        """Operating points that no search has stopped."""
        return tuple(point for point in self.operating_points if not point.stopped)

    @cached_property
    def lines(self) -> Mapping[LineKey, tuple[Point, ...]]:
        """Operating points of each line, in order of sparsity."""
        lines: dict[LineKey, tuple[Point, ...]] = {}
        for point in self.operating_points:
            lines[point.line_key] = (*lines.get(point.line_key, ()), point)
        return lines

    @cached_property
    def costlier(self) -> tuple[tuple[Point, Point], ...]:
        """Pairs of an operating point and the cheapest point of its level, for points that cost more than it.

        The cost is `total_cost`: steps from the initialisation, with scoring.
        """
        least: dict[Level, Point] = {}
        for point in self.operating_points:
            least[point.level] = min(least.get(point.level, point), point, key=lambda p: p.total_cost)
        pairs = ((point, least[point.level]) for point in self.operating_points)
        return tuple((point, other) for point, other in pairs if point.total_cost > other.total_cost)

    @property
    def unlearned(self) -> tuple[Point, ...]:
        """Dense networks that are hardly better than a constant answer."""
        return tuple(point for point in self.dense if point.skill is not None and point.skill < LEAST_SKILL)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Primary metrics of the points, each once."""
        return tuple(dict.fromkeys(point.metric for point in (*self.dense, *self.points)))

    @property
    def panels(self) -> tuple[tuple[str, str], ...]:
        """Pairs of model and data set, in order."""
        return tuple(dict.fromkeys(point.panel for point in (*self.dense, *self.points)))

    @property
    def largest_matching(self) -> Mapping[LineKey, Point | None]:
        """Line -> its sparsest matching point, None if none matches; a line without a tested point is left out."""
        return {
            line: max((point for point in points if point.matching == "yes"), key=lambda p: p.sparsity, default=None)
            for line, points in self.lines.items()
            if any(point.matching in ("yes", "no") for point in points)
        }

    def to_json(self) -> dict[str, Any]:
        """Return points, trials, failures and costs as plain data, without the rows."""
        shown = {id(point) for point in self.operating_points}
        return {
            "metrics": [asdict(metric) for metric in self.metrics],
            "dense": [_plain(point) for point in self.dense],
            "points": [_plain(point) | {"operating": id(point) in shown} for point in self.points],
            "trials": dict(self.trials),
            "failures": dict(self.failures),
            "cost": asdict(self.cost),
            "windows": [asdict(each) for each in self.windows],
            **({"harness": [asdict(each) for each in self.harness]} if self.harness else {}),
            **({} if self.search is None else {"search": asdict(self.search)}),
            **({"warnings": dict(self.warnings)} if self.warnings else {}),
        }


def _plain(point: Point) -> dict[str, Any]:
    plain = asdict(point) | {"metric": point.metric.name}
    for name in ("stopped", "answer"):
        if not plain[name]:  # a sweep without a search has no such fields
            del plain[name]
    return plain
