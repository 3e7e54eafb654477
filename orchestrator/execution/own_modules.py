"""Hold a process to the sources that a stage was planned with: Python keeps a module as it was when imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from orchestrator.config import sources
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import StageSpec

_known: dict[str, str] = {}
"""Dotted path -> digest of its file when this process was about to import it, or first heard of it."""


class SourceChanged(OrchestratorError):
    """A module of the user's own is not, here, what the stage's key says."""


class ProcessOutdated(SourceChanged):
    """The file is as planned, and this process has imported an older one: a fresh process can do the work."""


def hold_planned(specs: Iterable[StageSpec]) -> None:
    """Raise unless this process has, or will import, each own module as the stages' fingerprints name it.

    Raises:
        ProcessOutdated: an older version was imported here
        SourceChanged: the file itself is another one now, or on this node
    """
    planned = modules_of(specs)
    if not planned:
        return
    sources.look_again()
    found = {name: sources.module_digest(name) for name in planned}
    for name, digest in found.items():
        if name not in sys.modules or name not in _known:
            _known[name] = digest
    for name, digest in planned.items():
        if found[name] != digest and _known[name] != digest:
            raise SourceChanged(
                f"the source of `{name}` is not what the sweep was planned with: it was edited since, or this node "
                "has another version; run the same command again."
            )
    for name, digest in planned.items():
        if _known[name] != digest:
            raise ProcessOutdated(
                f"`{name}` was edited after this process had imported it, and cluster=inline works in this process; "
                "start the command anew."
            )


def modules_of(specs: Iterable[StageSpec]) -> dict[str, str]:
    """Return dotted path -> digest of every own module that the stages were planned with."""
    return {name: digest for spec in specs for name, digest in spec.typed.sources.modules.items()}
