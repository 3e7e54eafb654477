"""Files of networks: a head that is the embedding is not pruned unless it is named; shapes of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_language_models import BLOCKS, INNER, WIDTH, write_gguf, write_text
from small_trials import composed, planned

from orchestrator.catalogue.models import TIED
from orchestrator.planning.network_files import tied_head, weight_shapes
from orchestrator.planning.preview import preview

HEAD = "lm_head.weight"
METHODS = ("magnitude", "wanda", "sparsegpt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    write_text(tmp_path / "a.txt")
    return tmp_path


def asked(folder: Path, *overrides: str) -> dict[str, Any]:
    files = ("model=smollm2", f"model.weights={folder / 'tiny.gguf'}", "data=text", f"data.root={folder / 'a.txt'}")
    own = ("task=language_modelling", "train=none", "finetune=none", "schedule=half", "data.tokenizer=model")
    return composed(*files, *own, *overrides)


def described(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return {"kind": "huggingface", "path": str(folder), "weights": None}


@pytest.mark.parametrize("method", METHODS)
def test_a_tied_head_is_left_out_as_if_it_had_been_excluded(folder: Path, method: str) -> None:
    typed = planned(asked(folder, f"method={method}", f"prune.exclude=[{HEAD}]"))
    plain = planned(asked(folder, f"method={method}"))

    assert list(plain.stages) == list(typed.stages)
    assert plain.trials[0].config["prune"]["exclude"] == [HEAD]
    assert "keeps     lm_head.weight dense" in preview("tied", plain, ())


def test_a_tied_head_is_pruned_where_it_is_named(folder: Path) -> None:
    plain, named, patterns = (
        planned(asked(folder, *more)).trials[0]
        for more in ((), (f"prune.include=['*',{HEAD}]",), ("prune.exclude=['lm_*']",))
    )

    assert named.config["prune"]["exclude"] == []
    assert patterns.config["prune"]["exclude"] == ["lm_*"]
    assert named.dense == plain.dense
    assert len({trial.stages[-1] for trial in (plain, named, patterns)}) == 3


def test_a_configuration_tells_whether_the_head_is_the_embedding(tmp_path: Path) -> None:
    def told(**config: Any) -> str | None:
        return tied_head(described(tmp_path, **config))

    assert told(model_type="llama", tie_word_embeddings=True) == HEAD
    assert told(model_type="llama") is None
    assert told(model_type="gpt2") == HEAD
    assert told(model_type="gpt2", tie_word_embeddings=False) is None
    assert told(model_type="gpt_neox", tie_word_embeddings=True) is None, "its head has another name"
    model = described(tmp_path, model_type="gpt2")
    assert tied_head({**model, "overrides": {"tie_word_embeddings": False}}) is None
    assert tied_head({**model, "architecture": "AutoModelForSequenceClassification"}) is None
    assert tied_head({"kind": "mlp"}) is None
    for damaged in ("[]", "{", '{"model_type": 1}'):
        (tmp_path / "config.json").write_text(damaged)
        assert tied_head(model) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIED)
def test_transformers_ties_by_default_as_the_table_says(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind]
    network = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]

    assert config().tie_word_embeddings is TIED[kind]
    assert list(network._tied_weights_keys) == [HEAD]


def test_shapes_come_from_the_headers_of_weight_files(folder: Path) -> None:
    from_gguf = weight_shapes({"weights": str(folder / "tiny.gguf")})
    save_file({"a.weight": torch.zeros(3, 2)}, folder / "model.safetensors")

    assert len(from_gguf) == 2 + 9 * BLOCKS
    assert from_gguf["blk.0.ffn_down.weight"] == (WIDTH, INNER)
    assert weight_shapes({"weights": str(folder / "model.safetensors")}) == {"a.weight": (3, 2)}
    (folder / "b.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:500])
    (folder / "b.safetensors").write_bytes(b"short")
    assert [weight_shapes({"weights": str(folder / name)}) for name in ("b.gguf", "b.safetensors")] == [{}, {}]
    assert weight_shapes({"weights": None}) == weight_shapes({"weights": "memory://a.gguf"}) == {}
