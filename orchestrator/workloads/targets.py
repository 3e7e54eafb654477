"""Create the object that a `kind` or a `_target_` names, with clear errors; it uses Hydra in the worker."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from traceback import extract_tb
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from orchestrator.config.sources import LABELS
from orchestrator.core.errors import DataError, OrchestratorError
from pruning.catalogue.rows import Row

READY = {"optimizer": "adam", "scheduler": "step"}
"""Part of a training -> a ready choice of it, as an example."""
NAMING = LABELS | {"kind", "_target_"}
"""Keys of a model, data set or method that are not arguments of the object to create."""


class TargetError(OrchestratorError):
    """A `_target_` that cannot be imported, or a `_target_` or `kind` that raised an error when called."""


def create(where: str, node: Mapping[str, Any], *arguments: Any, kinds: Mapping[str, Row] | None = None) -> Any:
    """Call the target of `node` with `arguments` and the node's other keys, except `name` and `depends`.

    Nested nodes with a `_target_` are created first.

    Args:
        where: the node's place in the configuration, for errors.
        node: `kind`, a key of `kinds`, or `_target_`; and arguments by name.
        arguments: arguments by position.
        kinds: catalogue rows of the built-in objects.

    Returns:
        The result of the target.

    Raises:
        TargetError: the target cannot be imported or raised; the text names `where` and quotes the cause.
        OrchestratorError: raised by the target itself.
    """
    left_out = NAMING if kinds else LABELS | {"_target_"}
    named = {key: value for key, value in node.items() if key not in left_out}
    try:
        if kinds and node.get("kind"):
            return kinds[node["kind"]].load()(*arguments, **named)
        return instantiate({"_target_": node["_target_"], **named}, *arguments, _convert_="all")
    except (Exception, SystemExit) as error:
        if isinstance(cause := _cause(error), OrchestratorError):
            raise cause from None
        raise TargetError(failure(where, node, cause)) from cause


FILLED = ("input_shape", "classes")
"""Arguments of a network that are filled in from the data where they are null."""


def given(where: str, node: Mapping[str, Any]) -> str:
    """Return how the node at `where` names its target, for errors: "`model.kind` (=cnn)"."""
    key = "_target_" if node.get("_target_") else "kind"
    return f"`{where}.{key}` (={node.get(key)})"


def failure(where: str, node: Mapping[str, Any], cause: BaseException) -> str:
    """Return a message that creating the node at `where` failed with `cause`."""
    cause, said = _cause(cause), f"{given(where, node)} could not be created"
    if isinstance(cause, ModuleNotFoundError) and cause.name and not f"{node.get('_target_')}.".startswith(cause.name):
        return f"{said}: {_importing(cause)} imports {cause.name}, which cannot be found; install it."
    reason = " ".join(str(cause).split()).removesuffix(", set env var HYDRA_FULL_ERROR=1 to see chained exception.")
    refused = re.search(r"got an unexpected keyword argument '(\w+)'", reason)
    remedy = f"check the target and its arguments under `{where}`"
    if missing := re.search(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)", reason):
        filled = FILLED if where == "model" else ()
        words = [f"+{where}.{n}={'null' if n in filled else 'VALUE'}" for n in re.findall(r"'(\w+)'", missing[1])]
        remedy = f"add {' '.join(words)}" + "; the data fill in what is null" * ("=null" in " ".join(words))
    elif refused and refused[1] in node:
        near = get_close_matches(refused[1], _taken(node), 1)
        remedy = f"did you mean `{where}.{near[0]}`? " if near else ""
        remedy += _remedy_for_default(where, refused[1], node)
    return f"{said}: {type(cause).__name__}: {reason}; {remedy}."


def _taken(node: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters of a node's target that the node does not give."""
    try:
        parameters = inspect.signature(get_object(str(node["_target_"]))).parameters
    except (KeyError, TypeError, ValueError, ImportError, AttributeError):
        return []
    return [name for name in parameters if name not in node]


def _remedy_for_default(where: str, key: str, node: Mapping[str, Any]) -> str:
    """Return how to leave out a key that the target does not take; Hydra's `~` removes no key that is null."""
    part = where.rpartition(".")[2]
    ready = f"choose {part}@{where}={READY[part]} or a file of your own" if part in READY else ""
    ways = filter(None, ("" if node[key] is None else f"add ~{where}.{key}", ready))
    return f"`{where}.{key}` may come from a default: {', or '.join(ways) or 'leave it out'}"


def _cause(error: BaseException) -> BaseException:
    """Return the error that Hydra reports by an error of its own."""
    while error.__cause__ is not None and (
        isinstance(error, InstantiationException)
        or (isinstance(error, ImportError) and str(error).startswith("Error loading "))
    ):
        error = error.__cause__
    return error


def _importing(error: ModuleNotFoundError) -> str:
    """Return the file and the line that import the missing module."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    return f"{frames[-1].filename}, line {frames[-1].lineno},"


def returned_function(
    name: str, what: str, named: Mapping[str, Any], config: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return the function `name` that a data target may return; `what` is its argument, for errors."""
    found = named.get(name)
    if found is not None and not callable(found):
        raise DataError(
            f"{given('data', config)} must return a `{name}` that can be called with {what}, not "
            f"{type(found).__name__}."
        )
    return found
