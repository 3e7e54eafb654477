"""Schemas of `tracking`, `store` and `compare`, which do not affect the results of trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.cluster import is_memory
from orchestrator.config.key_rules import key
from pruning.catalogue.rows import Rule, is_number, one_of

MARGIN = Rule(
    lambda margin: is_number(margin) and 0.0 <= margin < float("inf"),
    "be at least 0, in the metric's own scale; pass 0.01 for one point of a fraction",
)
ADDRESS = Rule(
    lambda uri: "://" in uri or uri.startswith("databricks"),
    "be an address; pass http://host:5000 for a server, sqlite:////path/to/mlflow.db for a database",
)


@dataclass
class Tracking:
    """Tracking of the sweep."""

    kind: str = key("mlflow", one_of("mlflow", "none"))
    """`mlflow`: a parent run for the sweep and a child run for each trial; `none`: no tracking."""
    uri: str | None = key(None, ADDRESS.or_null(", or null"))
    """Address of the MLflow server or database; null: MLFLOW_TRACKING_URI, else `mlflow.db` in the working
    directory."""
    experiment: str = key("pruning", Rule(lambda name: bool(name.strip()), "be a name; pass pruning for the default"))
    """MLflow experiment; the default gives way to MLFLOW_EXPERIMENT_NAME, if that is set."""


@dataclass
class Store:
    """Store of finished stages, and its retention: see `orchestrator.store.store`."""

    uri: str = "store"
    """Directory, or address such as `s3://bucket/prefix`; stages finished there are not trained again."""
    keep: str = key("needed", one_of("needed", "all"))
    """Weights that stay: `needed` keeps dense networks, branch points, ends of trials and the newest stages; `all`
    keeps the weights of every stage."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file system, such as `endpoint_url` of an S3 server."""
    max_bytes: int | str | None = key(
        None,
        Rule(is_memory, "be above 0, in bytes or as text with a unit; pass 50GB, or null for no limit"),
    )
    """Size limit: above it, weights that no stage starts from are removed; with `keep=all`, the oldest first."""


@dataclass
class Compare:
    """Comparison of trials; does not affect their results."""

    margin: float | None = key(None, MARGIN.or_null())
    """Largest loss of the primary metric against dense that still counts as a match; null: the metric's default."""
