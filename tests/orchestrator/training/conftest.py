"""What the tests of this folder run under."""

import pytest


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sweeps draw no figures, which take as long as small trainings."""
    monkeypatch.setattr("orchestrator.views.report.files.draw", lambda *_: {})
