"""Which Ray a sweep runs on: one of its own, private, on loopback and able to import what we can, or one that runs."""

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
from orchestrator.execution.perform import DEFAULT_WORK
from orchestrator.execution.private_folder import PREFIX, private_folder

OBJECT_STORE = 128 * 2**20
"""Bytes of the object store of a Ray of our own: nothing but records passes through it."""

ALWAYS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` reinstalls the environment for each worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of what it will do one day
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else a lost worker is announced in the middle of the progress display
}
"""What must be set wherever ray is imported."""

VITAL = ("raylet", "gcs_server")
"""Processes of a Ray of our own without which nothing runs."""

JOINING = {
    "RAY_gcs_server_port_wait_time_s": "1",  # tries, in truth
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "4",
}
"""What has Ray give up within 8 s where no cluster answers, instead of trying for minutes; what the user set stands."""


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

    def reach(self) -> str:
        """Return where that is: `local` for our own, or else host:port.

        Raises:
            ClusterError: no cluster, or several, have a node here, or nothing listens: Ray itself would try for minutes
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
        """Return what to say of an error in joining or starting."""
        said = str(error).strip().splitlines()[0].rstrip(".")
        if self.own:
            return ClusterError(f"Ray could not be started on this machine: {said}.")
        unknown = "authenticat" in f"{error} {error.__cause__}".lower()
        token = " Its token is needed here too: set RAY_AUTH_MODE=token." if unknown else ""
        return ClusterError(
            f"`{self.named}` (={self.value}) names no Ray cluster that this machine can join ({said}).{token} "
            "Name one by host:port, start one with `ray start --head`, or pass cluster.address=local for one of the "
            "sweep's own."
        )


def address_of(cluster: Cluster) -> Address:
    """Return the address that the configuration names, or else RAY_ADDRESS, or else a Ray of the sweep's own."""
    elsewhere = os.environ.get("RAY_ADDRESS")
    if elsewhere and cluster.address in (None, "auto"):
        return Address(elsewhere, "RAY_ADDRESS")
    return Address(cluster.address or "local")


def lasting() -> dict[str, str]:
    """Return what stays in the environment of this process: a token of our own.

    Without it Ray writes one to the user's home directory, which then applies to every other Ray of that user; without
    any, every user of this machine could run code in our workers. What the user has set stands.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    token = {} if _has_token() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {"RAY_AUTH_MODE": "token", **token}


def while_starting(threads: int) -> dict[str, str]:
    """Return what Ray and its workers must find when they start, or are imported."""
    return {
        **ALWAYS,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what it does on those systems, it does anywhere: loopback only
        **of_workers(threads),
    }


def of_workers(threads: int) -> dict[str, str]:
    """Return what worker processes must find, of our own Ray or of any."""
    found = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # a reused worker must see every GPU that it may be given
        "OMP_NUM_THREADS": str(threads),
    }
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:  # a submitted job brings its working directory itself
        found["PYTHONPATH"] = os.pathsep.join(import_path())
    return found


def import_path() -> list[str]:
    """Return where this process finds modules beyond the interpreter's own places, the working directory included."""
    own = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    found = [Path(entry or os.getcwd()).absolute() for entry in sys.path]
    return [str(path) for path in dict.fromkeys(found) if not any(p in own for p in (path, *path.resolve().parents))]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put back what was there."""
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
    """Connect to Ray unless this process is, and give whether it did; leave it once that Ray has been shut down.

    Raises:
        ClusterError: there is no such Ray, or it refuses us
    """
    where = address.reach()
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address.own:
        os.environ.update(lasting())
    elif address.value == "auto" and (_has_token() or Path("~/.ray/auth_token").expanduser().exists()):
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does for a cluster that it has found by itself
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
                except Exception as error:  # Ray raises no narrower one where a node does not come up in time
                    raise address.refused(error) from error
        yield new


def death() -> str | None:
    """Return how the Ray of our own has died, in a sentence with the remedy; None while it lives."""
    import ray

    node: Any = ray._private.worker._global_node
    for name, process in () if node is None else node.dead_processes():
        if name in VITAL:
            status = process.returncode
            how = f"was killed by {_signal(-status)}" if status < 0 else f"ended with status {status}"
            return (
                f"the sweep's own Ray has died: its {name} {how}, as where memory runs out or someone kills it; what "
                "finished is kept, and the same command starts another Ray and runs the rest."
            )
    return None


def _signal(number: int) -> str:
    """Return the name of a signal, or its number where it has none, as real-time ones between their ends."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _preloaded(work: Work | str) -> list[str]:
    """Return the modules that workers import while nothing else can be done yet."""
    if work == DEFAULT_WORK:
        return ["orchestrator.training.preload"]
    return [work.partition(":")[0]] if isinstance(work, str) else []


def _clusters() -> set[str]:
    """Return the addresses of the Ray clusters that have a node on this machine, but for private ones."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *arguments = os.fsdecode(path.read_bytes()).split("\0")
            if os.path.basename(program) == "raylet" and not any(PREFIX in each for each in arguments):
                found |= {each.partition("=")[2] for each in arguments if each.startswith("--gcs-address=")}
    return found
