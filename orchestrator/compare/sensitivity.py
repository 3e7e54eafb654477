"""Sensitivity of layers: validation figures of networks in which one layer, or one block, alone is pruned. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from math import fsum

from orchestrator.compare.panels import positions
from orchestrator.compare.statistics import Estimate, estimate
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

DENSE = 0.0
"""Sparsity of the first point of a curve."""


@dataclass(frozen=True)
class SensitivityPoint:
    """Networks with the layer at one sparsity; the first point of a curve is the dense network."""

    sparsity: float
    seeds: tuple[int, ...]
    val: Estimate | None
    """Primary metric on validation."""
    loss: Estimate | None
    """Loss on validation."""
    loss_increase: Estimate | None
    """Loss on validation minus that of the seed's own dense network."""


@dataclass(frozen=True)
class SensitivityCurve:
    """Figures of a layer or block that is pruned alone, by sparsity."""

    model: str
    data: str
    line: str
    method: str
    layer: str
    """Name of the tensor, or what the names of a block's tensors begin with."""
    sizes: Mapping[str, int]
    """Tensor -> number of entries."""
    metric: Metric
    points: tuple[SensitivityPoint, ...]

    @property
    def entries(self) -> int:
        """Number of entries of all tensors of the layer."""
        return sum(self.sizes.values())


def sensitivity_curves(plan: Plan, records: Mapping[str, StageRecord]) -> tuple[SensitivityCurve, ...]:
    """Return the curves of each model and data set whose lines prune two or more parts of the network, none in common.

    Args:
        plan: plan of the sweep
        records: stage key -> record
    """
    lines: dict[tuple[str, str], dict[str, list[_Network]]] = {}
    for trial, position in zip(plan.trials, positions(plan), strict=True):
        dense, pruned = records.get(trial.dense), records.get(trial.stages[-1])
        if dense is not None and pruned is not None and pruned.round:
            network = _Network(position.method, position.seed, dense, pruned)
            lines.setdefault(position.panel, {}).setdefault(position.line, []).append(network)
    return tuple(
        _curve(panel, line, networks)
        for panel, each in lines.items()
        if _are_apart({frozenset(network.pruned.tensor_sizes) for networks in each.values() for network in networks})
        for line, networks in each.items()
    )


@dataclass(frozen=True)
class _Network:
    method: str
    seed: int
    dense: StageRecord
    pruned: StageRecord


def _are_apart(parts: set[frozenset[str]]) -> bool:
    return len(parts) > 1 and not any(one & other for one, other in combinations(parts, 2))


def _curve(panel: tuple[str, str], line: str, networks: Sequence[_Network]) -> SensitivityCurve:
    levels: dict[float, list[_Network]] = {}
    for network in networks:
        levels.setdefault(round(network.pruned.sparsity, 9), []).append(network)
    own = {network.seed: network for network in networks}
    sizes = networks[0].pruned.tensor_sizes
    points = [
        _point(DENSE, [(seed, each.dense, each.dense) for seed, each in sorted(own.items())]),
        *(
            _point(sparsity, [(each.seed, each.dense, each.pruned) for each in level])
            for sparsity, level in sorted(levels.items())
            if sparsity != DENSE
        ),
    ]
    metric = networks[0].pruned.primary
    return SensitivityCurve(*panel, line, networks[0].method, _shared_name([*sizes]), sizes, metric, tuple(points))


def _point(sparsity: float, each: Sequence[tuple[int, StageRecord, StageRecord]]) -> SensitivityPoint:
    losses = [(dense.after.get("val/loss"), record.after.get("val/loss")) for _, dense, record in each]
    known = [(dense, loss) for dense, loss in losses if dense is not None and loss is not None]
    values = [value for _, _, record in each if (value := record.after.get(f"val/{record.primary.name}")) is not None]
    return SensitivityPoint(
        sparsity,
        tuple(seed for seed, _, _ in each),
        estimate(values),
        estimate([loss for _, loss in known]) if len(known) == len(each) else None,
        estimate([loss - dense for dense, loss in known]) if len(known) == len(each) else None,
    )


def _shared_name(names: Sequence[str]) -> str:
    """Return a tensor's name, or the first parts that the names of several tensors share."""
    if len(names) == 1:
        return names[0]
    parts = zip(*(name.split(".") for name in names), strict=False)
    shared = [each[0] for each in takewhile(lambda each: len({*each}) == 1, parts)]
    return ".".join(shared) or ", ".join(names)


ESTIMATES = ("val", "loss", "loss_increase")
"""Fields of a point that take a column for each of `PARTS`."""
PARTS = ("mean", "std", "low", "high")
SENSITIVITY_COLUMNS = (
    *("model", "data", "method", "line", "layer", "entries", "metric", "sparsity", "seeds"),
    *(f"{name}_{part}" for name in ESTIMATES for part in PARTS),
)
"""Columns of sensitivity.csv."""


def sensitivity_rows(curves: Sequence[SensitivityCurve]) -> Iterator[dict[str, object]]:
    """Yield column name -> value for each point of each curve: `SENSITIVITY_COLUMNS`."""
    for curve in curves:
        for point in curve.points:
            yield {
                **{name: getattr(curve, name) for name in ("model", "data", "method", "line", "layer", "entries")},
                "metric": curve.metric.name,
                "sparsity": point.sparsity,
                "seeds": " ".join(map(str, point.seeds)),
                **{f"{name}_{part}": getattr(getattr(point, name), part, None) for name in ESTIMATES for part in PARTS},
            }


@dataclass(frozen=True)
class Allocation:
    """Densities that a sparsity takes, and the sums of the measured increases of the loss."""

    sparsity: float
    densities: Mapping[str, float]
    """Tensor -> fraction that is kept."""
    increase: float
    """Sum over layers, interpolated between measured sparsities."""
    uniform_increase: float | None
    """Sum with all layers at `sparsity`; None if a layer was not measured there."""


def allocation(curves: Sequence[SensitivityCurve], sparsity: float) -> Allocation:
    """Return the densities with the least sum of increases of the validation loss, at exactly a total sparsity.

    Args:
        curves: curves of one network and one method, each layer once
        sparsity: fraction of all entries of these layers to prune

    Raises:
        OrchestratorError: the sparsity lies outside of the measured ones, or a loss is not finite
    """
    from pruning.selection.allocation import largest_remainder
    from pruning.selection.measured_allocation import interpolated, least_loss

    sizes = {curve.layer: curve.entries for curve in curves}
    losses: dict[str, dict[float, float]] = {}
    for curve in curves:
        known = {point.sparsity: point.loss_increase for point in curve.points}
        if missing := [level for level, increase in known.items() if increase is None]:
            raise OrchestratorError(
                f"{curve.layer} at sparsity {missing[0]:g} has no finite loss on validation; leave this sparsity out."
            )
        losses[curve.layer] = {level: increase.mean for level, increase in known.items() if increase is not None}
    try:
        pruned = least_loss(sizes, losses, sparsity)
    except ValueError as error:
        raise OrchestratorError(str(error)) from None
    densities: dict[str, float] = {}
    for curve in curves:
        share = pruned[curve.layer] / curve.entries
        quotas = {name: share * size for name, size in curve.sizes.items()}
        counts = largest_remainder(quotas, pruned[curve.layer], dict.fromkeys(quotas, 0), dict(curve.sizes))
        densities |= {name: 1 - counts[name] / size for name, size in curve.sizes.items()}
    achieved = {name: count / sizes[name] for name, count in pruned.items()}
    measured = all(max(each) >= sparsity for each in losses.values())
    return Allocation(
        sparsity,
        densities,
        fsum(interpolated(losses[name], level) for name, level in achieved.items()),
        fsum(interpolated(each, sparsity) for each in losses.values()) if measured else None,
    )
