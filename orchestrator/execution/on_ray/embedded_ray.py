"""Start or join Ray: a private Ray of the sweep's own, on loopback, or a running cluster."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.work_order import Work
from orchestrator.execution.on_ray.private_folder import PREFIX, private_folder
from orchestrator.execution.perform import DEFAULT_WORK

OBJECT_STORE = 128 * 2**20
"""Bytes of the object store of the sweep's own Ray; only records pass through it."""

ALWAYS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` reinstalls the environment for each worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a future change
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else Ray reports a lost worker in the middle of the progress display
}
"""Environment variables that must be set wherever ray is imported."""

VITAL = ("raylet", "gcs_server")
"""Processes of the sweep's own Ray that it cannot run without."""

JOINING = {
    "RAY_gcs_server_port_wait_time_s": "1",  # Ray reads this as a number of tries
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "4",
}
"""Variables that make Ray give up after 8 s if no cluster answers, not after minutes; the user's own values win."""


class ClusterError(OrchestratorError):
    """Ray cannot be started or joined, or can never run the trials. Nothing was started."""

    exit_status = 2


@dataclass(frozen=True)
class Address:
    """The address of Ray: `local` for the sweep's own, `auto`, or `host:port`; and the setting that gave it."""

    value: str
    named: str = "cluster.address"

    @property
    def own(self) -> bool:
        """Whether the sweep starts and ends this Ray."""
        return self.value == "local"

    def reach(self) -> str:
        """Return the address of a cluster that answers: `local` for the sweep's own Ray, else host:port.

        Raises:
            ClusterError: no cluster or several clusters have a node here, or nothing listens at the address; Ray itself
                would keep trying for minutes
        """
        if self.own:
            return self.value
        if self.value.startswith("ray://"):
            raise ClusterError(
                f"`{self.named}` (={self.value}) must not be a Ray Client address; run the command on a node of the "
                "cluster with cluster=auto, or submit it with `ray job submit`."
            )
        found = sorted(_clusters()) if self.value == "auto" else [self.value]
        if len(found) != 1:
            raise self.refused(ValueError(f"several run here: {', '.join(found)}" if found else "none runs here"))
        host, _, port = found[0].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except (OSError, ValueError) as error:
            raise self.refused(error) from error
        return found[0]

    def refused(self, error: Exception) -> ClusterError:
        """Return the ClusterError for an error in joining or starting Ray."""
        said = str(error).strip().splitlines()[0].rstrip(".")
        if self.own:
            return ClusterError(f"Ray could not be started on this machine: {said}.")
        unknown = "authenticat" in f"{error} {error.__cause__}".lower()
        token = " The cluster's token is needed here, too: set RAY_AUTH_MODE=token." if unknown else ""
        return ClusterError(
            f"`{self.named}` (={self.value}) names no Ray cluster that this machine can join ({said}).{token} "
            "Pass the host:port of a cluster, start one with `ray start --head`, or pass cluster.address=local to run "
            "on a Ray of the sweep's own."
        )


def address_of(cluster: Cluster) -> Address:
    """Return RAY_ADDRESS if it is set and `cluster.address` is null or auto; else `cluster.address`, or `local`."""
    elsewhere = os.environ.get("RAY_ADDRESS")
    if elsewhere and cluster.address in (None, "auto"):
        return Address(elsewhere, "RAY_ADDRESS")
    return Address(cluster.address or "local")


def lasting() -> dict[str, str]:
    """Return the variables that stay in the environment of this process: a token for the sweep's own Ray.

    Without this token Ray writes one to the user's home directory, where it applies to every other Ray of that user.
    With no token at all, every user of this machine could run code in our workers. The user's own settings win.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    token = {} if _has_token() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"RAY_AUTH_MODE": "token", **token}


def while_starting(threads: int) -> dict[str, str]:
    """Return the variables that must be set while Ray and its workers start."""
    return {
        **ALWAYS,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # has Ray listen on loopback only, on any system
        **of_workers(threads),
    }


def of_workers(threads: int) -> dict[str, str]:
    """Return the variables that worker processes need, on any Ray."""
    found = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # a reused worker may be assigned any GPU, and must see all
        "OMP_NUM_THREADS": str(threads),
    }
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # Ray copies the working directory of a submitted job itself
        found["PYTHONPATH"] = os.pathsep.join(import_path())
    return found


def import_path() -> list[str]:
    """Return this process's import path without the interpreter's own folders; the working directory is included."""
    own = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    found = [Path(entry or os.getcwd()).absolute() for entry in sys.path]
    return [str(path) for path in dict.fromkeys(found) if not any(p in own for p in (path, *path.resolve().parents))]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore the previous values at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _has_token() -> bool:
    return any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))


@contextmanager
def connected(address: Address, cluster: Cluster, work: Work | str) -> Iterator[bool]:
    """Connect to Ray unless this process is connected, and yield whether the connection is new.

    Leave the context only after Ray has been shut down.

    Raises:
        ClusterError: there is no such Ray, or it refuses us
    """
    where = address.reach()
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address.own:
        os.environ.update(lasting())
    elif address.value == "auto" and (_has_token() or Path("~/.ray/auth_token").expanduser().exists()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray sets this for a cluster that it finds itself
    with ExitStack() as stack:
        joining = {**ALWAYS, "RAY_ADDRESS": where, **{name: os.environ.get(name, JOINING[name]) for name in JOINING}}
        with environment(while_starting(cluster.thread_count) if address.own else joining):
            import ray

            if new := not ray.is_initialized():
                options: dict[str, Any] = {"address": address.value, "log_to_driver": False}
                try:
                    if address.own:
                        options |= {
                            "num_cpus": cluster.num_cpus,
                            "include_dashboard": cluster.dashboard,
                            "object_store_memory": OBJECT_STORE,
                            "_temp_dir": stack.enter_context(private_folder()),
                            "_system_config": {"preload_python_modules": _preloaded(work)},
                        }
                    ray.init(logging_level=logging.ERROR, **options)
                except Exception as error:  # Ray raises a plain Exception if a node does not start in time
                    raise address.refused(error) from error
        yield new


def leave(*, own: bool) -> None:
    """Disconnect from Ray; end its processes at once if it is the sweep's `own`.

    Another thread may free a reference to a task at any time, and Ray ends this process if that happens while its core
    shuts down. References that find no core are freed without it, so the core is taken away before it shuts down.
    """
    import ray

    node: Any = ray._private.worker._global_node
    if own and node is not None:
        kill = node.kill_all_processes  # by default waits a second for each process to end on SIGTERM
        node.kill_all_processes = lambda **_: kill(check_alive=False)
    core: Any = vars(ray._private.worker.global_worker).pop("core_worker", None)
    if core is not None:
        core.shutdown_driver()
    ray.shutdown()


def death() -> str | None:
    """Return how the sweep's own Ray has died, in a sentence with the remedy; None while it is alive."""
    import ray

    node: Any = ray._private.worker._global_node
    for name, process in () if node is None else node.dead_processes():
        if name in VITAL:
            status = process.returncode
            how = f"was killed by {_signal(-status)}" if status < 0 else f"ended with status {status}"
            return (
                f"the sweep's own Ray has died: its {name} {how}, perhaps because memory ran out or someone killed it; "
                "finished stages are kept; run the same command again to start another Ray and run the rest."
            )
    return None


def _signal(number: int) -> str:
    """Return the name of a signal, or its number if it has no name, as most real-time signals."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _preloaded(work: Work | str) -> list[str]:
    """Return the modules that workers import as they start, before any work arrives."""
    if work == DEFAULT_WORK:
        return ["orchestrator.training.preload"]
    return [work.partition(":")[0]] if isinstance(work, str) else []


def _clusters() -> set[str]:
    """Return the addresses of the Ray clusters that have a node on this machine, without other sweeps' own."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *arguments = os.fsdecode(path.read_bytes()).split("\0")
            if os.path.basename(program) == "raylet" and not any(PREFIX in each for each in arguments):
                found |= {each.partition("=")[2] for each in arguments if each.startswith("--gcs-address=")}
    return found
