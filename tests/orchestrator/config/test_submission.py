"""Submitted jobs: paths in their temporary working directory are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.cluster import JOB_CONFIG, submission_violations

ELSEWHERE = {"store": {"uri": "s3://bucket/runs"}, "tracking": {"kind": "mlflow", "uri": "http://mlflow:5000"}}


@pytest.fixture(autouse=True)
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


def config(store: str | None = None, **tracking: str | None) -> dict[str, Any]:
    return {
        "store": {"uri": store} if store else ELSEWHERE["store"],
        "tracking": {**ELSEWHERE["tracking"], **tracking},
    }


@pytest.mark.parametrize("uri", ["store", "./a/b", "a/../b"])
def test_a_store_in_the_copy_is_refused_with_what_to_set(uri: str) -> None:
    (sentence,) = submission_violations(config(uri))

    assert sentence.startswith(f"`store.uri` (={uri}) lies in the working directory")
    assert "s3://bucket/prefix" in sentence


@pytest.mark.parametrize("uri", [None, "sqlite:///mlflow.db"])
def test_a_view_in_the_copy_is_refused_with_what_to_set(uri: str | None) -> None:
    (sentence,) = submission_violations(config(uri=uri))

    assert sentence.startswith("`tracking.uri` (=sqlite:///mlflow.db) lies in the working directory")
    assert "tracking=none" in sentence


def test_the_absolute_path_of_the_copy_is_refused_too(tmp_path: Path) -> None:
    assert len(list(submission_violations(config(str(tmp_path / "store"), uri=f"sqlite:///{tmp_path}/mlflow.db")))) == 2


def test_places_that_last_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(submission_violations(ELSEWHERE))
    assert not list(submission_violations(config("/shared/store", uri="sqlite:////shared/mlflow.db")))
    assert not list(submission_violations(config(str(tmp_path.parent / "store"), kind="none", uri=None)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert not list(submission_violations(config(uri=None)))


@pytest.mark.parametrize("given", [None, "{}", '{"runtime_env": {"env_vars": {}}}', "not json"])
def test_elsewhere_a_relative_path_is_the_users_own(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_CONFIG) if given is None else monkeypatch.setenv(JOB_CONFIG, given)

    assert not list(submission_violations(config("store", uri=None)))
