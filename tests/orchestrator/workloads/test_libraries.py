"""Networks of transformers and timm: tiny ones with random weights are built, pruned and given other weights."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import safetensors.torch
import torch
from torch import nn

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import PruneFields
from orchestrator.planning import file_places, pinned_content
from orchestrator.workloads import model_building
from orchestrator.workloads.networks.initial_weights import initialise
from pruning.measure.macs import macs

PRUNE = PruneFields(
    (
        "Linear",
        "Conv2d",
    )
)
VISION = (
    *("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc"),
    *(".transforms", ".transforms.functional"),
)


def build(kind: str, shape: tuple[int, ...], classes: int, seed: int = 0, **node: Any) -> nn.Module:
    node = {"kind": kind, "input_shape": None, "classes": None, **node}
    return model_building.build(node, input_shape=shape, classes=classes, seed=seed)


def tiny(name: str, folder: Path) -> Any:
    """Save the configuration of a tiny transformers decoder, and return it."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **small)
    else:
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(max_position_embeddings=16, **sizes, **small)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize(
    ("architecture", "named"),
    [("AutoModelForImageClassification", "AutoModelForCausalLM"), ("AutoModelForMaskedLM", "AutoModelForQuestionAn")],
)
def test_an_auto_class_of_other_networks_is_refused(architecture: str, named: str, tmp_path: Path) -> None:
    tiny("gpt2", tmp_path)
    said = rf"`model.architecture` \(={architecture}\) has no network of the type 'gpt2'.*one of .*{named}.*, AutoModel"
    with pytest.raises(OrchestratorError, match=said) as refused:
        build("huggingface", (6,), 11, path=str(tmp_path), architecture=architecture)
    assert architecture not in str(refused.value).partition("pass ")[2]
    assert len(str(refused.value)) < 600, "not all configurations"


@pytest.mark.parametrize(("name", "pruned"), [("gpt2", 2 * 4 + 1), ("llama", 2 * 7 + 1)])
def test_a_decoder_of_transformers_is_built_from_its_configuration(name: str, pruned: int, tmp_path: Path) -> None:
    tiny(name, tmp_path)
    first, again, other = (build("huggingface", (6,), 11, path=str(tmp_path), seed=seed) for seed in (1, 1, 2))
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]

    assert first(torch.zeros(2, 6, dtype=torch.int64)).logits.shape == (2, 6, 13)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len(model_building.prunable(first, PRUNE)) == pruned


def test_what_transformers_saved_is_loaded_with_its_head_or_without(tmp_path: Path) -> None:
    tiny("gpt2", tmp_path)
    theirs = build("huggingface", (6,), 11, path=str(tmp_path), seed=1)
    tokens = torch.arange(6).view(1, 6)
    for part in (theirs, theirs.transformer):
        part.save_pretrained(tmp_path / "saved")
        ours = build("huggingface", (6,), 11, path=str(tmp_path / "saved"), seed=2, overrides={"vocab_size": 13})
        place = file_places.checkpoint(str(tmp_path / "saved"))
        initialise(ours, place, file_digest(place))

        assert torch.equal(ours.eval()(tokens).logits, theirs.eval()(tokens).logits)


def mixture(seed: int) -> Any:
    """Return a tiny Mixtral; its files hold a matrix for each expert, and it holds them in one parameter."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_local_experts": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 13}
    torch.manual_seed(seed)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


@pytest.mark.parametrize("saved", [{}, {"max_shard_size": "2KB"}, {"save_original_format": False}, None])
def test_a_mixture_is_loaded_as_from_pretrained_loads_it(saved: dict[str, Any] | None, tmp_path: Path) -> None:
    theirs, ours, place = mixture(1), mixture(2), str(tmp_path / "w.pt")
    theirs.save_pretrained(tmp_path, **(saved or {}))
    if saved is None:
        tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
        torch.save({f"module.{name}": value for name, value in tensors.items()}, place)
    else:
        place = file_places.checkpoint(str(tmp_path))
    initialise(ours, place, pinned_content.weights_digest(place))

    expected = type(theirs).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


def test_an_expert_that_a_file_lacks_is_named(tmp_path: Path) -> None:
    theirs = mixture(1)
    theirs.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = next(each for each in state if "experts.1.w3" in each)
    last = state.pop(name)

    def begin(changed: dict[str, Any], keep: tuple[str, ...] = ()) -> Any:
        place, ours = str(tmp_path / "w.safetensors"), mixture(2)
        safetensors.torch.save_file(changed, place)
        initialise(ours, place, file_digest(place), keep)
        return ours

    with pytest.raises(OrchestratorError, match=rf"does not fit this network: the file lacks `{name}`; choose"):
        begin({**state, name.replace("experts.1", "experts.3"): last})
    with pytest.raises(OrchestratorError, match=rf"`{name}` is \[12, 7\] in the file and \[12, 8\] in the network"):
        begin({**state, name: last[:, :7].contiguous()})
    with pytest.raises(OrchestratorError, match=f"NaN or infinity in `{name}`"):
        begin({**state, name: last / 0})
    kept = begin(state, ("*.0.mlp.experts.gate_up_proj",)).state_dict()
    assert torch.equal(
        kept["model.layers.0.mlp.experts.gate_up_proj"], mixture(2).model.layers[0].mlp.experts.gate_up_proj
    )
    assert torch.equal(kept["model.norm.weight"], theirs.model.norm.weight)


def test_a_classifier_of_transformers_has_as_many_outputs_as_the_data_have_classes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes).save_pretrained(tmp_path)
    model = build("huggingface", (1, 8, 8), 10, path=str(tmp_path), architecture="AutoModelForImageClassification")

    assert model(torch.zeros(3, 1, 8, 8)).logits.shape == (3, 10)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            {"overrides": {"vocab_size": 5}},
            r"has a vocabulary of 5, but the data have 11 tokens; pass \+model.ov",
        ),
        ({"architecture": "AutoModelForNothing"}, r"cannot be built by AutoModelForNothing of transformers: Attribut"),
        ({"content": "0" * 64}, r"must have the config.json that the sweep was planned with, but it has changed"),
    ],
)
def test_what_transformers_cannot_build_is_told(node: dict[str, Any], said: str, tmp_path: Path) -> None:
    tiny("gpt2", tmp_path)
    with pytest.raises(OrchestratorError, match=said):
        build("huggingface", (6,), 11, path=str(tmp_path), **node)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OrchestratorError, match=r"`model.path` \(=.*\) cannot be built by AutoModelForCausalLM"):
        build("huggingface", (6,), 11, path=str(tmp_path))


def test_timm_without_torchvision_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutTorchvision(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setitem(sys.modules, "timm", WithoutTorchvision("timm"))
    with pytest.raises(OrchestratorError) as caught:
        build("timm", (1, 8, 8), 10, architecture="test_resnet")
    assert str(caught.value).startswith("`model.kind` (=timm) needs the torchvision release for torch ")
    assert str(caught.value).endswith("No module named 'torchvision'); install that release of torchvision.")


def test_timm_that_is_not_installed_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(OrchestratorError, match=r"needs timm, which is not installed here; pip install timm"):
        build("timm", (1, 8, 8), 10, architecture="test_resnet")


def test_a_yolo_has_the_classes_of_the_data_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    class DetectionModel(nn.Module):
        def __init__(self, described: dict[str, Any], channels: int, verbose: bool) -> None:
            super().__init__()
            assert not verbose
            self.model = nn.ModuleList([nn.Conv2d(channels, described["nc"] * described["width"], 1)])
            self.stride = torch.tensor([8.0, 16.0, 32.0])

    tasks = ModuleType("ultralytics.nn.tasks")
    tasks.DetectionModel = DetectionModel  # type: ignore[attr-defined]
    tasks.yaml_model_load = {"yolo0.yaml": {"nc": 80, "width": 2}}.__getitem__  # type: ignore[attr-defined]
    for name, module in (("ultralytics", ModuleType("ultralytics")), ("ultralytics.nn", None), (tasks.__name__, tasks)):
        monkeypatch.setitem(sys.modules, name, module)

    made = build("yolo", (3, 64, 96), 4, architecture="yolo0")
    assert made.model[0].weight.shape[:2] == (6, 3), "three classes, since label 0 is none"  # type: ignore[index,union-attr]
    assert made.model[0].dynamic, "anchors of each shape"  # type: ignore[index,union-attr]
    with pytest.raises(
        OrchestratorError, match=r"`model.input_shape` \(=\[3, 64, 40\]\) must be .* multiples of 32 for"
    ):
        build("yolo", (3, 64, 40), 4, architecture="yolo0")
    with pytest.raises(
        OrchestratorError, match=r"`model.architecture` \(=yolo1\) cannot be built by ultralytics: KeyError"
    ):
        build("yolo", (3, 64, 64), 4, architecture="yolo1")
    monkeypatch.setitem(sys.modules, tasks.__name__, None)
    with pytest.raises(
        OrchestratorError, match=r"`model.kind` \(=yolo\) needs ultralytics .*; pip install ultralytics"
    ):
        build("yolo", (3, 64, 64), 4, architecture="yolo0")


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import timm with a stand-in for torchvision: torchvision's wheels fit one torch build, and no network uses it."""
    if not pinned_content.release_of("timm"):
        pytest.skip("timm is not installed")
    if not pinned_content.release_of("torchvision"):
        for name in VISION:
            monkeypatch.setitem(sys.modules, f"torchvision{name}", MagicMock(FrozenBatchNorm2d=nn.BatchNorm2d))


@pytest.mark.usefixtures("timm")
def test_a_network_of_timm_is_built_for_the_data_and_pruned() -> None:
    first, again, other = (build("timm", (1, 8, 8), 10, architecture="test_resnet", seed=seed) for seed in (1, 1, 2))

    assert first.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert len(model_building.prunable(first, PRUNE)) == sum(
        isinstance(m, nn.Linear | nn.Conv2d) for m in first.modules()
    )
    state = [list(model.state_dict().values()) for model in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(state[0], state[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(state[0], state[2], strict=True))
    sized = build("timm", (3, 32, 32), 4, architecture="test_vit", options={"img_size": 32})
    assert sized(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    with pytest.raises(OrchestratorError, match=r"`model.architecture` \(=resnet0\) cannot be built by timm.create"):
        build("timm", (1, 8, 8), 10, architecture="resnet0")
    with pytest.raises(OrchestratorError, match=r"`model.input_shape` \(=\[6\]\) must be \[channels, height, width\]"):
        build("timm", (6,), 10, architecture="resnet18")


@pytest.mark.usefixtures("timm")
def test_multiply_accumulates_of_vision_transformers_are_those_by_hand() -> None:
    with torch.device("meta"):
        base = importlib.import_module("timm").create_model("vit_base_patch16_224")
        found = macs(base, torch.empty(1, 3, 224, 224))

    tokens, width, block = 197, 768, 12 * 768 * 768  # queries, keys, values, output: 4; MLP: 8
    attention = 2 * tokens * tokens * width
    assert found.layers["blocks.3.attn"].total == attention
    assert found.total == 196 * 3 * 16 * 16 * width + 12 * (tokens * block + attention) + width * 1000
    assert found.total == 17_563_828_224, "torchvision documents 17.56 billion for its own ViT"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"model_type": "timm_wrapper", "architecture": "local-dir:/tmp/x"}, "architecture"),
        ({"model_type": "timm_wrapper", "architecture": "a", "model_args": {"checkpoint_path": "x"}}, "model_args"),
        ({"model_type": "gemma3n", "vision_config": {"architecture": "hf-hub:them/it"}}, "architecture"),
        ({"model_type": "upernet", "backbone_config": [{"use_pretrained_backbone": True}]}, "use_pretrained_backbone"),
        ({"model_type": "detr", "backbone": "them/it"}, "backbone"),
        ({"model_type": "lightglue", "trust_remote_code": True}, "trust_remote_code"),
        ({"model_type": "llama", "attn_implementation": "them/it"}, "attn_implementation"),
        ({"model_type": "llama", "_attn_implementation": {"": "them/it"}}, "_attn_implementation"),
        ({"model_type": "llama", "configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
    ],
)
def test_a_configuration_that_leads_to_code_or_files_is_refused(
    values: dict[str, Any], key: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(OrchestratorError, match=rf"has the key '{key}' .* would load code or files"):
        build("huggingface", (3, 8, 8), 10, path=str(tmp_path), architecture="AutoModel")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(OrchestratorError, match=rf"has the key '{key}' .* would load code or files"):
        build("huggingface", (3, 8, 8), 10, path=str(tmp_path), architecture="AutoModel", overrides=values)
