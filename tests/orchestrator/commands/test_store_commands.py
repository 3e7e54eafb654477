"""Command `python -m orchestrator.store`: all subcommands and their error messages."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_plan, make_records, sweep_info
from fakes import trial_of
from store_cases import FILES, Content, chain, record_for

import orchestrator
from orchestrator.commands.compare_command import main as compare_main
from orchestrator.commands.export_command import main as export_main
from orchestrator.commands.gate_command import main as gate_main
from orchestrator.commands.store_command import main
from orchestrator.commands.sync_command import main as sync_main
from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.store import retention, saved_sweep
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store

Said = tuple[int, str, str]
Command = Callable[..., Said]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Function that runs a command next to the folder `store` and returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def save(store: Store, name: str, *trials: list[StageSpec]) -> list[StageSpec]:
    """Commit and save a sweep; return its stages."""
    stages = {spec.key: spec for trial in trials for spec in trial}
    for spec in stages.values():
        store.commit(record_for(spec), FILES)
    plan = Plan(stages, tuple(trial_of(f"t{i}", trial) for i, trial in enumerate(trials)))
    store.save_sweep(name, manifest(sweep_info(name), plan))
    return list(stages.values())


def test_report_prune_and_verify(command: Command, store: Store) -> None:
    specs = chain(1, 2)
    for spec in specs:
        store.commit(record_for(spec), FILES)

    status, out, err = command("report")

    assert (status, err) == (0, "")
    assert "weights                      3 files     30.7 kB" in out
    assert "prune would free 10.2 kB: weights that nothing starts from, 1;" in out
    assert "would free 10.2 kB" in command("prune", "--dry-run")[1]
    store.checkpoints.save(specs[0].key, 3, {}, FILES[WEIGHTS])
    assert "; files of checkpoints and failures that nothing needs, 2; left" in command("prune", "--dry-run")[1]
    store.checkpoints.drop(specs[0].key)
    assert command("prune", "--keep", "all")[1].startswith("freed 0 B")
    assert command("prune")[1].startswith("freed 10.2 kB: weights that nothing starts from, 1; leftover files, 0")
    assert command("verify") == (0, "3 of 3 stages are intact\n", "")
    Path(store.uri, "stages", specs[0].key, WEIGHTS).write_bytes(b"")
    assert command("verify")[:2] == (1, "2 of 3 stages are intact\n")
    assert "removed quarantine/" in command("prune", "--quarantine")[1]
    assert store.backend.names("quarantine") == []


@pytest.mark.parametrize(
    "arguments", [["list"], ["show", "x"], ["delete", "x"], ["copy", "x", "y"], ["report"], ["prune"], ["verify"]]
)
def test_a_store_that_is_not_there_is_a_mistake(command: Command, tmp_path: Path, arguments: list[str]) -> None:
    status, out, err = command(*arguments, "--store", str(tmp_path / "none"))

    assert (status, out) == (2, "")
    assert f"`--store` (={tmp_path / 'none'}) does not exist or is empty; pass the store of your sweeps" in err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "--store", "nosuch://x"], "`--store` (=nosuch://x) must be a path or an fsspec URI"),
        (["list", "--option", "x"], "`--option` (='x') must be KEY=VALUE"),
        (["show", "none"], "`SWEEP` (='none') does not exist; "),
        (["copy", "mine", "other", "--target-option", "x"], "`--target-option` (='x') must be KEY=VALUE"),
        (["copy", "mine", "store"], "is the store itself; name another"),
    ],
)
def test_mistakes_are_said(command: Command, store: Store, arguments: list[str], said: str) -> None:
    save(store, "mine", chain(1))

    status, out, err = command(*arguments)

    assert (status, out) == (2, "")
    assert said in err


def test_an_address_of_mlflow_that_is_none_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert sync_main(["--uri", "foo"]) == 2
    assert capsys.readouterr().err.startswith("`--uri` (=foo) must be an address; pass http://host:5000")


def test_a_warning_of_a_damaged_stage_names_the_argument_too(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (spec,) = save(store, "mine", chain(1)[:1])

    def damage() -> None:
        Path(store.uri, "stages", spec.key, "record.json").write_text("{}")

    damage()
    compare_main(["mine"])
    assert caplog.messages[-1].startswith(f"`--store` (={store.uri}): stage {spec.key}: record.json is damaged")
    store.commit(record_for(spec), FILES)
    damage()
    store.finished([spec.key])
    assert caplog.messages[-1].startswith(f"`store.uri` (={store.uri}): stage {spec.key}: record.json is damaged")


def test_a_damaged_sweep_is_told_of_the_argument_that_named_its_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(store, "mine", chain(1))
    Path(store.uri, "sweeps", "mine.json").write_text("{}")

    for run, arguments in (
        (compare_main, ["mine"]),
        (sync_main, ["mine"]),
        (gate_main, ["base.json", "mine"]),
        (export_main, ["mine", "--to", "torch", "--output", "out"]),
        (main, ["show", "mine"]),
        (main, ["report"]),
        (main, ["prune"]),
    ):
        run(arguments)
        assert capsys.readouterr().err.startswith("`--store` (="), arguments
    with pytest.raises(StoreError, match=r"^`uri` \(=.*mine.json is damaged"):
        orchestrator.open(store.uri).sweep("mine")


def test_a_damaged_sweep_keeps_all_weights_and_stops_nothing_else(command: Command, store: Store) -> None:
    specs = chain(1, 2)
    save(store, "mine", specs)
    Path(store.uri, "sweeps", "torn.json").write_text("{")
    leftover = Path(store.uri, "tmp", "dead")
    leftover.mkdir()
    (leftover / "x").write_bytes(b"12345")
    os.utime(leftover / "x", (0, 0))

    reported, pruned = command("report"), command("prune")

    assert reported[0] == 0
    assert "prune would free 5 B: weights that nothing starts from, 0; leftover files, 1" in reported[1]
    assert pruned[:2] == (1, "freed 5 B: weights that nothing starts from, 0; leftover files, 1\n")
    for said in (reported[2], pruned[2]):
        assert "sweeps/torn.json is damaged" in said
        assert "Until then all weights stay, as this sweep might need them." in said
    assert all(WEIGHTS in store.finished([spec.key])[spec.key].files for spec in specs)
    with pytest.raises(StoreError, match=r"torn\.json is damaged"):
        retention.prune_sweep(store, Plan({}, ()), {})
    assert "damaged        0/0 trials" in command("list")[1]


def test_a_linked_sweep_is_listed_as_a_link(command: Command, store: Store) -> None:
    save(store, "mine", chain(1))
    Path(store.uri, "sweeps", "linked.json").symlink_to("mine.json")

    assert "linked  -                 a link         0/0 trials" in command("list")[1]
    assert [*orchestrator.open(store.uri).sweeps()["status"]] == ["finished", "a link"]
    assert orchestrator.open(store.uri).sweeps()["date"].isna().tolist() == [False, True]
    assert orchestrator.open(store.uri).sweep().name == "mine"


def test_sweeps_are_listed_and_shown(command: Command, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    long = chain(1, 2)
    save(store, "whole", long)
    save(store, "half", long[:2], chain(1, seed=7))
    lost = chain(1, seed=7)[1]
    store.discard(lost.key)
    info = sweep_info("odd")
    plan = make_plan(["l1_unstructured"], [0.5], [0])
    store.save_sweep("odd", manifest(type(info)("odd", {}, "\x1b[2Jcommand " + "x" * 500, {}), plan, {"a": "b"}))
    with store.leases() as leases:
        leases.acquire(long[2].key)
        status, out, err = command("list")
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "running        1/1 trials" in lines["whole"]
    assert "unfinished     1/2 trials" in lines["half"]
    assert "failed         0/1 trials" in lines["odd"]
    assert "\\x1b[2Jcommand" in lines["odd"]
    assert "\x1b" not in out
    assert "x" * 500 in lines["odd"], "whole where no terminal is"
    assert "  +sweep=synthetic" in lines["whole"]
    assert compare_main([]) == 0
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == sorted(lines)

    status, out, _ = command("show", "half")
    assert status == 0
    assert "1 of 2 finished" in out
    assert "3 of 4 finished, 2 in no other sweep" in out
    assert "missing  t1: not run" in out


def test_an_interrupted_sweep_is_shown_in_a_few_lines_and_with_its_checkpoints(command: Command, store: Store) -> None:
    trials = [chain(1, seed=seed) for seed in range(7)]
    stages = {spec.key: spec for trial in trials for spec in trial}
    plan = Plan(stages, tuple(trial_of(f"t{i}", trial) for i, trial in enumerate(trials)))
    store.save_sweep("cut", manifest(sweep_info("cut"), plan, {trials[3][0].key: "its data went away"}))
    store.checkpoints.save(trials[0][0].key, 3, {}, FILES[WEIGHTS])
    store.checkpoints.save(trials[3][0].key, 2, {}, FILES[WEIGHTS])

    _, shown, _ = command("show", "cut")
    _, listed, _ = command("list")

    (size,) = re.findall(r"size +([\d.]+ kB), 0 B of it weights, \1 checkpoints\n", shown)
    assert f" {size} " in listed, "the same as in the list"
    assert "missing  t1; t2; t4; t5; t6: not run\n" in shown
    assert "missing  t0: dense training is at step 3\n" in shown
    assert "missing  t3: its data went away\n" in shown


def test_how_far_a_checkpoint_is_is_told_of_the_trials_that_wait_for_it(command: Command, store: Store) -> None:
    plan = make_plan(["l1_unstructured"], [0.5, 0.9], [0])  # 12 epochs, then 4 in each round
    dense, first = plan.trials[0].stages[:2]
    store.save_sweep("cut", manifest(sweep_info("cut"), plan))
    curve = [{"step": 50, "epoch": 2.0, "time": 0.0, "metrics": {}}]
    store.checkpoints.save(dense, 75, {"curve": curve}, FILES[WEIGHTS])
    names = "; ".join(trial.name for trial in plan.trials)
    assert f"missing  {names}: dense training is at step 75 (25%)\n" in command("show", "cut")[1]

    store.commit(replace(make_records(plan)[dense], files={}), {})
    store.checkpoints.drop(dense)
    store.checkpoints.save(first, 75, {"curve": curve}, FILES[WEIGHTS])
    shown = command("show", "cut")[1]
    assert f"missing  {plan.trials[0].name}: round 1 is at step 75 (75%)\n" in shown
    assert f"missing  {plan.trials[1].name}: not run\n" in shown


@pytest.mark.parametrize("typed", ["", "\n", "what\n"])
def test_deleting_without_an_answer_from_a_terminal_is_a_mistake(
    command: Command, store: Store, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    save(store, "mine", chain(1))
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))

    status, _, err = command("delete", "mine")
    assert status == 2
    assert err == "nobody answered, so nothing was deleted; pass --yes to delete without the question\n"
    assert store.sweeps() == ["mine"]


def test_deleting_takes_what_no_other_sweep_needs(
    command: Command, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = chain(1, 2)
    save(store, "whole", long)
    save(store, "start", long[:2])
    answers = iter(["n", "y"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))

    status, out, _ = command("delete", "whole")
    assert (status, store.sweeps()) == (0, ["start", "whole"])
    assert "whole: the sweep, and 1 stages with" in out
    assert "nothing was deleted" in out
    assert len(store.stages.known()) == 3

    assert command("delete", "whole")[0] == 0
    assert store.sweeps() == ["start"]
    assert store.stages.known() == sorted(spec.key for spec in long[:2])
    assert command("delete", "start", "--yes")[0] == 0
    assert store.stages.known() == []


def test_what_is_being_trained_or_cannot_be_told_is_not_deleted(
    command: Command, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = save(store, "mine", chain(1))

    def nobody(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    assert "pass --yes" in command("delete", "mine")[2]
    with store.leases() as leases:
        leases.acquire(specs[1].key)
        status, _, err = command("delete", "mine", "--yes")
    assert status == 2
    assert f"mine is being trained by {leases.owner}" in err
    Path(store.uri, "sweeps", "torn.json").write_text("{")
    assert "torn.json is damaged" in command("delete", "mine", "--yes")[2]
    assert store.sweeps() == ["mine", "torn"]
    assert len(store.stages.known()) == 2
    assert command("delete", "torn", "--yes")[0] == 0, "a damaged sweep is deleted alone"
    assert len(store.stages.known()) == 2


def test_a_sweep_is_copied_whole_and_verified(command: Command, store: Store, tmp_path: Path) -> None:
    specs = save(store, "mine", chain(1, 2))
    save(store, "other", chain(1, seed=9))
    store.drop_weights([specs[1].key])

    assert command("copy", "mine", "there")[:2] == (0, f"mine: 3 stages were copied to {tmp_path}/there and verified\n")

    there = Store(str(tmp_path / "there"))
    assert there.sweeps() == ["mine"]
    assert saved_sweep.load(there, "mine") == saved_sweep.load(store, "mine")
    assert retention.verify(there) == []
    assert command("copy", "mine", "there")[1].startswith("mine: 0 stages were copied")
    there.discard(specs[0].key)
    there.commit(record_for(specs[0], weights_digest="others"), FILES)
    assert f"holds stage {specs[0].key} with other weights" in command("copy", "mine", "there")[2]
    Path(store.uri, "stages", specs[2].key, WEIGHTS).write_bytes(bytes(len(FILES[WEIGHTS])))
    status, _, err = command("copy", "mine", str(tmp_path / "elsewhere"))
    assert status == 2
    assert f"{WEIGHTS} is damaged" in err


def test_a_comparison_says_what_was_found_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(["l1_unstructured"], [0.5], [0, 1])
    for record in make_records(plan).values():
        store.commit(record, {WEIGHTS: Content(b"x" * 50)})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))
    Path(store.uri, "stages", plan.trials[0].stages[-1], WEIGHTS).write_bytes(b"short")

    for _ in range(2):  # when the damage is found, and afterwards
        assert compare_main(["mine"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "1 of 2 trials did not finish" in said
        assert "it was damaged and was set aside in the store's quarantine/; run the sweep again to repeat it" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lst"], "invalid choice: 'lst'; choose from 'list', 'show', "),
        (["lst"], "; did you mean `list`? --help lists all"),
        (["prune", "--dryrun"], "unrecognized arguments: --dryrun; did you mean `--dry-run`? --help lists all"),
        (["prune", "--keep", "alll"], "invalid choice: 'alll'; choose from 'needed', 'all'; --help lists all"),
        ([], "the following arguments are required: command; --help lists all"),
    ],
)
def test_a_mistyped_command_is_answered_in_a_line(command: Command, arguments: list[str], said: str) -> None:
    status, out, told = command(*arguments)

    assert (status, out, told.count("\n")) == (2, "", 1)
    assert said in told
