"""Targets are found as files, never imported, and fingerprinted by content."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.config import sources
from orchestrator.core.canonical import digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "their_package"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\nfrom .nets import Reexported\n")
    (folder / "nets.py").write_text("class Net: ...\nReexported = Net\n")
    (folder / "sub" / "__init__.py").write_text("from ..nets import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.locate.cache_clear()
    sources._file_digest.cache_clear()
    sources._names.cache_clear()
    return folder


def test_a_target_is_found_without_being_imported(package: Path) -> None:
    assert sources.locate("their_package.nets.Net") == package / "nets.py"
    assert sources.locate("their_package.Reexported") == package / "nets.py"
    assert sources.locate("their_package.sub.Anything") == package / "sub" / "__init__.py"
    assert "their_package" not in sys.modules


def test_the_fingerprint_is_that_of_the_file(package: Path) -> None:
    before = sources.fingerprints({"_target_": "their_package.nets.Net"})
    assert before == {"their_package.nets.Net": digest((package / "nets.py").read_bytes())}

    (package / "nets.py").write_text("class Net: changed = True\n")
    sources._file_digest.cache_clear()
    assert sources.fingerprints({"_target_": "their_package.nets.Net"}) != before


def test_nested_targets_count_and_built_ins_do_not(package: Path) -> None:
    node = {
        "_target_": "orchestrator.workloads.models.mlp",
        "parts": [{"_target_": "their_package.nets.Net"}],
        "o": {"_target_": "torch.optim.SGD"},
    }

    assert list(sources.fingerprints(node)) == ["their_package.nets.Net"]


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("Net", "dotted path"),
        ("no_such_package.Net", "no module 'no_such_package'"),
        ("their_package.nets.Nett", "has no 'Nett'"),
        ("their_package.nets", "is a module"),
        ("their package.Net", "dotted path"),
    ],
)
def test_what_leads_nowhere_is_said(package: Path, target: str, rule: str) -> None:
    with pytest.raises(sources.SourceError, match=rule):
        sources.locate(target)
