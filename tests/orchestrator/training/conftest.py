"""Fixtures of the training tests."""

from pathlib import Path

import pytest

from orchestrator.store.store import Store


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps draw no figures, which would take as long as small trainings."""
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Store in a directory; every kind of store gets the same results."""
    return Store(str(tmp_path / "store"))
