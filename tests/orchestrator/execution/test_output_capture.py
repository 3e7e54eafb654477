"""Contexts for work in a worker, tested in this process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from orchestrator.execution.output_capture import captured_output, interrupt_flag


def test_output_goes_to_the_file_below_python(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with captured_output(str(tmp_path / "logs" / "a.log")) as path:
        os.write(2, b"an error\n")
        os.write(1, b"an output\n")
    os.write(1, b"after\n")
    assert Path(path).read_text().splitlines() == ["an error", "an output"]
    assert capfd.readouterr().out == "after\n"


def test_an_empty_log_is_removed(tmp_path: Path) -> None:
    with captured_output(str(tmp_path / "a.log")) as path:
        pass
    assert not Path(path).exists()


def test_an_empty_file_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    with captured_output(str(tmp_path / "a.log")):
        pass
    assert (tmp_path / "a.log").exists()


@pytest.mark.parametrize("said", [b"", b"lost\n"])
def test_without_a_place_for_logs_nothing_is_removed(
    said: bytes, elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could remove /dev/null itself, and for any other user that raised PermissionError."""
    (tmp_path / "null").touch()
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    monkeypatch.setattr("orchestrator.execution.output_capture.node_folder", lambda: None)
    monkeypatch.setattr(Path, "unlink", lambda path, **_: pytest.fail(f"{path} was removed"))
    with captured_output(elsewhere) as path:
        os.write(2, said)
    assert path == str(tmp_path / "null")
    assert (tmp_path / "null").exists()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Log in a folder that cannot be made; the temporary directory is `tmp_path`."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return str(tmp_path / "file" / "a.log")


def test_a_folder_that_cannot_be_made_is_replaced_by_one_of_this_user_alone(
    tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):  # a container whose user has no entry in /etc/passwd
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with captured_output(elsewhere) as path:
        os.write(2, b"kept\n")
    assert Path(path).parents[2] == tmp_path
    assert Path(path).parents[1].stat().st_mode & 0o777 == 0o700
    assert Path(path).read_text() == "kept\n"


@pytest.mark.parametrize("planted", ["link", "open folder"])
def test_a_folder_that_others_may_have_prepared_is_not_written_to(tmp_path: Path, elsewhere: str, planted: str) -> None:
    theirs, found = tmp_path / "theirs", tmp_path / f"pruning-orchestrator-{os.getuid()}"
    theirs.mkdir()
    if planted == "link":
        found.symlink_to(theirs)
    else:
        found.mkdir()
        found.chmod(0o777)
    with captured_output(elsewhere) as path:
        os.write(2, b"lost\n")
    assert path == os.devnull
    assert not [*theirs.iterdir(), *found.iterdir()]


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.default_int_handler])
def test_an_interrupt_raises_a_flag_and_nothing_else(before: signal.Handlers) -> None:
    own = signal.signal(signal.SIGINT, before)
    try:
        with interrupt_flag() as raised:
            assert not raised()
            signal.raise_signal(signal.SIGINT)
            assert raised()
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, own)


def test_outside_of_the_main_thread_there_is_no_flag_to_raise() -> None:
    seen: list[bool] = []

    def use() -> None:
        with interrupt_flag() as raised:
            seen.append(raised())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [False]
