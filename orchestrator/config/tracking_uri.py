"""Where the MLflow view lives: the tracking URI and experiment in force, and how a person opens it."""

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
    """Return the tracking URI in force, SQLite paths made absolute.

    In order: `uri`, MLFLOW_TRACKING_URI, `mlflow.db` in the working directory, which a plain `mlflow ui` there shows.
    """
    found = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
    path = sqlite_path(found)
    _, mark, query = found.partition("?")
    return found if path is None else f"{_SQLITE}{path}{mark}{query}"


def resolve_experiment(name: str | None = None) -> str:
    """Return the experiment in force: `name` unless that is the default, MLFLOW_EXPERIMENT_NAME, the default."""
    if name and name != DEFAULT_EXPERIMENT:
        return name
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT


def sqlite_path(uri: str) -> Path | None:
    """Return the absolute path of the database file that `uri` names, None for any other kind of URI."""
    if not uri.startswith(_SQLITE) or uri == _SQLITE:
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute()  # what follows are options of the connection


def artifact_location(uri: str, experiment: str) -> str | None:
    """Return where a new experiment keeps its artifacts: beside a SQLite database, None where the server decides."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlruns" / quote(experiment, safe=" ")).as_uri()


def local_folder(uri: str) -> Path | None:
    """Return the directory of this machine that an artifact URI names, None for any other kind of URI."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def ui_hint(uri: str) -> str:
    """Return what a person does to see the runs: the server's address, or the command that shows the database."""
    if uri.startswith(("http://", "https://")):
        return redact(uri)
    if uri == resolve_uri(DEFAULT_URI):
        return "mlflow ui"
    return f"mlflow ui --backend-store-uri {shlex.quote(redact(uri))}"
