"""Check that a process runs the sources that a stage was planned with, as Python never reloads an edited module."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from orchestrator.config import sources
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.plain_data import digest
from orchestrator.core.specs import StageSpec

RUN_AGAIN = "run the same command again; all nodes of a cluster need the same sources."
SKIPPED = sources.INSTALLED | {"__pycache__"}
"""Names of folders that are left out of the search for a moved module."""
MOST_FOLDERS = 2000
"""Maximum number of folders to search for a moved module."""

_known: dict[str, str] = {}
"""Dotted path -> digest of the file when this process last saw it before importing it, or first checked it."""


class SourceChanged(OrchestratorError):
    """A module of the user's own has another source on this node than the stage's key says."""


class ProcessOutdated(SourceChanged):
    """This process has imported an older version of a module than planned; a fresh process can do the work."""


def hold_planned(specs: Iterable[StageSpec], remedy: str | None = RUN_AGAIN) -> None:
    """Raise unless this process has imported, or will import, each own module in the version that was planned.

    Args:
        specs: the stages; their fingerprints give the planned versions
        remedy: advice in the message if a file has changed; None: how to restore the planned file

    Raises:
        ProcessOutdated: this process has imported an older version
        SourceChanged: the file has another source now, or on this node
    """
    planned = modules_of(specs)
    if not planned:
        return
    sources.look_again()
    found = {name: sources.module_digest(name) for name in planned}
    for name, source in found.items():
        if name not in sys.modules or name not in _known:
            _known[name] = source
    for name, source in planned.items():
        if found[name] != source and _known[name] != source:
            changed, back = _change(name, source)
            raise SourceChanged(f"`{name}` is not what the sweep was planned with: {changed}; {remedy or back}")
    for name, source in planned.items():
        if _known[name] != source:
            raise ProcessOutdated(
                f"`{name}` was edited after this process had imported it, and cluster=inline runs in this process; "
                "start the command again in a new process."
            )


def _change(name: str, source: str) -> tuple[str, str]:
    """Return what has changed about a module, and how to restore it.

    Args:
        name: dotted path of the module
        source: digest of its source when the sweep was planned
    """
    here, path = sources.module_file(name), _moved_to(name, source)
    found = f"Python imports {here} in its place" if here else f"Python finds no module of that name from {Path.cwd()}"
    if path is not None:
        folder = _folder_above(path, name)
        back = f"start Python in {folder}, or add that folder to PYTHONPATH." if folder else "move it back."
        return f"it was moved to {path}, and {found}", back
    if here is None:
        return f"it is missing, and {found}", "start Python in its folder, or add its folder to PYTHONPATH."
    return f"it was edited since, and Python imports it from {here}", "put its source back, or run the sweep again."


def _moved_to(name: str, source: str) -> Path | None:
    """Return a file below the working directory or the import path that has a module's planned source."""
    if source == digest(b""):
        return None  # empty files are common, so an equal one need not be the module
    there = sources.module_file(name)
    folders = dict.fromkeys((Path.cwd(), *(Path(entry).absolute() for entry in sys.path if _may_be_own(entry))))
    files = (path for folder in folders for path in _python_files(folder))
    return next((path for path in files if path != there and digest(path.read_bytes()) == source), None)


def _may_be_own(entry: str) -> bool:
    path = Path(entry).resolve()
    return path.is_dir() and not (
        sources.INSTALLED & set(path.parts) or any(path.is_relative_to(folder) for folder in sources.STANDARD)
    )


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, the nearest first, without hidden folders and installed packages."""
    pending = deque([folder])
    for _ in range(MOST_FOLDERS):
        if not pending:
            return
        with suppress(OSError):
            found = sorted(pending.popleft().iterdir())
            yield from (path for path in found if path.suffix == ".py" and path.is_file())
            pending += (
                path
                for path in found
                if path.is_dir()
                and not path.is_symlink()
                and not path.name.startswith(".")
                and path.name not in SKIPPED
            )


def _folder_above(path: Path, name: str) -> Path | None:
    """Return the folder from which `path` is imported as `name`; None if its name differs."""
    parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
    wanted = tuple(name.split("."))
    return Path(*parts[: -len(wanted)]) if parts[-len(wanted) :] == wanted else None


def modules_of(specs: Iterable[StageSpec]) -> dict[str, str]:
    """Return dotted path -> digest of every own module that the stages were planned with."""
    return {name: digest for spec in specs for name, digest in spec.typed.sources.modules.items()}
