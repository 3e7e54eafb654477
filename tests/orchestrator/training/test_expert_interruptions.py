"""Mixtures pruned layer by layer: equal bits after interruptions between blocks and within a pass of statistics."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from small_trials import bits, composed, planned

from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store

pytest.importorskip("transformers")
from small_mixtures import network_of
from test_layer_by_layer import chain, interrupted

SHORT = (
    *("+sweep=language_model", "cluster=inline", "tracking=none", "data.block=8", "train.steps=4", "finetune.steps=2"),
    *("train.eval_every=null", "data.root=book.txt", "model=huggingface", "model.path=net"),
    *("method=wanda", "schedule=one_shot", "schedule.sparsity=0.5", "score.examples=8", "score.batch_size=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_an_interrupted_pruning_of_experts_gives_the_same_bits(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(["the", "cat", "sat", "on"], k=400)))
    network_of(kind).config.save_pretrained(tmp_path / "net")
    specs = chain(planned(composed(*SHORT)))
    quiet = list(run_segment(WorkOrder(specs, Worker(store))))[-1]

    assert any("experts" in name for name in quiet.tensor_sparsity)
    for number, after in enumerate((1, 2)):
        fresh = Store(str(tmp_path / f"other{number}"))
        found, reached = interrupted(specs, fresh, after)
        assert bits(found, fresh) == bits(quiet, store)
        assert {"block 1", "block 2"} & {*reached}, "it was interrupted between blocks"
        assert fresh.checkpoints.known() == []
