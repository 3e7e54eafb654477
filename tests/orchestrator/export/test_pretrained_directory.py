"""Export of a network of transformers as a directory: stock transformers loads it in a process without this project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_language_models import write_gguf, write_text
from torch import nn

import pruning
from orchestrator.commands.export_command import main as export
from orchestrator.core.errors import OrchestratorError
from orchestrator.deploy.checked_writing import CODECS, Deployed, Masked, shrunk, write_checked
from orchestrator.deploy.formats.format import Example, ExportError, difference
from orchestrator.deploy.formats.huggingface_format import stock_network, stock_smaller
from orchestrator.export import completed_directory, export_folder, stock_loading
from orchestrator.export.completed_directory import SENTENCE, hold_in_fresh_process, questions
from orchestrator.export.export_folder import require_builder, size
from orchestrator.export.stored_network import StoredNetwork
from orchestrator.workloads.data_sets.text import ByteCodec, Characters
from orchestrator.workloads.tokenizer_files import copy_tokenizer

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Sizes of a Llama of a moment."""


@dataclass(frozen=True)
class OfTokens(Masked):
    """A stored network without a store."""

    data: Any = None
    spec: Any = field(default_factory=lambda: SimpleNamespace(location={}))

    @property
    def inputs(self) -> list[Example]:
        return [(torch.arange(10).reshape(2, 5),), (torch.arange(5).reshape(1, 5),)]


def llama(*empty: int, **keys: Any) -> StoredNetwork:
    """Return a Llama of two layers; the given number of leading units is masked in each layer's MLP."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=11, max_position_embeddings=32, **SIZES, eos_token_id=2, **keys)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    for layer, count in zip(model.model.layers, empty or (0, 0), strict=True):
        with torch.no_grad():
            layer.mlp.up_proj.weight[:count] = 0
    return cast(StoredNetwork, OfTokens(model))


def test_a_model_that_transformers_did_not_build_is_refused_before_it_is_built() -> None:
    with pytest.raises(
        OrchestratorError, match=r"`--to` \(=huggingface\) must be another format for `model.kind` \(=mlp"
    ):
        require_builder([CODECS["torch"], CODECS["huggingface"]], {"kind": "mlp"})
    require_builder([CODECS["huggingface"]], {"_target_": "my.network"})
    require_builder([CODECS["torch"]], {"kind": "mlp"})
    with pytest.raises(ExportError, match=r"networks whose class comes from transformers, and `model` is torch\.nn"):
        stock_network(nn.Linear(2, 2))


def test_sizes_that_a_configuration_can_express_are_written_in_it(tmp_path: Path) -> None:
    kept, chosen = llama(5, 3), CODECS["huggingface"]
    smaller = stock_smaller(kept.model)
    chosen.write(smaller, kept.inputs[0], tmp_path)

    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 9
    assert load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].shape == (8, 9)
    run = chosen.load(tmp_path)
    with torch.no_grad():
        assert all(difference(run(each), kept.model(*each).logits) <= 1e-5 for each in kept.inputs)


@pytest.mark.slow
def test_sizes_that_the_configuration_does_not_say_are_refused(tmp_path: Path) -> None:
    kept = llama(5, 3)
    smaller = shrunk(kept.model, kept.inputs[0])

    with pytest.raises(ExportError, match=r"the configuration of LlamaForCausalLM has other sizes than the network"):
        CODECS["huggingface"].write(smaller, kept.inputs[0], tmp_path)


def differing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Deployed]:
    """Write a network whose outputs are not the masked one's; return the masked one, and what was written."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=32, **SIZES, initializer_range=0.5)
    kept: Any = OfTokens(transformers.BertForMaskedLM(config).eval())
    with torch.no_grad():
        for name, parameter in kept.model.named_parameters():  # without scales of their own, norms change nothing twice
            if "LayerNorm" in name:
                parameter.copy_(torch.rand(parameter.shape))
    pruning.prune(kept.model, "magnitude", unit="layer", sparsity=0.5)
    pruning.remove_all(kept.model)
    monkeypatch.setattr(Masked, "metrics_of", lambda *_: {"val/perplexity": 7.0})
    written = write_checked(kept, stock_smaller(kept.model), CODECS["huggingface"], folder, threads=1, remedy="none")
    return kept, written


def test_a_network_that_differs_from_the_masked_one_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, written = differing(tmp_path, monkeypatch)

    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1
    assert written.difference > 1e-3
    assert written.achieved == {"val/perplexity": 7.0}
    assert "The outputs are not those of the masked network: the masked network keeps" in export_folder._notes(written)


@pytest.mark.slow
def test_a_network_that_differs_is_loaded_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, written = differing(tmp_path, monkeypatch)

    with pytest.raises(ExportError, match="computes other outputs"):
        hold_in_fresh_process(kept, tmp_path)
    hold_in_fresh_process(cast(StoredNetwork, replace(kept, model=written.network)), tmp_path)


def test_a_network_of_no_family_keeps_its_size() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 12, "num_hidden_layers": 1}
    config = transformers.OPTConfig(vocab_size=11, max_position_embeddings=32, num_attention_heads=2, **sizes)
    network = transformers.OPTForCausalLM(config)

    assert stock_smaller(network) is network


def test_tied_weights_are_written_once_and_quantisation_not_at_all(tmp_path: Path) -> None:
    kept = llama(tie_word_embeddings=True)
    network: Any = kept.model
    network.config.quantization_config = {"quant_method": "gguf"}
    CODECS["huggingface"].write(network, kept.inputs[0], tmp_path)

    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert network.config.quantization_config, "the network is not changed"
    held = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in held
    assert "lm_head.weight" not in held
    run = CODECS["huggingface"].load(tmp_path)
    with torch.no_grad():
        assert torch.equal(run(kept.inputs[0]), network(*kept.inputs[0]).logits)


def test_a_prompt_leaves_room_in_the_context_for_the_continuation() -> None:
    network = stock_network(llama().model)
    tokens = torch.arange(40).reshape(2, 20) % 11

    asked = questions(network, [(tokens,), (tokens[:1],)])

    assert asked["prompt"].tolist() == tokens[:1, :16].tolist(), "a context of 32, less 16 new tokens"
    assert set(asked) == {"0/input_ids", "1/input_ids", "prompt"}


@pytest.mark.slow
def test_the_fresh_process_cannot_import_this_project(tmp_path: Path) -> None:
    root = Path(stock_loading.__file__).parents[2]
    code = (
        "import runpy, sys\n"
        f"loading = runpy.run_path({stock_loading.__file__!r})\n"
        "assert 'orchestrator' not in sys.modules\n"
        f"loading['hide']({str(root)!r})\n"
        "for name in ('orchestrator', 'orchestrator.export', 'pruning', 'pruning.masks', 'hydra_plugins'):\n"
        "    try: __import__(name)\n"
        "    except ModuleNotFoundError: continue\n"
        "    raise SystemExit(name)\n"
        "import transformers\n"
        f"assert {str(root)!r} not in sys.path\n"
    )

    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_a_directory_with_another_weight_is_found_in_the_fresh_process(tmp_path: Path) -> None:
    kept = llama()
    CODECS["huggingface"].write(kept.model, kept.inputs[0], tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["lm_head.weight"][3] += 1
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(ExportError, match="stock transformers computes other outputs than the masked network"):
        hold_in_fresh_process(kept, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="stock transformers cannot load the written directory"):
        hold_in_fresh_process(kept, tmp_path)


def test_the_tokenizer_of_the_data_is_copied_before_that_of_the_model(tmp_path: Path) -> None:
    model, other, folder = (tmp_path / name for name in ("model", "other", "folder"))
    for each in (model, other, folder):
        each.mkdir()
    (model / "tokenizer.json").write_text("of the model")
    (model / "tokenizer_config.json").write_text("its settings")
    (other / "mine.json").write_text("of the data")

    copy_tokenizer("characters", tmp_path, folder)
    assert not list(folder.iterdir())
    copy_tokenizer("characters", model, folder)
    assert {each.name: each.read_text() for each in folder.iterdir()} == {
        "tokenizer.json": "of the model",
        "tokenizer_config.json": "its settings",
    }
    (folder / "tokenizer_config.json").unlink()
    copy_tokenizer(str(other / "mine.json"), model, folder)
    assert (folder / "tokenizer.json").read_text() == "of the data"
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(("codec", "copied"), [(Characters("ab"), False), (ByteCodec(), False), (None, True)])
def test_a_network_of_characters_gets_no_tokenizer(
    codec: Any, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completed_directory, "hold_in_fresh_process", lambda *_: None)
    for name in ("model", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("of the model")
    location = {"model": {"path": str(tmp_path / "model")}}
    network: Any = SimpleNamespace(spec=SimpleNamespace(location=location), data=SimpleNamespace(codec=codec))
    completed_directory.complete(network, tmp_path / "folder")

    assert (tmp_path / "folder" / "tokenizer.json").exists() == copied


def test_the_tokenizer_in_a_gguf_file_is_written_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model.gguf").touch()
    asked: list[Any] = []

    def read(folder: Path, *, gguf_file: str, local_files_only: bool, trust_remote_code: bool) -> Any:
        assert (local_files_only, trust_remote_code) == (True, False)
        asked.append(folder / gguf_file)
        return SimpleNamespace(save_pretrained=lambda into: (into / "tokenizer.json").write_text("from gguf"))

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
    copy_tokenizer("", tmp_path / "model.gguf", tmp_path)

    assert asked == [tmp_path / "model.gguf"]
    assert (tmp_path / "tokenizer.json").read_text() == "from gguf"


def written_parts(folder: Path, family: str) -> None:
    """Write a text, a tokenizer of 40 tokens for it, and a directory with a tiny network's configuration."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = " ".join(SENTENCE for _ in range(40))
    if family == "gguf":
        write_gguf(folder / "net.gguf", tokens=100)
        write_text(folder / "book.txt")
        return
    (folder / "book.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    (folder / "net").mkdir()
    tokenizer.save(str(folder / "net" / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    if family == "llama":
        sizes = {**SIZES, "vocab_size": count, "max_position_embeddings": 32, "tie_word_embeddings": True}
        transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1).save_pretrained(folder / "net")
    elif family == "mixtral":
        sizes = {**SIZES, "vocab_size": count, "max_position_embeddings": 32, "num_key_value_heads": 2}
        config = transformers.MixtralConfig(**sizes, num_local_experts=4, bos_token_id=0, eos_token_id=1)
        transformers.MixtralForCausalLM(config).save_pretrained(folder / "net")
    else:
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": count}
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1).save_pretrained(folder / "net")
    transformers.GenerationConfig(eos_token_id=1, repetition_penalty=1.3).save_pretrained(folder / "net")
    (folder / "net" / "README.md").write_text("---\nlicense: mit\nbase_model:\n- them/little\n---\n# Little\n")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gguf", "mixtral"])
def test_a_network_of_a_sweep_is_loaded_by_stock_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.__main__ import main as orchestrate

    written_parts(tmp_path, family)
    monkeypatch.chdir(tmp_path)
    sweep = (
        "model.weights=net.gguf" if family == "gguf" else "model.path=net",
        *("model=huggingface", "data=text", "data.root=book.txt", "data.block=16"),
        *("data.tokenizer=model", "task=language_modelling", "method=magnitude"),
        *("schedule=one_shot", "schedule.sparsity=0.5", "train.epochs=null", "train.steps=4", "finetune.epochs=null"),
        *("finetune.steps=4", "cluster=inline", "tracking=none", "prune.exclude=[lm_head.weight]"),
        *(("finetune.lora_rank=2", "finetune.teacher=tuned") if family == "llama" else ()),
        *(("model.weights=net",) if family == "mixtral" else ()),
    )
    monkeypatch.setattr(sys, "argv", ["orchestrator", *sweep])
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    orchestrate()
    capsys.readouterr()

    assert export(["--to", "huggingface", "--output", "out"]) == 0

    said = capsys.readouterr()
    assert re.search(r"huggingface +[\d.]+ kB, outputs within 0\.0e\+00 of the masked", said.out)
    assert not said.err
    names = {each.name for each in Path("out").iterdir()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        "tokenizer_config.json",
    }
    settings = json.loads(Path("out/generation_config.json").read_text())
    assert settings.get("repetition_penalty") == (None if family == "gguf" else 1.3)
    page = Path("out/README.md").read_text()
    lacking = "the README names no base model; pass --base-model NAME"
    assert (lacking in said.out) == (family == "gguf"), "no file names it there"
    head = yaml.safe_load(page.split("---\n")[1])
    assert head["pipeline_tag"] == "text-generation"
    assert head["tags"] == ["pruning", "sparsity", "magnitude"]
    assert (head.get("base_model"), head.get("license")) == (
        (None, None) if family == "gguf" else ("them/little", "mit")
    )
    assert "pruned by magnitude" in page
    assert "\n\nThe command:\n\n    " in page
    code = "import sys\nsys.modules.update(orchestrator=None, pruning=None)\n"
    for block in re.findall(r"```python \w+\n(.*?)```", page, re.DOTALL):
        code += block
    code += "assert outputs.shape[:2] == (2, 16)\n"
    subprocess.run([sys.executable, "-P", "-c", code], cwd="out", check=True)
    held = load_file("out/model.safetensors")
    assert sum(int((tensor == 0).sum()) for name, tensor in held.items() if "mlp" in name or "experts" in name) > 20
    assert sum(".experts." in name for name in held) == (2 * 4 * 3 if family == "mixtral" else 0), (
        "as the hub holds them"
    )


def test_a_weight_with_two_places_counts_once() -> None:
    network = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert size(network) == 128
    network[1].weight = network[0].weight
    assert size(network) == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "unit", "key", "left"),
    [
        ("llama", "layer", "num_hidden_layers", 1),
        ("llama", "heads", "num_key_value_heads", 1),
        ("gpt2", "mlp", "n_inner", 16),
    ],
)
def test_units_of_a_transformer_are_exported_without_what_was_pruned(
    family: str,
    unit: str,
    key: str,
    left: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from orchestrator.__main__ import main as orchestrate

    written_parts(tmp_path, family)
    monkeypatch.chdir(tmp_path)
    sweep = (
        *("model=huggingface", "model.path=net", "data=text", "data.root=book.txt", "data.block=16"),
        *("data.tokenizer=model", "task=language_modelling", "method=magnitude", f"unit={unit}", "train.epochs=null"),
        *("schedule=one_shot", "schedule.sparsity=0.5", "train.steps=2", "finetune.epochs=null", "finetune.steps=2"),
        *("cluster=inline", "tracking=none", "deploy=huggingface", "deploy.batch_sizes=[2]", "deploy.seconds=0.05"),
    )
    monkeypatch.setattr(sys, "argv", ["orchestrator", *sweep])
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})
    orchestrate()
    said = capsys.readouterr().out

    assert export(["--to", "huggingface", "--output", "out"]) == 0

    times = r"[\d.]+× as fast \([\d.]+× for a token\) at batch 2"
    assert re.search(rf"finished +trial, latency as huggingface +{times}", said)
    assert json.loads(Path("out/config.json").read_text())[key] == left
    page = Path("out/README.md").read_text()
    assert re.search(rf"^- {re.escape(key).replace('_', '.?_')}: .* -> {left}$", page, re.MULTILINE)
    assert all(bool((tensor != 0).any()) for tensor in load_file("out/model.safetensors").values())
