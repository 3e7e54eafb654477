"""How many units each tensor keeps: integer counts that add up exactly.

    uniform        density_l = rho
    uniform_plus   1 for a first convolution, at least 0.2 for the last tensor, the rest alike     (arXiv 2010.07611)
    er             density_l = min(1, eps ((n_in + n_out) / (n_in n_out))^power)       (Mocanu 2018, arXiv 1707.04780)
    erk            density_l = min(1, eps (sum(shape) / prod(shape))^power)              (Evci 2020, arXiv 1911.11134)

with eps such that sum_l density_l n_l = rho sum_l n_l; a tensor above 1 becomes dense, the largest first, and eps is
solved again. Counts are those densities by largest remainder; of equal remainders the earlier tensor comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.choices.axes import Scope
from pruning.selection.selection_groups import Groups
from pruning.selection.smallest import prune_smallest_across_

TINY = 1e-9
"""What arithmetic may lose: .29 of 100 is 29."""


def allocate(
    groups: Groups,
    sparsity: float | None,
    scores: Mapping[str, Tensor] | None = None,
    alive: Mapping[str, Tensor] | None = None,
    *,
    capped: bool = False,
) -> dict[str, int]:
    """Return name -> how many units each pool of that tensor keeps; a tensor is one pool unless rows or windows are.

    Of n units, n - round(sparsity n) are kept (half to even), dead ones counted as pruned. Where a total is divided,
    what a tensor cannot keep, because fewer survive, goes to the others.

    Args:
        groups: the units; their `scope` says how they divide the budget.
        sparsity: the fraction of all units to be pruned in the end; None where densities or windows say it.
        scores: name -> score of each unit, for "global" (those that rank) and "lamp" (LAMP's).
        alive: name -> bool for each unit, whether it may be kept; None is all.
        capped: a tensor, row or window of which fewer survive than it is to keep, keeps these instead of an error: for
            a step on the way to a target.

    Raises:
        ValueError: the target cannot be reached under `min_kept`, given densities, or what survives; of tensors, rows
            or windows that are counted by themselves, in any of them.
    """
    scope, sizes, row = groups.scope, groups.sizes, ALLOCATIONS[groups.scope.allocation]
    if scope.kind == "window":
        _check_windows(scope, sparsity)
        return _by_pool(groups, dict.fromkeys(sizes, scope.n), alive, f"`scope.n` (={scope.n})", capped)
    most = dict(sizes) if alive is None else {name: int(alive[name].sum()) for name in sizes}
    least = {name: min(scope.min_kept, most[name]) for name in most}
    asked = f"`sparsity` (={sparsity})" if sparsity is not None else "`scope.densities`"
    if scope.allocation == "given":
        wanted = _given(groups, sparsity)
    else:
        total = kept_of_all(groups, sparsity)
        assert sparsity is not None
        if scope.kind == "global" or row.ranking:
            return _by_ranking(groups, scores, alive, total, least, most)
        wanted = _shared(groups, sparsity)
    if scope.kind == "row":
        rows = {layout.name: layout.pool - math.floor(wanted[layout.name] * layout.pool + TINY) for layout in groups}
        return _by_pool(groups, rows, alive, asked, capped)
    if row.by_itself:
        kept = {name: size - round(wanted[name] * size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if not capped and least[name] > math.ceil((1 - wanted[name]) * size - TINY):
                raise ValueError(
                    f"{asked} cannot be reached: {name!r} is to keep {kept[name]} of its {size} units, but "
                    f"`scope.min_kept` (={scope.min_kept}) asks for more; lower one, or use allocation='uniform', "
                    "where the others make up for it."
                )
        return {name: max(least[name], count) for name, count in _by_pool(groups, kept, alive, asked, capped).items()}
    return largest_remainder({name: (1 - wanted[name]) * size for name, size in sizes.items()}, total, least, most)


def kept_of_all(groups: Groups, sparsity: float | None) -> int:
    """Return how many units a sparsity leaves of all tensors together.

    Raises:
        ValueError: there is none.
    """
    if sparsity is None:
        raise ValueError(
            "`sparsity` (=None) must be a fraction in [0, 1), unless given densities or windows say what is kept."
        )
    total = sum(groups.sizes.values())
    return total - round(sparsity * total)


def _by_pool(
    groups: Groups, counts: dict[str, int], alive: Mapping[str, Tensor] | None, asked: str, capped: bool
) -> dict[str, int]:
    """Return how many each tensor, row or window keeps: `counts`, and refused or capped where fewer survive."""
    if alive is None:
        return counts
    capped_counts = {}
    for layout in groups:
        name, count = layout.name, counts[layout.name]
        survivors = alive[name].view(-1, layout.pool).sum(1) if layout.units else torch.zeros(1, dtype=torch.int64)
        capped_counts[name] = min(count, int(survivors.max()))
        if not capped and int(survivors.min()) < min(count, layout.units):
            part = "its" if layout.pool == layout.units else "each"
            raise ValueError(
                f"{asked} cannot be reached: {name!r} is to keep {count} of {part} {layout.pool} units, but only "
                f"{int(survivors.min())} survive{'' if part == 'its' else ' in one place'}; prune no less than before, "
                "or let entries return by dynamics='free'."
            )
    return capped_counts


def _check_windows(scope: Scope, sparsity: float | None) -> None:
    if sparsity is not None and abs(sparsity - (1 - scope.n / scope.m)) > TINY:
        raise ValueError(
            f"`sparsity` (={sparsity}) must be {1 - scope.n / scope.m:g} where {scope.n} of each {scope.m} entries are "
            "kept, or left out."
        )


def _shared(groups: Groups, sparsity: float) -> dict[str, float]:
    """Return name -> the sparsity that the allocation gives it."""
    scope, shapes, sizes = groups.scope, [layout.shape for layout in groups], list(groups.sizes.values())
    row = ALLOCATIONS[scope.allocation]
    if not row.code or not any(sizes):
        return dict.fromkeys(groups.sizes, sparsity)
    densities = row.load()(
        shapes, sizes, 1 - sparsity, **{each.name: getattr(scope, each.name) for each in row.options}
    )
    return {name: 1 - density for name, density in zip(groups.sizes, densities, strict=True)}


def _given(groups: Groups, sparsity: float | None) -> dict[str, float]:
    wanted, given = {}, groups.scope.densities
    if unused := [key for key in given if not any(key == name or fnmatchcase(name, key) for name in groups.sizes)]:
        raise ValueError(
            f"`scope.densities` has {unused[0]!r}, which names nothing of what is pruned: {', '.join(groups.sizes)}."
        )
    for name in groups.sizes:
        matching = [key for key in given if key == name] or [key for key in given if fnmatchcase(name, key)]
        if not matching:
            raise ValueError(
                f"`scope.densities` must name every tensor that is pruned, but lacks {name!r}; give it one (1 keeps it "
                "dense), or leave it out of what is pruned."
            )
        wanted[name] = 1 - float(given[matching[0]])
    if sparsity is not None:
        pruned, total = sum(wanted[name] * size for name, size in groups.sizes.items()), sum(groups.sizes.values())
        if abs(pruned - sparsity * total) > 0.5 * len(wanted) + TINY * total:
            raise ValueError(
                f"`sparsity` (={sparsity}) cannot be reached by `scope.densities`, which prune {pruned / total:.6g}; "
                "leave `sparsity` out, or change them."
            )
    return wanted


def er(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float, power: float = 1.0) -> list[float]:
    """Return the densities of ER, proportional to ((n_in + n_out) / (n_in n_out))^power; see `scaled`."""
    return scaled([ratio(shape[:2], power) for shape in shapes], sizes, density)


def erk(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float, power: float = 1.0) -> list[float]:
    """Return the densities of ERK, proportional to (sum(shape) / prod(shape))^power; see `scaled`."""
    return scaled([ratio(shape, power) for shape in shapes], sizes, density)


def uniform(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float) -> list[float]:  # noqa: ARG001
    """Return `density` for each tensor."""
    return [density] * len(sizes)


def ratio(shape: Sequence[int], power: float = 1.0) -> float:
    """Return (sum(shape) / prod(shape))^power."""
    return float((sum(shape) / max(1, math.prod(shape))) ** power)


def scaled(raw: Sequence[float], sizes: Sequence[int], density: float) -> list[float]:
    """Return density_l = min(1, eps raw_l) with sum density_l n_l = density sum n_l.

    Args:
        raw: of each tensor, above 0.
        sizes: units of each tensor.
        density: of all tensors together.
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


LAST = 0.2
"""The least density that uniform+ leaves the last tensor."""


def uniform_plus(shapes: Sequence[Sequence[int]], sizes: Sequence[int], density: float) -> list[float]:
    """Return the densities of uniform+: a first convolution dense, the last tensor at least `LAST`, the rest alike.

    Raises:
        ValueError: those two alone are more than `density` allows.
    """
    fixed = {0: 1.0} if len(shapes[0]) > 2 and len(shapes) > 1 else {}
    while True:
        free = [i for i in range(len(sizes)) if i not in fixed]
        left = density * sum(sizes) - sum(fixed[i] * sizes[i] for i in fixed)
        share = left / max(1, sum(sizes[i] for i in free))
        last = len(sizes) - 1
        if last in free and share < LAST and density < 1:
            fixed[last] = LAST
            continue
        if share < 0 or (not free and left < -TINY):
            least = sum(fixed[i] * sizes[i] for i in fixed) / sum(sizes)
            raise ValueError(
                f"`sparsity` (={1 - density:.6g}) cannot be reached by allocation='uniform_plus', which keeps "
                f"{least:.6g} in the first convolution and the last tensor alone; use 'erk'."
            )
        return [fixed.get(i, min(1.0, share)) for i in range(len(sizes))]


def largest_remainder(
    quotas: Mapping[str, float], total: int, least: Mapping[str, int], most: Mapping[str, int]
) -> dict[str, int]:
    """Return integers near `quotas`, within [least, most], that add up to `total`.

    Each gets the floor of its quota; what is left goes by the largest remainders, of equal ones to the earlier.

    Raises:
        ValueError: the bounds leave no such integers.
    """
    check_reachable(total, least, most)
    counts = {name: min(max(math.floor(q + TINY), least[name]), most[name]) for name, q in quotas.items()}
    remainder = {name: round(q - math.floor(q + TINY), 9) for name, q in quotas.items()}
    names = sorted(quotas, key=lambda name: -remainder[name])  # stable: the earlier of equal ones first
    step = 1 if sum(counts.values()) < total else -1
    while (left := abs(total - sum(counts.values()))) > 0:
        room = [
            name for name in names[::step] if (counts[name] < most[name] if step > 0 else counts[name] > least[name])
        ]
        for name in room[:left]:
            counts[name] += step
    return counts


def check_reachable(total: int, least: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Raise `ValueError` unless `total` units can be kept with at least and at most so many of each tensor."""
    if sum(least.values()) > total:
        raise ValueError(
            f"`scope.min_kept` asks for {sum(least.values())} units, but the sparsity leaves {total}; lower one."
        )
    if sum(most.values()) < total:
        raise ValueError(
            f"`sparsity` cannot be reached: {total} units are to be kept, but only {sum(most.values())} survive; prune "
            "no less than before."
        )


def _by_ranking(
    groups: Groups,
    scores: Mapping[str, Tensor] | None,
    alive: Mapping[str, Tensor] | None,
    total: int,
    least: Mapping[str, int],
    most: Mapping[str, int],
) -> dict[str, int]:
    """Rank all tensors as one, once the best `least` of each are kept."""
    if scores is None:
        raise ValueError("`scores` must be given to an allocation that ranks all tensors as one.")
    check_reachable(total, least, most)
    names = list(groups.sizes)
    open_to = {name: _alive(groups, alive, name) for name in names}
    if any(least.values()):
        for name in names:
            rest = open_to[name].clone()
            prune_smallest_across_([rest], [scores[name]], most[name] - least[name], names=[f"scores of {name}"])
            open_to[name] &= ~rest  # these are kept whatever the ranking says
    prune_smallest_across_(
        [open_to[name] for name in names],
        [scores[name] for name in names],
        sum(most.values()) - total,
        names=[f"scores of {name}" for name in names],
    )
    return {name: least[name] + int(open_to[name].sum()) for name in names}


def _alive(groups: Groups, alive: Mapping[str, Tensor] | None, name: str) -> Tensor:
    return torch.ones(groups.sizes[name], dtype=torch.bool) if alive is None else alive[name].clone()
