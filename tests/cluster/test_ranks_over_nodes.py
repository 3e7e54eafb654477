"""A trial of two processes on two real Ray nodes: the bits of one node, also after the loss of one. Slow."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Nodes, two_nodes
from rank_kills import Trial, disturbed, quiet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="needs the loopback addresses 127.0.0.2 and up"),
]
LOST = ("node of rank 0", "silent node of rank 1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Two nodes, and a head for the driver."""
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """Results of a sweep on one node, and the seconds for which its rank 1 worked."""
    trial = Trial(tmp_path_factory.mktemp("quiet"))
    span = quiet(trial)
    return trial.results(), span


def test_a_trial_that_must_be_on_one_node_is_refused_before_anything_starts(cluster: Nodes, tmp_path: Path) -> None:
    trial = Trial(tmp_path, cluster).start("cluster.placement=pack")

    assert trial.wait() == 2
    assert "`cluster.cpus_per_trial` (=2) must fit on one node" in trial.output
    assert "cluster.placement=spread" in trial.output
    assert "Traceback" not in trial.output
    assert not list((tmp_path / "store").glob("stages/*"))


def test_two_nodes_give_the_bits_of_one(cluster: Nodes, one_node: tuple[dict[str, Any], float], tmp_path: Path) -> None:
    trial = Trial(tmp_path, cluster).start("cluster.placement=spread")
    trial.until_ranks()

    assert {trial.node_of("rank 0"), trial.node_of("rank 1")} == {3, 4}
    assert trial.wait() == 0, trial.output
    assert trial.retries == 0
    assert trial.results() == one_node[0]


def test_the_death_or_silence_of_a_node_costs_one_attempt_and_no_bit(
    cluster: Nodes, one_node: tuple[dict[str, Any], float], tmp_path: Path
) -> None:
    results, span = one_node
    trial = Trial(tmp_path, cluster)
    losses = disturbed(trial, LOST, span / 3, random.Random(0))

    assert [loss.kind for loss in losses] == [*LOST]
    assert not any(loss.late for loss in losses), losses
    assert trial.driver.returncode == 0, trial.output
    assert trial.retries == len(LOST)
    assert trial.results() == results
