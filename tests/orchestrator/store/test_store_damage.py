"""Stores with random damage and matching seals: commands answer clearly, touch nothing outside, and bound memory."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import config, make_records, plan_of, sweep_info

from orchestrator.commands.compare_command import main as compare_main
from orchestrator.commands.store_command import main as store_main
from orchestrator.core.file_names import MASKS, WEIGHTS
from orchestrator.core.plain_data import digest
from orchestrator.store.backends import seal, unseal
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from pruning.masks import mask_files as mask_files

MANY = int(os.environ.get("DAMAGED_STORES", "200"))
GROWTH = 600e6
"""Bytes by which this process may grow above its 400 MB."""
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 10**18, 10**250, 1.5, 1e90, 1e300, "", "x", "../../outside/x", "1/../../../outside/x"),
    *("$\\frac{$", "\x1b[2J", "\0", "é" * 1000, "=1+1", "<b>", [], [[]], [7], {}, {"a": 1}, {"network": "f" * 64}),
    *([[[[[[[[[[7]]]]]]]]]], "f" * 64),
)


def content(key: str, name: str) -> bytes:
    masks = {"conv1.weight": np.ones(72, bool), "fc1.weight": np.arange(8192) % 3 > 0}
    return bytes(1000) if name == WEIGHTS else mask_files.write_npz(mask_files.encode(masks, "x" * 64))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store with a sweep of four trials in two lines."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    store = Store(str(folder))
    plan = plan_of(
        [config(name, 0.5, seed, 1) for name in ("l1_unstructured", "random_unstructured") for seed in (0, 1)]
    )
    for key, record in make_records(plan).items():
        names = (WEIGHTS, MASKS) if record.round else (WEIGHTS,)
        store.commit(record, {name: lambda file, k=key, n=name: file.write(content(k, n)) for name in names})
    store.save_sweep("mine", manifest(sweep_info("mine"), plan))
    return folder


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in plain data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*above, name)
        yield from places(inner, (*above, name))


def change(data: Any, draw: random.Random) -> None:
    """Replace a value with an unexpected one, remove it, or rename it."""
    *above, last = draw.choice(list(places(data)))
    for name in above:
        data = data[name]
    match draw.randrange(5):
        case 0 if isinstance(data, dict):
            del data[last]
        case 1 if isinstance(data, dict):
            data[str(draw.choice(ODD))] = data.pop(last)
        case _:
            data[last] = draw.choice(ODD)


def resealed(path: Path, draw: random.Random) -> None:
    data = unseal(path.read_bytes())
    for _ in range(draw.randint(1, 2)):
        change(data, draw)
    body = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    path.write_bytes(b'{"sha256":"' + digest(body).encode() + b'",' + body[1:].encode())


def forged_masks(path: Path, draw: random.Random) -> None:
    """Masks that claim other shapes, with their digest in the record."""
    claim = draw.choice([[3 * 10**9], [-1], [10**9, 10**9], "x", [8191], None])
    members = dict(mask_files.encode({"fc1.weight": np.zeros(8192, bool)}, "x" * 64))
    header = json.loads(members[mask_files.HEADER].tobytes())
    header["tensors"]["fc1.weight"]["shape"] = claim
    members[mask_files.HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.write_bytes(forged := mask_files.write_npz(members))
    sealed = path.with_name("record.json")
    data = unseal(sealed.read_bytes())
    data["record"]["files"][MASKS] = {"sha256": digest(forged), "bytes": len(forged)}
    if draw.random() < 0.5 and isinstance(claim, list):
        data["record"]["tensor_sizes"]["fc1.weight"] = abs(int(np.prod([float(n) for n in claim])))
    sealed.write_bytes(seal(data))


def replaced(path: Path, draw: random.Random) -> None:
    """Replacements of a file: random bytes, a link, a pipe, a folder, a large sparse file."""
    kind = draw.randrange(8)
    if path.is_dir():
        kind = 2
        shutil.rmtree(path)
    else:
        path.unlink()
    match kind:
        case 0:
            path.write_bytes(draw.randbytes(draw.choice([0, 1, 100, 10_000])))
        case 1 | 2:
            path.symlink_to(path.parents[len(path.parts) - 1 - path.parts.index("store")].parent / "outside")
        case 3:
            os.mkfifo(path)
        case 4:
            path.mkdir()
        case 5:
            path.touch()
            os.truncate(path, draw.choice([2**26, 2**40]))
        case 6:
            path.write_bytes(b"[" * 10**6)
        case _:
            path.write_bytes(seal({"format": draw.choice(ODD), "plan": draw.choice(ODD), "record": draw.choice(ODD)}))


def damaged(folder: Path, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 2)):
        present = sorted(path for path in folder.rglob("*") if not path.is_symlink())
        files = [path for path in present if path.is_file() and path.stat().st_size < 2**20]
        sealed = [path for path in files if path.suffix == ".json" and path.name != "store.json"]
        masks = [path for path in files if path.name == MASKS and path.with_name("record.json") in sealed]
        try:
            match draw.randrange(6):
                case 0 | 1 | 2:
                    resealed(draw.choice(sealed), draw)
                case 3:
                    forged_masks(draw.choice(masks), draw)
                case _:
                    replaced(draw.choice(present), draw)
        except (ValueError, OSError, LookupError, TypeError):
            continue  # earlier damage rules this one out


def asked(folder: Path, draw: random.Random) -> list[Callable[[], int]]:
    """Commands in random order."""
    uri = ["--store", str(folder / "store")]
    lines = [["list"], ["show", "mine"], ["report"], ["verify"], ["prune", "--quarantine"], ["delete", "mine", "--yes"]]
    lines += [["copy", "mine", str(folder / "copied")]]
    commands: list[Callable[[], int]] = [lambda line=line: store_main([*line, *uri]) for line in lines]
    output = ["--output", str(folder / "report")] if draw.random() < 0.05 else []
    commands += [lambda: compare_main(["mine", *uri, *output])]
    return draw.sample(commands, len(commands))


def held() -> float:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def look(whole: Path, folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    shutil.copytree(whole, folder / "store")
    outside = folder / "outside"
    (outside / "deep").mkdir(parents=True)
    for path in (outside / "kept.json", outside / "deep" / "record.json"):
        path.write_text("precious")
        os.utime(path, (0, 0))
    damaged(folder / "store", draw)
    for command in asked(folder, draw):
        assert command() in (0, 1, 2)
    assert [path.read_text() for path in sorted(outside.rglob("*.json"))] == ["precious"] * 2
    assert {path.name for path in folder.iterdir()} <= {"store", "outside", "copied", "report"}
    assert len(list(outside.rglob("*"))) == 3


@pytest.mark.parametrize(
    "count", [25, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.many, pytest.mark.timeout(3600)])]
)
def test_a_store_damaged_at_random_is_answered_and_nothing_outside_is_touched(
    whole: Path, tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    first = random.SystemRandom().randrange(10**9)
    before = held()
    for seed in range(first, first + count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            look(whole, folder, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert "\x1b" not in said.out + said.err, seed
        shutil.rmtree(folder)
    grown = held() - before
    with capsys.disabled():
        print(f"\n{count} damaged stores from seed {first}: {grown / 1e6:.0f} MB more memory", file=sys.stderr)
    assert grown < GROWTH
