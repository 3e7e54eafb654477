"""Shared fixtures of the tests: the order of tests, and an S3 server."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # how long an example takes says what else runs
settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, those of whole sweeps: so two processes end together."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish() -> None:
    """Spare the collector all that was imported, a tenth of the time of the tests, and look for cycles less often."""
    _spare_the_collector()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)  # after the fixtures' own, whose cycles are no imports
def pytest_runtest_teardown() -> None:
    """Spare it what a test has imported: latency, accelerate and torch.export let it look through everything."""
    if len(sys.modules) > SPARED[0] + 50:
        _spare_the_collector()


SPARED = [0]
"""Modules that the collector is spared."""


def _spare_the_collector() -> None:
    gc.collect()
    gc.freeze()
    SPARED[0] = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def _no_bytecode_of_what_tests_write() -> None:
    """Compile a module that a test writes each time: within a second, another text of its length would go unnoticed."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _a_terminal_of_no_habits() -> None:
    """Let no test depend on where it runs: a CI's variables or a dumb terminal make the display plain lines."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, object]]:
    """Options of an S3 server on loopback with a bucket named `bucket`."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server_module = pytest.importorskip("moto.server", reason="moto's server is not installed")
    import s3fs

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, object] = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
    s3fs.S3FileSystem(**options).mkdir("bucket")
    yield options
    server.stop()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: threads that wait for each other would take most of the time of small networks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
