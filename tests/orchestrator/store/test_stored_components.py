"""Saved sweeps that choose what runs: only listed options of a built-in reach the builders of other libraries."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from factories import sweep_info
from small_trials import composed, planned, train

import orchestrator
from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.models import MODELS
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.export import stored_network
from orchestrator.export.stock_classes import is_stock
from orchestrator.planning import pinned_content
from orchestrator.store.backends import seal, unseal
from orchestrator.store.saved_sweep import manifest
from orchestrator.store.store import Store
from orchestrator.workloads.data_sets import idx_files

TRIAL = (
    *("model=mlp", "model.hidden=[6]", "schedule=one_shot", "schedule.sparsity=0.5", "train.epochs=1"),
    "finetune.epochs=0",
)
TIMM = {"kind": "timm", "input_shape": None, "classes": None, "architecture": "resnet18", "options": {}}
TRANSFORMERS = {"kind": "huggingface", "path": "0" * 64, "architecture": "AutoModelForCausalLM", "overrides": {}}
Forge = Callable[..., Any]


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    """Return a function that stores a trial whose stages have other fields, with the keys that belong to them."""
    plan = planned(composed(*TRIAL))
    (dense, spec), trial = plan.stages.values(), plan.trials[0]
    store = Store(str(tmp_path / "store"))
    train(plan, store)

    def forged(fields: Mapping[str, Any], config: Mapping[str, Any] | None = None, key: str | None = None) -> Any:
        other = replace(dense, fields={**dense.fields, **fields})
        after = replace(spec, inputs=dict.fromkeys(spec.inputs, key or other.key))
        for old, new in ((dense, other), (spec, after)):
            folder = tmp_path / "store" / "stages"
            if key is None:
                (folder / old.key).rename(folder / new.key)
            path = folder / (key or new.key) / "record.json"
            sealed = unseal(path.read_bytes())
            sealed["record"] |= {"key": key or new.key, "spec": new.to_json()}
            path.write_bytes(seal(sealed))
            if key is not None:
                break
        stages = {key or other.key: other, (spec.key if key else after.key): spec if key else after}
        crafted = replace(
            trial, dense=key or other.key, stages=tuple([*stages][1:]), config={**trial.config, **(config or fields)}
        )
        store.save_sweep("crafted", manifest(sweep_info("crafted"), Plan(stages, (crafted,))))
        return orchestrator.open(str(tmp_path / "store")).sweep("crafted").trials[0]

    return forged


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of a stand-in for timm.create_model."""
    calls: list[dict[str, Any]] = []

    def create_model(architecture: str, **options: Any) -> None:
        calls.append({"architecture": architecture, **options})
        raise RuntimeError("enough")

    stand_in = ModuleType("timm")
    stand_in.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    return calls


def test_a_stored_sweep_gives_timm_no_checkpoint(forge: Forge, built: list[dict[str, Any]]) -> None:
    trial = forge({"model": {**TIMM, "options": {"pretrained_cfg_overlay": {"file": "planted.pth"}}}})

    with pytest.raises(OrchestratorError, match=r"`model\.options` .* must have only numbers.*pass --run-own-code"):
        trial.model(0)
    assert not built
    with pytest.raises(OrchestratorError, match=r"timm\.create_model: RuntimeError: enough"):
        trial.model(0, run_own_code=True)
    assert built[0]["pretrained_cfg_overlay"] == {"file": "planted.pth"}


def test_a_stored_sweep_builds_a_network_of_timm_by_its_sizes(forge: Forge, built: list[dict[str, Any]]) -> None:
    trial = forge({"model": {**TIMM, "architecture": "vit_tiny_patch16_224", "options": {"img_size": [8, 8]}}})

    with pytest.raises(OrchestratorError, match="enough"):
        trial.model(0)
    assert built[0]["img_size"] == [8, 8]


def test_fields_that_are_not_those_of_the_key_are_refused(forge: Forge) -> None:
    (dense, _) = planned(composed(*TRIAL)).stages.values()
    trial = forge({"model": {**dense.fields["model"], "dropout": 0.5}}, key=dense.key)

    with pytest.raises(OrchestratorError, match=r"stage \w{12} has other fields than those that its key is made from"):
        trial.model()


@pytest.mark.parametrize(
    ("part", "node", "said"),
    [
        ("model", {**TIMM, "options": {"checkpoint_path": "x.pth"}}, "have no `checkpoint_path`"),
        ("model", {**TIMM, "options": {"pretrained": True}}, "`model.options` .* must have only numbers"),
        ("model", {**TIMM, "options": {"img_size": {"a": 1}}}, "`model.options` .* must have only numbers"),
        ("model", {**TIMM, "options": {"cache_dir": 3}}, "`model.options` .* must have only numbers"),
        ("model", {**TIMM, "architecture": "hf-hub:them/it"}, "`model.architecture` .* must be a plain name"),
        ("model", {**TIMM, "architecture": "local-dir:/tmp/x"}, "`model.architecture` .* must be a plain name"),
        ("model", {**TIMM, "architecture": ["resnet18"]}, "the saved sweep is damaged: `model.architecture`"),
        ("model", {**TIMM, "checkpoint_path": "x"}, "`model.checkpoint_path` .* must be left out"),
        ("model", {**TIMM, "pretrained": True}, "`model.pretrained` .* must be left out"),
        ("model", {**TRANSFORMERS, "architecture": "pipeline"}, "`model.architecture` .* must be an Auto class"),
        ("model", {**TRANSFORMERS, "overrides": {"_attn_implementation": "a/b"}}, "`model.overrides` .* only numbers"),
        ("model", {**TRANSFORMERS, "overrides": {"trust_remote_code": True}}, "`model.overrides` .* only numbers"),
        ("model", {**TRANSFORMERS, "overrides": {"vision_config": {}}}, "`model.overrides` .* only numbers"),
        ("model", {"kind": "theirs"}, "`model.kind` .* is no built-in model"),
        ("data", {"kind": "huggingface", "path": "them/it"}, "`data.path` .* must be one of uoft-cs/cifar10"),
        ("data", {"kind": "huggingface", "path": "/tmp/x"}, "`data.path` .* must be one of uoft-cs/cifar10"),
        ("data", {"kind": "mnist", "root": "x", "mirrors": ["http://x"]}, "`data.mirrors` .* must be left out"),
    ],
)
def test_an_option_that_no_store_may_choose_is_refused(part: str, node: Mapping[str, Any], said: str) -> None:
    with pytest.raises(OrchestratorError, match=said):
        stored_network._refuse_unlisted([StageSpec("dense", {part: node})], (part,))


@pytest.mark.parametrize(
    ("part", "node"),
    [
        ("model", {**TIMM, "architecture": "resnet18.a1_in1k", "options": {"drop_rate": 0.1, "depths": [2, 2]}}),
        ("model", {**TRANSFORMERS, "overrides": {"num_hidden_layers": 2, "tie_word_embeddings": False}}),
        ("data", {"kind": "huggingface", "path": "ylecun/mnist"}),
        ("data", {"kind": "text", "root": "0" * 64, "tokenizer": "characters", "block": 8}),
    ],
)
def test_options_of_stored_sweeps_that_name_nothing_are_taken(part: str, node: Mapping[str, Any]) -> None:
    stored_network._refuse_unlisted([StageSpec("dense", {part: node})], (part,))


def test_each_option_without_a_type_has_a_rule_for_stores() -> None:
    """An option of any type reaches a builder as it is, so its row says what a store may choose."""
    rows = [*MODELS.values(), *DATA.values()]
    loose = [(row.name, option.name) for row in rows for option in row.options if "Any" in str(option.type)]
    assert loose == [("huggingface", "overrides"), ("smollm2", "overrides"), ("timm", "options")]
    assert all(option.stored for row in rows for option in row.options if (row.name, option.name) in loose)


@pytest.mark.parametrize("kind", ["mnist", "fashion_mnist"])
def test_a_stored_sweep_downloads_nothing(
    forge: Forge, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idx_files, "_download", lambda *_: pytest.fail("a download"))
    data = {"kind": kind, "val_size": 10}
    trial = forge({"data": data}, {"data": {**data, "root": str(tmp_path / "theirs"), "download": True}})

    with pytest.raises(OrchestratorError, match=r"`data\.root` \(=.*theirs\) must hold .*train-images"):
        trial.model(0)
    assert not (tmp_path / "theirs").exists()


LAYERS = [{"_target_": "torch.nn.Flatten"}, {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10}]
MIXTRAL: dict[str, Any] = {"_target_": "transformers.MixtralForCausalLM", "name": "m", "weights": None, "depends": []}
SIZES = {"_target_": "transformers.MixtralConfig", "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("node", "stock"),
    [
        ({"_target_": "torch.nn.Sequential", "_args_": LAYERS}, True),
        ({"_target_": "torch.nn.Sequential", "_args_": [*LAYERS, {"_target_": "os.system", "command": "x"}]}, False),
        ({"_target_": "torch.hub.load", "repo_or_dir": "x"}, False),
        ({"_target_": "torch.nn.init.zeros_"}, False),
        ({"kind": "mlp", "hidden": [6]}, False),
        ({**MIXTRAL, "config": SIZES}, True),
        ({**MIXTRAL, "config": {**SIZES, "attn_implementation": "kernels/theirs"}}, False),
        ({**MIXTRAL, "config": {**SIZES, "text_config": {"model_type": "timm_wrapper"}}}, False),
        ({**MIXTRAL, "config": {**SIZES, "_target_": "transformers.CLIPConfig"}}, False),
        ({**MIXTRAL, "config": {**SIZES, "_target_": "transformers.AutoConfig.from_pretrained"}}, False),
        ({**MIXTRAL, "_target_": "transformers.pipeline"}, False),
    ],
)
def test_stock_classes_are_those_of_libraries_with_plain_arguments(node: Mapping[str, Any], stock: bool) -> None:
    if stock and node["_target_"].startswith("transformers"):
        pytest.importorskip("transformers")
    assert is_stock(node) is stock


def test_a_network_of_a_stock_class_needs_no_permission(tmp_path: Path) -> None:
    layers = "[{_target_:torch.nn.Flatten},{_target_:torch.nn.Linear,in_features:64,out_features:10}]"
    own = ("model=own", "model._target_=torch.nn.Sequential", f"+model._args_={layers}")
    plan, store = planned(composed(*own, *TRIAL[2:])), Store(str(tmp_path / "store"))
    train(plan, store)
    store.save_sweep("stock", manifest(sweep_info("stock"), plan))
    trial = orchestrator.open(str(tmp_path / "store")).sweep("stock").trials[0]

    assert torch.equal(trial.model()[1].weight, trial.weights()["1.weight"])  # type: ignore[index]


CONFIGURATIONS = (
    {"model_type": "timm_wrapper", "architecture": "resnet18"},
    {"model_type": "lightglue", "trust_remote_code": True},
    {"model_type": "llama", "text_config": {"model_type": "timm_wrapper"}},
    {"architecture": "resnet18", "pretrained_cfg": {}},
    {},
    [],
)


@pytest.mark.parametrize("found", CONFIGURATIONS)
def test_a_stored_sweep_builds_only_listed_networks_of_transformers(found: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(found))
    dense = StageSpec("dense", {"model": TRANSFORMERS})

    with pytest.raises(OrchestratorError, match=r"`model\.path` .*(of one of albert|no readable config\.json)"):
        stored_network._refuse_unknown_type(dense, {"model": {"path": str(tmp_path)}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    stored_network._refuse_unknown_type(dense, {"model": {"path": str(tmp_path)}})


@pytest.mark.parametrize("lacking", ["tests", "root"])
def test_a_stored_text_without_a_setting_is_told_in_a_sentence(forge: Forge, tmp_path: Path, lacking: str) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be, that is the question; " * 50)
    node = {"kind": "text", "root": str(tmp_path / "book.txt"), "tokenizer": "characters", "block": 8, "tests": {}}
    fields = pinned_content.pinned({"model": {"kind": "mlp"}, "data": node, "task": {}})[0]["data"]
    for each in (node, fields):
        each.pop(lacking)
    trial = forge({"data": fields}, {"data": node})

    said = "the model's|larger|entries|does not fit" if lacking == "tests" else "damaged: it lacks 'root'"
    with pytest.raises(OrchestratorError, match=said):
        trial.model(0)
