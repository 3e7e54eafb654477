"""Contract of a store, on a directory, in memory, and on a real S3 API server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import trial_of
from sampling import sampled
from store_cases import FILES, Content, altered, chain, fresh, key_of, record_for, record_of, store_of

from orchestrator.core import plain_data
from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.specs import Plan
from orchestrator.store.backends import seal
from orchestrator.store.finished_stages import StageDamaged
from orchestrator.store.store import Store
from orchestrator.sweep.first_checks import Probe, probing

KEY = key_of(0)


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return store_of(request, tmp_path)


def path_of(store: Store, name: str) -> str:
    """Return the path of a file of stage KEY in the store."""
    commit = store.stages.standing(KEY)
    assert commit is not None
    return commit.path(name)


def test_a_committed_stage_is_found_and_read_back(store: Store) -> None:
    assert store.finished([KEY]) == {}
    committed = store.commit(record_of(KEY), FILES)
    assert committed.result() == record_of(KEY).result()
    other = fresh(store)
    assert other.finished([key_of(1), KEY, KEY]) == {KEY: committed}
    assert {name: other.read(KEY, name) for name in committed.files} == FILES
    assert committed.files[WEIGHTS].bytes == len(FILES[WEIGHTS])


def test_the_files_of_one_folder_can_be_listed(store: Store) -> None:
    assert list(store.backend.entries("sweeps")) == []
    store.commit(record_of(KEY), FILES)
    store.save_sweep("mine", {})

    assert [entry.path for entry in store.backend.entries("sweeps")] == ["sweeps/mine.json"]
    assert set(store.backend.entries("stages")) < set(store.backend.entries())


def test_the_first_commit_stands(store: Store) -> None:
    first = store.commit(record_of(KEY, attempt=1), FILES)
    second = fresh(store).commit(record_of(KEY, attempt=2), altered(FILES))
    assert second == first
    assert store.read(KEY, WEIGHTS) == FILES[WEIGHTS]


def test_of_concurrent_commits_one_wins_and_all_learn_which(store: Store) -> None:
    attempts = range(1, 9)
    files = [{**FILES, WEIGHTS: Content(bytes([attempt]) * 1000)} for attempt in attempts]
    with ThreadPoolExecutor(8) as pool:
        commit = lambda attempt: fresh(store).commit(record_of(KEY, attempt=attempt), files[attempt - 1])  # noqa: E731
        records = list(pool.map(commit, attempts))
    winner = store.finished([KEY])[KEY]
    assert store.read(KEY, WEIGHTS) == files[winner.attempt - 1][WEIGHTS]
    assert {record.attempt for record in records} == {winner.attempt}
    left = {entry.path for entry in store.backend.entries() if entry.path.startswith(("stages/", "tmp/"))}
    assert left == {f"stages/{KEY}/record.json", path_of(store, WEIGHTS), path_of(store, "masks.safetensors")}


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "foreign"])
@pytest.mark.parametrize("name", [WEIGHTS, "masks.safetensors"])
def test_a_damaged_file_is_refused_named_and_set_aside(store: Store, damage: str, name: str) -> None:
    store.commit(record_of(KEY), FILES)
    path, content = path_of(store, name), FILES[name]
    harm(store, path, content, damage)
    with pytest.raises(StageDamaged, match=rf"{name} is damaged: expected {len(content)} bytes.*found") as refused:
        store.read(KEY, name)
    assert KEY in str(refused.value)
    assert "quarantine/" in str(refused.value)
    assert fresh(store).finished([KEY]) == {}
    [aside] = store.backend.names("quarantine")
    assert name in store.backend.read(f"quarantine/{aside}/reason.txt").decode()
    store.commit(record_of(KEY), FILES)
    assert store.read(KEY, name) == content


def harm(store: Store, path: str, content: bytes, damage: str) -> None:
    harmed = {"flipped": altered({"": content}, "")[""], "truncated": content[:-1], "foreign": b"something else"}
    if damage == "missing":
        store.backend.remove(path)
    else:
        store.backend.write(path, harmed[damage])


@sampled(4)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"not JSON",
        b'{"version": 1}',
        b"\xff\xfe",
        b"[1]",
        seal({"record": []}),
        seal({"sweep": 1}),
    ],
)
def test_a_foreign_record_is_set_aside(store: Store, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store.commit(record_of(KEY), FILES)
    store.backend.write(f"stages/{KEY}/record.json", content)
    assert store.finished([KEY]) == {}
    assert "record.json is damaged" in caplog.text
    assert store.commit(record_of(KEY), FILES).files[WEIGHTS].bytes == len(FILES[WEIGHTS])


def test_every_flipped_or_missing_byte_of_a_record_is_noticed(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    content = store.backend.read(f"stages/{KEY}/record.json")
    for position in range(0, len(content), len(content) // (3 if store.uri.startswith("s3:") else 12)):
        for harmed in (
            content[:position],
            content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :],
        ):
            store.backend.write(f"stages/{KEY}/record.json", harmed)
            assert store.finished([KEY]) == {}
            store.commit(record_of(KEY), FILES)


def test_the_record_of_another_stage_is_refused(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    store.commit(record_of(key_of(1)), FILES)
    store.backend.write(f"stages/{KEY}/record.json", store.backend.read(f"stages/{key_of(1)}/record.json"))
    assert store.finished([KEY]) == {}
    assert list(store.finished([KEY, key_of(1)])) == [key_of(1)]
    assert len(store.backend.names("quarantine")) == 1


@pytest.mark.parametrize("version", [0, 1, "2"])
def test_a_record_of_another_version_is_refused_and_left_alone(store: Store, version: object) -> None:
    store.commit(record_of(KEY), FILES)
    data = {**record_of(KEY).to_json(), "version": version}
    store.backend.write(f"stages/{KEY}/record.json", seal({"attempt": "", "record": data}))
    for use in (lambda: store.finished([KEY]), lambda: store.commit(record_of(KEY), FILES)):
        with pytest.raises(StoreError, match=r"`version`.*must be 3.*release that wrote the record"):
            use()
    assert store.backend.names("quarantine") == []


def test_a_store_of_another_format_is_refused(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    for content, said in [
        (b'{"format": 2}', r"store\.json has format 2, and this release reads 1; use the release"),
        (b"[]", r"store\.json is damaged: Expected `object`.*write \{\"format\":1\} to it"),
        (b"\xff", r"store\.json is damaged"),
        (b"[" * 10_000, r"store\.json is damaged: it is nested too deeply"),
        (b'{"format": %s}' % (b"9" * 5000), r"store\.json is damaged: .*out of range"),
    ]:
        store.backend.write("store.json", content)
        with pytest.raises(StoreError, match=said):
            fresh(store).finished([KEY])


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../b", "..", ".", "", "a//b", "record.json", "a\\b", "a\0b", "-x", "~x", "a b"],
)
def test_names_that_leave_the_stage_are_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="`name`"):
        store.commit(record_of(KEY), {name: Content(b"x")})
    with pytest.raises(StoreError, match="`name`"):
        store.read(KEY, name)
    assert store.finished([KEY]) == {}


@pytest.mark.parametrize("key", ["../../x", "", "a/b", "..", "\n"])
def test_keys_that_leave_the_store_are_refused(store: Store, key: str) -> None:
    for use in (
        lambda: store.commit(record_of(key), FILES),
        lambda: store.finished([key]),
        lambda: store.read(key, WEIGHTS),
        lambda: store.discard(key),
        lambda: store.save_sweep(key, {}),
        lambda: store.load_sweep(key),
        lambda: Probe(store, key)(),
        lambda: store.leases().acquire(key),
    ):
        with pytest.raises(StoreError, match=r"`(key|name|token)`"):
            use()


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd"])
def test_a_record_that_names_files_outside_is_not_followed(store: Store, name: str) -> None:
    data = record_of(KEY).to_json() | {"files": {name: {"sha256": "0" * 64, "bytes": 1}}}
    store.backend.write(f"stages/{KEY}/record.json", seal({"attempt": "", "record": data}))
    assert store.finished([KEY]) == {}
    store.backend.write(f"stages/{KEY}/record.json", seal({"attempt": "..", "record": record_of(KEY).to_json()}))
    assert store.finished([KEY]) == {}


def test_files_may_lie_in_folders(store: Store) -> None:
    store.commit(record_of(KEY), {"logs/worker.txt": Content(b"hello")})
    assert store.read(KEY, "logs/worker.txt") == b"hello"


def test_reading_what_is_not_there_says_so(store: Store) -> None:
    with pytest.raises(StoreError, match="not finished"):
        store.read(KEY, WEIGHTS)
    store.commit(record_of(KEY), FILES)
    with pytest.raises(StoreError, match=r"no other\.bin in stage"):
        store.read(KEY, "other.bin")


def test_a_discarded_stage_is_gone(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    store.discard(KEY)
    store.discard(KEY)
    assert store.finished([KEY]) == {}
    assert store.commit(record_of(KEY, attempt=2), FILES).attempt == 2


def test_a_record_with_nan_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="NaN"):
        store.commit(record_of(KEY, after={"val/loss": float("nan")}), FILES)
    assert store.finished([KEY]) == {}


def test_dropped_weights_are_put_back_by_an_equal_result(store: Store) -> None:
    first = store.commit(record_of(KEY), FILES)
    store.drop_weights([KEY])
    store.drop_weights([KEY])
    assert list(store.finished([KEY])[KEY].files) == ["masks.safetensors"]
    with pytest.raises(StoreError, match="weights were dropped"):
        store.read(KEY, WEIGHTS)
    again = fresh(store).commit(record_of(KEY, started=2e9, measurements={"seconds": 9.0}, attempt=2), FILES)
    assert again == first
    assert store.read(KEY, WEIGHTS) == FILES[WEIGHTS]


def test_a_different_result_replaces_a_stage_without_weights(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    store.drop_weights([KEY])
    again = store.commit(record_of(KEY, weights_digest="other"), altered(FILES))
    assert again.weights_digest == "other"
    assert store.finished([KEY]) == {KEY: again}
    assert store.read(KEY, WEIGHTS) == altered(FILES)[WEIGHTS]
    assert len(store.backend.names("quarantine")) == 1


def test_stages_whose_weights_are_missed_are_repeated(store: Store) -> None:
    dense, first, second, third = chain(1, 2, 3)
    branch = chain(3, seed=5, parent=second)[0]
    for spec in (dense, first, second, third):
        store.commit(record_for(spec), FILES)
    store.drop_weights([first.key])
    store.drop_weights([second.key])
    old = Plan({spec.key: spec for spec in (dense, first, second, third)}, ())
    assert list(store.resumable(old)) == list(old.stages)
    new = Plan({**old.stages, branch.key: branch}, ())
    assert list(store.resumable(new)) == [dense.key, third.key]


def test_sweeps_are_saved_and_rebuilt(store: Store) -> None:
    specs = chain(1, 2)
    plan = Plan(
        {spec.key: spec for spec in specs},
        (trial_of("a", specs, ("seed=0",), seed=0),),
    )
    store.save_sweep("digits", {"command": "old", "plan": plan.to_json()})
    store.save_sweep("digits", {"command": "é", "plan": plan.to_json()})
    loaded = fresh(store).load_sweep("digits")
    assert (loaded["name"], loaded["command"]) == ("digits", "é")
    rebuilt = Plan.from_json(loaded["plan"])
    assert rebuilt == plan
    assert [spec.key for spec in rebuilt.stages.values()] == list(plan.stages)  # parents stay before children
    store.save_sweep("a-b", {})
    assert store.sweeps() == ["a-b", "digits"]
    with pytest.raises(StoreError, match="no sweep 'other'; it holds: a-b, digits"):
        store.load_sweep("other")
    store.backend.write("sweeps/digits.json", store.backend.read("sweeps/digits.json").replace(b"old", b"new")[:-3])
    with pytest.raises(StoreError, match=r"sweeps/digits\.json is damaged"):
        store.load_sweep("digits")


def test_a_probe_is_seen_where_the_store_is_the_same(store: Store, tmp_path: Path) -> None:
    with probing(store) as probe:
        Probe(fresh(store), probe.token)()
        assert store.backend.names("probes") == [probe.token]
        with pytest.raises(StoreError, match=r"^node \S+ does not see `store.uri`.*; set `store.uri` to"):
            Probe(Store(str(tmp_path / "elsewhere")), probe.token)()
    with pytest.raises(StoreError, match="does not see"):
        probe()


def test_records_are_plain_json_that_keeps_the_order_of_layers(store: Store) -> None:
    layers = {"conv2.weight": 0.5, "conv10.weight": 0.25, "conv1.weight": 0.75}
    sizes = dict.fromkeys(layers, 100)
    store.commit(record_of(KEY, tensor_sparsity=layers, tensor_sizes=sizes), FILES)
    assert list(store.finished([KEY])[KEY].tensor_sparsity) == list(layers)
    assert json.loads(store.backend.read(f"stages/{KEY}/record.json"))["record"]["sparsity"] == 0.5


def test_a_stage_is_not_finished_once_its_parent_is_of_other_weights(store: Store) -> None:
    dense, first, second = chain(1, 2)
    for spec in (dense, first, second):
        store.commit(record_for(spec), FILES)
    store.discard(dense.key)
    keys = [spec.key for spec in (dense, first, second)]
    assert set(store.finished(keys)) == set(keys[1:])
    assert store.resumable(Plan({s.key: s for s in (dense, first, second)}, ())) == {}, "until its bits are known"

    store.commit(record_for(dense, weights_digest="others"), FILES)

    assert set(store.finished(keys)) == {dense.key, second.key}
    again = store.commit(record_for(first, started_from="others", weights_digest="new"), FILES)
    assert again.weights_digest == "new"
    assert len(store.backend.names("quarantine")) == 1
    assert set(store.finished(keys)) == {dense.key, first.key}


def test_dropped_weights_are_put_back_where_a_record_says_0_for_0_0(store: Store) -> None:
    whole = record_of(KEY, sparsity=0, measurements={"seconds": 1})
    store.commit(whole, FILES)
    store.drop_weights([KEY])

    assert store.commit(whole, FILES) == store.finished([KEY])[KEY]
    assert store.backend.names("quarantine") == []


def test_a_saved_sweep_may_be_larger_than_other_texts_but_not_too_large(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_data, "MOST_BYTES", 1000)
    store.save_sweep("large", {"command": "x" * 5000})

    assert fresh(store).load_sweep("large")["command"] == "x" * 5000
    with pytest.raises(StoreError, match=r"'huge' cannot be saved: it is larger than 8000 bytes .* several sweeps"):
        store.save_sweep("huge", {"command": "x" * 9000})
