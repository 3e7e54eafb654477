"""Which Ray a sweep runs on, and how it is said that there is none."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError


class ClusterError(OrchestratorError):
    """Ray cannot be had, or can never run what is asked: nothing was started."""

    exit_status = 2


@dataclass(frozen=True)
class Address:
    """Where Ray is: `local` for one of the sweep's own, `auto`, or `host:port`; and which setting named it."""

    value: str
    named: str = "cluster.address"

    @property
    def own(self) -> bool:
        """Whether the sweep starts and ends this Ray."""
        return self.value == "local"

    def reach(self) -> None:
        """Raise `ClusterError` unless something listens there: Ray itself would try for many minutes."""
        if self.value in ("auto", "local"):
            return
        if self.value.startswith("ray://"):
            raise ClusterError(
                f"`{self.named}` (={self.value}) must not be a Ray Client address; run the command on a node of the "
                "cluster with cluster=auto, or submit it with `ray job submit`."
            )
        host, _, port = self.value.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except (OSError, ValueError) as error:
            raise self.refused(error) from error

    def refused(self, error: Exception) -> ClusterError:
        """Return what to say of an error in joining or starting."""
        said = str(error).strip().splitlines()[0].rstrip(".")
        if self.own:
            return ClusterError(f"Ray could not be started on this machine: {said}.")
        token = " Its token is needed here too: set RAY_AUTH_MODE=token." if "authenticat" in str(error).lower() else ""
        return ClusterError(
            f"`{self.named}` (={self.value}) names no Ray cluster that this machine can join ({said}).{token} Start "
            "one with `ray start --head`, or pass cluster.address=local for one of the sweep's own."
        )


def address_of(cluster: Cluster) -> Address:
    """Return the address that the configuration names, or else RAY_ADDRESS, or else a Ray of the sweep's own."""
    elsewhere = os.environ.get("RAY_ADDRESS")
    if elsewhere and cluster.address in (None, "auto"):
        return Address(elsewhere, "RAY_ADDRESS")
    return Address(cluster.address or "local")
