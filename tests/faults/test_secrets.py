"""Passwords, tokens and keys are written nowhere, wherever they were given: console, view, report, logs, store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_commands import SWEEP, Command
from hydra.core.global_hydra import GlobalHydra
from sampling import sampled

from orchestrator.__main__ import main
from orchestrator.execution import interrupts

SECRET = "hunter2-zx81"
LINE = (*SWEEP, "cluster=inline", "seed=0", "schedule.sparsity=0.5", "schedule.rounds=1", "train.epochs=1")
MODEL = f"""
_target_: planted.net
input_shape: null
classes: null
password: null
pass_through: 7
login: {{user: me, pw: "{SECRET}"}}
tokens: [{SECRET}, {SECRET}]
secret: {{deep: {{deeper: {SECRET}}}}}
url: mysql://me:{SECRET}/x@host/db
header: "Authorization: Bearer {SECRET}"
text: '{{"password": "{SECRET}"}}'
"""
PLANTED = (
    *("-m", "--config-dir", "mine", "model=planted", f"model.password='{SECRET},a','{SECRET} b'", "finetune.epochs=1"),
    *(f"+model.more={{api_key: {SECRET}}}", f"+model.jwt={SECRET}", "schedule.sparsity=0.5", "train.epochs=1"),
    *("finetune.optimizer._target_=planted.SGD", f"+finetune.optimizer.api_key={SECRET}"),
    *("+finetune.optimizer.fails=true,false", "cluster=inline", "name=planted"),
)


def planted(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    (folder / "mine" / "model").mkdir(parents=True)
    (folder / "mine" / "model" / "planted.yaml").write_text(MODEL)
    return folder


def holding_secrets(tmp_path: Path) -> list[Path]:
    """Return the files, without the user's own, that hold the secret in their content or name."""
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "mine" not in path.parts]
    assert len(files) > 3
    return [path for path in files if SECRET in str(path) or SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_what_a_sweep_leaves_holds_no_secret(start: Callable[..., Command], tmp_path: Path) -> None:
    folder = planted(tmp_path)
    command = start(folder, *PLANTED, "tracking=none", AWS_SECRET_ACCESS_KEY=SECRET)

    assert command.wait() == 1, command.stdout + command.stderr
    assert "2 of 4 trials failed" in command.stderr
    assert "no login with *** at mysql://me:***@host/db" in command.stderr
    assert "password=***" in command.stdout
    assert holding_secrets(tmp_path) == []
    assert b"pass_through: 7" in next(folder.glob("outputs/*/comparison/report.html")).read_bytes()


@pytest.mark.slow  # a new MLflow database takes long to make
def test_nor_do_the_view_and_the_commands_after_it(start: Callable[..., Command], tmp_path: Path) -> None:
    folder = planted(tmp_path)
    uri = f"sqlite:///{folder}/mlflow.db?token={SECRET}"
    options = [f"+store.options.secret={SECRET}", f"+store.options.endpoint_url=https://me:{SECRET}@host/"]
    command = start(folder, *PLANTED, f"tracking.uri='{uri}'", *options, AWS_SECRET_ACCESS_KEY=SECRET)
    assert command.wait(240) == 1, command.stderr
    preview = start(tmp_path / "dry", *LINE, f"store.uri='memory://me:{SECRET}@host'", "dry_run=true")
    compare = start(folder, "planted", "--output", "again", module="orchestrator.compare")
    sync = start(folder, "planted", "--uri", uri, module="orchestrator.sync")

    assert preview.wait() == 0, preview.stderr
    assert compare.wait() == 0, compare.stderr
    assert sync.wait() == 0, sync.stderr
    assert holding_secrets(tmp_path) == []
    assert (folder / "mlflow.db").stat().st_size > 0


@sampled(2)
@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (f"store.uri=nope://me:{SECRET}@host/bucket", "nope://me:***@host"),
        (f"+password='{SECRET} x'", "`password` (=***)"),
        (f"+password=a:{{{SECRET}", "`+password=***` cannot be parsed"),
    ],
)
def test_secrets_are_not_quoted_in_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["orchestrator", *LINE, argument, "tracking=none"])
    monkeypatch.setattr(interrupts, "leave_when_interrupted", lambda *_: None)

    with pytest.raises(SystemExit, match="2"):
        main()
    GlobalHydra.instance().clear()

    told = capsys.readouterr()
    assert shown in told.err
    assert SECRET not in told.out + told.err
