"""Language models in .gguf files and sharded directories: weights, configuration and tokenizer; one-sentence errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_language_models import BLOCKS, WIDTH, write_gguf, write_text
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import OrchestratorError
from orchestrator.planning import pinned_content
from orchestrator.planning.file_places import INDEX, checkpoint
from orchestrator.workloads import data_loading, model_building
from orchestrator.workloads.networks.initial_weights import initialise
from orchestrator.workloads.tokenizer_files import copy_tokenizer

transformers = pytest.importorskip("transformers")


def build(path: Path, classes: int = 100, **node: Any) -> nn.Module:
    node = {"kind": "huggingface", "input_shape": None, "classes": None, "path": str(path), **node}
    return model_building.build(node, input_shape=(8,), classes=classes, seed=0)


def begun(model: nn.Module, place: str) -> nn.Module:
    initialise(model, place, pinned_content.weights_digest(place))
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def by_hand(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file as its reader gives them; transformers permutes queries and keys."""
    from gguf import GGUFReader

    return {each.name: torch.tensor(each.data.copy()) for each in GGUFReader(path).tensors}


def test_one_file_gives_configuration_weights_and_tokenizer(tiny: Path, tmp_path: Path) -> None:
    model, held = begun(build(tiny), str(tiny)), by_hand(tiny)
    state = model.state_dict()

    assert (model.config.num_hidden_layers, model.config.hidden_size) == (BLOCKS, WIDTH)  # type: ignore[union-attr]
    assert torch.equal(state["lm_head.weight"], held["token_embd.weight"]), "the head is tied"
    assert torch.equal(state["model.layers.2.mlp.down_proj.weight"], held["blk.2.ffn_down.weight"])
    assert torch.equal(state["model.norm.weight"], held["output_norm.weight"])
    model.save_pretrained(tmp_path)  # a network from a GGUF load of transformers refuses this
    data = data_loading.load(
        {
            "kind": "text",
            "root": str(write_text(tmp_path / "a.txt")),
            "tokenizer": str(tiny),
            "block": 8,
            "test_size": 3,
        }
    )
    tokens = next(iter(data.train.batches(1, device=torch.device("cpu"))))[0][0].tolist()
    own = transformers.AutoTokenizer.from_pretrained(tiny.parent, gguf_file=tiny.name)
    assert (data.classes, len(data.test)) == (100, 3)
    assert own.decode(tokens) == (tmp_path / "a.txt").read_text()[: len(own.decode(tokens))]


def test_an_exported_directory_gets_the_tokenizer_of_the_file(tiny: Path, tmp_path: Path) -> None:
    copy_tokenizer(str(tiny), tiny, tmp_path)

    own = transformers.AutoTokenizer.from_pretrained(tiny.parent, gguf_file=tiny.name)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("ab ba")["input_ids"] == own("ab ba")["input_ids"]


def test_a_sharded_directory_gives_the_bits_of_one_file(tiny: Path, tmp_path: Path) -> None:
    model = begun(build(tiny), str(tiny))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "parts", max_shard_size="5KB")
    place = checkpoint(str(tmp_path / "parts"))
    found = begun(build(tmp_path / "parts"), place).state_dict()

    assert place.endswith(INDEX)
    assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())
    before, part = pinned_content.weights_digest(place), next((tmp_path / "parts").glob("model-*"))
    part.write_bytes(part.read_bytes()[:-4] + bytes(4))
    with pytest.raises(OrchestratorError, match=r"must be the file that the sweep was planned with"):
        initialise(build(tmp_path / "parts"), place, before)
    part.unlink()
    with pytest.raises(pinned_content.Misplaced, match=rf"lacks {part.name}, which its {INDEX} lists"):
        pinned_content.weights_digest(place)
    (tmp_path / "parts" / INDEX).write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(pinned_content.Misplaced, match=r"has a damaged model.safetensors.index.json"):
        pinned_content.weights_digest(place)


def test_a_damaged_file_is_told(tiny: Path, tmp_path: Path) -> None:
    holed = write_gguf(tmp_path / "holed.gguf", without=["blk.1.ffn_down", "blk.0.attn_q"])
    with pytest.raises(OrchestratorError, match=r"lacks model.layers.0.self_attn.q_proj.weight, model.layers.1.mlp"):
        build(holed)
    (tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:9000])
    with pytest.raises(OrchestratorError, match=r"`model.path` \(=.*cut.gguf\) cannot be read as a .gguf file"):
        build(tmp_path / "cut.gguf")
    with pytest.raises(OrchestratorError, match=r"must have the content that the sweep was planned with"):
        build(tiny, content=file_digest(str(holed)))


def test_the_tokenizer_of_a_larger_model_is_told(tiny: Path) -> None:
    with pytest.raises(OrchestratorError, match=r"has a vocabulary of 100, but the data have 120 tokens; pass"):
        build(tiny, classes=120)
