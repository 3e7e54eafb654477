"""Two real Ray nodes must see one store; a node that does not see it is reported at once. Slow."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import OWN_MOUNTS, Nodes, nodes, run

from orchestrator.core.specs import Plan
from orchestrator.store.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the loopback addresses 127.0.0.2 and up"),
]

SWEEP = (
    "+sweep=random_amounts",
    "schedule.sparsity=0.5,0.9",
    "schedule.rounds=1",
    "seed=0,1",
    "model=mlp",
    "model.hidden=[16]",
    "train.epochs=1",
    "finetune.epochs=1",
    "tracking=none",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Head node, and a second node for which the folder `private` is empty."""
    with nodes() as found:
        hidden = found.root / "private"
        hidden.mkdir()
        if not shutil.which("unshare") or subprocess.run([*OWN_MOUNTS, str(hidden), "true"], check=False).returncode:
            pytest.skip("mounting in a namespace is not permitted here")
        found.head(cpus=1)
        found.join(3, without=hidden)
        yield found


def sweep(cluster: Nodes, uri: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the head node."""
    command = [sys.executable, "-m", "orchestrator", *SWEEP, f"store.uri={uri}", *overrides]
    return run([*command, f"cluster.address={cluster.address}"], cluster.root / "head", cluster.environment)


def finished(store: Store) -> int:
    """Return the number of finished stages of the only sweep; asserts that all of its stages are finished."""
    (name,) = store.sweeps()
    plan = Plan.from_json(store.load_sweep(name)["plan"])
    assert set(store.finished(plan.stages)) == set(plan.stages)
    return len(plan.stages)


def test_a_node_that_does_not_see_the_store_is_named_before_anything_runs(cluster: Nodes) -> None:
    folder = cluster.root / "private" / "store"
    result = sweep(cluster, str(folder))

    assert result.returncode == 2, result.stdout + result.stderr
    assert f"does not see `store.uri` (={folder}) as the driver does" in result.stderr
    assert "s3://bucket/prefix" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(folder.glob("stages/*"))
    assert not list(folder.glob("probes/*"))


def test_a_directory_that_both_nodes_mount_holds_every_result(cluster: Nodes) -> None:
    folder = cluster.root / "shared"
    result = sweep(cluster, str(folder))

    assert result.returncode == 0, result.stdout + result.stderr
    assert finished(Store(str(folder))) == 6
    assert not list(folder.glob("probes/*"))


def test_nodes_that_share_nothing_but_an_object_store(cluster: Nodes, s3: dict[str, object]) -> None:
    uri = f"s3://bucket/{uuid.uuid4().hex}"
    options = [f"+store.options.{name}={value}" for name, value in s3.items()]
    result = sweep(cluster, uri, *options)

    assert result.returncode == 0, result.stdout + result.stderr
    assert finished(Store(uri, options=s3)) == 6
    assert not Path(cluster.root / "head" / "store").exists()
