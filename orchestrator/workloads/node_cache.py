"""Cache of prepared tensors in files of this node: prepared once and mapped by all processes.

The files lie in the node's folder. If a file cannot be stored or trusted, the process holds the tensors in memory.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.store.node_folder import node_folder, tidy
from orchestrator.workloads.weight_files import state_digest, write_state

FORMAT = 3
"""Format version; raise it when the same source is prepared differently."""
WORTHWHILE = 4 * 2**20
"""Size in bytes below which each process holds the tensors itself."""
PATIENCE = 60.0
"""Seconds to wait for another process that is preparing tensors; after them, each process prepares its own."""


def shared(source: Mapping[str, Any], make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the result of `make`; if it is large, from a file that the processes of this node share.

    Processes may write to the tensors: the pages are copied on write, so no other process sees the change.

    Args:
        source: JSON values that determine the tensors completely; files by their `stamp`
        make: prepares contiguous tensors on the CPU; called by one process at a time, and only if no file exists
    """
    folder = node_folder()
    if folder is None:
        return make()
    path = folder / f"{digest(canonical_json([FORMAT, source]))}.safetensors"
    found = _mapped(path)
    if found is not None:
        return found
    with _locked(folder):
        found = _mapped(path)
        return found if found is not None else _stored(path, make())


def room(shape: Sequence[int]) -> Tensor:
    """Return an empty uint8 tensor to fill; a large one is mapped from an unnamed file instead of memory."""
    folder, size = node_folder(), math.prod(shape)
    if folder is None or size < WORTHWHILE:
        return torch.empty(*shape, dtype=torch.uint8)
    path = folder / f".{uuid.uuid4().hex}"
    try:
        with _own_file(path) as file:
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # without reserved space, a full disk would kill the process when it writes
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(*shape)
    except (OSError, RuntimeError, AttributeError):  # macOS cannot reserve space
        return torch.empty(*shape, dtype=torch.uint8)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _own_file(path: Path) -> BinaryIO:
    """Open a new file that only this user can read."""
    return open(path, "xb", opener=partial(os.open, mode=0o600))


def stamp(path: str | Path) -> list[str | int]:
    """Return a fingerprint of a file: absolute path, size in bytes, modification time in nanoseconds."""
    found = os.stat(path)
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]


def _mapped(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file, mapped copy-on-write; None if the file is absent or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            whole = (file.metadata() or {}).get("digest") == state_digest(tensors)
    except (OSError, SafetensorError):
        return None
    with suppress(OSError):
        os.utime(path)
    return tensors if whole else None


def _stored(path: Path, made: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Write `made` to a file and return it mapped from there; return `made` itself if it is small or on failure."""
    size = sum(tensor.nbytes for tensor in made.values())
    found = _mapped(path)  # written by a process that did not wait for the lock
    if found is not None or size < WORTHWHILE:
        return found or made
    aside = path.with_name(f".{uuid.uuid4().hex}")
    try:
        if shutil.disk_usage(path.parent).free > 2 * size:
            with _own_file(aside) as file:
                write_state(made, file, {"digest": state_digest(made)})
            os.replace(aside, path)
    except (OSError, SafetensorError):
        return made
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    with suppress(OSError):  # another process may tidy at the same time
        tidy(path.parent, path.suffix)
    return _mapped(path) or made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder, so that one process prepares at a time; the kernel releases it if a process dies."""
    import fcntl  # absent on Windows

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)
