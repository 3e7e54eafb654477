from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.tracking_uri import (
    artifact_location,
    local_folder,
    resolve_experiment,
    resolve_uri,
    sqlite_path,
    ui_hint,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_default_is_a_database_here_that_a_plain_mlflow_ui_shows(tmp_path: Path) -> None:
    assert resolve_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    assert ui_hint(resolve_uri()) == "mlflow ui"
    assert artifact_location(resolve_uri(), "pruning") == (tmp_path / "mlruns" / "pruning").as_uri()


def test_relative_databases_become_absolute(tmp_path: Path) -> None:
    assert resolve_uri("sqlite:///views/x.db") == f"sqlite:///{tmp_path}/views/x.db"
    assert resolve_uri("sqlite:////data/x.db") == "sqlite:////data/x.db"
    assert ui_hint("sqlite:////data/x.db") == "mlflow ui --backend-store-uri sqlite:////data/x.db"


def test_variables_of_mlflow_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")

    assert resolve_uri(None) == "http://host:5000"
    assert resolve_uri("http://other") == "http://other"
    assert resolve_experiment("pruning") == resolve_experiment(None) == "mine"
    assert resolve_experiment("asked for") == "asked for"


def test_a_server_decides_where_its_artifacts_are() -> None:
    assert artifact_location("http://host:5000", "pruning") is None
    assert sqlite_path("http://host:5000") is None
    assert sqlite_path("postgresql://u:p@host/db") is None


def test_options_of_a_connection_are_no_part_of_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_path("sqlite:///mine.db?timeout=60") == tmp_path / "mine.db"
    assert resolve_uri("sqlite:///mine.db?timeout=60") == f"sqlite:///{tmp_path / 'mine.db'}?timeout=60"


def test_hints_hold_no_password() -> None:
    assert "hunter2" not in ui_hint("https://me:hunter2@host")
    assert "hunter2" not in ui_hint("postgresql://me:hunter2@host/db")


def test_odd_names_of_experiments_stay_one_folder(tmp_path: Path) -> None:
    location = artifact_location(resolve_uri(), "team/a b")

    assert location is not None
    assert location.startswith((tmp_path / "mlruns").as_uri() + "/team%252Fa")


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("file:///a%20b/artifacts", Path("/a b/artifacts")),
        ("/a%20b/artifacts", Path("/a%20b/artifacts")),
        ("mlflow-artifacts:/1/artifacts", None),
        ("s3://bucket/artifacts", None),
        ("file://elsewhere/artifacts", None),
    ],
)
def test_artifacts_in_a_directory_of_this_machine_are_found(uri: str, folder: Path | None) -> None:
    assert local_folder(uri) == folder
