"""The surroundings of the work in a worker, in this process."""

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


def test_a_folder_that_cannot_be_made_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with captured_output(str(tmp_path / "file" / "a.log")) as path:
        os.write(2, b"kept\n")
    assert Path(path).parent.parent == tmp_path
    assert Path(path).read_text() == "kept\n"


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
