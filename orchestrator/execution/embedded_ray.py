"""Start a Ray of our own, private, on loopback and able to import what we can, or join one that runs."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.core.work_order import Work
from orchestrator.execution.address import Address
from orchestrator.execution.perform import DEFAULT_WORK

OBJECT_STORE = 128 * 2**20
"""Bytes of the object store of a Ray of our own: nothing but records passes through it."""

ALWAYS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` reinstalls the environment for each worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of what it will do one day
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # else a lost worker is announced in the middle of the progress display
}
"""What must be set wherever ray is imported."""


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


def connect(address: Address, cluster: Cluster, work: Work | str) -> bool:
    """Connect to Ray unless this process is; return whether it did."""
    address.reach()
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address.own:
        os.environ.update(lasting())
    with environment(while_starting(cluster.thread_count) if address.own else ALWAYS):
        import ray

        if ray.is_initialized():
            return False
        options: dict[str, Any] = {"address": address.value, "log_to_driver": False, "logging_level": logging.ERROR}
        if address.own:
            options |= {
                "num_cpus": cluster.num_cpus,
                "include_dashboard": cluster.dashboard,
                "object_store_memory": OBJECT_STORE,
                "_system_config": {"preload_python_modules": _preloaded(work)},
            }
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise address.refused(error) from error
    return True


def _preloaded(work: Work | str) -> list[str]:
    """Return the modules that workers import while nothing else can be done yet."""
    if work == DEFAULT_WORK:
        return ["orchestrator.training.preload"]
    return [work.partition(":")[0]] if isinstance(work, str) else []
