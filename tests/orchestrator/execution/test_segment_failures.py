"""A stage that would fail the same way is not tried again; any other failure is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from store_cases import FILES, chain, record_for

from orchestrator.core.errors import DataError, OrchestratorError, StoreError
from orchestrator.core.records import StageRecord
from orchestrator.core.work_order import Result, Worker, WorkOrder
from orchestrator.execution import segment
from orchestrator.execution.perform import perform
from orchestrator.store.store import Store
from orchestrator.training.loop.training_job import TrainingError
from orchestrator.training.loop.training_loop import Diverged
from orchestrator.training.pruning_rounds import LawBroken, Overflow

Attempt = Callable[..., tuple[int, str]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def attempt(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """Run a round that raises `error`; return how often it ran, and the message, or the log if there is one."""
    dense, spec = chain(1)[:2]
    store.commit(record_for(dense), FILES)

    def act(error: BaseException | None, log: str = "") -> tuple[int, str]:
        runs = []

        def run(*_: object) -> Result:
            runs.append(1)
            if error is not None:
                raise error
            return Result(record_for(spec), FILES, None)

        monkeypatch.setattr(segment, "resolve", lambda work: run if isinstance(work, str) else work)
        (outcome,) = perform(WorkOrder((spec,), Worker(store, log=log), lineage=(dense,)), segment.run_segment)
        return len(runs), getattr(outcome, "log" if log else "message", "")

    return act


@pytest.mark.parametrize("error", [Diverged("nan."), LawBroken("nested"), Overflow("inf"), TrainingError("wrong")])
def test_what_would_come_again_is_not_tried_again(error: OrchestratorError, attempt: Attempt, store: Store) -> None:
    assert attempt(error) == (1, str(error))
    runs, said = attempt(None)
    assert runs == 0
    assert said.startswith("the stage failed before, on 2")
    assert said.endswith(f": {str(error).rstrip('.')}; pass retry_failed=true to try it again.")
    assert attempt(None) == (runs, said), "and it is told of the first time"
    store.failures.drop_all(store.failures.known())
    assert attempt(None) == (1, "")


def test_a_repetition_names_the_log_that_has_the_traceback(tmp_path: Path, attempt: Attempt, store: Store) -> None:
    first, later = tmp_path / "logs" / "first.log", tmp_path / "logs" / "later.log"

    assert attempt(Diverged("nan"), str(first)) == (1, str(first))
    assert attempt(None, str(later)) == (0, str(first))
    assert first.read_text().count("Traceback") == 1
    assert not later.exists()


def _caused(error: OrchestratorError, cause: Exception) -> OrchestratorError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        *(MemoryError(), ConnectionError(), TimeoutError(), RuntimeError("CUDA error"), FileNotFoundError("data")),
        *(DataError("not downloaded"), OrchestratorError("something")),
        _caused(TrainingError("own loop"), OSError("a file is missing")),
    ],
)
def test_what_may_have_passed_since_then_is_tried_again(error: Exception, attempt: Attempt, store: Store) -> None:
    assert attempt(error)[0] == 1
    assert store.failures.known() == []
    assert attempt(None) == (1, "")


def test_another_environment_tries_again(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(Diverged("nan"))
    monkeypatch.setattr(segment, "deciding", lambda _: {"processor": "another"})
    assert attempt(None) == (1, "")


def test_other_weights_to_start_from_try_again(attempt: Attempt, store: Store) -> None:
    attempt(Diverged("nan"))
    (key,) = store.failures.known()
    past = store.failures.of(key)
    assert past is not None
    dense = chain(1)[0].key
    assert past.circumstances[dense] == store.finished([dense])[dense].weights_digest
    store.failures.save(key, replace(past, circumstances={**past.circumstances, dense: "other"}))
    assert attempt(None) == (1, "")


def test_a_store_that_is_away_does_not_hide_the_failure(
    attempt: Attempt, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = chain(1)[0].key
    finished = store.finished

    def away(_: Store, keys: Iterable[str]) -> Mapping[str, StageRecord]:
        if dense in (asked := list(keys)):
            raise StoreError("the store is away")
        return finished(asked)

    monkeypatch.setattr(Store, "finished", away)
    assert attempt(Diverged("nan")) == (1, "nan")


def test_a_secret_is_not_remembered(attempt: Attempt, store: Store) -> None:
    attempt(Diverged("it failed at https://me:hunter2@host"))
    (key,) = store.failures.known()
    assert b"hunter2" not in store.backend.read(f"failures/{key}")
