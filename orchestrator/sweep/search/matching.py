"""Search `matching`: the largest sparsity of each line that matches dense, explored by bisection, then confirmed.

A few seeds explore: bisection looks for the largest sparsity at which a confirmation would probably succeed. The first
looks know little of the spread, so all are judged again at the end, by the spread of all. Other seeds confirm, by the
non-inferiority test of the comparison on validation figures: from one sparsity below the estimate upwards, in a fixed
order, up to the first no. No confirming seed has influenced where the tests begin, so the chance of a false match is
that of the test: at most 2.5% for each line, if the loss grows with sparsity.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.compare.statistics import LEVEL, Estimate, estimate, has_spread, least_gain, matches, t_quantile
from orchestrator.core.metrics import Metric
from orchestrator.planning.number_formats import percent
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.policy import Answer, Ask, Conclude, RuleOut, Seen, Step, Strand, uneven

SURE = 0.97
"""Two-sided level at which exploration must predict that a confirmation succeeds: 98.5% on one side."""
LEAST_TO_CONFIRM = 2
"""Minimum number of seeds of a test, which needs their spread."""


@dataclass(frozen=True)
class Matching:
    """Search for the largest sparsity that matches dense, line by line.

    Args:
        explore: number of seeds that explore, the first ones; 0 tests all sparsities upwards with all seeds
        tries: maximum number of confirmations; each has its own seeds and an equal part of the 2.5%
    """

    explore: int = 3
    tries: int = 1

    @property
    def level(self) -> float:
        """Two-sided level of each confirmation."""
        return 1 - (1 - LEVEL) / self.tries

    def refusals(self, space: SearchSpace) -> Iterator[str]:
        """Yield the reasons why a line cannot be searched."""
        least = self.explore + LEAST_TO_CONFIRM * self.tries
        yield from _no_margin(space)
        for line, points in space.lines.items():
            sparsities = [point.sparsity for point in points]
            if None in sparsities or len(set(sparsities)) < len(points):
                yield (
                    f"search=matching needs an axis with an order, and {line} has networks without a requested "
                    "fraction of their own; sweep schedule.sparsity, as in schedule.sparsity=0.5,0.6,0.7,0.8,0.9."
                )
            elif len(points) < 2:
                yield (
                    f"search=matching looks for a sparsity, and {line} has only one; pass an axis, as in "
                    "schedule.sparsity=0.5,0.6,0.7,0.8,0.9."
                )
            elif (count := len(seeds := points[0].seeds)) < least:
                yield (
                    f"`seed` has {count} values for {line}, too few to explore and to confirm: search.explore "
                    f"(={self.explore}), and {LEAST_TO_CONFIRM} for each of search.tries (={self.tries}); pass "
                    f"seed=range({max(8, least)})."
                )
            elif wrong := [*uneven(points, seeds)]:
                yield from wrong
            elif (fresh := sum(map(len, self._split(space, points)[1]))) < LEAST_TO_CONFIRM * self.tries:
                yield (
                    f"`seed` has {fresh} values for {line} that could confirm, as earlier searches in this store have "
                    f"seen the others, and a confirmation needs {LEAST_TO_CONFIRM} or more; pass more seeds, as in "
                    f"seed=range({count + 5})."
                )

    def strands(self, space: SearchSpace) -> list[Strand]:
        """Return the search of each line."""
        return [self._search(space, line, points) for line, points in space.lines.items()]

    def bounds(self, space: SearchSpace) -> tuple[list[Cell], list[Cell]]:
        """Return the networks of the shortest and of the longest search of each line."""
        least, most = list[Cell](), list[Cell]()
        for points in space.lines.values():
            ways = [way for found in range(-1, len(points)) for way in self._ways(space, points, found)]
            shortest, longest = min(ways, key=lambda way: len(way[0])), max(ways, key=lambda way: len(way[1]))
            least += shortest[0]
            most += longest[1]
        return least, most

    def _ways(
        self, space: SearchSpace, points: Sequence[Candidate], found: int
    ) -> Iterator[tuple[list[Cell], list[Cell]]]:
        """Yield the fewest and the most networks of a search whose bisection ends at an index, for each estimate."""
        explorers, (first, *others) = self._split(space, points)
        path, low, high = list[int](), -1, len(points)
        while high - low > 1:
            path.append((low + high) // 2)
            low, high = (path[-1], high) if path[-1] <= found else (low, path[-1])
        explored = [cell for index in path for cell in _cells(points[index], explorers)]
        for estimated in (found, *(index for index in path if index > found)):
            start = max(estimated - 1, 0)
            confirmed = [cell for point in points[start:] for cell in _cells(point, first)]
            again = [cell for seeds in others for point in points[:start] for cell in _cells(point, seeds)]
            yield [*explored, *_cells(points[start], first)], explored + confirmed + again

    def _split(self, space: SearchSpace, points: Sequence[Candidate]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the seeds that explore, and the seeds of each confirmation, which no earlier search has seen."""
        known = {seed for point in points for seed, cell in point.cells.items() if cell.network in space.seen}
        seeds = sorted(points[0].seeds, key=lambda seed: (seed not in known, seed))
        explorers, left = seeds[: self.explore], [seed for seed in seeds[self.explore :] if seed not in known]
        return tuple(explorers), [tuple(left[place :: self.tries]) for place in range(self.tries)]

    def _search(self, space: SearchSpace, line: str, points: Sequence[Candidate]) -> Strand:
        explorers, confirmers = self._split(space, points)
        start = 0
        if explorers:
            start = max((yield from self._explore(points, explorers, len(confirmers[0]))) - 1, 0)
        claimed, ended = -1, start
        for number, seeds in enumerate(confirmers):
            claimed, ended, metric = yield from self._confirm(points, start, seeds)
            if claimed >= 0 or start == 0 or number == len(confirmers) - 1:
                break
            start //= 2
        yield RuleOut(tuple(points[:start]), f"the search confirmed from {points[start].name} upwards")
        if ended < len(points):
            yield RuleOut(tuple(points[ended:]), f"the confirmation of {line} ended at {points[ended].name}")
        yield _answer(line, points, claimed, ended, seeds, metric)

    def _explore(
        self, points: Sequence[Candidate], seeds: Sequence[int], confirming: int
    ) -> Generator[Step, Seen, int]:
        """Return the index of the largest sparsity at which a confirmation would probably succeed; -1 for none."""
        gains, margin = dict[int, list[float]](), 0.0

        def promising(index: int) -> bool:
            each = (*(gains[other] for other in gains if other != index), gains[index])
            return would_match(each, confirming, margin, self.level)

        low, high, told = -1, len(points), ""
        while high - low > 1:
            middle = (low + high) // 2
            cells = tuple(_cells(points[middle], seeds))
            seen = yield Ask(f"explore {points[middle].name}", cells)
            found = [figures for cell in cells if (figures := seen[cell]) is not None]
            if len(found) == len(cells):
                gains[middle], margin = [figures.gain for figures in found], found[0].metric.margin
            good = middle in gains and promising(middle)
            low, high = (middle, high) if good else (low, middle)
            told = _loss(estimate([figures.difference for figures in found]), found[0].metric) if found else "failed"
            if high - low > 1:
                yield Conclude(f"{told}; on to {'sparser' if good else 'denser'} networks")
        estimated = max([low, *filter(promising, gains)])
        raised = f"; by the spread of all looks {points[estimated].name} is good enough" if estimated > low else ""
        yield Conclude(f"{told}{raised}")
        return estimated

    def _confirm(
        self, points: Sequence[Candidate], start: int, seeds: Sequence[int]
    ) -> Generator[Step, Seen, tuple[int, int, Metric | None]]:
        """Test upwards from `start`; return the index of the last match (-1 for none), of the first no, the metric."""
        differences: list[Estimate | None] = []
        claimed, metric = -1, None
        for index in range(start, len(points)):
            cells = tuple(_cells(points[index], seeds))
            seen = yield Ask(f"confirm {points[index].name}", cells, confirms=True)
            found = [figures for cell in cells if (figures := seen[cell]) is not None]
            metric = found[0].metric if found else metric
            whole = len(found) == len(cells)
            differences.append(estimate([each.difference for each in found], self.level) if whole else None)
            verdict = "no" if metric is None else [*matches(differences, metric)][-1]
            yield Conclude(f"{_loss(differences[-1], metric) if metric else 'failed'}: {verdict}")
            if verdict == "yes":
                claimed = index
            if verdict == "no":
                return claimed, index, metric
        return claimed, len(points), metric


def would_match(gains: Sequence[Sequence[float]], confirming: int, margin: float, level: float = LEVEL) -> bool:
    """Predict whether a confirmation of the last explored sparsity would succeed.

    With mean g of its k gains over dense, the pooled standard deviation s of all explored sparsities (f degrees of
    freedom) and n seeds that confirm, the prediction is yes if

        g > -margin + s (t(level, n - 1) / sqrt(n) + t(SURE, f) sqrt(1/k + 1/n))

    The first term is the interval of the confirmation; the second is the uncertainty of its mean, given g.

    Args:
        gains: gains of each explored sparsity by seed, the last one at the end
        confirming: number of seeds that confirm
        margin: largest loss that a match may hide
        level: two-sided level of the confirmation
    """
    means = [math.fsum(each) / len(each) for each in gains]
    squares = math.fsum((gain - mean) ** 2 for each, mean in zip(gains, means, strict=True) for gain in each)
    degrees = sum(len(each) - 1 for each in gains)
    deviation = math.sqrt(squares / degrees)
    room = t_quantile(level, confirming - 1) / math.sqrt(confirming)
    unknown = t_quantile(SURE, degrees) * math.sqrt(1 / len(gains[-1]) + 1 / confirming)
    return means[-1] > -margin + deviation * (room + unknown)


def _no_margin(space: SearchSpace) -> Iterator[str]:
    """Yield a sentence if the plan sets a margin of zero: `compare.margin`, else that of the task."""
    for trial in space.plan.trials:
        given = {name: (trial.config.get(name) or {}).get("margin") for name in ("compare", "task")}
        key, margin = next(((name, each) for name, each in given.items() if each is not None), ("", None))
        if margin == 0:
            yield (
                f"`{key}.margin` (={margin:g}) leaves nothing to search for: a network exactly as good as dense "
                "passes the test in 2.5% of cases, however many seeds it has; pass the loss that you accept as "
                "compare.margin, in the metric's own scale."
            )
            return


def _cells(point: Candidate, seeds: Iterable[int]) -> Iterator[Cell]:
    return (point.cells[seed] for seed in seeds)


def _loss(difference: Estimate | None, metric: Metric) -> str:
    """Return the difference from dense with the limit of the loss, in the metric's unit."""
    if difference is None:
        return "failed"
    unit = " points" if metric.scale != 1 else f" {metric.unit}" if metric.unit else ""
    text = f"{metric.written(difference.mean, '+')}{unit} against dense"
    if not has_spread(difference):
        return text
    return f"{text}, at worst {metric.written(least_gain(difference, metric), '+')}"


def _answer(
    line: str, points: Sequence[Candidate], claimed: int, ended: int, seeds: Sequence[int], metric: Metric | None
) -> Answer:
    if claimed < 0 or metric is None:
        end = points[min(ended, len(points) - 1)].name
        return Answer(f"{line}: no sparsity is shown to match dense; the confirmation ended at {end}")
    point = points[claimed]
    assert point.sparsity is not None
    further = "; no sparser network was swept" if claimed == len(points) - 1 else ""
    return Answer(
        f"{line}: {percent(point.sparsity)} matches dense: {metric.loss} is ruled out on validation by {len(seeds)} "
        f"seeds that explored nothing{further}",
        tuple(cell.network for cell in _cells(point, point.seeds)),
    )
