"""What the tests of this folder run under."""

from pathlib import Path

import pytest

from orchestrator.store.store import Store


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps draw no figures, which take as long as small trainings."""
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in a directory: what is trained is the same in any."""
    return Store(str(tmp_path / "store"))
