"""Hostile stores: no operation leaves the store or follows a link, and impossible values are refused on reading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from factories import make_plan, sweep_info
from store_cases import FILES, key_of, record_of

from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.plain_data import DEEPEST, parse_json
from orchestrator.core.specs import Plan
from orchestrator.store import saved_sweep
from orchestrator.store.backends import seal
from orchestrator.store.retention import prune, verify
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store

KEY = key_of(0)
PLAN = make_plan(["l1_unstructured"], [0.5], [0])
_ROUND = {"kind": "round", "fields": {"round": 1, "target": 0.5}, "inputs": {}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "store"))
    store.commit(record_of(KEY), FILES)
    store.save_sweep("mine", manifest(sweep_info(), PLAN))
    return store


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Folder next to the store that looks like a part of a store, and is old enough to count as a leftover."""
    folder = tmp_path / "outside"
    (folder / KEY).mkdir(parents=True)
    for path in (folder / "kept", folder / KEY / "kept"):
        path.write_text("precious")
        os.utime(path, (0, 0))
    return folder


VERBS: dict[str, Callable[[Store], object]] = {
    "verify": verify,
    "prune": prune,
    "finished": lambda store: store.finished([KEY]),
    "commit": lambda store: store.commit(record_of(KEY), FILES),
    "discard": lambda store: store.discard(KEY),
    "save": lambda store: store.save_sweep("mine", {}),
    "load": lambda store: saved_sweep.load(store, "mine"),
    "lease": lambda store: store.leases().acquire(KEY),
    "quarantine": lambda store: [
        store.backend.remove_folder(f"quarantine/{name}") for name in store.backend.names("quarantine")
    ],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "link", ["stages", f"stages/{KEY}", "sweeps", "quarantine", "quarantine/x", "tmp", "leases", "leases/stages"]
)
def test_no_verb_follows_a_link(store: Store, outside: Path, link: str, verb: str) -> None:
    path = Path(store.uri, link)
    if path.exists():
        path.rename(outside.parent / "moved")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(outside)
    Path(store.uri, "stages", KEY, "weights.safetensors").unlink(missing_ok=True)  # so that the stage must be set aside

    with suppress(StoreError):
        VERBS[verb](store)

    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [KEY, f"{KEY}/kept", "kept"]
    assert (outside / "kept").read_text() == (outside / KEY / "kept").read_text() == "precious"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "path", ["store.json", "sweeps/mine.json", f"stages/{KEY}/record.json", f"leases/stages/{KEY}", "quarantine/x"]
)
def test_a_fifo_hangs_nothing(store: Store, path: str, verb: str) -> None:
    full = Path(store.uri, path)
    full.parent.mkdir(parents=True, exist_ok=True)
    full.unlink(missing_ok=True)
    os.mkfifo(full)

    with suppress(StoreError):
        VERBS[verb](Store(store.uri))


def test_a_file_that_is_too_large_is_not_read(store: Store) -> None:
    os.truncate(Path(store.uri, "sweeps", "mine.json"), 2**40)

    with pytest.raises(StoreError, match=r"sweeps/mine\.json has 1099511627776 bytes, more than the limit of"):
        store.load_sweep("mine")


_DEPLOY = {"kind": "deploy", "fields": {"format": "onnx"}, "inputs": {"network": "f" * 64}}
_COST = {"steps": 1, "examples": 1, "forward": 1, "backward": 2}
_UPDATE = {
    "step": 1,
    "kept": 9,
    "dropped": 1,
    "grown": 1,
    "first_overlap": 0.5,
    "last_overlap": 0.5,
    "explored": 0.5,
}
_MEASURE = {
    "kind": "measure",
    "fields": {"format": "onnx", "measure": {"batch_sizes": [1]}},
    "inputs": {"network": "f" * 64},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"round": "1/../../../outside/x"}, "Expected `int`, got `str` - at `$.round`"),
        ({"round": 10**20}, "Expected `int` <= 9223372036854775807 - at `$.round`"),
        ({"round": -1}, "Expected `int` >= 0 - at `$.round`"),
        ({"started": 1e90}, "Expected `float` <= 100000000000.0 - at `$.started`"),
        ({"sparsity": True}, "Expected `float`, got `bool` - at `$.sparsity`"),
        ({"after": {"test/accuracy": "high"}}, "Expected `float`, got `str` - at `$.after[...]`"),
        ({"after": {"test/loss": 1e200}}, "Expected `float` <= 1e+150 - at `$.after[...]`"),
        ({"tensor_sizes": [7]}, "Expected `object`, got `array` - at `$.tensor_sizes`"),
        ({"tensor_sizes": {"a": 10**30}}, "<= 9223372036854775807 - at `$.tensor_sizes[...]`"),
        ({"curve": 7}, "Expected `array`, got `int` - at `$.curve`"),
        ({"curve": [{"step": 1}]}, "Object missing required field `epoch` - at `$.curve[0]`"),
        (
            {"files": {"masks.npz": {"sha256": "../x", "bytes": 1}}},
            "matching regex '\\\\A[0-9a-f]{64}\\\\Z' - at `$.files[...].sha256`",
        ),
        ({"files": {"masks.npz": {"sha256": "0" * 64, "bytes": 10**12}}}, "masks.npz must be at most"),
        ({"spec": {"kind": "round"}}, "Object missing required field `fields`"),
        (
            {"spec": {"kind": "round", "fields": {}, "inputs": {"network": ["x"]}}},
            "Expected `str`, got `array` - at `$.inputs[...]`",
        ),
        ({"details": {"rounding": "much"}}, "Expected `float`, got `str` - at `$.rounding`"),
        ({"details": {"dead_tensors": [1]}}, "Expected `str`, got `int` - at `$.dead_tensors[0]`"),
        ({"details": {"scoring": {"passes": -1}}}, "Expected `int` >= 0 - at `$.scoring.passes`"),
        (
            {"details": {"training_macs": {"dense": {**_COST, "backward": -1}}}},
            "Expected `int` >= 0 - at `$.training_macs[...].backward`",
        ),
        (
            {"details": {"training_macs": {"dense": {"steps": 1}}}},
            "Object missing required field `examples` - at `$.training_macs[...]`",
        ),
        (
            {"details": {"mask_updates": [{**_UPDATE, "explored": 2}]}},
            "Expected `float` <= 1.0 - at `$.mask_updates[0].explored`",
        ),
        ({"details": {"form": "module"}}, "`details` of a round must not have 'form'"),
        ({"details": {"shared_examples": 1}}, "`details` of a round must not have 'shared_examples'"),
        ({"details": {"mask_updates": [{**_UPDATE, "step": "1"}]}}, "got `str` - at `$.mask_updates[0].step`"),
        (
            {"details": {"mask_updates": [{**_UPDATE, "kept": 1001}]}},
            "`mask_updates` must have at most 1000 `kept` entries, the sum of `tensor_sizes`",
        ),
        ({"warnings": "text"}, "Expected `array`, got `str` - at `$.warnings`"),
        ({"macs_remaining": 1e9}, "`macs_remaining` (=1e+09) must be at most `macs` (=1000)"),
        ({"macs": 0}, "`macs_remaining` (=500) must be at most `macs` (=0)"),
        ({"parameters": 0}, "`parameters` (=0) must be at least the sum of `tensor_sizes` (=1000)"),
        ({"tensor_sparsity": {}}, "`tensor_sparsity` must have the same parameter names as `tensor_sizes`"),
        ({"spec": _ROUND, "round": 7}, "`round` (=7) must be the round of `spec` (=1)"),
        (
            {"spec": _ROUND, "requested_sparsity": None},
            "`requested_sparsity` (=None) must be the target of `spec` (=0.5)",
        ),
        ({"kind": "measure"}, "`spec` of a measurement must name its network in `inputs`"),
        ({"kind": "measure", "spec": _DEPLOY}, "`spec` of a measurement must have `format` and `measure.batch_sizes`"),
        ({"kind": "measure", "spec": _MEASURE}, "`measurements` must have 'bytes', above 0"),
        ({"kind": "deploy"}, "`spec` of a deployment must name its network in `inputs`"),
        ({"kind": "deploy", "spec": _DEPLOY}, "`measurements` must have 'bytes', above 0"),
    ],
)
def test_a_record_that_cannot_be_is_damaged(store: Store, change: dict[str, Any], said: str) -> None:
    data = {"attempt": "", "record": record_of(KEY).to_json() | change}
    store.backend.write(f"stages/{KEY}/record.json", seal(data))

    (damage,) = verify(store)

    assert "record.json is damaged" in damage
    assert said in damage


def _at(data: Any, path: str, value: Any) -> Any:
    """Return a copy of plain data with another value at a dotted path."""
    data = json.loads(json.dumps(data))
    *above, last = path.split(".")
    inner = data
    for part in above:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(last) if isinstance(inner, list) else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("plan", 7),
        ("plan.stages", 7),
        ("plan.trials", 7),
        ("plan.stages.0", [1, 2, 3]),
        ("plan.stages.0.0", "../x"),
        ("plan.stages.0.1.kind", "distil"),
        ("plan.stages.1.1.inputs.network", "f" * 64),
        ("plan.stages.1.1.fields.round", "1/../x"),
        ("plan.trials.0.stages", []),
        ("plan.trials.0.dense", "f" * 64),
        ("plan.trials.0.name", 7),
        ("plan.parts", 7),
        ("plan.trials.0.config.model", {"part": 99}),
        ("plan.trials.0.config.model", {"part": "x"}),
        ("plan.trials.0.config.model", {}),
        ("plan.trials.0.config.seed", "x"),
        ("plan.trials.0.config.seed", 10**250),
        ("plan.trials.0.measured", [PLAN.trials[0].dense]),
        ("plan.trials.0.config.compare", {"margin": "x"}),
        ("plan.trials.0.config.method", "x"),
        ("plan.trials.0.config", {"schedule": {}}),
        ("plan.trials.0.config", {"method": {}}),
        ("plan.trials.0.config.score", "x"),
        ("plan.trials.0.config.restart", 7),
        ("plan.trials.0.config.schedule", [7]),
        ("plan.stages.0.1.fields.train", "x"),
        ("plan.stages.1.1.fields.restart", 1.5),
        ("plan.stages.1.1.fields.score", {"batch_size": "x"}),
        ("plan.stages.1.1.fields.method", "x"),
        ("plan.stages.1.1.fields.scope", {"budget": "x"}),
        ("plan.stages.1.1.fields.scope", {"budget": 7}),
        ("plan.stages.1.1.fields.measure", {"batch_sizes": ["x"]}),
        ("failures", [1]),
        ("environment", {"torch": 2}),
        ("command", None),
    ],
)
def test_a_sweep_that_cannot_be_is_damaged(store: Store, path: str, value: Any) -> None:
    store.save_sweep("mine", _at(store.load_sweep("mine"), path, value))

    with pytest.raises(StoreError, match=r"sweeps/mine\.json is damaged: .*Remove it"):
        saved_sweep.load(store, "mine")


def test_of_the_format_no_more_is_said_than_can_be_read(store: Store) -> None:
    store.save_sweep("mine", {"format": "x" * 10**6})

    with pytest.raises(OrchestratorError, match="was saved in format") as refused:
        saved_sweep.load(store, "mine")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"[" * (DEEPEST + 2) + b"]" * (DEEPEST + 2), "nested more than"),
        (b"9" * 5000, "out of range"),
        (b"1e999", "out of range"),
        (b"NaN", "malformed"),
        (b'"\\ud800 or so"', "surrogate"),
        (b"[{},{}" + b",{}" * 2**21 + b"]", "larger than"),
        (b'"\xff"', "invalid start byte"),
    ],
)
def test_json_beyond_the_bounds_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_a_link_is_named_with_what_to_do(store: Store, outside: Path) -> None:
    Path(store.uri, "quarantine").symlink_to(outside)
    Path(store.uri, "stages", KEY, "weights.safetensors").write_bytes(b"short")

    (damage,) = verify(store)

    assert "could not be set aside" in damage
    assert "quarantine is a link; a store must not hold links; remove it" in damage


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path, other: path.symlink_to(other), "a link, and links are not followed"),
        (lambda path, other: path.symlink_to(other / "none"), "a link, and links are not followed"),
        (lambda path, _: os.mkfifo(path), "not a regular file"),
    ],
)
def test_a_sweep_whose_file_is_none_is_told_apart_from_one_that_is_not_there(
    store: Store, outside: Path, make: Callable[[Path, Path], None], what: str
) -> None:
    file = Path(store.uri, "sweeps", "mine.json")
    file.rename(outside / "mine.json")
    make(file, outside / "mine.json")

    with pytest.raises(StoreError) as refused:
        saved_sweep.load(store, "mine")
    assert str(refused.value) == (
        f"`store.uri` (={store.uri}): sweeps/mine.json cannot be read: it is {what}; put a regular file there, or "
        "remove it"
    )
    with pytest.raises(StoreError, match="holds no sweep 'other'; it holds: mine"):
        saved_sweep.load(store, "other")


def test_what_is_in_no_plan_is_not_read_as_a_sweep(store: Store) -> None:
    Path(store.uri, "sweeps", "\x1b[2J.json").write_text("{}")

    assert store.sweeps() == ["mine"]
    assert isinstance(saved_sweep.plan_of(store, "mine"), Plan)
