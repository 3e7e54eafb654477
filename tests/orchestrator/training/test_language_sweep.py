"""The sweep of a language model from one file: methods, exclusions, masks; equal bits after SIGKILL at any moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_language_models import BLOCKS, write_gguf, write_text
from small_trials import bits, composed, planned, train
from torch import Tensor

from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.local_backend import LocalBackend
from orchestrator.store.store import Store
from orchestrator.store.unfinished_stages import Checkpoints
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.state import checkpointing
from pruning.reconstruction import sparsegpt

pytest.importorskip("transformers")
METHODS = ("magnitude", "wanda", "sparsegpt", "n_m", "wanda_n_m", "sparsegpt_n_m")
LAYERS = 7
"""Linear layers in a block of Llama."""
WRITTEN, SAVED = LAYERS + 1, LAYERS + 2
"""Counts at which the tensors of a block's checkpoint are written, and at which the checkpoint is saved."""
MOMENTS = (2, WRITTEN, LAYERS, SAVED, 1, WRITTEN, SAVED, 5, WRITTEN, 3, LAYERS)
"""For each attempt, the count of solved layers and of steps of checkpoints after which it is killed."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    write_text(tmp_path / "a.txt")
    return tmp_path


def asked(folder: Path, *methods: str) -> Plan:
    files = (f"model.weights={folder / 'tiny.gguf'}", f"data.root={folder / 'a.txt'}", "data.block=16")
    own = (*files, "score.examples=8", "data.test_size=4", "cluster=inline")
    return planned(*(composed("+sweep=smollm2", *own, f"method={method}") for method in methods))


def stored(store: Store, key: str) -> dict[str, Tensor]:
    return load(store.read(key, "weights.safetensors"))


@pytest.mark.slow
def test_each_method_prunes_the_linear_layers_of_the_blocks_to_half(folder: Path, store: Store) -> None:
    plan = asked(folder, *METHODS)
    for spec in plan.stages.values():
        list(run_preflight(WorkOrder((spec,), Worker(store), lineage=plan.lineage(spec.key))))
    records = train(plan, store)
    dense = stored(store, plan.trials[0].dense)

    for method, trial in zip(METHODS, plan.trials, strict=True):
        record, weights = records[trial.stages[-1]], stored(store, trial.stages[-1])
        assert len(record.tensor_sparsity) == LAYERS * BLOCKS
        assert set(record.tensor_sparsity.values()) == {0.5}, method
        for name, weight in weights.items():
            if name not in record.tensor_sparsity:
                assert torch.equal(weight, dense[name]), "embedding, head and norms stay"
            elif method.endswith("n_m"):
                assert (torch.count_nonzero(weight.view(-1, 4), 1) <= 2).all()
            elif method == "wanda":
                assert (torch.count_nonzero(weight, 1) == weight.shape[1] // 2).all()
        if method == "magnitude":
            for name in record.tensor_sparsity:
                sizes, kept = dense[name].abs(), weights[name] != 0
                assert sizes[kept].min() >= sizes[~kept].max()
        assert record.figure("test") > 0


def killed_at(moment: int, order: WorkOrder) -> bool:
    """Run a work order in a forked process that is killed at a moment; return whether the process was killed."""
    child = os.fork()
    if child == 0:
        left = [moment]
        status = 1
        try:
            for owner, name in ((sparsegpt, "sparsegpt"), (LocalBackend, "put"), (Checkpoints, "save")):
                _count(owner, name, left)
            list(run_segment(order))
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _count(owner: Any, name: str, left: list[int]) -> None:
    """Let calls of a function count down, and kill this process after the call at which the count reaches zero."""
    call: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        found = call(*arguments, **options)
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, counted)


@pytest.mark.slow
def test_a_pruning_that_is_killed_at_ten_moments_gives_the_same_bits(
    folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "MOST_SHARE", 1.0)  # a checkpoint after each block, however short
    plan = asked(folder, "sparsegpt")
    often = {part: {"checkpoint_minutes": 1e-9} for part in ("train", "finetune")}
    specs: tuple[StageSpec, ...] = tuple(
        replace(plan.stages[key], location={**plan.stages[key].location, **often}) for key in plan.trials[0].stages
    )
    torch.set_num_threads(1)  # a forked process has none of the threads
    quiet = list(run_segment(WorkOrder(specs, Worker(store))))[-1]
    fresh, kills, reached = Store(str(tmp_path / "killed")), 0, set()
    list(run_segment(WorkOrder(specs[:1], Worker(fresh))))
    for moment in MOMENTS:
        if not killed_at(moment, WorkOrder(specs[1:], Worker(fresh), lineage=specs[:1])):
            break
        kills += 1
        reached.add(fresh.checkpoints.reached(specs[1].key).number)

    assert kills >= 10
    assert {-1, 1, 2} <= reached, "it was killed in the first block and after each checkpoint"
    if not fresh.finished([specs[1].key]):
        list(run_segment(WorkOrder(specs[1:], Worker(fresh), lineage=specs[:1])))
    assert bits(fresh.finished([specs[1].key])[specs[1].key], fresh) == bits(quiet, store)
