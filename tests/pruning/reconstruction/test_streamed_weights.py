"""Pruning with the weights of one block at a time gives the files of pruning in memory; wrong files are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.two(torch.tanh(self.one(self.norm(x))))
        return out


class Model(nn.Module):
    """Embedding, blocks, and a head that is tied to the embedding; a residual between blocks, if asked."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.mixes = mixes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            assert sum(not weight.is_meta for weight in self.layers.parameters()) <= 6 or not any(
                weight.is_meta for weight in self.layers.parameters()
            ), "one block at a time"
            x = layer(x) + (x if self.mixes else 0)
        out: Tensor = self.head(x)
        return out


class Normed(nn.Module):
    """Block with running statistics, a scale that files may lack, and a buffer that is in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((2,), 0.5)[:1])
        self.register_buffer("shift", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.linear(x)) * self.scale + self.shift
        return out


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(11, (2, 5), generator=generator)} for _ in range(2)]


def written(model: nn.Module, folder: Path, sharded: bool) -> Path:
    """Write the weights without the tied name, to one file or to one for each tensor."""
    folder.mkdir()
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    if not sharded:
        save_file(state, folder / "model.safetensors")
        return folder
    for index, (name, value) in enumerate(state.items()):
        save_file({name: value}, folder / f"{index}.safetensors")
    listed = {name: f"{index}.safetensors" for index, name in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def emptied(model: nn.Module) -> nn.Module:
    found: Any = copy.deepcopy(model).to("meta")
    found.head.weight = found.embedding.weight  # torch unties weights that move to the meta device
    return found  # type: ignore[no-any-return]


def read(folder: Path) -> dict[str, Tensor]:
    listed: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in listed.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("mixes", [False, True], ids=["repeated", "whole passes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_hold_what_pruning_in_memory_gives(
    sharded: bool, mixes: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Model(mixes).to(dtype)
    source = written(model, tmp_path / "source", sharded)
    empty = emptied(model)

    found = pruning.layerwise(empty, "sparsegpt", batches(), sparsity=0.5, offload=source, output=tmp_path / "pruned")

    expected = pruning.layerwise(model, "sparsegpt", batches(), sparsity=0.5)
    assert found.masks == expected.masks
    tensors = read(tmp_path / "pruned")
    assert tensors.keys() == model.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors.items())
    assert all(weight.is_meta for weight in empty.layers.parameters())


@pytest.mark.parametrize("is_meta", [False, True], ids=["buffers with values", "buffers on the meta device"])
def test_persistent_buffers_are_read_and_written(is_meta: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, fresh = (nn.Sequential(*(Normed() for _ in range(3))) for _ in range(2))
    for block in model.modules():
        if isinstance(block, nn.BatchNorm1d):
            block.running_mean, block.running_var = torch.randn(8), torch.rand(8) + 0.1
            block.num_batches_tracked = torch.tensor(7)
    given = [torch.randn(16, 8) for _ in range(2)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({name: value for name, value in state.items() if "scale" not in name}, tmp_path / "w.safetensors")
    for block in fresh.modules() if is_meta else ():
        if isinstance(block, nn.BatchNorm1d):
            block.to("meta")

    pruning.layerwise(
        fresh, "sparsegpt", given, sparsity=0.5, offload=tmp_path / "w.safetensors", output=tmp_path / "pruned"
    )

    pruning.layerwise(model, "sparsegpt", given, sparsity=0.5)
    tensors = read(tmp_path / "pruned")
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors.items())


def mixture() -> Any:
    """Return a small Mixtral, whose files hold a matrix for each expert, under other names."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_local_experts": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11}
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_a_mixture_is_read_and_written_in_the_form_of_its_files(sharded: bool, tmp_path: Path) -> None:
    model, given = mixture(), [{"input_ids": torch.arange(10).view(2, 5)}]
    model.save_pretrained(tmp_path / "source", max_shard_size="2KB" if sharded else "1GB")
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)

    def interrupt(result: pruning.Layerwise) -> None:
        seen.append(result)
        raise KeyboardInterrupt

    seen: list[pruning.Layerwise] = []
    chosen: dict[str, Any] = {"sparsity": 0.5, "parameters": ["*self_attn*"]}
    asked = {**chosen, "offload": tmp_path / "source", "output": tmp_path / "pruned"}
    with pytest.raises(KeyboardInterrupt):
        pruning.layerwise(copy.deepcopy(empty), "wanda", given, on_block=interrupt, **asked)
    pruning.layerwise(empty, "wanda", given, done=seen[0], **asked)

    pruning.layerwise(model, "wanda", given, **chosen)
    model.save_pretrained(tmp_path / "expected")
    expected, found = load_file(tmp_path / "expected" / "model.safetensors"), read(tmp_path / "pruned")
    assert found.keys() == expected.keys()
    assert sum(".experts." in name for name in found) == 2 * 3 * 3
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_an_expert_that_is_missing_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = mixture()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(each for each in state if "experts.1.w3" in each)

    def refused(said: str, changed: dict[str, Tensor]) -> None:
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(ValueError, match=said):
            pruning.layerwise(
                model, "wanda", batches(), sparsity=0.5, offload=tmp_path / "w.safetensors", output=tmp_path / "pruned"
            )

    others = {each: value for each, value in state.items() if each != name}
    refused(f"must have a tensor for '{name}'", others)
    refused(f"must have a tensor for '{name}'", {**others, name.replace("experts.1", "experts.3"): state[name]})
    refused(f"with '{name}' of the shape .12, 7.", {**others, name: torch.ones(12, 7)})
    refused(
        r"experts.gate_up_proj' of the shape .4, 24, 8.",
        {**state, **{each.replace("experts.1", "experts.3"): value.clone() for each, value in state.items()}},
    )


def test_files_with_the_names_of_another_layout_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = Model()
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    other = {name.replace("one", "experts.w1"): value for name, value in state.items()}
    save_file(other, tmp_path / "w.safetensors")

    with pytest.raises(ValueError, match=r"'layers.0.experts.w1.weight'.*'layers.0.one.weight'.*converts"):
        pruning.layerwise(
            model, "wanda", batches(), sparsity=0.5, offload=tmp_path / "w.safetensors", output=tmp_path / "pruned"
        )


def test_an_interrupted_pruning_reads_the_blocks_that_it_wrote(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(result: pruning.Layerwise) -> None:
        seen.append(result)
        if len(seen) == 2:
            raise Interrupted

    torch.manual_seed(0)
    model, seen = Model(), list[pruning.Layerwise]()
    source, empty = written(model, tmp_path / "source", False), emptied(model)
    given: dict[str, Any] = {"sparsity": 0.5, "offload": source, "output": tmp_path / "pruned"}
    pruning.layerwise(model, "sparsegpt", batches(), sparsity=0.5)

    with pytest.raises(Interrupted):
        pruning.layerwise(copy.deepcopy(empty), "sparsegpt", batches(), on_block=interrupt, **given)
    pruning.layerwise(empty, "sparsegpt", batches(), done=seen[-1], **given)

    assert all(torch.equal(value, model.state_dict()[name]) for name, value in read(tmp_path / "pruned").items())


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    model = Model()
    source, empty = written(model, tmp_path / "source", False), emptied(model)

    def refused(said: str, **given: Any) -> None:
        with pytest.raises(ValueError, match=said):
            pruning.layerwise(empty, "sparsegpt", batches(), sparsity=0.5, **given)

    refused("`model` .with 'embedding.weight' on the meta device. must have values; pass `offload`")
    refused("must be given together", offload=source)
    refused("must be a safetensors file, or a directory", offload=tmp_path, output=tmp_path / "pruned")
    refused("`output` .* must be another directory", offload=source, output=source)
    state = load_file(source / "model.safetensors")
    save_file({**state, "layers.0.one.bias": torch.ones(4)}, tmp_path / "shape.safetensors")
    refused(r"'layers.0.one.bias' of the shape \(4,\)", offload=tmp_path / "shape.safetensors", output=tmp_path / "p")
    state.pop("layers.0.one.bias")
    save_file(state, tmp_path / "missing.safetensors")
    refused(
        "must have a tensor for 'layers.0.one.bias'", offload=tmp_path / "missing.safetensors", output=tmp_path / "p"
    )
    (tmp_path / "source" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    refused("b.safetensors is missing", offload=source, output=tmp_path / "p")
    empty.register_buffer("positions", torch.ones(2, device="meta"), persistent=False)
    (tmp_path / "source" / "model.safetensors.index.json").unlink()
    refused("the buffer 'positions' on the meta device", offload=source, output=tmp_path / "p")
