"""The command line as its users type it, in a directory of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from sampling import sampled

from orchestrator.__main__ import main
from orchestrator.execution import interrupts

Run = Callable[..., subprocess.CompletedProcess[str]]
Here = Callable[..., None]
QUICK = ("cluster=inline", "tracking=none", "model=mlp", "model.hidden=[16]", "train.epochs=1", "finetune.epochs=1")


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    home = str(tmp_path_factory.mktemp("home"))

    def start(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "orchestrator"]
        without_figures = str(Path(__file__).parent / "without_figures")
        import_path = os.pathsep.join(filter(None, [without_figures, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": home, "COLUMNS": "120", "PYTHONPATH": import_path}
        return subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return start


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Type a command line in this process; figures, which take longer than all else, are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "leave_when_interrupted", lambda *_: None)
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})

    def typed(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["orchestrator", *arguments])
        main()

    yield typed
    GlobalHydra.instance().clear()


@sampled(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["+sweep=random_amounts", "schedule.rounds=0"], "15 of 15 trials cannot be planned"),
        (["cluster.cpus_per_trial=999", "dry_run=true"], "`cluster.cpus_per_trial` (=999) must fit on one node"),
        (["-m", "store.uri=a,b"], "`store` differs between trials"),
        (["model._target_=no_such.Net", "model.kind=null"], "there is no module 'no_such'"),
    ],
)
def test_a_mistake_is_said_in_a_sentence_and_ends_with_2(
    arguments: list[str], said: str, here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        here(*arguments)

    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == [], "nothing was started"


def test_a_mistake_ends_the_process_with_2(run: Run, tmp_path: Path) -> None:
    result = run("schedule.sparsty=0.5")

    assert result.returncode == 2
    assert "did you mean `schedule.sparsity`?" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was started"


@pytest.mark.slow
def test_what_does_not_fit_is_found_by_a_worker_and_ends_with_2(run: Run, tmp_path: Path) -> None:
    result = run("schedule=amount", "schedule.amount=100000")

    assert result.returncode == 2
    assert "conv1.weight has 288" in result.stderr
    assert "Traceback" not in result.stderr
    left = {path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("preflight-")}
    assert left <= {"mlflow.db"}, "what the worker had to say, and a database that was made while Ray started"


def test_the_dry_run_shows_the_plan_and_imports_nothing_heavy(run: Run, tmp_path: Path) -> None:
    code = (
        "import sys, orchestrator.__main__ as m; m.main()\n"
        "heavy = {'torch', 'ray', 'mlflow', 'matplotlib', 'scipy', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = run("+sweep=random_amounts", "dry_run=true", code=code)

    assert result.returncode == 0, result.stderr
    assert "trials    15" in result.stdout
    assert "48 unique of 60 asked for, 12 shared; 3 dense trainings, 45 rounds" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_and_the_same_command_runs_nothing_again(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("-m", *QUICK, "method=random_unstructured,l1_unstructured", "schedule.rounds=2", "seed=range(2)")
    monkeypatch.setenv("COLUMNS", "120")
    here(*command)
    first = capsys.readouterr().out
    here(*command)
    second = capsys.readouterr().out

    assert first.count("finished  dense") == 2, "one dense training for each seed"
    assert "; 0 stages to run." in second
    assert table(first) == table(second)
    assert {path.name for path in tmp_path.iterdir()} <= {"store", "outputs"}


def table(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("sparsity %"))
    return lines[start : lines.index("", start)]


@pytest.mark.slow
def test_a_users_own_preset_model_and_method(here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "sweep").mkdir(parents=True)
    (tmp_path / "mine" / "model").mkdir()
    (tmp_path / "mine" / "sweep" / "my_sweep.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /model: theirs]\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {schedule.sparsity: '0.5,0.9'}}}\n"
    )
    (tmp_path / "mine" / "model" / "theirs.yaml").write_text(
        "_target_: their_code.Net\nwidth: 12\nclasses: null\ndepends: [mine]\n"
    )
    (tmp_path / "their_code.py").write_text(
        "from torch import nn\n"
        "import pruning\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, width, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))\n"
        "class Largest(pruning.L1Unstructured):\n"
        "    def compute_mask(self, scores, default_mask):\n"
        "        return super().compute_mask(-scores.abs().add(1).reciprocal(), default_mask)\n"
    )
    method = ("method._target_=their_code.Largest", "method.kind=null", "method.name=largest")
    here("--config-dir", "mine", "+sweep=my_sweep", *QUICK[:2], *QUICK[4:], *method)

    told = capsys.readouterr().out
    assert "2 of 2 trials done" in told
    assert "largest" in told


def test_a_failing_target_is_refused_and_says_where(
    here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_network.py").write_text("def net(**arguments): raise RuntimeError('their mistake')\n")
    with pytest.raises(SystemExit, match="2"):  # nothing was trained
        here("cluster=inline", "tracking=none", "model={_target_: broken_network.net, kind: null}")

    told = capsys.readouterr().err
    assert "their mistake" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_terminal_without_our_signs_sees_all_the_rest(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    here(*QUICK)
    assert b"1 of 1 trials done" in terminal.buffer.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match="0"):
        here("compare", "trial")
    assert b"?" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [["compare"], ["gate", "x.json"], ["sync"], ["store", "list"]])
def test_the_other_commands_are_arguments_of_the_console_script(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pruning-orchestrator", *arguments])
    before = list(sys.path)

    with pytest.raises(SystemExit, match="2"):
        main()

    assert "does not exist or is empty" in capsys.readouterr().err
    assert sys.path == before, "a file of the working directory can stand in for no package"


def test_help_reads_well(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        here("--help")

    told = capsys.readouterr().out
    assert "python -m orchestrator +sweep=random_amounts" in told
    assert "schema" not in told
