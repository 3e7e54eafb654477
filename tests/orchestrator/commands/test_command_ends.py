"""Every command ends quietly when it is interrupted, or when the reader of its output has closed it."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from factories import make_plan, make_records, sweep_info
from sampling import sampled

from orchestrator.__main__ import main
from orchestrator.execution import interrupts
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store

WITHOUT_FIGURES = str(Path(__file__).parents[2] / "without_figures")
TRIAL = ("cluster=inline", "tracking=none", "model=mlp", "train.epochs=1", "finetune.epochs=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a store that has a sweep."""
    folder = tmp_path_factory.mktemp("commands")
    plan, store = make_plan(("l1_unstructured",), (0.5,), (0, 1)), Store(str(folder / "store"))
    for record in make_records(plan).values():
        store.commit(replace(record, files={}), {})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))
    return folder


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def unread(folder: Path, arguments: Sequence[str], **more: str) -> tuple[int, str]:
    """Run a command whose output nobody reads; return its exit status and standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env=environment(**more),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    return ended.returncode, ended.stderr


@sampled(2)
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (("orchestrator", "--cfg", "job"), "1"),  # printed by Hydra
        (("orchestrator.store", "list"), "1"),
        (("orchestrator.store", "--help"), ""),  # printed by argparse
    ],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(
    folder: Path, arguments: Sequence[str], unbuffered: str
) -> None:
    assert unread(folder, arguments, PYTHONUNBUFFERED=unbuffered) == (141, "")


@pytest.mark.parametrize("name", ["compare", "export", "gate", "store", "sync"])
def test_a_module_of_a_command_runs_the_command_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()
    monkeypatch.setattr("orchestrator.__main__.run_command", begun.append)
    monkeypatch.delitem(sys.modules, f"orchestrator.{name}", raising=False)
    runpy.run_module(f"orchestrator.{name}", run_name="__main__")

    assert begun == [name], "and so ends as each command does"


@pytest.mark.slow
def test_a_trial_whose_output_nobody_reads_ends_quietly_and_the_same_command_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"PYTHONPATH": os.pathsep.join(filter(None, [WITHOUT_FIGURES, os.environ.get("PYTHONPATH", "")]))}
    assert unread(folder, ("orchestrator", *TRIAL), **figures) == (141, "")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(interrupts, "leave_when_interrupted", lambda *_: None)
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["orchestrator", *TRIAL])
    main()
    assert "1 of 1 trials done" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("orchestrator",), ("orchestrator.compare",)])
def test_an_interrupt_during_imports_ends_without_a_traceback(folder: Path, arguments: Sequence[str]) -> None:
    command = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # `nohup ... &` would let it be ignored
    )
    assert command.stderr is not None
    with command:
        for line in command.stderr:
            if line.endswith((" orchestrator.core.specs\n", " hydra.types\n")):
                command.send_signal(signal.SIGINT)
                break
        told = command.stderr.read()

    assert command.returncode == 130
    assert "Traceback" not in told
    assert told.rstrip().endswith(("Interrupted.", "the same command runs the rest."))


def test_an_interrupt_that_a_callback_would_swallow_ends_the_process() -> None:
    code = """
from orchestrator.execution.interrupts import ending_on_interrupt

class Closing:
    def __del__(self):
        raise KeyboardInterrupt

with ending_on_interrupt():
    Closing()
    print("goes on")
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "\nInterrupted.\n")
