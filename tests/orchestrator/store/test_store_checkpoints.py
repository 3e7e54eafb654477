"""Checkpoints: one for each stage, whole or absent, and never in the way of a commit."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from store_cases import Content, fresh, key_of

from orchestrator.core.errors import CheckpointDamaged, StoreError
from orchestrator.core.records import CurvePoint
from orchestrator.store.store import Store

KEY = key_of(0)


def save(store: Store, step: int, content: bytes = b"tensors", **values: Any) -> None:
    store.checkpoints.save(KEY, step, values, Content(content))


def files(store: Store) -> list[str]:
    return sorted(entry.path for entry in store.backend.entries() if entry.path.startswith("checkpoints/"))


def test_the_last_state_is_found_by_another_process(store: Store) -> None:
    assert store.checkpoints.latest(KEY) is None
    assert store.checkpoints.reached(KEY).number == -1
    for step in (3, 7):
        save(store, step, bytes([step]) * 100, loss=0.1)
    found = fresh(store).checkpoints.latest(KEY)

    assert found is not None
    assert (found.step, found.values) == (7, {"loss": 0.1})
    assert found.tensors.read_bytes() == b"\x07" * 100
    assert store.checkpoints.reached(KEY).number == 7
    assert len(files(store)) == 2, "the one before is gone"
    store.checkpoints.drop(KEY)
    assert store.checkpoints.latest(KEY) is None
    assert not files(store)


def test_the_curve_of_a_state_can_be_read_without_its_tensors(store: Store) -> None:
    points = [asdict(CurvePoint(step, step / 4, 5.0 + step, {"val/loss": 1 / step})) for step in (1, 3)]
    assert store.checkpoints.curve(KEY) == ()
    save(store, 3, curve=points)
    assert [asdict(point) for point in store.checkpoints.curve(KEY)] == points
    for odd in ({}, {"curve": "none"}, {"curve": [{"step": "x"}]}):
        save(store, 4, **odd)
        assert store.checkpoints.curve(KEY) == ()


def test_a_write_that_fails_leaves_the_state_before(store: Store) -> None:
    def broken(file: BinaryIO) -> None:
        file.write(b"half")
        raise StoreError("the disk is full")

    save(store, 3)
    with pytest.raises(StoreError, match="full"):
        store.checkpoints.save(KEY, 5, {}, broken)
    assert store.checkpoints.reached(KEY).number == 3
    assert store.checkpoints.latest(KEY) is not None
    assert len(files(store)) == 2


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "pointer", "other format", "leads out"])
def test_a_damaged_state_is_told_and_set_aside_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(str(tmp_path / "store"))
    save(store, 3, b"0123456789")
    folder = tmp_path / "store" / "checkpoints" / KEY
    (tensors,) = folder.glob("*.safetensors")
    pointer = folder / "checkpoint.json"
    if damage == "truncated":
        tensors.write_bytes(b"01234")
    elif damage == "altered":
        tensors.write_bytes(b"0123456780")
    elif damage == "missing":
        tensors.unlink()
    elif damage == "pointer":
        pointer.write_bytes(pointer.read_bytes()[:-20])
    else:
        from orchestrator.store.backends import seal, unseal

        change = {"format": 0} if damage == "other format" else {"file": "../../store.json"}
        pointer.write_bytes(seal({**unseal(pointer.read_bytes()), **change}))
    with pytest.raises(CheckpointDamaged) as caught:
        store.checkpoints.latest(KEY)
    with caplog.at_level(logging.WARNING):
        store.checkpoints.put_aside(KEY, str(caught.value))

    assert f"checkpoint of stage {KEY[:12]} was set aside in quarantine/" in caplog.text
    assert not files(store)
    (aside,) = (tmp_path / "store" / "quarantine").iterdir()
    assert (aside / "reason.txt").read_text().strip() in caplog.text
    save(store, 1)
    assert store.checkpoints.reached(KEY).number == 1


def test_a_state_is_plain_json_and_tensors(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    save(store, 3, values=[1, 2.5, "x"])
    pointer = json.loads((tmp_path / "store" / "checkpoints" / KEY / "checkpoint.json").read_bytes())

    assert pointer["values"] == {"values": [1, 2.5, "x"]}
    assert set(pointer) == {"sha256", "format", "file", "info", "step", "values"}


def test_a_stage_that_is_forgotten_has_no_state_either(store: Store) -> None:
    save(store, 3)
    store.discard(KEY)

    assert not files(store)
