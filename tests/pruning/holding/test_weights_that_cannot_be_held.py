"""Weights without floats are refused before anything changes; masks made in inference mode train; hooks convert not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pruning

INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(48).reshape(6, 8) % 2 == 0
WAYS: dict[str, Callable[[nn.Sequential], object]] = {
    "prune": lambda model: pruning.prune(model, "magnitude", sparsity=0.5),
    "prune by a class": lambda model: pruning.prune(model, pruning.L1Unstructured, sparsity=0.5),
    "prune groups": lambda model: pruning.prune(model, unit="group", sparsity=0.5, example=INPUTS),
    "l1": lambda model: pruning.l1_unstructured(model[0], "weight", amount=0.5),
    "random": lambda model: pruning.random_unstructured(model[0], "weight", amount=0.5),
    "ln": lambda model: pruning.ln_structured(model[0], "weight", amount=0.5, n=2, dim=0),
    "identity": lambda model: pruning.identity(model[0], "weight"),
    "mask": lambda model: pruning.custom_from_mask(model[0], "weight", MASK),
    "global": lambda model: pruning.global_unstructured([(model[0], "weight")], pruning.L1Unstructured, amount=0.5),
    "plain tensor": lambda model: pruning.L1Unstructured(0.5).prune(model[0].weight.detach()),  # type: ignore[operator]
    "mask set": lambda model: pruning.MaskSet({"0.weight": MASK}).apply(model),
    "keeper": lambda model: pruning.MaskKeeper(model, {"0.weight": MASK}),
    "layerwise": lambda model: pruning.layerwise(model, "magnitude", [(INPUTS,)], sparsity=0.5),
    "dynamics": lambda model: pruning.dynamics.rigl().attach(
        model, {"0.weight": MASK}, torch.optim.SGD(model.parameters(), 0.1), length=300
    ),
}


def layer_of(dtype: torch.dtype) -> nn.Sequential:
    layer = nn.Linear(8, 6, bias=False)
    trained = dtype.is_floating_point or dtype.is_complex
    layer.weight = nn.Parameter(torch.full((6, 8), 3.0).to(dtype), requires_grad=trained)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        *((torch.int8, way) for way in WAYS),
        *((dtype, "prune") for dtype in (torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu)),
        *((dtype, "mask set") for dtype in (torch.int64, torch.bool, torch.float8_e5m2)),
    ],
)
def test_a_weight_without_floats_is_refused_before_anything_changes(dtype: torch.dtype, way: str) -> None:
    model = layer_of(dtype)
    with pytest.raises(ValueError, match=rf"\(of {dtype}\) cannot be pruned: it must hold floats of at least 16 bits"):
        WAYS[way](model)
    assert not pruning.is_pruned(model)
    assert list(model.state_dict()) == ["0.weight"]


def test_a_quantised_layer_may_be_left_out() -> None:
    model = nn.Sequential(*layer_of(torch.int8), nn.Linear(6, 4))
    with pytest.raises(ValueError, match=r"`0.weight` \(of torch.int8\) cannot be pruned"):
        pruning.prune(model, sparsity=0.5)
    assert pruning.prune(model, sparsity=0.5, parameters=["1.weight"]).masks.sparsity() == 0.5


@pytest.mark.parametrize("score", ["magnitude", "random", "lamp", "fpgm"])
def test_complex_weights_are_pruned_by_scores_of_their_magnitudes(score: str) -> None:
    model = nn.Sequential(*layer_of(torch.complex64), nn.Linear(6, 4, dtype=torch.complex64))
    unit = {"unit": "channel"} if score == "fpgm" else {}
    plan = pruning.prune(model, pruning.Choices(), sparsity=0.5, score=score, **unit)  # type: ignore[arg-type]
    assert plan.masks.sparsity() == 0.5


def test_distances_of_complex_filters_have_the_imaginary_part() -> None:
    layer = nn.Linear(1, 3, bias=False, dtype=torch.complex64)
    layer.weight = nn.Parameter(torch.tensor([[3 + 0j], [4j], [0.0]], dtype=torch.complex64))
    scores = pruning.scores.fpgm(nn.Sequential(layer))["0.weight"]
    assert scores.tolist() == [5.0, 5.0, 0.0]  # the third filter is 0, as if pruned


@pytest.mark.parametrize(
    "way",
    [
        lambda model: pruning.prune(
            model, "snip", sparsity=0.5, batches=[INPUTS], loss=lambda net, x: net(x).abs().mean()
        ),
        lambda model: pruning.prune(model, unit="group", sparsity=0.5, example=INPUTS),
        lambda model: pruning.layerwise(model, "wanda", [(INPUTS,)], sparsity=0.5),
        lambda model: pruning.dynamics.movement(0.5).attach(
            model, None, torch.optim.SGD(model.parameters(), 0.1), length=300
        ),
    ],
)
def test_what_computes_with_real_numbers_refuses_complex_weights(way: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"`0.weight` \(of torch.complex64\) must hold real numbers for "):
        way(layer_of(torch.complex64))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("plain tensor", "keeper", "dynamics", "layerwise")])
def test_masks_made_in_inference_mode_train_afterwards(way: str) -> None:
    model = network()
    with torch.inference_mode():
        WAYS[way](model)
        WAYS[way](model)
    masks = pruning.MaskSet.collect(model)
    trained(model)
    with torch.inference_mode():
        model(INPUTS)
        pruning.remove_all(model)
    trained(model)
    assert masks.keys() >= {"0.weight"}


@pytest.mark.parametrize("name", ["rigl", "set", "static", "ste", "soft_movement", "gradual", "movement"])
def test_dynamics_attached_in_inference_mode_train(name: str) -> None:
    model, options = network(), {"gradual": {"sparsity": 0.8}, "movement": {"sparsity": 0.8}}.get(name, {})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    every: dict[str, Any] = {} if name in ("static", "ste", "soft_movement") else {"every": 2}
    dynamics = getattr(pruning.dynamics, name)(**options, **every)
    with torch.inference_mode():
        masks = None if options else {"0.weight": torch.rand(6, 8) > 0.5}
        dynamics.attach(model, masks, optimizer, length=6, generator=torch.Generator().manual_seed(0))
    trained(model, optimizer)
    assert not model[0].weight.masked_select(~dynamics.masks["0.weight"]).any()  # type: ignore[operator]


def test_a_keeper_made_in_inference_mode_trains() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with torch.inference_mode():
        keeper = pruning.MaskKeeper(model, {"0.weight": MASK})
        keeper.attach(optimizer)
    trained(model, optimizer)
    assert not model[0].weight.masked_select(~MASK).any()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_conversions_of_hooks_say_to_remove_them_first() -> None:
    model = network().eval()
    pruning.l1_unstructured(model[0], "weight", amount=0.5)
    with pytest.raises(AttributeError, match=r"cannot be compiled by torch.jit.script; call pruning.remove_all"):
        torch.jit.script(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"of Linear are missing: .*; call pruning.remove_all\(model\) before"):
        quantised(INPUTS)


def test_magnitudes_of_whole_numbers_as_scores_do_not_overflow() -> None:
    layer, scores = nn.Linear(4, 1), torch.tensor([[-128, 3, 100, -5]], dtype=torch.int8)
    pruning.l1_unstructured(layer, "weight", amount=2, importance_scores=scores)
    assert layer.weight_mask.tolist() == [[1, 0, 1, 0]]  # type: ignore[operator]


def test_a_pruned_network_in_8_bit_floats_is_read_and_released_but_not_pruned_further() -> None:
    model = network()
    pruning.prune(model, sparsity=0.5)
    masks = pruning.MaskSet.collect(model)
    model.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"`0.weight` \(of torch.float8_e4m3fn\) cannot be pruned"):
        pruning.prune(model, sparsity=0.7)
    assert pruning.MaskSet.collect(model) == masks
    pruning.remove_all(model)
    assert not model[0].weight.float().masked_select(~masks["0.weight"]).any()  # type: ignore[operator]
