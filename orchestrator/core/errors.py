"""Errors that a user can fix: their base class, and the classes that several rooms raise or catch."""

from __future__ import annotations

from orchestrator.core.redact import shown


class OrchestratorError(Exception):
    """Base of all errors that a user can fix; the text is the whole message, without a traceback."""

    exit_status = 1
    """Exit status of the command line; 2 if nothing was started."""
    repeats = False
    """Whether the stage fails with this error every time on the same processor with the same releases."""
    log = host = ""
    """Log file of an earlier attempt that holds the traceback, and the machine with that file; empty if unknown."""

    def __str__(self) -> str:
        """Return the redacted message: it may quote text that somebody else wrote."""
        return shown(super().__str__())


class StoreError(OrchestratorError):
    """Store that cannot be used as requested; the text gives the reason and the remedy."""


class StageMissing(StoreError):
    """Finished stage whose files are damaged or missing: it must run again before the stages that need it.

    Args:
        message: the text of the error.
        key: the key of the missing stage.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class CheckpointDamaged(StoreError):
    """Checkpoint that cannot be read, or differs from the checkpoint that was written."""


class DataError(OrchestratorError):
    """Data set that is absent, damaged, or different from the configuration."""


class CannotKeep(OrchestratorError):
    """View that its server or database can never hold, even after retries; the text gives reason and remedy."""


class ModelError(OrchestratorError):
    """Network that cannot be built from its configuration, or has nothing to prune."""


class Cancelled(Exception):
    """Stage that ended at a batch because it was cancelled."""
