"""Records and files for tests of the store."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from factories import ACCURACY

from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import digest
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.store.store import Store

if TYPE_CHECKING:
    import pytest


class Content(bytes):
    """Content of a file; calling it writes the content."""

    def __call__(self, file: BinaryIO) -> None:
        file.write(self)


FILES = {WEIGHTS: Content(bytes(range(256)) * 40), "masks.safetensors": Content(b"\x01\x80" * 500)}


def key_of(number: int) -> str:
    return digest(f"stage {number}")


def record_of(key: str, **changes: Any) -> StageRecord:
    values: dict[str, Any] = {
        "key": key,
        "kind": "round",
        "round": 1,
        "before": {"val/loss": 0.5, "val/accuracy": 0.25},
        "after": {"val/loss": 0.1, "val/accuracy": 1 / 3, "test/loss": 0.1, "test/accuracy": 0.9},
        "metrics": (ACCURACY,),
        "curve": tuple(CurvePoint(step, step / 10, 1.5e9 + step, {"train/loss": 1 / (step + 1)}) for step in range(20)),
        "requested_sparsity": 0.5,
        "sparsity": 0.5,
        "tensor_sparsity": {"fc1.weight": 0.5},
        "tensor_sizes": {"fc1.weight": 1000},
        "parameters": 1010,
        "macs": 1000,
        "macs_remaining": 500.0,
        "weights_digest": "w",
        "mask_digest": "m",
        "steps": 20,
        "best_step": 19,
        "measurements": {"seconds": 1.25},
        "started": 1.5e9,
        "environment": {"torch": "2"},
    }
    return StageRecord(**(values | changes))


def chain(*rounds: int, seed: int = 0, parent: StageSpec | None = None) -> list[StageSpec]:
    """Return a dense stage and a round for each number, or only the rounds below `parent`."""
    specs = [] if parent is not None else [StageSpec("dense", {"seed": seed})]
    for number in rounds:
        above = specs[-1] if specs else parent
        specs.append(StageSpec("round", {"round": number, "seed": seed}, {NETWORK: above.key} if above else {}))
    return specs


def record_for(spec: StageSpec, **changes: Any) -> StageRecord:
    digests = {"weights_digest": f"weights {spec.key}", "started_from": f"weights {spec.parent}" if spec.parent else ""}
    return record_of(spec.key, kind=spec.kind, round=spec.round, spec=spec.to_json(), **(digests | changes))


def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return an empty store of the kind that is the parameter of a fixture."""
    if request.param == "local":
        return Store(str(tmp_path / "store"))
    if request.param == "memory":
        return Store(f"memory://{uuid.uuid4().hex}")
    return Store(f"s3://bucket/{uuid.uuid4().hex}", options=request.getfixturevalue("s3"))


def fresh(store: Store) -> Store:
    """Return the same store as another process would open it."""
    return pickle.loads(pickle.dumps(store))


def altered(files: Mapping[str, bytes], name: str = WEIGHTS) -> dict[str, Content]:
    changed = {**files, name: bytes([files[name][0] ^ 1]) + files[name][1:]}
    return {name: Content(data) for name, data in changed.items()}
