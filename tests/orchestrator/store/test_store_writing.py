"""A large file is synced to disk while later parts are still written and hashed."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from orchestrator.store import backends

PIECES = [bytes([number]) * 1000 for number in range(20)]


def pieces(file: BinaryIO) -> None:
    for piece in PIECES:
        file.write(piece)


@pytest.mark.parametrize("at_once", [1, 2500, 10**6])
def test_a_file_is_what_was_written_however_often_it_is_synced(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(backends, "AT_ONCE", at_once)
    monkeypatch.setattr(os, "fsync", synced.append)

    info = backends.write_hashed(tmp_path / "file", pieces)

    whole = b"".join(PIECES)
    assert (tmp_path / "file").read_bytes() == whole
    assert (info.sha256, info.bytes) == (hashlib.sha256(whole).hexdigest(), len(whole))
    assert (len(synced) > 1) == (at_once < len(whole)), "the last one, of all, is always done"


def test_what_a_sync_meanwhile_could_not_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:  # a file system reports an error only once
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backends, "AT_ONCE", 15_000)
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space"):
        backends.write_hashed(tmp_path / "file", pieces)


def test_a_file_that_is_not_to_be_durable_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "AT_ONCE", 1)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it was synced"))

    backends.write_hashed(tmp_path / "file", pieces, sync=False)
