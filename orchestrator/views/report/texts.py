"""Data and names as texts for people: YAML, and Markdown that shows a name as it is. Pure."""

from __future__ import annotations

import re
from typing import Any

_MARKUP = re.compile(r"[&<>\[\]()!*`|\\\n]")


def as_yaml(data: Any) -> bytes:
    """Return `data` as YAML in its own order."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True)).encode()


def as_markdown(name: str) -> str:
    """Return `name` so that Markdown shows it as it is: neither markup nor HTML."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", name)
