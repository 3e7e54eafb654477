"""Tracking URI and experiment of the MLflow view, and the command that opens the view."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from orchestrator.core.redact import redact

DEFAULT_EXPERIMENT = "pruning"
DEFAULT_URI = "sqlite:///mlflow.db"
_SQLITE = "sqlite:///"


def resolve_uri(uri: str | None = None) -> str:
    """Return the tracking URI to use, with an absolute path for SQLite.

    The first one given: `uri`, MLFLOW_TRACKING_URI, or `mlflow.db` in the working directory, which `mlflow ui` shows.
    """
    found = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    path = sqlite_path(found)
    _, mark, query = found.partition("?")
    return found if path is None else f"{_SQLITE}{path}{mark}{query}"


def resolve_experiment(name: str | None = None) -> str:
    """Return the experiment to use: `name` if it is not the default, else MLFLOW_EXPERIMENT_NAME, else the default."""
    if name and name != DEFAULT_EXPERIMENT:
        return name
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the SQLite file in `uri`; None for any other URI."""
    if not uri.startswith(_SQLITE) or uri == _SQLITE:
        return None
    return Path(
        uri.removeprefix(_SQLITE).partition("?")[0]
    ).absolute()  # options of the connection follow the question mark


def artifact_location(uri: str, experiment: str) -> str | None:
    """Return the artifact URI of a new experiment, beside a SQLite database; None if the server decides."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlruns" / quote(experiment, safe=" ")).as_uri()


def local_folder(uri: str) -> Path | None:
    """Return the local directory of an artifact URI; None for any other URI."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def ui_hint(uri: str) -> str:
    """Return how to see the runs: the address of the server, or the command that shows the database."""
    if uri.startswith(("http://", "https://")):
        return redact(uri)
    if uri == resolve_uri(DEFAULT_URI):
        return "mlflow ui"
    return f"mlflow ui --backend-store-uri {shlex.quote(redact(uri))}"
