"""Allocation of a sparsity to tensors: how many units each keeps, as integers that add up exactly.

    uniform        density_l = rho
    uniform_plus   1 for a first convolution, at least 0.2 for the last tensor, equal for the rest (arXiv 2010.07611)
    er             density_l = min(1, eps ((n_in + n_out) / (n_in n_out))^power)       (Mocanu 2018, arXiv 1707.04780)
    erk            density_l = min(1, eps (sum(shape) / prod(shape))^power)              (Evci 2020, arXiv 1911.11134)

with eps such that sum_l density_l n_l = rho sum_l n_l. A tensor whose density would exceed 1 becomes dense, the
highest density first, and eps is solved again. Largest remainders round these densities to counts; of equal remainders
the earlier tensor comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.choices.axes import Scope
from pruning.refused import RefusedValue
from pruning.selection.selection_groups import Groups
from pruning.selection.smallest import prune_smallest_across_

LONG = 100
"""Entries of a row from which on counts may be rounded down, as in Wanda's code."""
TOLERANCE = 1e-9
"""Tolerance for floating point errors: 0.29 of 100 is 29."""


def allocate(
    groups: Groups,
    sparsity: float | None,
    scores: Mapping[str, Tensor] | None = None,
    alive: Mapping[str, Tensor] | None = None,
    *,
    capped: bool = False,
) -> dict[str, Any]:
    """Return name -> how many units each pool of the tensor keeps; a pool is a row, a window or the whole tensor.

    The number kept of n units is n - round(sparsity n), half to even; dead units count as pruned. Rows that keep
    different numbers have them in a tensor (see `kept_of_rows`). Where an allocation
    divides a total, other tensors keep what a tensor cannot keep because too few of its units survive.

    Args:
        groups: the units; their `scope` decides how tensors divide the total.
        sparsity: the fraction of all units that is pruned in the end; None where densities or windows decide it.
        scores: name -> score of each unit; the ranking scores for "global", LAMP's scores for "lamp".
        alive: name -> bool for each unit, whether it may be kept; None means all.
        capped: a tensor, row or window with fewer survivors than its count keeps them all and raises no error; for
            steps on the way to a target.

    Raises:
        ValueError: the target cannot be reached with `min_kept`, the given densities or the survivors; tensors, rows
            and windows with a count of their own are checked one by one.
    """
    scope, sizes, row = groups.scope, groups.sizes, ALLOCATIONS[groups.scope.allocation]
    if scope.kind == "window":
        _check_windows(scope, sparsity)
        return _by_pool(groups, dict.fromkeys(sizes, scope.n), alive, RefusedValue("scope.n", scope.n), capped)
    most = dict(sizes) if alive is None else {name: int(alive[name].sum()) for name in sizes}
    least = {name: min(scope.min_kept, most[name]) for name in most}
    asked = RefusedValue("sparsity", sparsity)
    if sparsity is None:
        asked = RefusedValue("scope.densities", dict(scope.densities))
    if scope.allocation == "given":
        wanted = _given_densities(groups, sparsity)
    else:
        total = kept_of_all(groups, sparsity)
        assert sparsity is not None
        if scope.kind == "global" or row.ranking:
            return _by_ranking(groups, scores, alive, total, least, most)
        wanted = _shared_sparsities(groups, sparsity)
    if scope.kind == "row":
        rows = {n.name: kept_of_rows(wanted[n.name], n.units // max(1, n.pool), n.pool) for n in groups}
        return _by_pool(groups, rows, alive, asked, capped)
    if row.by_itself:
        kept = {name: size - round(wanted[name] * size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if not capped and least[name] > math.ceil((1 - wanted[name]) * size - TOLERANCE):
                raise asked.because(
                    f"cannot be reached: it leaves {kept[name]} of the {size} units of {name!r}, fewer than "
                    f"`scope.min_kept` (={scope.min_kept}); lower one of the two, or use allocation='uniform', which "
                    "prunes more of other tensors instead."
                )
        return {name: max(least[name], count) for name, count in _by_pool(groups, kept, alive, asked, capped).items()}
    quotas = {name: (1 - wanted[name]) * size for name, size in sizes.items()}
    return largest_remainder(quotas, total, least, most, scope.min_kept)


def kept_of_all(groups: Groups, sparsity: float | None) -> int:
    """Return the number of units of all tensors together that a sparsity keeps.

    Raises:
        ValueError: `sparsity` is None.
    """
    if sparsity is None:
        raise RefusedValue("sparsity", None).because(
            "must be a fraction in [0, 1); leave it out only with given densities or windows."
        )
    total = sum(groups.sizes.values())
    return total - round(sparsity * total)


def kept_of_rows(sparsity: float, rows: int, entries: int) -> int | Tensor:
    """Return how many of its entries each row keeps; a tensor if rows keep different numbers.

    A row loses floor(sparsity entries). If it has fewer than `LONG` entries, or if that is more than a twentieth short
    of what it should lose or keep, the first rows lose one more, until the rows together have lost
    round(sparsity rows entries). A row loses no fewer for a higher sparsity.
    """
    lost = math.floor(sparsity * entries + TOLERANCE)
    more = math.floor(sparsity * entries * rows + 0.5 + TOLERANCE) - lost * rows
    short = 20 * (sparsity * entries - lost)
    if (entries >= LONG and short <= min(sparsity, 1 - sparsity) * entries) or not more:
        return entries - lost
    return entries - lost - (torch.arange(rows) < more).long()


def _by_pool(
    groups: Groups, counts: dict[str, Any], alive: Mapping[str, Tensor] | None, asked: RefusedValue, capped: bool
) -> dict[str, Any]:
    """Return how many units each tensor, row or window keeps; refuse or cap a count above the number of survivors."""
    if alive is None:
        return counts
    capped_counts = {}
    for part in groups:
        name, count = part.name, counts[part.name]
        survivors = alive[name].view(-1, part.pool).sum(1) if part.units else torch.zeros(1, dtype=torch.int64)
        most = int(survivors.max())
        capped_counts[name] = min(count, most) if isinstance(count, int) else count.clamp(max=most)
        few = survivors < (min(count, part.units) if isinstance(count, int) else count)
        if not capped and bool(few.any()):
            row = int(few.int().argmax())
            least, asked_for = int(survivors[row]), count if isinstance(count, int) else int(count[row])
            whole = part.pool == part.units
            raise asked.because(
                f"cannot be reached: {name!r} must keep {asked_for} of {'its' if whole else 'each'} {part.pool} units, "
                f"but only {least} survive{'' if whole else ' in one row or window'}; ask for no lower sparsity than "
                "now, or let entries return with dynamics='free'."
            )
    return capped_counts


def _check_windows(scope: Scope, sparsity: float | None) -> None:
    if sparsity is not None and abs(sparsity - (1 - scope.n / scope.m)) > TOLERANCE:
        raise RefusedValue("sparsity", sparsity).because(
            f"must be {1 - scope.n / scope.m:g} where {scope.n} of each {scope.m} entries are kept; pass that, or "
            "leave `sparsity` out."
        )


def _shared_sparsities(groups: Groups, sparsity: float) -> dict[str, float]:
    """Return name -> sparsity by the allocation of `groups.scope`."""
    scope, shapes, sizes = groups.scope, [part.shape for part in groups], list(groups.sizes.values())
    row = ALLOCATIONS[scope.allocation]
    if not row.code or not any(sizes):
        return dict.fromkeys(groups.sizes, sparsity)
    densities = row.load()(
        shapes, sizes, 1 - sparsity, **{each.name: getattr(scope, each.name) for each in row.options}
    )
    return {name: 1 - density for name, density in zip(groups.sizes, densities, strict=True)}


def _given_densities(groups: Groups, sparsity: float | None) -> dict[str, float]:
    wanted, given = {}, groups.scope.densities
    if unused := [key for key in given if not any(key == name or fnmatchcase(name, key) for name in groups.sizes)]:
        raise RefusedValue("scope.densities", unused[0]).because(
            f"must name tensors that are pruned; choose from {', '.join(groups.sizes)}."
        )
    for name in groups.sizes:
        matching = [key for key in given if key == name] or [key for key in given if fnmatchcase(name, key)]
        if not matching:
            raise RefusedValue("scope.densities", dict(given)).because(
                f"must name every tensor that is pruned, but lacks {name!r}; add its density (1 keeps it dense), or "
                "exclude the tensor from pruning."
            )
        wanted[name] = 1 - float(given[matching[0]])
    if sparsity is not None:
        pruned, total = sum(wanted[name] * size for name, size in groups.sizes.items()), sum(groups.sizes.values())
        if abs(pruned - sparsity * total) > 0.5 * len(wanted) + TOLERANCE * total:
            raise RefusedValue("sparsity", sparsity).because(
                f"cannot be reached by `scope.densities`, which prune {pruned / total:.6g}; leave `sparsity` out, or "
                "change the densities."
            )
    return wanted


def er(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float, power: float = 1.0) -> list[float]:
    """Return the densities of ER, proportional to ((n_in + n_out) / (n_in n_out))^power; see `scale_to_density`."""
    return scale_to_density([shape_ratio(shape[:2], power) for shape in shapes], sizes, density)


def erk(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float, power: float = 1.0) -> list[float]:
    """Return the densities of ERK, proportional to (sum(shape) / prod(shape))^power; see `scale_to_density`."""
    return scale_to_density([shape_ratio(shape, power) for shape in shapes], sizes, density)


def uniform(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float) -> list[float]:  # noqa: ARG001
    """Return `density` for each tensor."""
    return [density] * len(sizes)


def shape_ratio(shape: Sequence[int], power: float = 1.0) -> float:
    """Return (sum(shape) / prod(shape))^power."""
    return float((sum(shape) / max(1, math.prod(shape))) ** power)


def scale_to_density(raw: Sequence[float], sizes: Sequence[int], density: float) -> list[float]:
    """Return density_l = min(1, eps raw_l) with sum density_l n_l = density sum n_l.

    Args:
        raw: relative density of each tensor, above 0.
        sizes: number n_l of units of each tensor.
        density: density of all tensors together.
    """
    dense: set[int] = set()
    while True:
        free = [i for i in range(len(sizes)) if i not in dense]
        if not free:
            return [1.0] * len(sizes)
        eps = (density * sum(sizes) - sum(sizes[i] for i in dense)) / sum(raw[i] * sizes[i] for i in free)
        above = [i for i in free if eps * raw[i] > 1]
        if not above:
            return [1.0 if i in dense else eps * raw[i] for i in range(len(sizes))]
        dense.add(max(above, key=lambda i: raw[i]))


LAST_DENSITY = 0.2
"""The lowest density that uniform+ gives the last tensor."""


def uniform_plus(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float) -> list[float]:
    """Return the densities of uniform+: 1 for a first convolution, at least `LAST_DENSITY` for the last, equal others.

    Raises:
        ValueError: the first convolution and the last tensor alone exceed `density`.
    """
    fixed = {0: 1.0} if len(shapes[0]) > 2 and len(shapes) > 1 else {}
    while True:
        free = [i for i in range(len(sizes)) if i not in fixed]
        left = density * sum(sizes) - sum(fixed[i] * sizes[i] for i in fixed)
        share = left / max(1, sum(sizes[i] for i in free))
        last = len(sizes) - 1
        if last in free and share < LAST_DENSITY and density < 1:
            fixed[last] = LAST_DENSITY
            continue
        if share < 0 or (not free and left < -TOLERANCE):
            least = sum(fixed[i] * sizes[i] for i in fixed) / sum(sizes)
            raise RefusedValue("sparsity", round(1 - density, 6)).because(
                f"cannot be reached by allocation='uniform_plus', which keeps a fraction {least:.6g} of all units in "
                "the first convolution and the last tensor; use 'erk'."
            )
        return [fixed.get(i, min(1.0, share)) for i in range(len(sizes))]


def largest_remainder(
    quotas: Mapping[str, float], total: int, least: Mapping[str, int], most: Mapping[str, int], min_kept: int = 0
) -> dict[str, int]:
    """Round `quotas` to integers within [least, most] that add up to `total`.

    Each count is the floor of its quota; the rest goes to the largest remainders, the earlier of equal ones first.

    Raises:
        ValueError: no integers within the bounds add up to `total`; it names `min_kept`, which `least` follows from.
    """
    check_reachable(total, least, most, min_kept)
    counts = {name: min(max(math.floor(q + TOLERANCE), least[name]), most[name]) for name, q in quotas.items()}
    remainder = {name: round(q - math.floor(q + TOLERANCE), 9) for name, q in quotas.items()}
    names = sorted(quotas, key=lambda name: -remainder[name])  # stable: the earlier of equal ones first
    step = 1 if sum(counts.values()) < total else -1
    while (left := abs(total - sum(counts.values()))) > 0:
        room = [
            name for name in names[::step] if (counts[name] < most[name] if step > 0 else counts[name] > least[name])
        ]
        for name in room[:left]:
            counts[name] += step
    return counts


def check_reachable(total: int, least: Mapping[str, int], most: Mapping[str, int], min_kept: int = 0) -> None:
    """Raise `ValueError` unless `total` units can be kept with between `least` and `most` units of each tensor.

    The error names `min_kept`, which `least` follows from.
    """
    if sum(least.values()) > total:
        raise RefusedValue("scope.min_kept", min_kept or max(least.values())).because(
            f"keeps {sum(least.values())} units of all tensors together, but the sparsity leaves {total}; lower one of "
            "the two."
        )
    if sum(most.values()) < total:
        raise ValueError(
            f"`sparsity` cannot be reached: {total} units must be kept, but only {sum(most.values())} survive; ask for "
            "no lower sparsity than now."
        )


def _by_ranking(
    groups: Groups,
    scores: Mapping[str, Tensor] | None,
    alive: Mapping[str, Tensor] | None,
    total: int,
    least: Mapping[str, int],
    most: Mapping[str, int],
) -> dict[str, int]:
    """Keep the `least` best units of each tensor, then rank all other units together."""
    if scores is None:
        raise ValueError("`scores` (=None) must be given for an allocation that ranks all tensors together.")
    check_reachable(total, least, most, groups.scope.min_kept)
    names = list(groups.sizes)
    ranked = {name: _alive(groups, alive, name) for name in names}
    if any(least.values()):
        for name in names:
            best = ranked[name].clone()
            prune_smallest_across_([best], [scores[name]], most[name] - least[name], names=[f"scores of {name}"])
            ranked[name] &= ~best
    prune_smallest_across_(
        [ranked[name] for name in names],
        [scores[name] for name in names],
        sum(most.values()) - total,
        names=[f"scores of {name}" for name in names],
    )
    return {name: least[name] + int(ranked[name].sum()) for name in names}


def _alive(groups: Groups, alive: Mapping[str, Tensor] | None, name: str) -> Tensor:
    return torch.ones(groups.sizes[name], dtype=torch.bool) if alive is None else alive[name].clone()
