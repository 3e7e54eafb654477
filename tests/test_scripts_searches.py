"""The benchmark of searches: grids' answers by hand, laws of its figures, and the tables that it reads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import yaml

from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from scripts.benchmarks.bench_searches import FOLDER, row
from scripts.benchmarks.searches.answers import (
    best_method,
    distances,
    hypervolume_share,
    is_right,
    largest_match,
    raced,
    regret,
)
from scripts.benchmarks.searches.competitors import race
from scripts.benchmarks.searches.search_table import Network, Table, TableSpace, read_table, write_table

SPARSITIES = (0.2, 0.4, 0.6, 0.8, 0.9)
MARGIN = 0.01
T_8 = 2.306004
"""t(0.975, 8)."""


def networks(seeds: int = 9) -> Iterable[Network]:
    """Yield two methods: `good` loses the margin at 85%, `bad` at 50%."""
    draw = np.random.default_rng(0)
    for seed in range(seeds):
        dense = 0.97 + draw.normal(0, 0.001)
        yield Network("dense", 0.0, seed, dense, 0.5, 1000, 900, 300)
        for method, at in (("good", 0.85), ("bad", 0.5)):
            for sparsity in SPARSITIES:
                val = dense - MARGIN * (sparsity / at) ** 4 + draw.normal(0, 0.0005)
                left = round(1000 * (1 - sparsity))
                yield Network(method, sparsity, seed, val, 0.5, left, left, 100)


TABLE = Table(networks(), MARGIN)
SPACE = TableSpace(TABLE)


def test_the_answer_of_the_grid_by_hand() -> None:
    expected = {}
    for method in TABLE.methods:
        gains = np.array([TABLE.gains((method, sparsity)) for sparsity in SPARSITIES])
        worst = gains.mean(1) - T_8 * gains.std(1, ddof=1) / 3
        expected[method] = int(np.argmax(worst <= -MARGIN)) - 1

    assert {method: largest_match(TABLE, method) for method in TABLE.methods} == expected == {"good": 3, "bad": 1}


def test_matching_finds_the_answer_of_the_grid_for_the_steps_that_it_asked_for() -> None:
    found = SPACE.search(Matching(), TABLE)

    assert distances(TABLE, found) == {"good": 0, "bad": 0}
    assert found.share == sum(found.spent.values()) / (2 * 5 * 9)
    assert found.spent["good", 0.6] == 9, "explored with three seeds, confirmed with the other six"
    assert found.share < 1


def test_the_network_after_a_round_takes_the_rounds_before_it() -> None:
    table = Table(networks(), MARGIN, iterative=True)
    found = TableSpace(table).search(Matching(), table.resampled(9, random.Random(3)))
    spent = {method: [found.spent[method, sparsity] for sparsity in SPARSITIES] for method in table.methods}

    assert {method: [*dict(found.settings)].count(method) for method in table.methods} == {"good": 1, "bad": 1}
    assert all(counts == sorted(counts, reverse=True) for counts in spent.values())
    assert spent["good"][0] == 9, "no seed has a network without its first round"
    assert found.share == sum(map(sum, spent.values())) / (2 * 5 * 9)


def test_the_frontier_of_the_whole_grid_has_all_of_its_hypervolume() -> None:
    found = SPACE.search(Frontier(), TABLE)

    assert hypervolume_share(TABLE, TABLE.settings) == pytest.approx(1)
    assert 0.98 < hypervolume_share(TABLE, found.settings) <= 1
    assert 0 < hypervolume_share(TABLE, found.settings[:1]) < 1
    assert hypervolume_share(TABLE, [("bad", 0.9)]) < hypervolume_share(TABLE, [("good", 0.9)])


def test_halving_is_judged_by_the_means_of_all_seeds() -> None:
    found = SPACE.search(Halving(factor=4), TABLE)
    wrong = [("bad", sparsity) for sparsity in SPARSITIES]

    assert [*found.settings[2:]] == [("good", 0.6), ("good", 0.8), ("good", 0.9)]
    assert found.share == pytest.approx(2 / 18), "one seed ranks two methods, and then one is left"
    assert best_method(TABLE, 0.9) == "good"
    assert is_right(TABLE, ("good", 0.9))
    assert not is_right(TABLE, ("bad", 0.9))
    assert regret(TABLE, [("good", 0.9)]) == 0
    means = [np.mean(TABLE.gains(("good", s))) - np.mean(TABLE.gains(("bad", s))) for s in SPARSITIES]
    assert regret(TABLE, wrong) == pytest.approx(100 * np.mean(np.maximum(means, 0)))


def test_a_resampled_table_has_some_seeds_in_another_order() -> None:
    found = TABLE.resampled(5, random.Random(1))
    order = [next(seed for seed in TABLE.seeds if TABLE.dense[seed].val == found.dense[each].val) for each in range(5)]

    assert found.seeds == (0, 1, 2, 3, 4)
    assert len({*order}) == 5
    assert order != sorted(order)
    assert found.gains(("good", 0.8)) == [TABLE.gains(("good", 0.8))[seed] for seed in order]


class Third:
    """Scheduler that stops every trial whose mean is below a limit."""

    def __init__(self, limit: float) -> None:
        self.limit, self.started, self.reports = limit, 0, list[tuple[int, int]]()

    def start(self) -> int:
        self.started += 1
        return self.started - 1

    def goes_on(self, trial: int, seeds: int, value: float) -> bool:
        self.reports.append((trial, seeds))
        return value >= self.limit


GAINS = [[0.0, 0.2, 0.4], [-1.0, 9.0, 9.0], [0.1, 0.1, 0.1]]


def test_trials_of_a_race_report_in_turn_within_the_budget() -> None:
    alone, together = Third(0.0), Third(0.0)

    assert race(alone, GAINS, 6, workers=1) == 0, "the last report of method 0 is 0.2"
    assert race(together, GAINS, 6, workers=3) == 0
    assert alone.reports == [(0, 1), (0, 2), (0, 3), (1, 1), (2, 1), (2, 2)]
    assert together.reports == [(0, 1), (1, 1), (2, 1), (0, 2), (2, 2), (0, 3)]


def test_a_competitor_spends_what_halving_has_spent() -> None:
    outcome, racers = SPACE.search(Halving(), TABLE), list[Third]()

    def new(methods: int, seeds: int, draw: random.Random) -> Third:
        racers.append(Third(-1.0))
        return racers[-1]

    found = raced(TABLE, outcome, new, 2, random.Random(0))

    assert [sparsity for _, sparsity in found] == [*SPARSITIES]
    assert sum(len(racer.reports) for racer in racers) == sum(outcome.spent.values())


def test_a_table_is_read_as_it_was_written_and_lacks_no_network(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", networks())
    found = read_table(tmp_path / "table.csv", MARGIN)

    assert (found.dense, found.pruned) == (TABLE.dense, TABLE.pruned)
    with pytest.raises(SystemExit, match="not every setting with every seed"):
        Table([*networks()][:-1], MARGIN)


def test_the_tables_are_those_of_the_protocol() -> None:
    protocol = yaml.safe_load((FOLDER / "protocol.yaml").read_text())
    tables = sorted(FOLDER.glob("*.csv"))
    one_shot, iterative = protocol["one_shot"], protocol["iterative"]

    assert {path.stem for path in tables} == one_shot["tables"].keys() | iterative["tables"].keys()
    for path in tables:
        found = read_table(path, protocol["margin"])
        kind = one_shot if path.stem in one_shot["tables"] else iterative
        axes = dict(each.split("=", 1) for each in (*protocol["common"], *kind["common"]))
        asked = [*map(float, axes["schedule.sparsity"].split(","))]
        rounds = int(axes.get("schedule.rounds", 1))
        assert [*found.methods] == axes["method"].split(",")
        if rounds > 1:
            asked = [1 - (1 - asked[0]) ** (number / rounds) for number in range(1, rounds + 1)]
        assert [*found.sparsities] == pytest.approx(asked, abs=1e-6)
        assert len(found.seeds) == 10
        assert {each.steps for each in found.pruned.values()} == {int(axes["finetune.steps"])}
        assert float(axes["compare.margin"]) == protocol["margin"]


def test_a_row_holds_its_median_to_its_bar() -> None:
    found = row("share", [0.1, 0.2, 0.9], most=0.3)

    assert (found.median, found.low, found.high, found.met) == (0.2, 0.1, 0.9, True)
    assert not row("share", [0.1, 0.4, 0.9], most=0.3).met
    assert not row("volume", [0.9], least=0.98).met
