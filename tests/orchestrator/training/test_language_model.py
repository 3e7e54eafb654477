"""Small GPT on text: compared with a plain training loop, in a whole sweep, and replaced by a transformers model."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from composition import composed
from training_cases import job

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.seeding import derive
from orchestrator.core.specs import Job, Plan
from orchestrator.planning.plan import make_plan
from orchestrator.planning.preview import preview
from orchestrator.sweep import conductor
from orchestrator.sweep.outcome import Outcome
from orchestrator.training.loop import training_loop
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


def jobs(*trials: list[str]) -> list[Job]:
    return [Job(tuple(line), composed(*SHORT, *line)) for line in trials]


def run(*trials: list[str]) -> Outcome:
    return conductor.run(jobs(*trials))


def planned(line: list[str]) -> Plan:
    return make_plan(jobs(line))


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
    fitted = training_loop.fit(job(model, LanguageModelling(), config, data=text, seed=5))

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


@pytest.mark.slow
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


MEASURES = (
    *("task.stride=2", "task.against_dense=true", "task.last_word=true", "task.prompts=['the cat ','on a']"),
    *("task.generate=6", "finetune.steps=0", "+data.tests.other=other.txt"),
)


def test_what_a_task_asks_for_is_measured_on_test_once_and_kept(book: Path) -> None:
    (book.parent / "other.txt").write_text(book.read_text()[::-1])
    outcome = run([*TINY, "method=l1_unstructured", *MEASURES])
    dense, pruned = (next(r for r in outcome.records.values() if r.kind == kind) for kind in ("dense", "round"))
    held, vocabulary = pruned.details["measured"], set(book.read_text())

    assert outcome.status == "finished"
    for split in ("test", "test_other"):
        assert pruned.after[f"{split}/kl_from_dense"] > 0
        assert 0 < pruned.after[f"{split}/agreement_with_dense"] < 1
        assert 0 <= pruned.after[f"{split}/last_word"] <= 1
        windows = held[split]["windows"]
        assert sum(windows["tokens"]) == held[split]["tokens"] == BLOCK * len(windows["loss"])
        assert sum(windows["loss"]) / held[split]["tokens"] == pytest.approx(pruned.after[f"{split}/loss"], abs=1e-4)
        assert pruned.after[f"{split}/strided_perplexity"] != pruned.after[f"{split}/perplexity"]
    assert not any(name.startswith("val/kl") or "kl_from_dense" in dense.after for name in pruned.after)
    assert "windows" not in held["val"]
    for record in (dense, pruned):
        found = record.details["generations"]
        assert [each["prompt"] for each in found] == ["the cat ", "on a"]
        assert all(len(each["text"]) == 6 and set(each["text"]) <= vocabulary for each in found)


@pytest.mark.slow
def test_an_equal_network_agrees_with_dense(book: Path) -> None:
    outcome = run([*TINY, "method=identity", "schedule.sparsity=null", "task.against_dense=true", "finetune.steps=0"])
    pruned = next(record for record in outcome.records.values() if record.kind == "round")

    assert pruned.after["test/kl_from_dense"] == 0
    assert pruned.after["test/agreement_with_dense"] == 1


PASSAGES = '{"text": "the cat sat on a mat"}\n\n{"text": "a mat  sat on a cat "}\n'


def test_passages_of_a_file_are_measured_once_for_each_network(book: Path) -> None:
    (book.parent / "passages.jsonl").write_text(PASSAGES)
    (book.parent / "other.txt").write_text(book.read_text()[::-1])
    asked = ("task.passages=passages.jsonl", "finetune.steps=0", "+data.tests.other=other.txt")
    outcome = run([*TINY, "method=l1_unstructured", *asked])

    assert outcome.status == "finished"
    for record in outcome.records.values():
        assert record.after["test/passage_last_word"] in (0, 0.5, 1)
        assert record.after["test/passage_perplexity"] > 1
        assert record.details["measured"]["test"]["passages"] == 2
        assert not any("passage" in name for name in record.after if not name.startswith("test/"))


def test_a_key_has_the_passages_and_not_their_path(book: Path) -> None:
    def dense(*overrides: str) -> str:
        return planned([*TINY, "method=l1_unstructured", *overrides]).trials[0].dense

    for name in ("one.jsonl", "same.jsonl"):
        (book.parent / name).write_text(PASSAGES)
    first, same = (dense(f"task.passages={name}.jsonl") for name in ("one", "same"))
    (book.parent / "one.jsonl").write_text(PASSAGES.replace("sat", "mat"))

    assert first == same
    assert len({dense(), first, dense("task.passages=one.jsonl")}) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("lost.txt", None, r"must be an existing file of passages; pass task.passages=lambada.jsonl"),
        ("a.txt", b"\n \n", r"must have passages, but is empty"),
        ("a.txt", b"the cat\n\nsat\n", r"must have at least two words in each passage, but line 3 is 'sat'"),
        ("a.txt", b"the \xff cat", r"must be text in UTF-8 \(byte 4: invalid start byte\); convert it"),
        (
            "a.jsonl",
            b'{"text": "the cat"}\n{"txt": "a cat"}',
            r'must have {"text": "..."} in each line, .* but line 2 ',
        ),
        ("a.jsonl", b"the cat", r"must have .* but line 1 has no such text"),
        ("a.json", b'{"text": 5}', r"must have .* but line 1 has no such text"),
        ("a.json", b'[{"text": "the cat"}]', r"must have .* but line 1 has no such text"),
        ("a.jsonl", b'{"text": "the \\ud800"}', r"must have .* but line 1 has no such text"),
        ("", None, r"must be an existing file of passages"),
        ("pkg://nosuch/a.jsonl", None, r"needs the package nosuch, which is not installed"),
    ],
)
def test_passages_without_a_last_word_are_refused_in_the_plan(
    book: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (book.parent / name).write_bytes(content)

    with pytest.raises(OrchestratorError, match=rf"`task.passages` \(={name}\) {said}"):
        planned([*TINY, "method=l1_unstructured", f"task.passages={name}"])


@pytest.mark.parametrize(
    "cut", [("data.val_fraction=0.25",), ("data.test_size=6", "data.val_fraction=null", "data.val_size=3")]
)
def test_a_dry_run_tells_of_fewer_examples_than_a_score_asks_for(book: Path, cut: tuple[str, ...]) -> None:
    def lines(*overrides: str) -> list[str]:
        plan = planned([*TINY, *cut, *overrides])
        return [line for line in preview("few", plan, ()).splitlines() if line.startswith("scores ")]

    data = planned([*TINY, *cut, "method=magnitude"]).trials[0].config["data"]
    count = len(data_loading.load_anew({key: value for key, value in data.items() if key != "name"}).train)

    assert lines("method=wanda", f"score.examples={count}") == []
    assert lines("method=magnitude") == []
    (line,) = lines("method=wanda", f"score.examples={count + 1}")
    assert f"fewer than score.examples={count + 1}: " in line
    assert line.endswith(f"at most {count} blocks of {BLOCK} tokens to train on")


def test_a_stride_beyond_the_tokens_of_an_example_is_refused_in_the_plan(book: Path) -> None:
    said = rf"`task.stride` \(={BLOCK + 1}\) must be at most {BLOCK}, the tokens of an example \(`data.block`\)"

    with pytest.raises(OrchestratorError, match=said):
        planned([*TINY, "method=l1_unstructured", f"task.stride={BLOCK + 1}"])
    assert planned([*TINY, "method=l1_unstructured", f"task.stride={BLOCK}"]).trials


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "task=regression",
            r"`task` \(=regression\) needs a label for each example, but .* pass task=language_modelling",
        ),
        ("data.block=9000", r"`data.block` \(=9000\) must be less than .* the training part of `data.root` has \d+ of"),
    ],
)
def test_a_dry_run_refuses_another_task_and_a_text_without_a_block(book: Path, setting: str, said: str) -> None:
    with pytest.raises(OrchestratorError, match=said):
        run([*TINY, "method=l1_unstructured", setting, "dry_run=true"])


def test_a_prompt_that_the_tokens_cannot_write_is_refused_before_anything_trains(book: Path) -> None:
    with pytest.raises(OrchestratorError, match=r"`task.prompts` \(='Zebra'\) must have only .*, but has 'Z'"):
        run([*TINY, "method=l1_unstructured", "task.prompts=[Zebra]"])


def test_a_preflight_continues_each_prompt_by_one_token(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, counts = "orchestrator.workloads.tasks.language_modelling.greedy_generations", []
    monkeypatch.setattr(place, lambda model, prompts, count, inputs: counts.append(count) or [])
    outcome = run([*TINY, "method=l1_unstructured", "task.prompts=[the]", "task.generate=6"])

    assert outcome.status == "finished"
    assert set(counts[:-2]) == {1}
    assert counts[-2:] == [6, 6]


def test_only_rounds_depend_on_the_comparison_with_dense(book: Path) -> None:
    plain, compared, written = (
        planned([*TINY, "method=l1_unstructured", *more])
        for more in ((), ("task.against_dense=true",), ("task.prompts=[the]",))
    )
    dense, pruned = compared.trials[0].stages

    assert plain.trials[0].dense == dense
    assert pruned not in plain.stages
    assert compared.stages[pruned].inputs == {"network": dense, "dense": dense}
    assert plain.stages[dense].fields["task"] == {"kind": "language_modelling"}
    assert written.trials[0].dense != dense


def test_a_decoder_of_transformers_takes_its_place(book: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(book.parent / "net")
    asked = ("task.against_dense=true", "task.prompts=[the]", "task.generate=9")
    outcome = run(["model=huggingface", "model.path=net", *asked])

    assert outcome.status == "finished"
    assert all(record.after["test/perplexity"] < 21 for record in outcome.records.values())
    pruned = [record for record in outcome.records.values() if record.kind == "round"]
    assert all(record.after["test/kl_from_dense"] > 0 for record in pruned)
    assert all(len(record.details["generations"][0]["text"]) == 9 for record in outcome.records.values())
