#!/usr/bin/env python3
"""Measure how long a search takes to decide, among many candidates.

    python scripts/benchmarks/bench_decisions.py [--candidates 2500] [--seeds 4] [--repeats 3] [--json FILE]

The defaults make 10,000 networks: 2,500 candidates with four seeds. Each search runs to its end on made-up records, as
the conductor runs it: one replay, which goes on from decision to decision. A decision begins when the last record that
it waits for has come. Times are those of the processor, in milliseconds: for each decision the shortest of the repeats;
then the median and the longest of all decisions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "orchestrator"))

from searched_plans import crossing, grid, records_of  # type: ignore[import-not-found]

from orchestrator.core.records import StageRecord
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.sweep.search.policy import Budget, Policy
from orchestrator.sweep.search.replay import Replay

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)


def decisions(policy: Policy, space: SearchSpace, records: Mapping[str, StageRecord]) -> list[float]:
    """Run a search to its end; return the milliseconds of each decision."""
    replay, held, found = Replay(policy, space, Budget()), dict[str, StageRecord](), list[float]()
    while True:
        began = time.process_time()
        decision = replay.next(held)
        found.append(1000 * (time.process_time() - began))
        if decision.ended:
            return found
        held |= {key: records[key] for key in decision.run}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=2_500)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    methods = [f"method_{index}" for index in range(given.candidates // len(SPARSITIES))]
    plan = grid(methods, SPARSITIES, given.seeds)
    records, space = records_of(plan, crossing(0.7)), SearchSpace(plan)
    policies: dict[str, Policy] = {
        "matching": Matching(explore=2),
        "halving": Halving(),
        "halving, intervals": Halving(first=2, confidence=0.9),
        "frontier": Frontier(["parameters", "macs"]),
        "frontier, intervals": Frontier(["parameters"], within=0.02, first=2, confidence=0.9),
    }
    print(f"{len(space.candidates)} candidates, {len(plan.trials)} trials, {len(plan.stages)} stages")
    found = []
    for name, policy in policies.items():
        runs = zip(*(decisions(policy, space, records) for _ in range(given.repeats)), strict=True)
        each = [min(times) for times in runs]
        found.append({"search": name, "decisions": len(each), "median": statistics.median(each), "worst": max(each)})
        print(f"{name:20} {len(each):3} decisions: median {found[-1]['median']:6.1f} ms, worst {max(each):6.1f} ms")
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
