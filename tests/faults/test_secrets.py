"""Passwords and tokens of URIs and options are written nowhere: console, view, report, logs, store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import SWEEP, Command

SECRET = "hunter2-zx81"
LINE = (*SWEEP, "cluster=inline", "seed=0", "schedule.sparsity=0.5", "schedule.rounds=1", "train.epochs=1")


@pytest.mark.slow  # a new MLflow database takes long
def test_secrets_are_written_nowhere(start: Callable[..., Command], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    uri = f"sqlite:///{folder}/mlflow.db?token={SECRET}"
    options = [f"+store.options.secret={SECRET}", f"+store.options.endpoint_url=https://me:{SECRET}@host/"]
    command = start(folder, *LINE, f"tracking.uri='{uri}'", *options, AWS_SECRET_ACCESS_KEY=SECRET)
    preview = start(tmp_path / "dry", *LINE, f"store.uri='memory://me:{SECRET}@host'", "dry_run=true")

    assert command.wait() == 0, command.stderr
    assert preview.wait() == 0, preview.stderr
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) > 10
    assert [path for path, content in written.items() if SECRET.encode() in content] == []
    assert [path for path in written if SECRET in str(path)] == []
    assert any(b"***" in content for content in written.values()), "they are hidden, not left out"


def test_secrets_are_not_quoted_in_refusals(start: Callable[..., Command], tmp_path: Path) -> None:
    refused = start(tmp_path / "sweep", *LINE, f"store.uri=nope://me:{SECRET}@host/bucket", "tracking=none")

    assert refused.wait() == 2
    assert "nope://me:***@host" in refused.stderr
    assert SECRET not in refused.stdout + refused.stderr
