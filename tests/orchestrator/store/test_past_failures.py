"""Remembered failures: one for each stage, on every kind of store, and safe to lose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_cases import fresh, key_of

from orchestrator.core.work_order import PastFailure
from orchestrator.store.store import Store

KEY = key_of(0)
PAST = PastFailure("Diverged", "the loss is nan", 5.0, {"torch": "2"})


def test_the_last_failure_is_found_by_another_process(store: Store) -> None:
    assert store.failures.of(KEY) is None
    assert store.failures.known() == []
    for past in (PAST, replace(PAST, time=7.0)):
        store.failures.save(KEY, past)

    assert fresh(store).failures.of(KEY) == replace(PAST, time=7.0)
    assert fresh(store).failures.known() == [KEY]
    store.failures.drop_all([key_of(1)])
    assert store.failures.known() == [KEY]
    store.failures.drop_all([KEY, key_of(1)])
    assert store.failures.of(KEY) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"half"])
def test_one_that_cannot_be_read_is_none(damage: bytes, store: Store) -> None:
    store.failures.save(KEY, PAST)
    store.backend.write(f"failures/{KEY}", damage)

    assert store.failures.of(KEY) is None
