"""Command `python -m orchestrator.gate`: exit statuses, files and error messages."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from factories import make_plan, make_records, sweep_info

from orchestrator.commands.gate_command import main
from orchestrator.core.events import Decision
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store

Said = tuple[int, str, str]
Gate = Callable[..., Said]


def save(name: str, loss: float = 0.0, seeds: int = 3, processor: str = "one") -> None:
    """Save a sweep whose pruned networks lose `loss` in each round, slightly more for higher seeds."""
    plan = make_plan(("l1_unstructured",), (0.5 if seeds else 0.9,), range(seeds or 3), rounds=1)
    info = sweep_info(name)
    store = Store("store")
    for key, record in make_records(plan).items():
        test = record.after["test/accuracy"] - loss * record.round * (1 + 0.01 * plan.stages[key].fields["seed"])
        after = {**record.after, "test/accuracy": test}
        changed = replace(record, after=after, environment={"processor": processor}, files={})
        store.commit(changed, {})
    store.save_sweep(name, manifest(info, plan))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gate:
    """Function that runs the command next to a store and returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run


def test_the_gate_names_the_search_of_a_sweep(gate: Gate) -> None:
    save("whole")
    gate("baseline.json", "--write-baseline")
    plan, info = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1), sweep_info("searched")
    info = replace(info, config={"search": {"kind": "frontier"}})
    decision = Decision(stopped={plan.trials[2].name: "dominated after 2 seeds"}, ended=True)
    Store("store").save_sweep("searched", manifest(info, plan, None, decision))
    status, said, _ = gate("baseline.json", "searched")

    assert said.splitlines()[0] == (
        "searched was run by search=frontier, which stopped 1 of 3 trials; a point without all its seeds is undecided."
    )
    assert status == 0, "all stages are finished"
    assert "search" not in gate("baseline.json", "whole")[1]


def another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir(exist_ok=True)
    monkeypatch.chdir(other)


def test_a_sweep_passes_its_own_baseline_and_one_that_loses_does_not(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("first")
    status, out, err = gate("../base.json".removeprefix("../"), "--write-baseline")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "base.json: 2 points of first"
    base = str(tmp_path / "base.json")

    status, out, err = gate(base, "fir", "--junit", "junit.xml")
    assert (status, err) == (0, "")
    assert "4 limits: 4 pass, 0 fail, 0 undecided." in out
    assert len(ElementTree.parse("junit.xml").findall(".//testcase")) == 4

    another_store(tmp_path, monkeypatch)
    save("second", loss=0.05, processor="two")
    status, out, err = gate(base, "--junit", "junit.xml", "--allow-undecided")
    assert (status, err) == (1, "")
    assert "fail: l1_unstructured at 50.00%, test/accuracy: it is worse by 5.05%" in out
    assert "The baseline ran on one, second on two." in out
    assert len(ElementTree.parse("junit.xml").findall(".//failure")) == 1
    (suite,) = ElementTree.parse("junit.xml").getroot()
    assert suite.get("name") == f"gate of second against {base}"


def test_what_is_undecided_fails_unless_it_is_allowed(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("first")
    base = str(tmp_path / "base.json")
    gate(base, "--write-baseline")
    another_store(tmp_path, monkeypatch)
    save("second", seeds=2)

    assert gate(base)[0] == 1
    status, out, _ = gate(base, "--allow-undecided")
    assert status == 0
    assert "4 limits: 0 pass, 0 fail, 4 undecided." in out


def test_a_baseline_that_is_written_anew_keeps_its_margins(gate: Gate) -> None:
    save("first")
    gate("base.json", "--write-baseline")
    data = json.loads(Path("base.json").read_text())
    data["margins"]["test/accuracy"] = 0.07
    Path("base.json").write_text(json.dumps(data))

    assert gate("base.json", "--write-baseline")[0] == 0
    assert json.loads(Path("base.json").read_text())["margins"]["test/accuracy"] == 0.07


def test_mistakes_and_no_data_are_told_in_a_sentence(gate: Gate) -> None:
    def refused(*arguments: str) -> str:
        status, out, err = gate(*arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        return err

    assert "does not exist or is empty" in refused("base.json")
    save("first")
    assert "`BASELINE` (=base.json) does not exist; --write-baseline writes it." in refused("base.json")
    assert "`SWEEP` (='none') does not exist" in refused("base.json", "none")
    assert "--junitt" in refused("base.json", "--junitt", "x")
    gate("base.json", "--write-baseline")
    whole = Path("base.json").read_text()
    Path("base.json").write_text(whole[:100])
    assert "`BASELINE` (=base.json) is damaged or mistyped: " in refused("base.json")
    assert "`BASELINE` (=base.json) is damaged or mistyped: " in refused("base.json", "--write-baseline")
    Path("base.json").write_text(whole.replace('"test/accuracy": 0.01', '"test/accuracy": "little"'))
    assert "Expected `float`, got `str` - at `$.margins[...]`" in refused("base.json")
    Path("base.json").write_text(whole)
    missing = "`--junit` (=none/x.xml) cannot be written: No such file or directory; name another file.\n"
    assert gate("base.json", "--junit", "none/x.xml")[2] == missing
    assert refused(".") == "`BASELINE` (=.) cannot be read: it is a directory; name another file.\n"


@pytest.mark.parametrize("mode", [[], ["--write-baseline"]])
def test_a_sweep_without_a_baseline_before_it_is_refused(gate: Gate, mode: list[str]) -> None:
    save("first")
    status, out, err = gate("first", *mode)
    assert (status, out) == (2, "")
    assert err.startswith("`BASELINE` (=first) must be a file, and is the name of a sweep; type the file first: gate ")
    assert not Path("first").exists()


@pytest.mark.parametrize("unused", [["--junit", "x"], ["--allow-undecided"]])
def test_options_that_writing_a_baseline_ignores_are_refused(gate: Gate, unused: list[str]) -> None:
    save("first")
    said = f"`{unused[0]}` has no effect with --write-baseline, which judges nothing; drop one of them.\n"
    assert gate("base.json", "--write-baseline", *unused) == (2, "", said)
    assert not Path("base.json").exists()


def test_a_baseline_outlives_a_write_that_fails(gate: Gate, tmp_path: Path) -> None:
    save("first")
    gate("base.json", "--write-baseline")
    whole, limits = Path("base.json").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # fails like a full disk
    try:
        failed = [gate(*arguments) for arguments in (("base.json", "--write-baseline"), ("base.json", "--junit", "x"))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [status for status, _, _ in failed] == [2, 2]
    assert failed[0][2] == "`BASELINE` (=base.json) cannot be written: File too large; name another file.\n"
    assert failed[1][2] == "`--junit` (=x) cannot be written: File too large; name another file.\n"
    assert Path("base.json").read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.json", "store"], "nothing is left behind"


@pytest.mark.parametrize("mode", [[], ["--write-baseline"]])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "device", "link to a FIFO"])
def test_what_is_no_file_is_refused_as_a_baseline(gate: Gate, tmp_path: Path, kind: str, mode: list[str]) -> None:
    save("first")
    path = tmp_path / "base.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/full")
    else:
        os.mkfifo(other := tmp_path / "fifo" if "link" in kind else path)
        if "link" in kind:
            path.symlink_to(other)

    said = f"`BASELINE` (={path}) cannot be read: it is a {kind.removeprefix('link to a ')}; name another file.\n"
    assert gate(str(path), *mode) == (2, "", said)


def test_a_baseline_is_written_where_its_link_leads_and_keeps_its_permissions(gate: Gate, tmp_path: Path) -> None:
    save("first")
    link, target = tmp_path / "base.json", tmp_path / "committed.json"
    link.symlink_to(target)
    assert "`BASELINE` (=base.json) does not exist; --write-baseline writes it." in gate("base.json")[2]

    assert gate("base.json", "--write-baseline")[0] == 0
    target.chmod(0o640)
    assert gate("base.json", "--write-baseline")[0] == gate("base.json")[0] == 0
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    link.unlink()
    link.symlink_to(tmp_path / "none" / "x.json")
    assert gate("base.json", "--write-baseline")[2].startswith("`BASELINE` (=base.json) cannot be written: No such")


def test_an_empty_store_and_a_sweep_without_results_are_no_data(gate: Gate) -> None:
    plan = make_plan(("l1_unstructured",), (0.5,), range(3), rounds=1)
    save("first")
    gate("base.json", "--write-baseline")
    store = Store("store")
    for key in plan.stages:
        store.discard(key)

    status, out, err = gate("base.json")
    assert (status, out) == (2, "")
    assert "the sweep has none of the points of the baseline, which was written from 'first'; the sweep has none" in err
    assert "3 of 3 trials of first have not finished" in gate("base.json", "--write-baseline")[2]
    store.remove_sweep("first")
    assert gate("base.json")[2] == f"{store} holds no sweeps; run one, or name another store\n"
