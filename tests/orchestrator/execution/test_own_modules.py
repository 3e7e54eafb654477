"""Errors for custom modules that differ from those a sweep was planned with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.config import sources
from orchestrator.core.specs import StageSpec
from orchestrator.execution.own_modules import RUN_AGAIN, SourceChanged, hold_planned


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Sequence[StageSpec]:
    """Return stages that were planned with a module that no process has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "never_imported.py").write_text("VALUE = 1\n")
    sources.look_again()
    found = sources.fingerprint({"model": {"_target_": "never_imported.VALUE"}})
    assert set(found["modules"]) == {"never_imported"}
    return [StageSpec("dense", {"sources": found})]


def told(specs: Sequence[StageSpec]) -> str:
    with pytest.raises(SourceChanged) as refused:
        hold_planned(specs, remedy=None)
    said = str(refused.value)
    assert said.startswith("`never_imported` is not what the sweep was planned with: ")
    return said.partition(": ")[2]


def test_as_planned_nothing_is_said(specs: Sequence[StageSpec]) -> None:
    hold_planned(specs)


def test_an_edited_module_is_named_with_where_it_is_imported_from(specs: Sequence[StageSpec], tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text("VALUE = 2\n")

    assert told(specs) == (
        f"it was edited since, and Python imports it from {tmp_path}/never_imported.py; put its source back, or run "
        "the sweep again."
    )
    with pytest.raises(SourceChanged) as refused:
        hold_planned(specs)
    assert str(refused.value).endswith(f"; {RUN_AGAIN}"), "a worker's sweep is planned anew"


def test_a_missing_module_is_named_with_where_it_was_looked_for(specs: Sequence[StageSpec], tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").unlink()

    assert told(specs) == (
        f"it is missing, and Python finds no module of that name from {tmp_path}; start Python in its folder, or add "
        "its folder to PYTHONPATH."
    )


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("code/here/never_imported.py", "start Python in {}/code/here, or add that folder to PYTHONPATH."),
        ("code/renamed.py", "move it back."),
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_a_moved_module_is_named_with_where_it_lies_now(
    specs: Sequence[StageSpec], tmp_path: Path, place: str, remedy: str, other: bool
) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / "never_imported.py").rename(tmp_path / place)
    found = f"Python finds no module of that name from {tmp_path}"
    if other:
        (tmp_path / "never_imported.py").write_text("VALUE = 2\n")
        found = f"Python imports {tmp_path}/never_imported.py in its place"

    assert told(specs) == f"it was moved to {tmp_path}/{place}, and {found}; {remedy.format(tmp_path)}"
