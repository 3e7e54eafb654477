"""A mixture that two processes train has the masks of one process: whole experts, and entries of experts."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing
from composition import composed
from safetensors.torch import load
from small_trials import planned
from torch._C._distributed_c10d import TCPStore

from orchestrator.core.work_order import Seat, Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training.team.ranks import joined
from orchestrator.training.training_stages import follow
from pruning import MaskSet

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # two processes that import transformers

METHODS = ("reap", "wanda", "sparsegpt")
WORDS = (
    *("+sweep=experts", "data.root=book.txt", "data.block=16", "train.steps=6", "train.batch_size=8", "seed=0"),
    *("train.eval_every=null", "schedule.sparsity=0.5", "score.examples=16", "model.config.hidden_size=16"),
    *("model.config.intermediate_size=16", "model.config.num_hidden_layers=2"),
    "model.config.output_router_logits=false",  # the loss of balance is that of each process's share
)


def pruned(size: int, ranks: Any, store: Store) -> dict[str, dict[str, bytes]]:
    """Train and prune by each method as one of `size` processes; return the files of each pruned stage, of rank 0."""
    more = ("parallel=ddp", f"parallel.processes={size}", f"cluster.cpus_per_trial={size}") if size > 1 else ()
    plan = planned(*(composed(*WORDS, *more, f"method={method}") for method in METHODS))
    found: dict[str, dict[str, bytes]] = {}
    for keys in plan.segments():
        order = WorkOrder(
            tuple(plan.stages[key] for key in keys), Worker(store, ranks=ranks), lineage=plan.lineage(keys[0])
        )
        if ranks is not None and ranks.rank:
            follow(order)
            continue
        for record in run_segment(order):
            if record.kind == "round":
                files = ("masks.npz", "weights.safetensors")
                found[record.details["scoring"]["score"]] = {file: store.read(record.key, file) for file in files}
        if ranks is not None:
            ranks.say(None)
    return found


def _work(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    with joined(Seat(rank, size, port=port), place, torch.device("cpu")) as ranks:
        found = pruned(size, ranks, Store(f"{folder}/two"))
    if not rank:
        torch.save(found, f"{folder}/two.pt")


def test_two_processes_have_the_masks_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(["the", "cat", "sat", "on"], k=400)))
    leader = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # outlives every rank that waits on it
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _work, (2, leader.port, str(tmp_path)), 2, start_method="forkserver"
        )
    one, two = pruned(1, None, Store(str(tmp_path / "one"))), torch.load(tmp_path / "two.pt")

    assert one.keys() == two.keys() == {*METHODS}
    for method, files in one.items():
        assert MaskSet.from_bytes(files["masks.npz"]) == MaskSet.from_bytes(two[method]["masks.npz"]), method
        weights, others = (load(each["weights.safetensors"]) for each in (files, two[method]))
        assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-5
