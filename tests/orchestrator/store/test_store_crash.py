"""Writers of a store are killed: a stage is then whole or absent, never partly there."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sampling import sampled
from store_cases import FILES, altered, fresh, key_of, record_of

from orchestrator.core.file_names import WEIGHTS
from orchestrator.store.object_backend import ObjectBackend
from orchestrator.store.store import Store

HERE = Path(__file__).parents[1]
KEY = key_of(0)

KILL_AT_EVERY_STEP = """
import os, signal, sys
from store_cases import FILES, key_of, record_of
from orchestrator.store.store import Store

root, act = sys.argv[1:]
KEY, STEPS = key_of(0), {"open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
left = 0

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os_fsync = os.fsync
def fsync(descriptor):
    step()
    os_fsync(descriptor)
    step()
os.fsync = fsync
sys.addaudithook(lambda event, arguments: step() if event in STEPS else None)

def prepare(store):
    if act != "commit":
        store.commit(record_of(KEY), FILES)
        store.save_sweep("s", {"state": "old"})
    if act == "put back":
        store.drop_weights([KEY])
    if act == "set aside":
        os.truncate(f"{store.uri}/stages/{KEY}/weights.safetensors", 5)

ACTS = {
    "commit": lambda store: store.commit(record_of(KEY), FILES),
    "put back": lambda store: store.commit(record_of(KEY), FILES),
    "drop": lambda store: store.drop_weights([KEY]),
    "discard": lambda store: store.discard(KEY),
    "save sweep": lambda store: store.save_sweep("s", {"state": "new"}),
    "set aside": lambda store: store.finished([KEY]),
}

for point in range(1, 1000):
    store = Store(f"{root}/{point}")
    prepare(store)
    child = os.fork()
    if child == 0:
        store.backend
        left = point
        ACTS[act](store)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(point)
        break
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment(), capture_output=True, text=True, timeout=120
    )


def environment() -> dict[str, str]:
    return {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}", "PATH": ""}


def assert_whole(store: Store, key: str = KEY) -> bool:
    """Assert that the stage has all files of its record, or is absent; return which."""
    record = store.finished([key]).get(key)
    if record is not None:
        assert record.result() == record_of(key).result()
        for name in record.files:
            assert store.read(key, name) == FILES[name]
    return record is not None


@sampled(12)
@pytest.mark.parametrize("act", ["commit", "put back", "drop", "discard", "save sweep", "set aside"])
def test_a_writer_killed_at_any_step_leaves_the_old_state_or_the_new(tmp_path: Path, act: str) -> None:
    ended = run_script(KILL_AT_EVERY_STEP, str(tmp_path), act)
    assert ended.returncode == 0, ended.stderr
    points = int(ended.stdout)
    assert points >= 3  # the writer was killed at least twice before it finished
    seen = set()
    for point in range(1, points + 1):
        store = Store(str(tmp_path / str(point)))
        seen.add(assert_whole(store))
        if act != "set aside":
            assert store.backend.names("quarantine") == []
        if act != "commit":
            assert store.load_sweep("s")["state"] in ("old", "new")
        store.commit(record_of(KEY), FILES)
        assert store.read(KEY, WEIGHTS) == FILES[WEIGHTS]
    assert seen == {"commit": {False, True}, "discard": {False, True}, "set aside": {False}}.get(act, {True})


class Killed(BaseException):
    """Stands for the death of the process; no handler catches it."""


ACTS: dict[str, Callable[[Store], object]] = {
    "commit": lambda store: store.commit(record_of(KEY), FILES),
    "put back": lambda store: store.commit(record_of(KEY), FILES),
    "drop": lambda store: store.drop_weights([KEY]),
    "discard": lambda store: store.discard(KEY),
}


@pytest.mark.parametrize(
    ("store", "act"),
    [
        *(("memory", act) for act in ACTS),
        *(pytest.param("s3", act, marks=() if act == "commit" else pytest.mark.slow) for act in ACTS),
    ],
    indirect=["store"],
)
def test_a_writer_to_an_object_store_killed_at_any_step(
    store: Store, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for point in range(100):
        victim = Store(f"{store.uri}/{point}", options=store.options)
        if act != "commit":
            victim.commit(record_of(KEY), FILES)
        if act == "put back":
            victim.drop_weights([KEY])
        finished = run_until_step(victim, ACTS[act], point, monkeypatch)
        assert_whole(fresh(victim))
        assert victim.backend.names("quarantine") == []
        fresh(victim).commit(record_of(KEY), FILES)
        assert fresh(victim).read(KEY, WEIGHTS) == FILES[WEIGHTS]
        if finished:
            assert point >= 2
            return
    pytest.fail("never came to its end")


def run_until_step(store: Store, act: Callable[[Store], object], steps: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Call a function until the given number of objects was written or removed; return whether it finished."""
    backend = store.backend
    assert isinstance(backend, ObjectBackend)
    left = steps

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def changed(*arguments: object, **options: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("pipe_file", "put_file", "rm_file"):
            patch.setattr(backend._fs, name, counted(getattr(backend._fs, name)))
        try:
            act(store)
        except Killed:
            return False
    return True


WRITE_STAGES = """
import json, sys
from store_cases import FILES, Content, key_of, record_of
from orchestrator.store.store import Store

uri, options, attempt, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = Store(uri, options=options)
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(count):
    files = {**FILES, "weights.safetensors": Content(b"%d" % attempt * 5000)}
    won.append(store.commit(record_of(key_of(number), attempt=attempt), files).attempt)
print(json.dumps(won), flush=True)
"""


def start_writer(store: Store, attempt: int, count: int) -> subprocess.Popen[str]:
    arguments = [store.uri, json.dumps(dict(store.options)), str(attempt), str(count)]
    return subprocess.Popen(
        [sys.executable, "-c", WRITE_STAGES, *arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    return writer.stdout.readline()


@pytest.mark.parametrize("store", ["local", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_processes_that_commit_the_same_stages_agree_on_one_winner_each(store: Store) -> None:
    count = 60 if "://" not in store.uri else 15
    writers = [start_writer(store, attempt, count) for attempt in range(1, 5)]
    assert [say(writer) for writer in writers] == ["ready\n"] * 4
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    outcomes = [json.loads(writer.communicate(timeout=60)[0]) for writer in writers]
    standing = store.finished(key_of(number) for number in range(count))
    winners = [standing[key_of(number)].attempt for number in range(count)]
    assert outcomes == [winners] * 4
    for number, winner in enumerate(winners):
        assert store.read(key_of(number), WEIGHTS) == b"%d" % winner * 5000
    assert store.backend.names("quarantine") == []


@pytest.mark.slow
def test_writers_killed_at_random_moments_leave_whole_stages_only(tmp_path: Path) -> None:
    moments = random.Random(4)
    store = Store(str(tmp_path / "store"))
    for attempt in range(1, 4):
        writers = [start_writer(store, 2 * attempt + lane, 2000) for lane in (0, 1)]
        for writer in writers:
            say(writer)
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        time.sleep(moments.uniform(0.01, 0.25))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        for key, record in store.finished(key_of(number) for number in range(2000)).items():
            assert store.read(key, WEIGHTS) == b"%d" % record.attempt * 5000
            assert store.read(key, "masks.safetensors") == FILES["masks.safetensors"]
    assert store.backend.names("quarantine") == []
    assert store.finished([KEY])


def test_a_folder_without_a_record_gives_way(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    (tmp_path / "stages" / KEY).mkdir(parents=True)
    (tmp_path / "stages" / KEY / WEIGHTS).write_bytes(altered(FILES)[WEIGHTS])
    store.commit(record_of(KEY), FILES)
    assert store.read(KEY, WEIGHTS) == FILES[WEIGHTS]
    [aside] = store.backend.names("quarantine")
    assert (tmp_path / "quarantine" / aside / WEIGHTS).exists()
