"""Data and names as texts for people: YAML, and Markdown that shows a name as it is. Pure."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from orchestrator.core.redact import shown


def as_yaml(data: Any) -> bytes:
    """Return `data` as YAML in its own order."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True)).encode()


def markdown(text: str) -> str:
    """Return a text of foreign origin as Markdown that shows it: no markup, HTML or link of its own, one line."""
    return re.sub(r"[\\`*\[\]|]", r"\\\g<0>", escape(" ".join(shown(text).split()), quote=False))
