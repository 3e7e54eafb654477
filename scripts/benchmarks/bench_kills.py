#!/usr/bin/env python3
"""Kill a process, all processes, the driver or a node of a trial of two processes at random moments.

    python scripts/benchmarks/bench_kills.py [--moments 30] [--seed 0] [--only "node of rank 0"]

Each moment is a sweep of its own, of a dense training and a round, on a Ray of its own or on two nodes of one CPU each:
real raylets on loopback addresses. A silent node is stopped and not killed, so no connection to it breaks. A killed
driver is started again, and a killed node joins again once the driver has told the loss. Every sweep must end with the
bits of a quiet one on one node, and lose one attempt. No process of the lost attempt may be left after 10 s, or 20 s if
a node died. The status is 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cluster"))

from nodes import Nodes, two_nodes  # type: ignore[import-not-found]
from rank_kills import NODES, RANKS, Loss, Trial, disturbed, quiet  # type: ignore[import-not-found]

CASES = (
    *((kind, False) for kind in (*RANKS, "driver")),
    *((kind, True) for kind in (*NODES, "all ranks", "driver")),
)
"""Victims, and whether the trial runs on the two nodes."""


def main() -> int:
    """Kill, print a line for each moment, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=30, help="number of kills (30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (0)")
    parser.add_argument("--only", choices=[*RANKS, "driver", *NODES], help="what is killed (all of them in turn)")
    given = parser.parse_args()
    cases = itertools.cycle(case for case in CASES if given.only in (None, case[0]))
    chosen = sorted(itertools.islice(cases, given.moments), key=lambda case: case[1])
    with tempfile.TemporaryDirectory(prefix="kills") as folder:
        lost = [each for where in (False, True) for each in _on(where, chosen, given.seed, Path(folder))]
    good = sum(held for _, held, _ in lost)
    nodes_lost, others = ([each.left for each, *_ in lost if (each.node is None) is other] for other in (False, True))
    print(f"{good} of {len(lost)} held; attempts lost: {sum(attempts for *_, attempts in lost)}")
    print(f"longest until no process was left: {max(others, default=0):.1f} s, node {max(nodes_lost, default=0):.1f} s")
    return 0 if good == given.moments else 1


def _on(on_nodes: bool, cases: list[tuple[str, bool]], seed: int, root: Path) -> Iterator[tuple[Loss, bool, int]]:
    """Run the cases on the nodes, or on a Ray of each sweep's own; yield losses, whether all held, and attempts."""
    kinds = [kind for kind, where in cases if where is on_nodes]
    if not kinds:
        return
    with two_nodes() if on_nodes else contextlib.nullcontext() as cluster:
        expected, span = _quiet(root, cluster)
        print(
            f"{'two nodes' if on_nodes else 'Ray of its own'}: rank 1 of a quiet sweep works {span:.1f} s", flush=True
        )
        for number, kind in enumerate(kinds):
            draws = random.Random(f"{seed} {on_nodes} {number}")
            yield _killed(kind, root / f"{on_nodes}-{number}", cluster, expected, span, draws)


def _quiet(root: Path, cluster: Nodes | None) -> tuple[dict[str, Any], float]:
    """Return the results of a quiet sweep on one node, and the seconds of rank 1 here."""
    one_node, here = Trial(root / "quiet"), Trial(root / "quiet on nodes", cluster)
    if not one_node.results():
        span = quiet(one_node)
    if cluster is not None:
        span = quiet(here)
        print(f"bits on two nodes equal to those on one: {here.results() == one_node.results()}", flush=True)
    return one_node.results(), span


def _killed(
    kind: str, folder: Path, cluster: Nodes | None, expected: dict[str, Any], span: float, draws: random.Random
) -> tuple[Loss, bool, int]:
    """Run sweeps until a kill meets one before its end; print a line, and return whether all held."""
    for tried in itertools.count():
        begun = time.monotonic()
        trial = Trial(folder.with_name(f"{folder.name}-{tried}"), cluster)
        losses = disturbed(trial, [kind], span, draws)
        if losses:
            break
    (loss,), attempts = losses, trial.retries + (kind == "driver")
    equal = trial.driver.returncode == 0 and trial.results() == expected
    told = "" if loss.noticed is None else f", told after {loss.noticed:4.1f} s"
    print(
        f"{kind:21} {loss.moment:4.1f} s after both began: none left after {loss.left:4.1f} s{told}, "
        f"attempts lost: {attempts}, bits {'equal' if equal else 'DIFFERENT'}, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    held = equal and attempts == 1 and not loss.late
    if not held:
        print(trial.output, flush=True)
    return loss, held, attempts


if __name__ == "__main__":
    sys.exit(main())
