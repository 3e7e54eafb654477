"""Rounds that remove whole units of a transformer train the smaller network, and learn what the masked one would."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from small_trials import composed, planned, train
from torch import Tensor, nn
from training_cases import job

from orchestrator.core.seeding import derive, seeded
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training.loop import training_loop
from orchestrator.training.preflight.rehearsal import run_preflight
from orchestrator.training.state import from_scratch
from orchestrator.training.state.from_scratch import (
    ControlError,
    Small,
    may_be_smaller,
    small_transformer_of,
    transformer_left,
)
from orchestrator.workloads import data_loading
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from pruning import MaskSet

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 20, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 3, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a text and the configuration of a small Llama."""
    monkeypatch.chdir(tmp_path)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"]
    (tmp_path / "book.txt").write_text(" ".join(random.Random(0).choices(words, k=600)))
    transformers.LlamaConfig(**SIZES, tie_word_embeddings=True).save_pretrained("net")
    return tmp_path


def settings(*overrides: str) -> dict[str, Any]:
    """Return a trial that prunes a small Llama once and fine-tunes it for 12 steps."""
    given = ("model=huggingface", "model.path=net", "data=text", "data.root=book.txt", "data.block=8")
    given += ("task=language_modelling", "train=language_model", "finetune=language_model", "method=magnitude")
    given += ("schedule=one_shot", "schedule.sparsity=0.4", "train.steps=15", "train.eval_every=null")
    given += (
        "train.optimizer.lr=0.01",
        "finetune.steps=12",
        "finetune.eval_every=4",
        "optimizer@finetune.optimizer=sgd",
    )
    return composed(
        *given, "finetune.optimizer.lr=0.05", "~finetune.optimizer.betas", "scope.budget=parameters", *overrides
    )


def weights_of(store: Store, key: str) -> dict[str, Tensor]:
    """Return the weights of a stage."""
    return load(store.read(key, "weights.safetensors"))


@pytest.mark.parametrize(
    "unit", [*(pytest.param(unit, marks=pytest.mark.slow) for unit in ("layer", "mlp")), "heads", "layer_and_mlp"]
)
def test_the_smaller_network_learns_what_the_masked_one_would(
    unit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Small | None] = []

    def seen(*given: Any) -> Small | None:
        found.append(transformer_left(*given))
        return found[-1]

    plan = planned(settings(f"unit={unit}", f"scope.budget={'channels' if unit == 'heads' else 'parameters'}"))
    key = plan.trials[0].stages[-1]
    stores = [Store(str(folder / name)) for name in ("smaller", "masked")]
    records = []
    for store, way in zip(stores, (seen, lambda *_: None), strict=True):
        monkeypatch.setattr(from_scratch, "transformer_left", way)
        records.append(train(plan, store)[key])
    (small,) = found
    assert small is not None

    sizes = [sum(each.numel() for each in model.parameters()) for model in (small.model, *whole_of(stores[0], key))]
    assert sizes[0] < sizes[1]
    ours, theirs = (weights_of(store, key) for store in stores)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2e-4, atol=2e-5, msg=name)
        assert torch.equal(ours[name] == 0, tensor == 0), name
    assert records[0].after["val/loss"] == pytest.approx(records[1].after["val/loss"], rel=1e-4)
    assert [point.step for point in records[0].curve] == [point.step for point in records[1].curve]
    assert records[0].mask_digest == records[1].mask_digest


def whole_of(store: Store, key: str) -> list[nn.Module]:
    """Return the whole network with the weights of a stage."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained("net"))
    model.load_state_dict(weights_of(store, key), strict=False)
    return [model]


@pytest.mark.slow
def test_a_narrower_residual_stream_trains_masked_and_from_scratch_by_itself(folder: Path) -> None:
    """Its norms have other scales, so that a step of the optimizer would be another one."""
    plan = planned(*(settings("unit=residual", f"restart.control={each}") for each in ("none", "small")))
    store = Store(str(folder / "store"))
    records = train(plan, store)
    assert not may_be_smaller(plan.stages[plan.trials[0].stages[-1]])
    key = plan.trials[1].stages[-1]
    whole, *_ = whole_of(store, key)

    batch = torch.arange(16).reshape(2, 8) % 20
    small = transformer_left(whole, MaskSet.from_bytes(store.read(key, "masks.npz")), (batch,))
    assert small is not None
    with torch.no_grad():
        torch.testing.assert_close(small.model(batch).logits, whole(batch).logits, rtol=1e-4, atol=1e-5)
    assert records[key].steps == 15


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_bits(folder: Path) -> None:
    plan, one, other = planned(settings("unit=layer")), Store(str(folder / "one")), Store(str(folder / "other"))
    expected = train(plan, other)[plan.trials[0].stages[-1]]
    *before, spec = plan.stages.values()
    for each in before:
        list(run_segment(WorkOrder((each,), Worker(one), lineage=plan.lineage(each.key))))
    asked, lineage = iter(range(99)), plan.lineage(spec.key)
    with suppress(training_loop.Cancelled):
        list(run_segment(WorkOrder((spec,), Worker(one, grace=9, cancelled=lambda: next(asked) > 6), lineage=lineage)))
    assert one.checkpoints.reached(spec.key).number
    (found,) = run_segment(WorkOrder((spec,), Worker(one, grace=9), lineage=lineage))

    assert found.result() == expected.result()
    assert one.read(found.key, "weights.safetensors") == other.read(found.key, "weights.safetensors")


def test_from_scratch_it_is_trained_as_a_network_of_that_size_is(folder: Path) -> None:
    plan, store = planned(settings("unit=layer", "restart.control=small")), Store(str(folder / "store"))
    key = plan.trials[0].stages[-1]
    record = train(plan, store)[key]
    masks = MaskSet.from_bytes(store.read(key, "masks.npz"))
    left = [n for n in range(4) if masks[f"model.layers.{n}.mlp.up_proj.weight"].any()]

    with seeded(derive(0, "1/small")):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": len(left)}, tie_word_embeddings=True)
        )
    text = data_loading.load({"kind": "text", "root": "book.txt", "block": 8}, None)
    config = plan.stages[key].fields["train"]
    training_loop.fit(job(model, LanguageModelling(), config, data=text, seed=derive(0, "0/fit")))

    weights = weights_of(store, key)
    assert 0 < len(left) < 4
    for name, tensor in model.named_parameters():
        _, _, tail = name.partition("model.layers.")
        number, _, leaf = tail.partition(".")
        assert torch.equal(weights[f"model.layers.{left[int(number)]}.{leaf}" if tail else name], tensor), name
    assert record.steps == 15


def without_layers(network: nn.Module) -> MaskSet:
    return MaskSet(
        {
            name: torch.zeros_like(each, dtype=torch.bool)
            for name, each in network.named_parameters()
            if "layers.1." in name
        }
    )


def single_entries(network: nn.Module) -> MaskSet:
    mask = torch.ones_like(network.get_parameter("model.layers.1.mlp.up_proj.weight"), dtype=torch.bool)
    mask[0, 0] = False
    return MaskSet({"model.layers.1.mlp.up_proj.weight": mask})


def unequal_widths(network: nn.Module) -> MaskSet:
    names = ("mlp.up_proj.weight", "mlp.gate_proj.weight")
    masks = {f"model.layers.1.{name}": torch.ones(20, 24, dtype=torch.bool) for name in names}
    masks |= {"model.layers.1.mlp.down_proj.weight": torch.ones(24, 20, dtype=torch.bool)}
    for name, mask in masks.items():
        (mask if "down" not in name else mask.T)[:5] = False
    return MaskSet(masks)


def unchanged(network: nn.Module) -> None:
    """Leave the network as its class has built it."""


def another_activation(network: Any) -> None:
    network.model.layers[0].mlp.act_fn = nn.ReLU()


def zeros_without_a_mask(network: Any) -> None:
    with torch.no_grad():
        for layer in network.model.layers:
            layer.mlp.down_proj.weight[:, :5] = 0


@pytest.mark.parametrize(
    ("change", "masks", "some"),
    [
        (unchanged, without_layers, True),
        (unchanged, single_entries, False),
        (unchanged, unequal_widths, False),
        (unchanged, lambda _: MaskSet({}), False),
        (another_activation, without_layers, False),
        (zeros_without_a_mask, without_layers, False),
    ],
)
def test_the_masked_network_trains_where_no_stock_network_computes_the_same(
    change: Callable[[nn.Module], None], masks: Callable[[nn.Module], MaskSet], some: bool
) -> None:
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    change(network)
    given = (network, masks(network), (torch.arange(16).reshape(2, 8) % 20,))

    assert (transformer_left(*given) is not None) == some
    if not some:
        with pytest.raises(
            ControlError, match=r"the configuration of the network does not express it; pass scope=layer"
        ):
            small_transformer_of(*given, 0)


def test_it_is_tried_before_any_is_trained(folder: Path) -> None:
    plan = planned(settings("unit=mlp"))
    spec = plan.stages[plan.trials[0].stages[-1]]

    list(run_preflight(WorkOrder((spec,), Worker(Store(str(folder / "store"))), lineage=plan.lineage(spec.key))))
