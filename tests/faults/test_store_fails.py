"""If the store is full, read-only or gone during a sweep, the sweep stops and reports it; later it can continue."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from composition import composed
from fault_commands import SWEEP, Command, finished_stages, results_of

from orchestrator.config import schema as schema
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.records import FileInfo
from orchestrator.core.specs import Job
from orchestrator.core.work_order import FileWriter
from orchestrator.store import local_backend
from orchestrator.store.store import Store
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome

SKIPPED = ("-m", "schedule.sparsity", "seed", "train.optimizer", "finetune")
LINE = [part for part in SWEEP if not part.startswith(SKIPPED)]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Outcome:
    """Run the sweep in this process, so that the test can make its file system fail."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "orchestrator.views.report.report_files.report", lambda *_: {}
    )  # drawing figures takes longer than the rest of the test
    config = configured(*more)
    return conductor.run([Job((f"seed={n}",), {**config, "seed": n}) for n in range(4)])


def configured(*more: str) -> dict[str, Any]:
    return composed(*LINE, "cluster=inline", "tracking=none", "finetune.epochs=1", *more)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(errno.ENOSPC, "the disk or quota is full. Free some space", id="full"),
        pytest.param(errno.EROFS, "the file system is read-only", id="read-only", marks=pytest.mark.slow),
        pytest.param(errno.EACCES, "permission denied", id="denied"),
        pytest.param(errno.EIO, "Input/output error", id="broken", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_cannot_be_written_stops_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, number: int, said: str
) -> None:
    real, writes = local_backend.write_hashed, 0

    def failing(full: str, writer: FileWriter, sync: bool = True) -> FileInfo:
        nonlocal writes
        writes += "weights" in full
        if writes > 3:
            raise OSError(number, os.strerror(number), full)
        return real(full, writer, sync)

    with monkeypatch.context() as broken:
        broken.setattr(local_backend, "write_hashed", failing)
        outcome = run(tmp_path, monkeypatch)

    told = capsys.readouterr()
    assert outcome.status == "failed"
    assert said in str(outcome.incomplete())
    assert "every other trial would fail, too" in told.out
    assert "Traceback" not in told.out + told.err
    assert finished_stages(tmp_path) == 3
    assert writes == 4, "nothing more was trained"

    again = run(tmp_path, monkeypatch)
    assert again.status == "finished"
    assert len(again.records) == 12


@pytest.mark.slow
def test_weights_that_another_sweep_drops_until_this_one_is_saved_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path, monkeypatch)
    dense, save = [trial.stages[0] for trial in first.plan.trials], Store.save_sweep

    def too_late(store: Store, *arguments: Any) -> None:
        if dense:
            store.drop_weights([dense.pop()])
        save(store, *arguments)

    monkeypatch.setattr(Store, "save_sweep", too_late)
    second = run(tmp_path, monkeypatch, "schedule.sparsity=0.3")

    assert second.status == "finished"
    assert first.records[dense[0]].result() == second.records[dense[0]].result()


@pytest.mark.slow
def test_a_dry_run_leaves_a_damaged_stage_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, monkeypatch)
    next(tmp_path.glob("store/stages/*/weights.safetensors")).write_bytes(b"")
    before = sorted(tmp_path.glob("store/**/*"))
    outcome = run(tmp_path, monkeypatch, "dry_run=true")

    assert not outcome.ran
    assert "is damaged" in caplog.text
    assert "The next run sets it aside and repeats it" in caplog.text
    assert sorted(tmp_path.glob("store/**/*")) == before
    assert len(run(tmp_path, monkeypatch).records) == 12


@pytest.mark.slow
def test_a_file_too_large_for_the_limit_is_said_by_the_command(
    start: Callable[..., Command], tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "sweep"
    limited = start(folder, *SWEEP, "cluster=inline", "tracking=none", limit=4000)

    assert limited.wait() == 2, "nothing had started"
    assert "the file is larger than this process may write" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert start(folder, *SWEEP, "cluster=inline", "tracking=none").wait() == 0
    assert results_of(folder) == results_of(undisturbed)


def test_a_store_where_a_file_lies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(OrchestratorError, match="a part of that path is a file, not a directory") as refused:
        run(tmp_path, monkeypatch, f"store.uri={tmp_path / 'file'}")
    assert refused.value.exit_status == 2


@pytest.mark.slow
def test_a_damaged_layout_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{")

    with pytest.raises(StoreError, match=r'store\.json is damaged: .*write \{"format":1\} to it') as refused:
        run(tmp_path, monkeypatch)
    assert refused.value.exit_status == 2

    (tmp_path / "store" / "store.json").write_text('{"format":1}')
    assert run(tmp_path, monkeypatch).status == "finished"
