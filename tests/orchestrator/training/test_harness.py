"""Tasks of lm-evaluation-harness in a sweep: the figures of its own command, kept by task when a sweep is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_harness_tasks import write_tasks

import orchestrator
from orchestrator.commands.export_command import main as export
from orchestrator.config import sources
from orchestrator.core.errors import DataError
from orchestrator.training import harness_stages

pytestmark = pytest.mark.slow
pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
TASKS = ("choose", "complete", "write")
SWEEP = (
    *("model=huggingface", "model.path=net", "data=text", "data.root=book.txt", "data.block=16"),
    *("data.tokenizer=model", "task=language_modelling", "method=magnitude", "schedule=one_shot"),
    *("schedule.sparsity=0.5", "train.epochs=null", "train.steps=4", "finetune.epochs=null", "finetune.steps=4"),
    *("cluster=inline", "tracking=none", "prune.exclude=[lm_head.weight]", f"harness.tasks=[{','.join(TASKS)}]"),
    *("harness.include_path=tasks", "harness.batch_size=4"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a tiny GPT-2, its tokenizer, a text, and three tasks."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = " ".join("abcdefgh"[i % 8] * (1 + i % 3) for i in range(2000))
    (tmp_path / "book.txt").write_text(words)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([words], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    (tmp_path / "net").mkdir()
    tokenizer.save(str(tmp_path / "net" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "!"}
    (tmp_path / "net" / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": tokenizer.get_vocab_size()}
    transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path / "net")
    transformers.GenerationConfig(eos_token_id=0, repetition_penalty=1.3).save_pretrained(tmp_path / "net")
    write_tasks(tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    from orchestrator.__main__ import main as orchestrate

    monkeypatch.setattr(sys, "argv", ["orchestrator", *SWEEP, *more])
    orchestrate()


def by_command(network: Path, place: Path) -> dict[str, float]:
    """Return the figures that the command lm_eval finds for the files of a network."""
    options = {"--model_args": f"pretrained={network}", "--tasks": ",".join(TASKS), "--include_path": "tasks"}
    options |= {"--batch_size": "4", "--device": "cpu", "--output_path": "found"}
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        *(part for pair in options.items() for part in pair),
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = (place / "found").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {
        f"{task}/{name.removesuffix(',none')}": value
        for task, values in results.items()
        for name, value in values.items()
        if name.endswith(",none") and "stderr" not in name
    }


def test_the_figures_are_those_of_the_command_on_the_exported_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    said = capsys.readouterr().out
    assert export(["--to", "huggingface", "--output", "out"]) == 0
    expected = by_command(place / "out", place)

    frame = orchestrator.open("store").sweep().harness()
    found = {f"{row.task}/{row.metric}": row.score for row in frame.itertuples()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert set(found) == {"choose/acc", "choose/acc_norm", "complete/perplexity", "complete/acc", "write/letters"}
    by_name = frame.set_index(["task", "metric"])
    assert by_name.loc[("complete", "perplexity"), "better"] == "lower"
    assert by_name["documents"].isna().sum() == 1, "a perplexity is no mean over documents"
    written = by_name.loc[("write", "letters")]
    assert written.documents_low < written.difference < written.documents_high
    assert written.difference == pytest.approx(written.score - written.dense)
    assert "lm-evaluation-harness, against dense by document" in said
    assert (next(place.glob("outputs/*/comparison")) / "harness.csv").is_file()
    _, head, card = (place / "out" / "README.md").read_text().split("---\n", 2)
    (index,) = yaml.safe_load(head)["model-index"]
    scores = {
        f"{each['dataset']['name']}/{metric['type']}": metric["value"]
        for each in index["results"]
        for metric in each["metrics"]
    }
    assert scores == found
    assert index["name"] == card.strip().splitlines()[0].removeprefix("# ")
    rows = {
        name: line for line in card.splitlines() for name in ("choose acc,", "write letters,") if f"| {name}" in line
    }
    acc = by_name.loc[("choose", "acc")]
    assert acc.documents_low == acc.documents_high, "no answer differs"
    assert rows["choose acc,"] == f"| choose acc, by document +0.0000 | {acc.score:.4f} | {acc.dense:.4f} |"
    low, high = (f"{each:+.4f}" for each in (written.documents_low, written.documents_high))
    assert f"\\[{low}, {high}\\] | {written.score:.4f} | {written.dense:.4f} |" in rows["write letters,"]


def test_a_kill_costs_the_task_that_it_interrupts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    evaluation = harness_stages.evaluation

    def killed(network: object, tokenizer: object, asked: object, place: object) -> object:
        if asked.task == "complete" and len(done) < 3:
            raise KeyboardInterrupt
        done.append(asked.task)
        return evaluation(network, tokenizer, asked, place)

    monkeypatch.setattr(harness_stages, "evaluation", killed)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run(monkeypatch)
    assert done == ["choose", "choose"]
    done.append("-")
    run(monkeypatch)
    assert sorted(done[3:]) == ["complete", "complete", "write", "write"]
    with Path("tasks/utils.py").open("a") as file:
        file.write("# another version\n")
    run(monkeypatch)
    assert len(done) == 7 + 6, "the code of a task belongs to the keys of all tasks in its directory"


def test_a_task_that_fails_is_a_sentence(place: Path) -> None:
    from orchestrator.core.specs import HarnessFields
    from orchestrator.planning.harness_tasks import content
    from orchestrator.planning.pinned_content import release_of
    from orchestrator.workloads.harness_library import evaluation

    asked = HarnessFields("choose", release=release_of("lm_eval") or "", content=content("choose", "tasks"))
    where = {"include_path": str(place / "tasks"), "directory": str(place)}
    with pytest.raises(DataError, match=r"`harness.tasks` \(=choose\) cannot be evaluated by lm_eval: AttributeError"):
        evaluation(object(), None, asked, where)  # type: ignore[arg-type]
    Path("tasks/choose.yaml").write_text(Path("tasks/choose.yaml").read_text() + "num_fewshot: 0\n")
    sources.look_again()
    with pytest.raises(DataError, match=r"must have the definition, the data files and the release of lm_eval"):
        evaluation(object(), None, asked, where)  # type: ignore[arg-type]
