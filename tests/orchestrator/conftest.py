"""Shared fixtures of the tests of this package: stores of every kind, and an empty MLflow database."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

import pytest

from orchestrator.store.store import Store


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(str(tmp_path / "store"))
    if request.param == "memory":
        return Store(f"memory://{uuid.uuid4().hex}")
    return Store(f"s3://bucket/{uuid.uuid4().hex}", options=request.getfixturevalue("s3"))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A fresh MLflow database, made once for all workers: its migration takes seconds."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "empty.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "empty.db").exists():
            from mlflow import MlflowClient

            path = tmp_path_factory.mktemp("empty") / "mlflow.db"
            MlflowClient(f"sqlite:///{path}").search_experiments()
            path.rename(folder / "empty.db")
        return (folder / "empty.db").read_bytes()
