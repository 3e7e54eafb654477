"""Mixtures pruned layer by layer: equal bits after interruptions between blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from small_trials import composed, planned

from orchestrator.store.store import Store

pytest.importorskip("transformers")
from small_mixtures import network_of
from test_layer_by_layer import chain, hold_interruptions

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
    quiet = hold_interruptions(chain(planned(composed(*SHORT))), store, tmp_path)

    assert any("experts" in name for name in quiet.tensor_sparsity)
