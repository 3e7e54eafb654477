"""Leases: at any time one live driver holds a stage, and stages of dead drivers are taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_cases import fresh, key_of

from orchestrator.core.errors import StoreError
from orchestrator.store import leases as leases_module
from orchestrator.store.leases import Leases
from orchestrator.store.store import Store

HERE = Path(__file__).parents[1]
KEY, OTHER = key_of(0), key_of(1)


@dataclass
class Clock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every driver look like one on another machine, so that only its heartbeat counts."""
    names = iter(range(10**6))
    monkeypatch.setattr(leases_module, "_machine", lambda: f"machine {next(names)}")


def driver(store: Store, name: str, clock: Clock) -> Leases:
    """A driver that sends heartbeats only when the test does."""
    leases = fresh(store).leases(name, ttl=60, clock=clock)
    leases.beat()
    return leases


def test_a_stage_has_one_holder(store: Store) -> None:
    clock = Clock()
    first, second = driver(store, "first", clock), driver(store, "second", clock)
    assert first.holder(KEY) is None
    assert first.acquire(KEY)
    assert first.acquire(KEY)
    assert not second.acquire(KEY)
    assert second.acquire(OTHER)
    assert second.holder(KEY) == first.owner == first.holder(KEY)
    second.release(KEY)
    assert not second.acquire(KEY)
    first.release(KEY)
    assert first.holder(KEY) is None
    assert second.acquire(KEY)
    assert not first.acquire(KEY)


def test_closing_gives_everything_back(store: Store) -> None:
    with store.leases("first") as first:
        assert first.acquire(KEY)
        assert first.acquire(OTHER)
    assert store.backend.names("leases/stages") == []
    assert store.backend.names("leases/owners") == []
    second = driver(store, "second", Clock())
    assert second.acquire(KEY)


@pytest.mark.usefixtures("elsewhere")
def test_a_stale_lease_is_taken_over_by_one(store: Store) -> None:
    clock = Clock()
    dead = driver(store, "dead", clock)
    assert dead.acquire(KEY)
    clock.now += 59
    others = [driver(store, f"other{number}", clock) for number in range(6)]
    assert not any(other.acquire(KEY) for other in others)
    clock.now += 7
    assert others[0].holder(KEY) is None
    with ThreadPoolExecutor(6) as pool:
        taken = list(pool.map(lambda other: other.acquire(KEY), others))
    assert sum(taken) == 1
    assert {other.holder(KEY) for other in others} == {others[taken.index(True)].owner}


@pytest.mark.usefixtures("elsewhere")
def test_a_lease_is_taken_over_again_and_again(store: Store) -> None:
    clock = Clock()
    for number in range(4):
        leases = driver(store, f"driver{number}", clock)
        assert leases.acquire(KEY)
        assert leases.holder(KEY) == leases.owner
        clock.now += 61
    last = driver(store, "last", clock)
    assert last.acquire(KEY)
    last.release(KEY)
    assert driver(store, "after", clock).acquire(KEY)


@pytest.mark.usefixtures("elsewhere")
def test_a_heartbeat_keeps_every_lease(store: Store) -> None:
    clock = Clock()
    first, second = driver(store, "first", clock), driver(store, "second", clock)
    for number in range(5):
        assert first.acquire(key_of(number))
    for _ in range(5):
        clock.now += 50
        first.beat()
        assert not second.acquire(key_of(4))


@pytest.mark.usefixtures("elsewhere")
def test_a_driver_taken_for_dead_goes_on_without_its_leases(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    sleeper = driver(store, "sleeper", clock)
    assert sleeper.acquire(KEY)
    clock.now += 61
    other = driver(store, "other", clock)
    assert other.acquire(KEY)
    name = sleeper.owner
    sleeper.beat()
    assert "taken for dead, and 1 of its stages" in caplog.text
    assert sleeper.owner != name
    sleeper.release(KEY)
    assert sleeper.holder(KEY) == other.owner
    assert not sleeper.acquire(KEY)
    assert sleeper.acquire(OTHER)
    assert not other.acquire(OTHER)


@pytest.mark.usefixtures("elsewhere")
def test_a_driver_that_does_not_know_yet_gives_nothing_away(store: Store) -> None:
    clock = Clock()
    sleeper = driver(store, "sleeper", clock)
    assert sleeper.acquire(KEY)
    clock.now += 61
    other = driver(store, "other", clock)
    assert other.acquire(KEY)
    sleeper.release(KEY)
    assert not driver(store, "third", clock).acquire(KEY)
    assert other.holder(KEY) == other.owner


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_dead_driver_whose_clock_was_ahead_gives_way_too(store: Store) -> None:
    clock, ahead = Clock(), Clock(1e9 + 1e6)
    dead = driver(store, "dead", ahead)
    assert dead.acquire(KEY)
    other = driver(store, "other", clock)
    assert not other.acquire(KEY)
    clock.now += 50
    ahead.now += 50
    dead.beat()
    assert not other.acquire(KEY)
    clock.now += 50
    assert not other.acquire(KEY)
    clock.now += 20
    assert other.acquire(KEY)


@pytest.mark.parametrize("content", [b"", b"/../../../../x", b"..", b"\xff", b"nobody-123", b"a\n"])
def test_a_lease_of_nobody_is_taken_over_inside_the_store(tmp_path: Path, content: bytes) -> None:
    store = Store(str(tmp_path / "a" / "store"))
    store.backend.write(f"leases/stages/{KEY}", content)
    leases = driver(store, "driver", Clock())
    assert leases.acquire(KEY)
    assert leases.holder(KEY) == leases.owner
    assert [path.name for path in (*tmp_path.iterdir(), *(tmp_path / "a").iterdir())] == ["a", "store"]
    assert len(store.backend.names("leases/stages")) == 2


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("unread", [b"{", b"[]", b'{"beat": 1e12}', StoreError("the mount hangs")])
def test_a_heartbeat_that_cannot_be_read_voids_no_lease_until_that_lasts(
    store: Store, unread: bytes | StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    holder, other = driver(store, "holder", clock), driver(store, "other", clock)
    assert holder.acquire(KEY)
    assert not other.acquire(KEY)
    clock.now += 1000  # unseen by the other driver
    holder.beat()

    def read(path: str) -> bytes:
        if not path.startswith(f"leases/owners/{holder.owner}.json"):
            return whole(path)
        if isinstance(unread, bytes):
            return unread
        raise unread

    whole = other._backend.read
    with monkeypatch.context() as patch:
        patch.setattr(other._backend, "read", read)
        assert not other.acquire(KEY)
    clock.now += 10
    assert not other.acquire(KEY)
    clock.now += 10
    with monkeypatch.context() as patch:
        patch.setattr(other._backend, "read", read)
        assert not other.acquire(KEY)
        clock.now += 61
        assert other.acquire(KEY), "nobody knows of a sign of life for as long as a lease lasts"


HOLD = """
import signal, sys
from orchestrator.store.store import Store
leases = Store(sys.argv[1]).leases("holder").__enter__()
leases.acquire(sys.argv[2])
print(leases.owner, flush=True)
signal.pause()
"""


def test_on_one_machine_a_killed_driver_gives_way_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    environment = {"PYTHONPATH": str(HERE.parent.parent)}
    arguments = [sys.executable, "-c", HOLD, store.uri, KEY]
    holder = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    name = holder.stdout.readline().strip()
    with store.leases("next") as following:
        assert not following.acquire(KEY)
        assert following.holder(KEY) == name
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with store.leases("next") as following:
        assert following.acquire(KEY)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc to tell one process from another")
def test_a_process_number_that_was_given_again_is_another_process(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    former = store.leases("former")
    former.beat()
    assert former.acquire(KEY)
    path = f"leases/owners/{former.owner}.json"
    beat = json.loads(store.backend.read(path))
    store.backend.write(path, json.dumps({**beat, "born": "1"}).encode())
    assert driver(store, "next", Clock()).acquire(KEY)


def test_the_heart_beats_by_itself_and_outlives_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(str(tmp_path))
    failed, write = threading.Event(), store.backend.write

    def away(path: str, data: bytes) -> None:
        failed.set()
        raise StoreError("away")

    with store.leases("driver", ttl=0.2) as leases:
        path = tmp_path / "leases" / "owners" / f"{leases.owner}.json"
        first = json.loads(path.read_text())["beat"]
        monkeypatch.setattr(store.backend, "write", away)
        assert failed.wait(5)
        monkeypatch.setattr(store.backend, "write", write)
        deadline = time.monotonic() + 5
        while json.loads(path.read_text())["beat"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "could not be renewed: away" in caplog.text


RACE = """
import sys
from orchestrator.store.store import Store
from store_cases import key_of
store = Store(sys.argv[1])
with store.leases() as leases:
    print("ready", flush=True)
    sys.stdin.readline()
    mine = [number for number in range(200) if leases.acquire(key_of(number))]
    print(*mine, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_processes_share_stages_without_overlap(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}
    arguments = [sys.executable, "-c", RACE, str(tmp_path)]
    pipe = subprocess.PIPE
    drivers = [subprocess.Popen(arguments, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    held: list[int] = []
    for driver_process in drivers:
        assert driver_process.stdout is not None
        assert driver_process.stdout.readline() == "ready\n"
    for driver_process in drivers:
        assert driver_process.stdin is not None
        driver_process.stdin.write("go\n")
        driver_process.stdin.flush()
    for driver_process in drivers:
        assert driver_process.stdout is not None
        held.extend(int(number) for number in driver_process.stdout.readline().split())
    for driver_process in drivers:
        driver_process.communicate("end\n", timeout=30)
    assert sorted(held) == list(range(200))
    assert Store(str(tmp_path)).backend.names("leases/stages") == []


def test_leases_that_go_round_in_a_circle_are_told(store: Store) -> None:
    leases = driver(store, "driver", Clock())
    for path in (f"leases/stages/{KEY}", f"leases/stages/{KEY}@evil"):
        store.backend.write(path, b"evil")

    for ask in (leases.holder, leases.acquire):
        with pytest.raises(StoreError, match="name each other in a circle; remove leases/stages/"):
            ask(KEY)


@pytest.mark.parametrize(
    "beat", [b"[" * 100_000, b'{"beat": 1%s, "pid": 1}' % (b"0" * 400), b'{"beat": NaN, "pid": 1}', b"[]"]
)
def test_a_heartbeat_that_is_none_lapses(store: Store, beat: bytes) -> None:
    clock = Clock()
    leases = driver(store, "driver", clock)
    store.backend.write(f"leases/stages/{KEY}", b"evil")
    store.backend.write("leases/owners/evil.json", beat)

    assert leases.holder(KEY) == "evil"
    clock.now += 61
    assert leases.holder(KEY) is None
