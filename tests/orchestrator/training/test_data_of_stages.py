"""Data digests in records: a later stage is refused if its worker loads other data on an equal machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_training_stages import chain, run
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import StageSpec, start_of
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.workloads import data_loading

SHIFT = [0.0]
"""Offset of the inputs; another value stands for another process."""


def drawn() -> tuple[tuple[Tensor, Tensor], ...]:
    inputs = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)) + SHIFT[0]
    return (inputs[:40], torch.arange(40) % 2), (inputs[40:], torch.arange(20) % 2)


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    elsewhere(0.0)
    yield
    elsewhere(0.0)


def elsewhere(shift: float) -> None:
    """Continue as a process that draws other data."""
    SHIFT[0] = shift
    data_loading._load.cache_clear()


def specs(*targets: float) -> tuple[StageSpec, ...]:
    return chain(*targets, data={"_target_": f"{__name__}.drawn"})


class Altered(Store):
    """Store that commits records as another release or machine would."""

    changes: dict[str, Any]

    def commit(self, record: StageRecord, files: Any) -> StageRecord:
        return super().commit(replace(record, **self.changes), files)


def altered(store: Store, **changes: Any) -> Store:
    found = Altered(store.uri)
    object.__setattr__(found, "changes", changes)
    return found


def test_records_name_the_digest_of_their_data_where_these_are_the_users_own(store: Store) -> None:
    dense, pruned = run(store, specs(0.5))

    assert dense.data_digest == pruned.data_digest == data_loading.load({"_target_": f"{__name__}.drawn"}).digest != ""
    assert {record.data_digest for record in run(store, chain(0.5))} == {""}
    assert "data_digest" not in dense.result(), "a missing digest does not repeat finished stages"


def test_a_round_whose_worker_loads_other_data_is_refused_and_the_preflight_refuses_it_before(store: Store) -> None:
    dense, pruned = specs(0.5)
    run(store, (dense,))
    elsewhere(1.0)
    order = WorkOrder((pruned,), Worker(store), lineage=(dense,))

    said = f"`data._target_` (={__name__}.drawn) must return the same data as for dense stage {dense.key[:12]}, which"
    for work in (run_segment, run_preflight):
        with pytest.raises(DataError, match=re.escape(said)):
            list(work(order))
    assert store.finished([pruned.key]) == {}
    elsewhere(0.0)
    assert [record.key for record in run_segment(order)] == [pruned.key]


def test_a_training_does_not_go_on_from_a_start_on_other_data(store: Store) -> None:
    (whole,) = specs()
    start = start_of(whole, 1)
    run(store, (start,))
    elsewhere(1.0)

    with pytest.raises(DataError, match=f"as for start stage {start.key[:12]}, which this stage continues; seed"):
        run(store, (replace(whole, starts_from=(start.key,)),))


@pytest.mark.parametrize(
    "changes", [{"data_digest": ""}, {"environment": {"processor": "another", "torch": "2", "numpy": "2"}}]
)
def test_older_records_and_those_of_another_machine_are_gone_on_from(store: Store, changes: dict[str, Any]) -> None:
    dense, pruned = specs(0.5)
    run(altered(store, **changes), (dense,))
    elsewhere(1e-6)

    assert [record.key for record in run_segment(WorkOrder((pruned,), Worker(store), lineage=(dense,)))] == [pruned.key]


def test_a_record_of_before_is_read_and_says_nothing_of_data(store: Store) -> None:
    (record,) = run(store, specs())
    older = {name: value for name, value in record.to_json().items() if name != "data_digest"}

    assert StageRecord.from_json(older) == replace(record, data_digest="")


def test_weights_that_were_dropped_by_another_release_are_put_back_and_nothing_is_set_aside(store: Store) -> None:
    dense, pruned = specs(0.5)
    run(altered(store, data_digest=""), (dense,))
    store.drop_weights([dense.key])
    run(store, (dense, pruned))

    assert store.backend.names("quarantine") == []
    assert set(store.finished([dense.key, pruned.key])) == {dense.key, pruned.key}
