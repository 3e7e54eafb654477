"""Which runtimes a trial's last network is deployed to and measured on, beside the dense one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.catalogue.formats import FORMATS
from orchestrator.config.key_rules import key
from pruning.catalogue.value_rules import Rule, at_least, is_int, whole

MEASURED = tuple(name for name, row in FORMATS.items() if row.measured)
"""Formats that a network is deployed in and measured."""


@dataclass
class Deploy:
    """In which formats, and how the latency of each is measured; no format deploys nothing."""

    formats: list[str] = key(
        [],
        Rule(lambda given: all(name in MEASURED for name in given), f"hold formats among {', '.join(MEASURED)}"),
        Rule(lambda given: len(set(given)) == len(given), "name each format once"),
    )
    """What the last network of each trial, and the dense one, is deployed as and measured in."""
    batch_sizes: list[int] = key(
        [1, 64],
        Rule(
            lambda sizes: bool(sizes) and all(is_int(size) and size >= 1 for size in sizes),
            "hold numbers of examples of at least 1; pass [1] for one at a time",
        ),
    )
    """Numbers of examples to a batch, at each of which latency is measured."""
    threads: int | None = key(None, whole(1, ", or null for those of a trial").or_null(""))
    """Intra-op threads of the runtime; null: those of a trial."""
    seconds: float = key(1.5, at_least(0.01, "; a measurement at one batch size takes so many seconds"))
    """How long each measurement takes."""
    blocks: int = key(16, whole(2, ": of so many independent parts a measurement is made"))
    """A measurement is made in so many parts, whose spread gives its interval."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield which packages of the formats are not installed."""
        formats = values.get("formats", ())
        missing = {name: FORMATS[name].missing_packages() for name in formats if name in FORMATS}
        if lacking := [f"{name} lacks {', '.join(found)}" for name, found in missing.items() if found]:
            yield (
                f"`{where}.formats` (={formats}) must have its packages installed: {'; '.join(lacking)}; install the "
                "extra `export`, as by pip install 'pruning-orchestrator[export]'."
            )
