"""What a user can mend: the base of such errors, and those that several rooms raise or catch."""

from __future__ import annotations

from orchestrator.core.redact import shown


class OrchestratorError(Exception):
    """Base of everything a user can mend; its text is the whole message, no traceback needed."""

    exit_status = 1
    """What the command line ends with; 2 where nothing was started."""
    repeats = False
    """Whether a stage that ended so ends so each time, on the same processor with the same releases."""
    log = host = ""
    """Where its traceback is, if an earlier attempt's log has it: the file, and the machine that it is on."""

    def __str__(self) -> str:
        """Return the message as people may be shown it: it may quote what somebody else wrote."""
        return shown(super().__str__())


class StoreError(OrchestratorError):
    """The store cannot be used as asked; the text says why and what to do."""


class StageMissing(StoreError):
    """What a stage starts from was finished, and is damaged or not there any more: it has to be repeated first.

    `key` is the stage that is missing.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class CheckpointDamaged(StoreError):
    """What is kept of a stage's state cannot be read, or is not what was written."""


class DataError(OrchestratorError):
    """A data set that is absent, damaged, or not what the configuration says."""


class CannotKeep(OrchestratorError):
    """The view can never be kept there, however long it is waited for: says why and what to do."""


class ModelError(OrchestratorError):
    """A network that cannot be built from its configuration, or has nothing to prune."""


class Cancelled(Exception):
    """A stage ended at a batch, as it was asked to."""
