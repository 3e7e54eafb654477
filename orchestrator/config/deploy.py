"""Schema of the config group `deploy`: formats in which last networks are deployed and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.catalogue.formats import FORMATS
from orchestrator.config.key_rules import key
from pruning.catalogue.rows import Rule, at_least, is_int, whole
from pruning.kernels.compiling import KernelsUnavailable, installed_compiler

MEASURED = tuple(name for name, row in FORMATS.items() if row.measured)
"""Formats in which a network can be deployed and measured."""
SETS: Mapping[str, tuple[list[str], str]] = {
    "none": ([], "deploy nothing"),
    "runtimes": (["onnx", "openvino"], "graphs for ONNX Runtime and for OpenVINO; needs the extra `export`"),
}
"""Option of the group that is no single format -> its formats and its meaning."""
MOST, DAY = 2**31, 86_400
"""Maximum batch size, and maximum number of seconds, of a measurement."""


@dataclass
class Deploy:
    """Deployment formats, and settings of the latency measurement. Without formats, nothing is deployed."""

    formats: list[str] = key(
        [],
        Rule(lambda given: all(name in MEASURED for name in given), f"hold formats among {', '.join(MEASURED)}"),
        Rule(lambda given: len(set(given)) == len(given), "name each format once"),
    )
    """Formats for the last network of each trial and for the dense network."""
    batch_sizes: list[int] = key(
        [1, 64],
        Rule(
            lambda sizes: bool(sizes) and all(is_int(size) and 1 <= size <= MOST for size in sizes),
            f"hold numbers of examples from 1 to {MOST:,}; pass [1] for one at a time",
        ),
    )
    """Batch sizes at which latency is measured."""
    threads: int | None = key(None, whole(1, ", or null for a trial's threads").or_null(""))
    """Intra-op threads of the runtime; null: the threads of a trial."""
    seconds: float = key(
        1.5,
        at_least(0.01, ": the seconds of a measurement at one batch size"),
        Rule(lambda seconds: seconds <= DAY, f"be at most {DAY}, the seconds of a day"),
    )
    """Seconds of each measurement."""
    blocks: int = key(16, whole(2, ": the number of independent parts of a measurement"))
    """Number of parts of a measurement; their spread gives the interval."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the packages and the compiler of the formats that are not installed."""
        formats = values.get("formats", ())
        missing = {name: FORMATS[name].missing_packages() for name in formats if name in FORMATS}
        extras = {FORMATS[name].extra for name, found in missing.items() if found}
        if lacking := [f"{name} lacks {', '.join(found)}" for name, found in missing.items() if found]:
            yield (
                f"`{where}.formats` (={formats}) needs packages that are not installed: {'; '.join(lacking)}; run "
                f"pip install 'pruning-orchestrator[{','.join(sorted(extras))}]'."
            )
        if any(name in FORMATS and FORMATS[name].needs_compiler for name in formats):
            try:
                installed_compiler()
            except KernelsUnavailable as error:
                yield f"`{where}.formats` (={formats}) needs a C compiler: {error}"
