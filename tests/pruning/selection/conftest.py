"""What all tests of this folder run under."""

import pytest

from pruning.selection import chunks, smallest


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Make small tensors take the ways of large ones: several chunks, a bracket from a sample."""
    monkeypatch.setattr(chunks, "CHUNK", 64)
    monkeypatch.setattr(smallest, "SAMPLE", 128)
