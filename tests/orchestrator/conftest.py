"""Shared fixtures of the tests of this package: stores of every kind, and an empty MLflow database."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from store_cases import store_of

from orchestrator.store.store import Store


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Store of each kind; on S3, whose backend is that of the memory, the contract in `test_store` runs by default."""
    return store_of(request, tmp_path)


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
