#!/usr/bin/env python3
"""Compare searches with full grids, and with Optuna and Syne Tune, on tables of networks that were trained once.

    python scripts/benchmarks/bench_searches.py                     # 200 resampled tables of each table
    python scripts/benchmarks/bench_searches.py --tables lenet_300_100 --competitors --json searches.json
    python scripts/benchmarks/bench_searches.py --make cnn --data data --store store

The tables are scripts/benchmarks/searches/*.csv; protocol.yaml beside them says how they are made and what the figures
mean. --make trains a table anew, or goes on with an unfinished one. --competitors needs Optuna, and
`pip install --no-deps syne-tune==0.16.0 dill`. Optuna draws brackets by Python's hash: PYTHONHASHSEED=0 repeats them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

import orchestrator
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.sweep.search.policy import Policy
from scripts.benchmarks.searches.answers import (
    distances,
    hypervolume_share,
    is_right,
    largest_match,
    raced,
    regret,
)
from scripts.benchmarks.searches.competitors import COMPETITORS
from scripts.benchmarks.searches.search_table import Table, TableSpace, networks_of, read_table, write_table

FOLDER = Path(__file__).parent / "searches"
POLICIES: Mapping[str, type[Any]] = {"matching": Matching, "halving": Halving, "frontier": Frontier}
NEAR = 1
"""Number of sparsities from the grid's answer that count as near."""
BARS = (1 / 3, NEAR, 0.98, 1.0)
"""Largest share of the steps and distance, least share of the hypervolume, and whether the winner is right."""
WORKERS = (1, 4)
"""Numbers of workers of a competitor."""


@dataclass(frozen=True)
class Row:
    """Figure over resampled tables."""

    what: str
    median: float
    low: float
    high: float
    bar: str = ""
    met: bool = True

    def __str__(self) -> str:
        figures = f"{self.median:8.3f} [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.what:<68} {figures:<24} {self.bar:<9}{'' if self.met else 'SHORT'}".rstrip()


def row(what: str, values: Sequence[float], *, most: float | None = None, least: float | None = None) -> Row:
    """Return the median with the 5% and 95% quantiles, held to a bar if there is one."""
    ordered, middle = sorted(values), median(values)
    low, high = (ordered[round(part * (len(ordered) - 1))] for part in (0.05, 0.95))
    if most is not None:
        return Row(what, middle, low, high, f"<= {most:.3g}", middle <= most + 1e-9)
    if least is not None:
        return Row(what, middle, low, high, f">= {least:.3g}", middle >= least - 1e-9)
    return Row(what, middle, low, high)


def measured(table: Table, protocol: Mapping[str, Any], resamples: int, *, competitors: bool) -> Iterator[Row]:
    """Yield the figures of all searches over resampled tables; an iterative table has no bars."""
    draw, count = random.Random(0), protocol["seeds"]
    chosen = protocol["iterative" if table.iterative else "one_shot"]["searches"]
    policies: dict[str, Policy] = {
        name: POLICIES[name.partition("_")[0]](**settings) for name, settings in chosen.items()
    }
    tables = [table.resampled(count, draw) for _ in range(resamples)]
    most_steps, most_distance, least_volume, least_right = (None,) * 4 if table.iterative else BARS
    space = TableSpace(tables[0])
    found = {name: [space.search(policy, each) for each in tables] for name, policy in policies.items()}
    for name, outcomes in found.items():
        yield row(f"{name}: share of the steps", [each.share for each in outcomes], most=most_steps)
        pairs = [*zip(tables, outcomes, strict=True)]
        if name == "matching":
            by_method = [distances(*pair) for pair in pairs]
            for method in table.methods:
                away = [abs(each[method]) for each in by_method]
                yield row(f"{name}: sparsities from the grid's answer, {method}", away, most=most_distance)
            near = [fmean(abs(each) <= NEAR for each in found.values()) for found in by_method]
            yield row(f"{name}: share of methods at most one sparsity away", near)
        elif name == "frontier":
            volumes = [hypervolume_share(each, outcome.settings) for each, outcome in pairs]
            yield row(f"{name}: share of the hypervolume", volumes, least=least_volume)
        else:
            rights = [[is_right(each, setting) for setting in outcome.settings] for each, outcome in pairs]
            by_sparsity = [median(map(float, each)) for each in zip(*rights, strict=True)]
            yield row(f"{name}: median right, at the least certain sparsity", [min(by_sparsity)], least=least_right)
            yield row(f"{name}: share of sparsities with a right winner", [*map(fmean, rights)])
            yield row(f"{name}: regret, points", [regret(each, outcome.settings) for each, outcome in pairs])
            if competitors and not table.iterative:
                yield from _against(name, pairs, draw)


def _against(name: str, pairs: Sequence[tuple[Table, Any]], draw: random.Random) -> Iterator[Row]:
    """Yield the regret of the competitors at equal steps, and that of halving minus it."""
    ours = [regret(table, outcome.settings) for table, outcome in pairs]
    for competitor, new in COMPETITORS.items():
        tried = [
            [regret(table, raced(table, outcome, new, workers, draw)) for table, outcome in pairs]
            for workers in WORKERS
        ]
        theirs = min(tried, key=fmean)
        workers = WORKERS[tried.index(theirs)]
        yield row(f"{name}: regret of {competitor}, {workers} at a time, points", theirs)
        differences = [own - other for own, other in zip(ours, theirs, strict=True)]
        spread, mean = stdev(differences), fmean(differences)
        what = f"{name}: mean regret minus that of {competitor}, +- std"
        yield Row(what, mean, mean - spread, mean + spread, f"<= {spread:.3g}", mean <= spread)


def about(table: Table) -> Iterator[str]:
    """Yield whether the grid's answers with all seeds lie strictly inside the sparsities."""
    for method in table.methods:
        index = largest_match(table, method)
        inside = "inside" if 0 <= index < len(table.sparsities) - 1 else "NOT INSIDE"
        answer = f"{table.sparsities[index]:.0%}" if index >= 0 else "none"
        yield f"grid, {len(table.seeds)} seeds: the largest match of {method} is {answer}, {inside}"


def make(name: str, protocol: Mapping[str, Any], data: str, store: str) -> None:
    """Train the networks of a table that the store lacks, and write the table."""
    kind = "iterative" if name in protocol["iterative"]["tables"] else "one_shot"
    overrides = [*protocol["common"], *protocol[kind]["common"], *protocol[kind]["tables"][name], f"name={name}"]
    places = [f"data.root={data}", f"store.uri={store}", "cluster=inline", "tracking=none"]
    subprocess.run([sys.executable, "-m", "orchestrator", "-m", *places, *overrides], check=True)
    write_table(FOLDER / f"{name}.csv", networks_of(orchestrator.open(store).sweep(name)))


def main() -> int:
    """Measure, print and save; 1 if a figure falls short of its bar."""
    protocol = yaml.safe_load((FOLDER / "protocol.yaml").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for kind in ("one_shot", "iterative") for name in protocol[kind]["tables"]]
    made = [name for name in every if (FOLDER / f"{name}.csv").exists()]
    parser.add_argument("--tables", nargs="+", choices=made, default=made)
    parser.add_argument("--resamples", type=int, default=protocol["resamples"], help="number of resampled tables")
    parser.add_argument("--competitors", action="store_true", help="race Optuna and Syne Tune")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--make", choices=every, help="train this table")
    parser.add_argument("--data", default="data", help="directory with mnist/, for --make")
    parser.add_argument("--store", default="store", help="store of the networks, for --make")
    given = parser.parse_args()
    if given.make:
        make(given.make, protocol, given.data, given.store)
        return 0
    saved: dict[str, list[dict[str, Any]]] = {}
    for name in given.tables:
        iterative = name in protocol["iterative"]["tables"]
        table = read_table(FOLDER / f"{name}.csv", protocol["margin"], iterative=iterative)
        print(f"\n{name}, {given.resamples} resampled tables: median [5%, 95%]", *about(table), sep="\n")
        saved[name] = []
        for each in measured(table, protocol, given.resamples, competitors=given.competitors):
            print(each, flush=True)
            saved[name].append(asdict(each))
    if given.json:
        given.json.write_text(json.dumps(saved, indent=1) + "\n")
    return any(not each["met"] for rows in saved.values() for each in rows)


if __name__ == "__main__":
    raise SystemExit(main())
