"""Create what a `_target_` names, and say plainly why that failed. One of few places that use Hydra in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from orchestrator.config.sources import LABELS
from orchestrator.core.errors import OrchestratorError


class TargetError(OrchestratorError):
    """A `_target_` that cannot be imported, or that raised when called."""


def create(where: str, node: Mapping[str, Any], *, partial: bool = False) -> Any:
    """Call `node._target_` with the node's other keys, but for `name` and `depends`, and return what it returns.

    Nested nodes with a `_target_` are created first. With `partial` the call is left for the caller to complete.

    Raises:
        TargetError: the target cannot be imported or raised; it names `where` the node is and quotes the cause.
        OrchestratorError: what the target itself raised, when it is one.
    """
    arguments = {key: value for key, value in node.items() if key not in LABELS}
    try:
        return instantiate(arguments, _convert_="all", _partial_=partial)
    except InstantiationException as error:
        cause: BaseException = error.__cause__ or error
        if isinstance(cause, OrchestratorError):
            raise cause from None
        raise TargetError(failure(where, node, cause)) from error


def failure(where: str, node: Mapping[str, Any], cause: BaseException) -> str:
    """Say that the target of the node named `where` failed with `cause`."""
    reason = " ".join(str(cause).split()).removesuffix(", set env var HYDRA_FULL_ERROR=1 to see chained exception.")
    return (
        f"`{where}._target_` (={node.get('_target_')}) could not be created: {type(cause).__name__}: {reason}; "
        f"check the target and its arguments under `{where}`."
    )
