"""A worker that is killed at random moments, also while a checkpoint is written, gives the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from kills import VARIANTS, disturbed, each, stages, undisturbed

from orchestrator.store.store import Store

FAST = ("masked round",)
MANY = ("adam, cosine", "plateau", "early stopping", "accumulation", "gradual round", "sr_ste round", "movement round")
"""Variants whose state is that of others: killed by `scripts/test -m many`."""
INTERVAL = 0.05


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST) + [pytest.mark.many] * (name in MANY))
        for name in VARIANTS
    ],
)
def test_a_worker_that_is_killed_changes_no_bit(variant: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    most = int(request.config.getoption("--chaos", 10))
    kills = 2 if variant in FAST and most <= 10 else max(3, most // len(VARIANTS))
    specs = stages(variant, 3 * kills, INTERVAL)
    begun = time.monotonic()
    expected = undisturbed(tmp_path / "quiet", specs)
    seconds = time.monotonic() - begun
    killed = disturbed(tmp_path / "disturbed", specs, expected.steps, kills, INTERVAL, random.Random(0))
    print(f"{variant}: {killed}, {seconds:.1f} s undisturbed")
    quiet, store = Store(str(tmp_path / "quiet")), Store(str(tmp_path / "disturbed"))
    found = store.finished([specs[-1].key])[specs[-1].key]

    assert each(found, store) == each(expected, quiet)
    assert store.checkpoints.known() == []
    assert killed
    assert all(kill.lost <= INTERVAL + kill.write + kill.batch + 0.1 for kill in killed)
