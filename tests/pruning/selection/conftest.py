"""Small chunks and samples for all tests of this folder."""

import pytest

from pruning.selection import smallest


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Make small tensors use the code paths of large ones: several chunks, and a bracket from a sample."""
    monkeypatch.setattr(smallest, "CHUNK", 64)
    monkeypatch.setattr(smallest, "SAMPLE", 128)
