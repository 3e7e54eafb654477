"""Handwritten digits enlarged to the inputs of larger networks, for the sweeps of scripts/does_it_pay."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from orchestrator.workloads.data_sets.named import digits


def load(size: int = 32, channels: int = 3) -> dict[str, Any]:
    """Return the splits of `data=digits` with images of `channels` x `size` x `size`, by bilinear interpolation."""
    splits = digits()
    for name in ("train", "test"):
        images, labels = splits[name]
        larger = F.interpolate(images, size=(size, size), mode="bilinear")
        splits[name] = larger.expand(-1, channels, -1, -1).contiguous(), labels
    return splits
