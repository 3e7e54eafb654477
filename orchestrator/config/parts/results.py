"""Where results go, and how they are compared: plain dataclasses. Nothing here changes what a trial comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.cluster import is_memory
from orchestrator.config.key_rules import key
from pruning.catalogue.value_rules import Rule, is_number, one_of

MARGIN = Rule(
    lambda margin: is_number(margin) and 0.0 <= margin < float("inf"),
    "be at least 0: it is in the metric's own scale; pass 0.01 for one point of a fraction",
)
ADDRESS = Rule(
    lambda uri: "://" in uri or uri.startswith("databricks"),
    "be an address; pass http://host:5000 for a server, sqlite:////path/to/mlflow.db for a database",
)


@dataclass
class Tracking:
    """Where the view of the sweep goes: `mlflow` or `none`."""

    kind: str = key("mlflow", one_of("mlflow", "none"))
    """`mlflow` shows a parent run for the sweep and a child for each trial; `none` shows nothing."""
    uri: str | None = key(None, ADDRESS.or_null(", or null"))
    """Address of the MLflow server or database; null: MLFLOW_TRACKING_URI, else `mlflow.db` in the working
    directory."""
    experiment: str = key("pruning", Rule(lambda name: bool(name.strip()), "be a name; pass pruning for the default"))
    """MLflow's experiment; MLFLOW_EXPERIMENT_NAME, where it is set, goes before the default."""


@dataclass
class Store:
    """Where finished stages are kept, and how much of them: see `orchestrator.store.store`."""

    uri: str = "store"
    """A directory, or an address such as `s3://bucket/prefix`; what is finished there is not trained again."""
    keep: str = key("needed", one_of("needed", "all"))
    """Whose weights stay: `needed`, those of dense networks, branch points, ends of trials and the newest stages, or
    `all`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the fsspec file system, such as `endpoint_url` of an S3 server."""
    max_bytes: int | str | None = key(
        None,
        Rule(is_memory, "be above 0, in bytes or as text with a unit; pass 50GB, or null for no limit"),
    )
    """Where the store is larger, weights that nothing starts from go, with `keep=all` the oldest first."""


@dataclass
class Compare:
    """How trials are compared: what they are does not depend on it."""

    margin: float | None = key(None, MARGIN.or_null())
    """The loss of the primary metric against dense that a match may hide; null: the metric's own."""
