"""Stages that deploy a trial's last network and the dense network, and compare their latency. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.specs import DENSE, NETWORK, StageSpec
from orchestrator.planning.versions import versions_of_deployment


def deployments(
    config: Mapping[str, Any], dense: StageSpec, last: StageSpec
) -> tuple[list[StageSpec], tuple[str, ...]]:
    """Return the stages for each format, inputs first, and the keys of the measurements.

    Args:
        config: the node `deploy` of a trial's configuration
        dense: the dense training, whose deployment all trials of its seed share
        last: the stage that the trial ends with
    """
    stages, measured = list[StageSpec](), []
    for name in config["formats"]:
        whole, smaller = (_deployment(name, dense, of) for of in (dense, last))
        what = {
            "batch_sizes": config["batch_sizes"],
            "seconds": config["seconds"],
            "blocks": config["blocks"],
            "threads": config["threads"] or dense.typed.threads,
        }
        inputs = {NETWORK: smaller.key, DENSE: whole.key}
        latency = StageSpec("measure", {**smaller.fields, "measure": what}, inputs, location=dense.location)
        stages += [whole, smaller, latency]
        measured.append(latency.key)
    return stages, tuple(measured)


def _deployment(name: str, dense: StageSpec, network: StageSpec) -> StageSpec:
    known = {part: dense.fields[part] for part in ("device", "sources")}
    fields = {"format": name, **known, "versions": versions_of_deployment(name)}
    return StageSpec("deploy", fields, {NETWORK: network.key}, location=dense.location)
