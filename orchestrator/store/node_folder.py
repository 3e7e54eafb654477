"""A directory on this node for what can be had again: prepared data, and files on their way to or from an object store.

It is the user's own, under the temporary one ($TMPDIR), which systems clean by themselves; deleting it is harmless.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from pathlib import Path

KEPT = 8
"""Files of a kind that stay; when one more is written, those used longest ago are removed."""
ABANDONED = 3600.0
"""Seconds after which an unfinished file, whose name begins with a dot, is that of a killed process."""


def node_folder() -> Path | None:
    """Return the directory, None where none can be known to be this user's alone."""
    if sys.platform == "win32":
        return None
    try:
        folder = Path(tempfile.gettempdir(), f"pruning-orchestrator-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not what a link of another user's may lead to
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if own else None


def tidy(folder: Path, suffix: str, spared: float = 0.0) -> None:
    """Remove the files of a kind beyond `KEPT`, and what killed processes left.

    Args:
        folder: that of `node_folder`
        suffix: what the names of the kind end in
        spared: seconds since its last use for which a file stays all the same
    """
    now = time.time()
    used = {path: path.stat().st_mtime for path in folder.iterdir()}
    kind = sorted((path for path in used if path.suffix == suffix), key=used.__getitem__, reverse=True)
    old = [path for path in kind[KEPT:] if now - used[path] > spared]
    left = [path for path in used if path.name.startswith(".") and now - used[path] > ABANDONED]
    for path in (*old, *left):
        path.unlink()
