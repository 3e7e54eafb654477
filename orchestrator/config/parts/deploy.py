"""Which runtimes a trial's last network is deployed to and measured on, beside the dense one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from orchestrator.config.rules import Rule, at_least, is_int, key, whole

FORMATS = ("shrink", "torch", "onnx", "onnx_int8", "openvino")
"""What a network is deployed as: `shrink` is PyTorch as it is, without what is empty; others are files of that."""
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "onnx_int8": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Format -> the packages that write and load it, where these are no requirements of the project."""
NEEDED = "; ".join(f"{name} needs {', '.join(packages)}" for name, packages in PACKAGES.items())


def missing(name: str) -> list[str]:
    """Return the packages of a format that are not installed."""
    return [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]


@dataclass
class Deploy:
    """In which formats, and how the latency of each is measured; no format deploys nothing."""

    formats: list[str] = key(
        [],
        Rule(lambda given: all(name in FORMATS for name in given), f"hold formats among {', '.join(FORMATS)}"),
        Rule(lambda given: len(set(given)) == len(given), "name each format once"),
        Rule(
            lambda given: not any(map(missing, given)),
            f"hold formats whose packages are installed ({NEEDED}); install the extra `export`, as by "
            "pip install 'pruning-orchestrator[export]'",
        ),
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
