"""Versions of our own code that can change bits, one for each component: they are part of every stage's key.

A test holds each component's code to what its version stands for, and says what to do where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.components import BUILT_IN

VERSIONS: Mapping[str, int] = {
    "training": 5,
    "round": 3,
    "deploy": 1,
    "model/mlp": 1,
    "model/cnn": 1,
    "model/lenet_300_100": 1,
    "model/lenet5": 1,
    "model/resnet20": 1,
    "model/gpt": 1,
    "model/huggingface": 1,
    "model/timm": 1,
    "data/digits": 1,
    "data/mnist": 1,
    "data/fashion_mnist": 1,
    "data/huggingface": 2,
    "data/text": 1,
    "task/classification": 1,
    "task/regression": 1,
    "task/language_modelling": 1,
    "task/segmentation": 1,
    "task/torchmetrics": 1,
    "method/identity": 1,
    "method/random_unstructured": 1,
    "method/l1_unstructured": 1,
    "method/random_structured": 1,
    "method/ln_structured": 1,
    "score/magnitude": 1,
    "score/random": 1,
    "score/gradient": 1,
    "score/snip": 1,
    "score/grasp": 1,
    "score/synflow": 1,
    "score/taylor": 1,
    "score/fisher": 2,
    "score/obd": 2,
    "score/obs": 2,
    "score/lamp": 1,
    "score/bn_scale": 1,
    "score/fpgm": 1,
    "score/wanda": 2,
}
"""`training`: building, splitting, training and evaluating, in every stage; `round`: pruning; `deploy`: shrinking and
measuring; and each kind."""


def versions_of(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of what a stage with these parts of a configuration uses."""
    used = ["training", *(["round"] if "method" in parts else [])]
    used += [f"{group}/{parts[group]['kind']}" for group in BUILT_IN if parts.get(group, {}).get("kind")]
    return {component: VERSIONS[component] for component in used}
