"""A configuration as YAML, for a report and for MLflow."""

from __future__ import annotations

from typing import Any

from orchestrator.core.redact import shown_tree


def as_yaml(data: Any) -> bytes:
    """Return `data` as YAML in its own order, with secrets redacted and texts safe to display."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(shown_tree(data), Dumper=dumper, sort_keys=False, allow_unicode=True)).encode()
