"""A job submitted to a Ray cluster works in a temporary copy of its directory: nothing written there is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.tracking_uri import DEFAULT_URI, resolve_uri, sqlite_path
from orchestrator.core.redact import redact

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the environment of a submitted job."""


STOP_SECONDS = 2.0
"""What `ray job stop` leaves of three seconds for stages to end."""


def grace(seconds: float) -> float:
    """Return how long stages may take to end where the user allows for so many seconds: a submitted job has fewer."""
    return min(seconds, STOP_SECONDS) if JOB_CONFIG in os.environ else seconds


def in_temporary_copy() -> bool:
    """Whether this process is a submitted job with a working directory, which Ray copied and will remove."""
    try:
        runtime_env = json.loads(os.environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}
    except ValueError:
        return False
    return bool(runtime_env.get("working_dir"))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each place of a plain configuration that would be lost with the job's working directory."""
    if not in_temporary_copy():
        return
    uri, tracking = str(config["store"]["uri"]), config["tracking"]
    if "://" not in uri and _is_here(Path(uri).expanduser()):
        yield (
            f"`store.uri` (={uri}) lies in the working directory, and that of a submitted job is a temporary copy: "
            "every result would be lost with it; pass store.uri=s3://bucket/prefix, or the absolute path of a "
            "directory that every node mounts."
        )
    database = sqlite_path(resolve_uri(tracking["uri"])) if tracking["kind"] == "mlflow" else None
    if database is not None and _is_here(database):
        yield (
            f"`tracking.uri` (={redact(tracking['uri'] or DEFAULT_URI)}) lies in the working directory, and that of a "
            "submitted job is a temporary copy: the view would be lost with it; pass the address of an MLflow server, "
            "sqlite:////absolute/path/mlflow.db, or tracking=none."
        )


def _is_here(path: Path) -> bool:
    return path.absolute().resolve().is_relative_to(Path.cwd().resolve())
