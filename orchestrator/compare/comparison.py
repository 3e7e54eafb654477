"""The nouns of a comparison: rows, operating points, costs. Plain frozen data, made by `compare_trials`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from orchestrator.compare.deployment_points import Deployed
from orchestrator.compare.round_columns import WEIGHTS, Chosen
from orchestrator.compare.secondary_figures import Further, Harm
from orchestrator.compare.statistics import Estimate, Match
from orchestrator.core.metrics import Metric

TrialStatus = Literal["finished", "failed", "unfinished", "unmeasured"]


class Row(NamedTuple):  # of which there are tens of thousands
    """One trial after one round (0 is the dense network). Figures are in their metric's own scale, fractions plain."""

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
    """The name of the primary metric."""
    test: float
    """The primary metric, as `val` and `val_before`."""
    test_loss: float
    val: float
    val_loss: float
    val_before: float | None
    """Before fine-tuning; None for the dense network, as `val_loss_before`."""
    val_loss_before: float | None
    early_step: int | None
    """Step of this stage at which the validation loss was least, where early stopping would end; None without one."""
    early_val: float | None
    """The primary metric on validation at that step, whatever `train.select` has chosen."""
    parameters: int
    remaining_parameters: int
    compression: float
    """All parameters / parameters left."""
    macs: int
    macs_remaining: float
    speedup: float | None
    """Theoretical speed-up, see `StageRecord.macs_speedup`."""
    steps: int
    seconds: float
    total_steps: int
    """Optimizer steps from the initialisation to this round, whoever made them."""
    total_cost: float
    """These steps, and what scores read on the way in steps of the rounds that they rank: see `scoring_steps`."""
    total_seconds: float
    own_steps: int
    """Those of the total that no other trial of the sweep shares."""
    own_seconds: float
    stage: str
    chosen: Chosen
    others: Mapping[str, float]
    """What else was measured of it, by split and metric: `test/top5`, or `test_NAME/loss` of a further test set."""


LineKey = tuple[str, str, str]
"""Model, data set and label of the line, which is unique within these."""
Level = tuple[str, str, str, str, float]
"""Model, data set, primary metric, what the sparsity is a fraction of, and it, at which lines are compared with each
other."""


@dataclass(frozen=True)
class Point:
    """One operating point: trials that differ in nothing but the seed, after the same round."""

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
    """The primary one; its margin is that which `matching` was tested against."""
    test: Estimate | None
    """On the test split, of the model selected on validation."""
    val: Estimate | None
    val_before: Estimate | None
    difference: Estimate | None
    """`test` less that of the trial's own dense network, paired by seed."""
    compression: float
    macs: float
    """Multiply-accumulates of the dense network; 0 where none are counted."""
    macs_remaining: float
    speedup: float | None
    """Mean theoretical speed-up, see `StageRecord.macs_speedup`; None if it is None at a seed."""
    total_steps: float
    total_cost: float
    total_seconds: float
    own_steps: float
    own_seconds: float
    further: tuple[Further, ...] = ()
    """The same on further test sets."""
    harmed: tuple[Harm, ...] = ()
    """The classes that pruning harms most, the worst first."""
    deployed: tuple[Deployed, ...] = ()
    """What was measured of its networks, deployed; not for dense itself."""
    unit: str = ""
    """The kind of what goes at once, as in `Chosen`, which also says the next two."""
    budget: str = WEIGHTS
    reached: float | None = None
    """Mean over seeds."""
    best: bool = False
    """Whether its mean is the best of several lines at this sparsity."""
    matching: Match | None = None
    """Whether its loss against dense is shown to be below the margin, see `matches`; None for dense itself."""

    @property
    def line_key(self) -> LineKey:
        """Model, data set and line."""
        return self.model, self.data, self.line

    @property
    def macs_left(self) -> float | None:
        """Fraction of the dense network's multiply-accumulates that is left; None if none are counted."""
        if not self.macs:
            return None
        return self.macs_remaining / self.macs if self.speedup is None else 1 / self.speedup

    @property
    def asked_sparsity(self) -> float:
        """What it is known by: the sparsity asked for, else the achieved one, whose last digits machines differ in."""
        return round(self.sparsity if self.requested_sparsity is None else self.requested_sparsity, 6)

    @property
    def asked_of(self) -> str:
        """What the asked sparsity is a fraction of; channels of layers are none of groups, whose removal takes more."""
        return f"{self.budget} (unit={self.unit})" if self.unit and self.budget != WEIGHTS else self.budget

    @property
    def level(self) -> Level:
        """What it is compared at."""
        return self.model, self.data, self.metric.name, self.asked_of, self.asked_sparsity


@dataclass(frozen=True)
class Cost:
    """What a sweep's finished training cost, and what it would have cost had no trial shared a stage."""

    steps: int
    seconds: float
    unshared_steps: int
    unshared_seconds: float


@dataclass(frozen=True)
class Comparison:
    """What a sweep shows: every number, and none that is not in a record."""

    rows: tuple[Row, ...]
    dense: tuple[Point, ...]
    """One for each dense configuration, over its seeds."""
    points: tuple[Point, ...]
    """Every round of every line, by panel, line, sparsity."""
    trials: Mapping[str, TrialStatus]
    failures: Mapping[str, str]
    """Trial -> why it failed."""
    cost: Cost

    @cached_property
    def operating_points(self) -> tuple[Point, ...]:
        """The points at which lines are compared.

        A line that is asked for several sparsities has one where each trial ends. A line whose trials all end at one
        sparsity has one after every round.
        """
        ends: dict[LineKey, int] = {}
        for point in self.points:
            ends[point.line_key] = ends.get(point.line_key, 0) + point.final
        return tuple(point for point in self.points if point.final or ends[point.line_key] == 1)

    @cached_property
    def lines(self) -> Mapping[LineKey, tuple[Point, ...]]:
        """The operating points of each line, the least sparse first."""
        lines: dict[LineKey, tuple[Point, ...]] = {}
        for point in self.operating_points:
            lines[point.line_key] = (*lines.get(point.line_key, ()), point)
        return lines

    @cached_property
    def costlier(self) -> tuple[tuple[Point, Point], ...]:
        """Pairs of an operating point and the least trained one of its level, where it took more steps than that.

        Steps are `total_cost`, from the initialisation and with scoring.
        """
        least: dict[Level, Point] = {}
        for point in self.operating_points:
            least[point.level] = min(least.get(point.level, point), point, key=lambda p: p.total_cost)
        pairs = ((point, least[point.level]) for point in self.operating_points)
        return tuple((point, other) for point, other in pairs if point.total_cost > other.total_cost)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The primary metrics of the points, each once."""
        return tuple(dict.fromkeys(point.metric for point in (*self.dense, *self.points)))

    @property
    def panels(self) -> tuple[tuple[str, str], ...]:
        """The pairs of model and data set, in order."""
        return tuple(dict.fromkeys((point.model, point.data) for point in (*self.dense, *self.points)))

    @property
    def largest_matching(self) -> Mapping[LineKey, Point | None]:
        """Line -> its sparsest matching point, None where none matches; a line that is untested is left out."""
        return {
            line: max((point for point in points if point.matching == "yes"), key=lambda p: p.sparsity, default=None)
            for line, points in self.lines.items()
            if any(point.matching in ("yes", "no") for point in points)
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain data: every point, trial, failure and cost; the rows are better read as CSV."""
        shown = {id(point) for point in self.operating_points}
        return {
            "metrics": [asdict(metric) for metric in self.metrics],
            "dense": [_plain(point) for point in self.dense],
            "points": [_plain(point) | {"operating": id(point) in shown} for point in self.points],
            "trials": dict(self.trials),
            "failures": dict(self.failures),
            "cost": asdict(self.cost),
        }


def _plain(point: Point) -> dict[str, Any]:
    return asdict(point) | {"metric": point.metric.name}
