"""The node folder: prepared data, and files on their way to or from an object store.

The folder belongs to one user and lies in the temporary directory ($TMPDIR), which systems clean by themselves.
Deleting it is harmless, since everything in it can be made or fetched again.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

KEPT = 8
"""Number of files of each kind that stay; when one more is written, the least recently used are removed."""
ABANDONED = 3600.0
"""Age in seconds after which an unfinished file, whose name begins with a dot, belongs to a killed process."""


def node_folder() -> Path | None:
    """Return the node folder; None if no folder is sure to belong to this user alone."""
    if sys.platform == "win32":
        return None
    try:
        folder = Path(tempfile.gettempdir(), f"pruning-orchestrator-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # another user may have put a link here, so it is not followed
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if own else None


def tidy(folder: Path, suffix: str, spared: float = 0.0) -> None:
    """Remove all but the `KEPT` most recently used files of a kind, and the leftovers of killed processes.

    Args:
        folder: the folder that `node_folder` returned
        suffix: file name suffix of the kind
        spared: seconds after its last use during which a file is never removed
    """
    now = time.time()
    used = dict[Path, float]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # other processes remove their own files
            used[path] = path.stat().st_mtime
    kind = sorted((path for path in used if path.suffix == suffix), key=used.__getitem__, reverse=True)
    old = [path for path in kind[KEPT:] if now - used[path] > spared]
    left = [path for path in used if path.name.startswith(".") and now - used[path] > ABANDONED]
    for path in (*old, *left):
        path.unlink(missing_ok=True)
