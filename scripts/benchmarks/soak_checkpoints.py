#!/usr/bin/env python3
"""Kill the worker of long stages at random moments, and compare the results with undisturbed stages.

    python scripts/benchmarks/soak_checkpoints.py          # 30 kills of stages of a minute
    python scripts/benchmarks/soak_checkpoints.py --seconds 600 --kills 100 --variant "masked round"

Each attempt must continue from its last checkpoint. A kill may cost the interval between two checkpoints, one
checkpoint and one batch. Weights, masks, curve and record must be bit-equal at the end. Checkpoints are written at the
requested interval, at any cost. The stages are those of `tests/faults/test_checkpoint_kills.py`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "faults"))

from kills import VARIANTS, disturbed, each, stages, undisturbed  # type: ignore[import-not-found]

from orchestrator.store.store import Store

TRIED = 10
"""Epochs for measuring the speed of this machine."""
SLACK = 0.05
"""Extra seconds, as the killer may have to wait for the processor."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="seconds of an undisturbed stage (60)")
    parser.add_argument("--kills", type=int, default=30, help="number of kills, at least two for each variant (30)")
    parser.add_argument("--interval", type=float, default=2, help="seconds between two checkpoints (2)")
    parser.add_argument("--variant", nargs="*", choices=tuple(VARIANTS), help="variants to run (all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (0)")
    asked = parser.parse_args()
    variants, rng, broken = asked.variant or list(VARIANTS), random.Random(asked.seed), 0
    print(f"{'':32}undisturbed       kills  lost: mean  most  allowed at least  bits", flush=True)
    for index, variant in enumerate(variants):
        kills = max(2, len(range(index, asked.kills, len(variants))))
        with tempfile.TemporaryDirectory() as folder:
            held = _soaked(Path(folder), variant, asked.seconds, kills, asked.interval, rng)
        broken += not held
    return 1 if broken else 0


def _soaked(root: Path, variant: str, seconds: float, kills: int, interval: float, rng: random.Random) -> bool:
    """Soak one variant and print a line; return whether all checks passed."""
    begun = time.monotonic()
    undisturbed(root / "tried", stages(variant, TRIED, interval))
    epochs = round(TRIED * seconds / (time.monotonic() - begun))
    specs, begun = stages(variant, epochs, interval), time.monotonic()
    expected = undisturbed(root / "quiet", specs)
    taken = time.monotonic() - begun
    killed = disturbed(root / "disturbed", specs, expected.steps, kills, min(interval, taken / 20), rng)
    store = Store(str(root / "disturbed"))
    found = store.finished([specs[-1].key])[specs[-1].key]
    equal = each(found, store) == each(expected, Store(str(root / "quiet")))
    lost, allowed = [kill.lost for kill in killed], [interval + kill.write + kill.batch for kill in killed]
    late = [kill for kill, most in zip(killed, allowed, strict=True) if kill.lost > most + SLACK]
    print(
        f"{variant:32}{taken:6.1f} s, {expected.steps} steps {len(killed):3} {fmean(lost or [0.0]):10.2f} s "
        f"{max(lost, default=0.0):6.2f} s {min(allowed, default=0.0):11.2f} s  {'equal' if equal else 'DIFFERENT'}"
        f"{''.join(f', TOO MUCH LOST: {kill}' for kill in late)}",
        flush=True,
    )
    return equal and not late


if __name__ == "__main__":
    sys.exit(main())
