"""Perform a work order, in the same way under every executor, and yield its records or its failure."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.events import Failure
from orchestrator.core.redact import secrets_in, without
from orchestrator.core.work_order import Item, Preflight, Work, WorkOrder
from orchestrator.execution.output_capture import writable
from orchestrator.execution.own_modules import hold_planned

T = TypeVar("T")
DEFAULT_WORK: Work | str = "orchestrator.execution.segment:run_segment"
"""Given by name, so that the driver need not import torch."""
PREFLIGHT: Preflight | str = "orchestrator.training.preflight.rehearsal:run_preflight"

TRANSIENT = (MemoryError, ConnectionError, TimeoutError)
"""Exceptions after which a retry may succeed; torch's OutOfMemoryError is recognised by its name."""


def resolve(work: T | str) -> T:
    """Import the function that a `module:name` names; return anything else unchanged."""
    if not isinstance(work, str):
        return work
    module, _, name = work.partition(":")
    return cast(T, getattr(importlib.import_module(module), name))


def perform(order: WorkOrder, work: Callable[[WorkOrder], Iterator[Item]] | str) -> Iterator[Item | Failure]:
    """Yield each stage's record as it becomes durable and, if a stage raises, the failure as the last item.

    Once the worker is cancelled, any exception counts as the end of the work, and no failure is yielded.
    """
    worker = order.worker
    try:
        with pinned_threads(worker.threads):
            if worker.check is not None:
                _pass(worker.check)
            hold_planned(order.specs)
            yield from resolve(work)(order)
    except (Exception, SystemExit) as error:
        if not worker.cancelled():
            failure = failure_of(error, worker.log, [spec.fields for spec in (*order.lineage, *order.specs)])
            if worker.log and failure.traceback:
                log, _ = writable(Path(worker.log))
                with log.open("a") as file:  # keeps what an earlier run wrote
                    file.write(failure.traceback)
                failure = replace(failure, log=str(log))
            yield failure


@lru_cache(maxsize=8)
def _pass(check: Callable[[], object]) -> None:
    check()


def failure_of(error: BaseException, log: str = "", given: Sequence[Mapping[str, Any]] = ()) -> Failure:
    """Return the Failure for an exception on this host, without the secrets in the `given` configurations."""
    secrets = set(secrets_in(given))
    message = str(error) if isinstance(error, OrchestratorError) else f"{type(error).__name__}: {error}"
    earlier = error if isinstance(error, OrchestratorError) and error.log else None
    return Failure(
        message=without(message, secrets),
        traceback="" if earlier else without("".join(traceback.format_exception(error)), secrets),
        log=earlier.log if earlier else log,
        host=earlier.host if earlier else socket.gethostname(),
        transient=_is_transient(error),
        repeats=isinstance(error, OrchestratorError) and error.repeats and error.__cause__ is None,
        fatal=isinstance(error, StoreError) and isinstance(error.__cause__, OSError) and not _is_transient(error),
    )


def _is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed after `error`, judged by its type and the types of its causes."""
    while error is not None:
        if isinstance(error, TRANSIENT) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Limit numeric libraries to `threads` threads: OMP_NUM_THREADS, and torch's own setting if torch is imported.

    torch keeps the number of its first import in this process, so each order sets its own.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    if torch:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(before)
