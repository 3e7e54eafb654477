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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.store.local_backend import node_folder, tidy
from orchestrator.workloads.weight_files import state_digest, write_state

FORMAT = 3
"""Format version; raise it when the same source is prepared differently."""
WORTHWHILE = 4 * 2**20
"""Size in bytes below which each process holds the tensors itself, unless they take long to prepare."""
LONG = 1.0
"""Seconds of preparation from which tensors of any size are stored."""


@dataclass(frozen=True)
class Kind:
    """Kind of files, of which the node's folder keeps those used last.

    Args:
        suffix: file name suffix.
        spared: seconds after its last use during which a file is never removed.
        patience: seconds to wait for another process that is preparing the same tensors; after them, each process
            prepares its own.
    """

    suffix: str
    spared: float
    patience: float


DATA = Kind(".safetensors", spared=0.0, patience=60.0)
STATISTICS = Kind(".statistics", spared=3600.0, patience=600.0)
"""Small files, one for each draw of a sweep, which may have many draws; passes through a large network take minutes."""


def shared(
    source: Mapping[str, Any], make: Callable[[], Mapping[str, Tensor]], kind: Kind = DATA
) -> Mapping[str, Tensor]:
    """Return the result of `make`; if it is large or slow to make, from a file that the processes of this node share.

    Processes may write to the tensors: the pages are copied on write, so no other process sees the change.

    Args:
        source: JSON values that determine the tensors completely; files by their `stamp`
        make: prepares contiguous tensors on the CPU; called only if no file exists, and by one process at a time for a
            source where files can be written
        kind: kind of the file
    """
    folder = node_folder()
    if folder is None:
        return make()
    path = folder / f"{digest(canonical_json([FORMAT, source]))}{kind.suffix}"
    found = _mapped(path)
    if found is not None:
        return found
    with _locked(path.with_name(f".{path.stem}.lock"), kind.patience):
        found = _mapped(path)
        if found is not None:
            return found
        begin = time.perf_counter()
        made = make()
        return _stored(path, made, kind, is_slow=time.perf_counter() - begin >= LONG)


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


def _stored(path: Path, made: Mapping[str, Tensor], kind: Kind, *, is_slow: bool) -> Mapping[str, Tensor]:
    """Write `made` to a file and return it mapped from there; return `made` itself on failure, or if it is small.

    Small tensors are written, too, if it `is_slow` to make them.
    """
    size = sum(tensor.nbytes for tensor in made.values())
    found = _mapped(path)  # written by a process that did not wait for the lock
    if found is not None or (size < WORTHWHILE and not is_slow):
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
        tidy(path.parent, path.suffix, kind.spared)
    return _mapped(path) or made


@contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock of the file `path`, and remove the file at the end; the kernel releases it if a process dies.

    Who comes after the removal takes a new lock, and finds the prepared file.
    """
    import fcntl  # absent on Windows

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + patience
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
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(descriptor)
