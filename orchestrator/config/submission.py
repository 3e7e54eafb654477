"""Checks for jobs submitted to a Ray cluster, which work in a temporary copy of their directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.tracking_uri import DEFAULT_URI, resolve_uri, sqlite_path
from orchestrator.core.redact import redact

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for a submitted job."""


STOP_SECONDS = 2.0
"""Seconds for stages to end after `ray job stop`, which allows three seconds in all."""


def grace(seconds: float) -> float:
    """Return the seconds for stages to end: `seconds`, but at most `STOP_SECONDS` in a submitted job."""
    return min(seconds, STOP_SECONDS) if JOB_CONFIG in os.environ else seconds


def in_temporary_copy() -> bool:
    """Whether this process is a submitted job whose working directory is a temporary copy by Ray."""
    try:
        runtime_env = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    except ValueError:
        return False
    return bool(runtime_env.get("working_dir"))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each path of a plain configuration that would be lost with the working directory."""
    if not in_temporary_copy():
        return
    uri, tracking = str(config["store"]["uri"]), config["tracking"]
    if "://" not in uri and _is_here(Path(uri).expanduser()):
        yield (
            f"`store.uri` (={uri}) lies in the working directory, which is a temporary copy for a submitted job: "
            "every result would be lost; pass store.uri=s3://bucket/prefix, or the absolute path of a "
            "directory that every node mounts."
        )
    database = sqlite_path(resolve_uri(tracking["uri"])) if tracking["kind"] == "mlflow" else None
    if database is not None and _is_here(database):
        yield (
            f"`tracking.uri` (={redact(tracking['uri'] or DEFAULT_URI)}) lies in the working directory, which is a "
            "temporary copy for a submitted job: the view would be lost; pass the address of an MLflow server, "
            "sqlite:////absolute/path/mlflow.db, or tracking=none."
        )


def _is_here(path: Path) -> bool:
    return path.absolute().resolve().is_relative_to(Path.cwd().resolve())
