"""Files with densities of tensors by total sparsity, for `scope.densities_file`: read before planning, part of the key.

densities:
  0.9:                  # a value of schedule.sparsity
    conv1.weight: 0.55  # fraction of the tensor that is kept
    fc1.weight: 0.04
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from omegaconf import OmegaConf

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.redact import redact

KEY = "densities_file"
NAME: Any = field(
    default=None,
    metadata={
        "meaning": 'YAML or JSON file with densities by total sparsity, for "given"; `schedule.sparsity` selects them. '
        "`pruning-orchestrator allocate` writes such files."
    },
)
"""Field of the key in the schema."""
CLOSE = 1e-9
"""Largest difference of equal sparsities."""


def without_file(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scope without the name of its file, which is no part of a key: the densities are."""
    return {name: value for name, value in scope.items() if name != KEY}


def with_densities(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a trial's configuration with the densities of its file for its sparsity.

    Args:
        config: configuration of a trial, perhaps malformed.

    Raises:
        OrchestratorError: the file cannot be read, has no densities for the sparsity, or nothing can use it.
    """
    scope, schedule = config.get("scope"), config.get("schedule")
    if not isinstance(scope, Mapping) or not isinstance(schedule, Mapping) or scope.get(KEY) is None:
        return config
    name, sparsity = scope[KEY], schedule.get("sparsity")
    said = f"`scope.{KEY}` (={redact(str(name))})"
    if scope.get("allocation") != "given" or scope.get("densities"):
        raise OrchestratorError(f"{said} goes with scope=given, without `scope.densities`; pass scope=given alone.")
    if not isinstance(sparsity, float):
        raise OrchestratorError(
            f"{said} has densities for values of `schedule.sparsity` (={sparsity}); pass one of them, as in "
            "schedule.sparsity=0.9."
        )
    found = _read(said, str(name))
    fits = [densities for level, densities in found.items() if abs(level - sparsity) <= CLOSE]
    if not fits:
        raise OrchestratorError(
            f"{said} has no densities for `schedule.sparsity` (={sparsity}), only for "
            f"{', '.join(f'{level:g}' for level in found)}; pass one of these, or write the file for more."
        )
    return {**config, "scope": {**scope, "densities": fits[0]}}


def _read(said: str, name: str) -> dict[float, dict[str, float]]:
    """Return the densities of a file by sparsity."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(os.path.expanduser(name)))
    except Exception as error:  # a parser may raise anything
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OrchestratorError(f"{said} cannot be read: {' '.join(told.split())}; check the path.") from None
    levels = found.get("densities") if isinstance(found, dict) else None
    if not isinstance(levels, dict) or not levels:
        raise OrchestratorError(
            f"{said} must have the key `densities`, with densities by sparsity, as in densities: {{0.9: {{conv*: "
            "0.5, fc*: 0.05}}; pruning-orchestrator allocate writes such files."
        )
    return {_fraction(said, level, "sparsity"): _densities(said, level, each) for level, each in levels.items()}


def _densities(said: str, level: Any, each: Any) -> dict[str, float]:
    if not isinstance(each, dict) or not each:
        raise OrchestratorError(f"{said} must name tensors at sparsity {level}, as in {{conv*: 0.5, fc*: 0.05}}.")
    return {str(name): _fraction(said, value, f"density of {name} at sparsity {level}") for name, value in each.items()}


def _fraction(said: str, value: Any, what: str) -> float:
    try:
        number = math.nan if value is True or value is False else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise OrchestratorError(f"{said} has the {what} {value!r}, which must be a number in [0, 1]; correct it.")
    return number
