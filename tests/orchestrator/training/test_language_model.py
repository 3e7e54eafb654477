"""Small GPT on text: compared with a plain training loop, in a whole sweep, and replaced by a transformers model."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir

from orchestrator.__main__ import CONF
from orchestrator.config import hydra_options
from orchestrator.config.compose import plain
from orchestrator.core.seeding import derive
from orchestrator.core.specs import Job
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome
from orchestrator.training import training_loop
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.tasks.language_modelling import LanguageModelling

STEPS, BATCH, BLOCK = 30, 4, 8
SHORT = (
    *("+sweep=language_model", "cluster=inline", "tracking=none", "data.block=8", "train.steps=20", "finetune.steps=5"),
    *("train.eval_every=null", "schedule.sparsity=0.5", "data.root=book.txt"),
)
TINY = ("model.layers=1", "model.heads=2", "model.width=16")


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"]
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(words, k=600)))
    return tmp_path / "book.txt"


def run(*trials: list[str]) -> Outcome:
    hydra_options.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return conductor.run([Job(tuple(line), plain(compose("config", [*SHORT, *line]))) for line in trials])


def test_losses_are_those_of_a_plain_loop_at_every_step(book: Path) -> None:
    text = data_loading.load({"kind": "text", "root": str(book), "block": BLOCK})
    node = {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "input_shape": None, "classes": None}
    model = model_building.build(node, input_shape=text.input_shape, classes=text.classes, seed=3)
    theirs = copy.deepcopy(model)
    rates = {"lr": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.99]}
    config = {
        "steps": STEPS,
        "epochs": None,
        "batch_size": BATCH,
        "clip_norm": 1.0,
        "eval_every": 1,
        "drop_last": True,
        "optimizer": {"_target_": "torch.optim.AdamW", **rates},
        "scheduler": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None},
    }
    fitted = training_loop.fit(model, text, LanguageModelling(), config, seed=5, device=torch.device("cpu"))

    written = book.read_text()
    letters = {letter: index for index, letter in enumerate(sorted(set(written)))}
    tokens = torch.tensor([letters[letter] for letter in written])
    blocks = len(text.train)
    inputs, targets = tokens[: blocks * BLOCK].view(-1, BLOCK), tokens[1 : 1 + blocks * BLOCK].view(-1, BLOCK)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.003, weight_decay=0.1, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator, losses = torch.Generator().manual_seed(derive(5, "order")), []
    while len(losses) < STEPS:
        for chosen in torch.randperm(blocks, generator=generator)[: blocks // BATCH * BATCH].view(-1, BATCH):
            loss = F.cross_entropy(theirs(inputs[chosen]).transpose(1, 2), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())

    assert [point.metrics["train/loss"] for point in fitted.curve] == pytest.approx(losses[:STEPS], abs=1e-5)
    assert losses[-1] < 0.8 * losses[0]


def test_a_gpt_is_swept_by_perplexity(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(*([*TINY, f"method={name}_unstructured"] for name in ("l1", "random")))
    dense = next(record for record in outcome.records.values() if record.kind == "dense")
    rounds = [record for record in outcome.records.values() if record.kind == "round"]

    assert outcome.status == "finished"
    assert len(rounds) == 2
    assert 1 < dense.after["test/perplexity"] < len(set(book.read_text()))
    assert all(record.sparsity == pytest.approx(0.5, abs=0.01) for record in rounds)
    assert set(rounds[0].tensor_sizes) == {
        "head.weight",
        *(f"blocks.0.attention.{name}.weight" for name in ("query", "key", "value", "out")),
        *("blocks.0.fc1.weight", "blocks.0.fc2.weight"),
    }
    attention = 2 * BLOCK * 16  # per token: its query times all keys, and the result times all values
    assert dense.macs == BLOCK * (12 * 16 * 16 + attention + 16 * len(set(book.read_text())))
    assert "perplexity" in capsys.readouterr().out


def test_a_decoder_of_transformers_takes_its_place(book: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(book.parent / "net")
    outcome = run(["model=huggingface", "model.path=net"])

    assert outcome.status == "finished"
    assert all(record.after["test/perplexity"] < 21 for record in outcome.records.values())
