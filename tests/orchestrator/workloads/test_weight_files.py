"""Weight files: the same bytes as from safetensors, and no second copy in memory."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.workloads.networks.initial_weights import initialise
from orchestrator.workloads.weight_files import (
    CheckpointError,
    load_state,
    plain_state,
    state_digest,
    write_state,
)

HERE = Path(__file__).parent
ODD = {
    "b.weight": torch.randn(3, 5),
    "a": torch.tensor(7),
    'ü\n"': torch.randn(4, 4).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "byte": torch.arange(9, dtype=torch.uint8),
    "double": torch.randn(1, 2).double(),
    "none": torch.empty(0, 4),
    "last": torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last),
    "turned": torch.randn(5, 700).t(),
    "expanded": torch.randn(3, 1).expand(3, 4),
}

MEASURE = """
import json, sys, threading, time
from test_training_stages import chain
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training import pruning_rounds, stage_record
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_job import FitResult
from orchestrator.workloads.tasks.task import Measured

uri, options, width = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
store = Store(uri, options=options)
model = {"kind": "mlp", "input_shape": None, "classes": None}
dense, pruned = chain(0.5, model={**model, "hidden": [width, width]})
most = before = 0

def held():
    with open("/proc/self/status") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem")))

def watch():
    global most
    while True:
        most = max(most, held())
        time.sleep(0.0005)

def evaluate(*arguments, **options):  # the last that is done before a stage is committed
    global most, before
    most = before = held()
    return Measured({"loss": 0.0, "accuracy": 0.0})

def loaded(*arguments):  # the first that is done with a restored network
    print(json.dumps([committing, most - held()]))
    sys.exit()

store.mark()
training_loop.fit = lambda *a, **b: FitResult((), 0, 0)
stage_record.evaluate, pruning_rounds.prune_round = evaluate, loaded
threading.Thread(target=watch, daemon=True).start()
list(run_segment(WorkOrder((dense,), Worker(store))))
committing, most = most - before, 0
list(run_segment(WorkOrder((pruned,), Worker(store), (dense,))))
"""


def written(state: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    write_state(state, file)
    return file.getvalue()


def test_the_file_is_byte_for_byte_that_of_safetensors() -> None:
    whole = {name: tensor.contiguous() for name, tensor in ODD.items()}

    assert written(ODD) == save(whole)
    assert written({}) == save({})
    assert state_digest(ODD) == state_digest(whole)


def test_tensors_longer_than_a_piece_are_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, digest = written(ODD), state_digest(ODD)
    for piece in (1, 7, 64):
        monkeypatch.setattr("orchestrator.workloads.weight_files.PIECE", piece)
        assert (written(ODD), state_digest(ODD)) == (whole, digest)


def test_a_network_is_loaded_as_it_was_and_holds_nothing_of_the_file(tmp_path: Path) -> None:
    first, second = (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2))
    tied = nn.ModuleList([first, first[0]])
    (tmp_path / "weights").write_bytes(written(plain_state(first)))
    (tmp_path / "tied").write_bytes(written(plain_state(tied)))
    load_state(second, load_file(tmp_path / "weights"))
    load_state(tied, load_file(tmp_path / "tied"))
    (tmp_path / "weights").write_bytes(bytes(1000))

    assert state_digest(plain_state(second)) == state_digest(plain_state(first))


class Remembering(nn.Linear):
    """Layer with extra state that is not a tensor."""

    def __init__(self, memory: object = None) -> None:
        super().__init__(2, 2)
        self.memory = memory

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


@pytest.mark.parametrize("memory", [{"calls": 3, "names": ["a", None, 0.1]}, 5, None, torch.tensor([1.0])])
def test_what_a_network_keeps_beside_its_tensors_is_written_and_loaded(tmp_path: Path, memory: object) -> None:
    first, second, third = (nn.Sequential(Remembering(each)) for each in (memory, None, None))
    third[0].memory = torch.zeros(1) if isinstance(memory, Tensor) else None
    (tmp_path / "w.safetensors").write_bytes(written(plain_state(first)))
    load_state(second, load_file(tmp_path / "w.safetensors"))
    initialise(third, str(tmp_path / "w.safetensors"), file_digest(str(tmp_path / "w.safetensors")))

    assert second[0].memory == third[0].memory == memory
    assert state_digest(plain_state(first)) == state_digest(plain_state(second)) == state_digest(plain_state(third))


@pytest.mark.parametrize("memory", [object(), {1: 2}, (1, 2), float("nan"), {1, 2}])
def test_what_no_json_can_hold_is_refused(memory: object) -> None:
    with pytest.raises(CheckpointError, match=r"`0._extra_state` \(=.*change what `get_extra_state` of the network"):
        plain_state(nn.Sequential(Remembering(memory)))


def grown(size: int, uri: str, options: dict[str, object] | None = None) -> list[float]:
    """Return the memory that committing and loading weights takes beyond the network, as a fraction of `size` bytes."""
    width = round((size / 4) ** 0.5)
    line = [sys.executable, "-c", MEASURE, uri, json.dumps(options or {}), str(width)]
    environment = {"PYTHONPATH": f"{HERE.parent / 'training'}:{HERE.parent}:{HERE.parents[2]}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    return [more / (4 * width**2) for more in json.loads(ended.stdout)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("size", [64 * 2**20, 2**30])
def test_committing_and_loading_take_no_second_copy_of_the_weights(tmp_path: Path, size: int) -> None:
    found = grown(size, str(tmp_path / "store"))
    print(f"beyond the network: committing {found[0]:.3f}, loading {found[1]:.3f} of the weights")
    assert max(found) <= 0.3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_an_object_store_takes_none_either(s3: dict[str, object]) -> None:
    found = grown(2**28, "s3://bucket/memory", s3)
    print(f"beyond the network: committing {found[0]:.3f}, loading {found[1]:.3f} of the weights")
    assert max(found) <= 0.3
