"""Defects of `torch.nn.utils.prune` that this package corrects: numbers 6 to 15 of 15, on its use.

Where it is cheap, a test also runs against torch and must fail there, so that a fix in torch is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from against_torch import LIBRARIES, linear, snapshot
from torch import nn

import pruning


def two_layers() -> tuple[nn.Linear, nn.Linear]:
    return linear([[1.0, 2.0], [3.0, 4.0]]), linear([[0.5, 5.0], [6.0, 7.0]])


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_parameters_may_be_a_generator(library: Any) -> None:
    first, second = two_layers()
    library.global_unstructured(((m, "weight") for m in (first, second)), library.L1Unstructured, amount=2)
    assert first.weight.tolist() == [[0, 2], [3, 4]]
    assert second.weight.tolist() == [[0, 5], [6, 7]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_a_transposed_score_is_refused(library: Any) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        library.global_unstructured(
            [(layer, "weight")],
            library.L1Unstructured,
            importance_scores={(layer, "weight"): torch.rand(3, 2)},
            amount=1,
        )
    assert not library.is_pruned(layer)


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_a_parameter_named_twice_counts_once(library: Any) -> None:
    first, second = two_layers()
    pairs = [(first, "weight"), (first, "weight"), (second, "weight")]
    library.global_unstructured(pairs, library.L1Unstructured, amount=3)
    assert int((first.weight == 0).sum() + (second.weight == 0).sum()) == 3


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_scores_for_an_unknown_parameter_are_refused(library: Any) -> None:
    first, second = two_layers()
    scores = {(second, "weight"): torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"Linear\.weight"):
        library.global_unstructured([(first, "weight")], library.L1Unstructured, scores, amount=1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_all_or_nothing(library: Any) -> None:
    first, second = two_layers()
    pairs = [(first, "weight"), (second, "weight"), (nn.ReLU(), "weight")]
    with pytest.raises(AttributeError):
        library.global_unstructured(iter(pairs), library.L1Unstructured, amount=1)
    assert not library.is_pruned(first)
    library.global_unstructured(pairs[:2], library.L1Unstructured, amount=1)
    taken = nn.Linear(2, 2)
    taken.register_buffer("weight_orig", torch.ones(1))  # so that the last of three cannot be pruned
    before = (snapshot(first), snapshot(second))
    with pytest.raises((AttributeError, KeyError, RuntimeError)):
        library.global_unstructured([*pairs[:2], (taken, "weight")], library.L1Unstructured, amount=1)
    assert (snapshot(first), snapshot(second)) == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_06_tied_parameters_count_once_and_share_a_mask(library: Any) -> None:
    first, second = two_layers()
    second.weight = first.weight
    library.global_unstructured([(first, "weight"), (second, "weight")], library.L1Unstructured, amount=0.5)
    assert first.weight_mask is second.weight_mask
    assert first.weight.tolist() == second.weight.tolist() == [[0, 0], [3, 4]]


@pytest.mark.parametrize("method", ["random_unstructured", "random_structured"])
def test_07_a_generator_reproduces_and_leaves_the_default_one_alone(method: str) -> None:
    extra: dict[str, Any] = {"dim": 0} if method == "random_structured" else {}
    state = torch.get_rng_state()
    masks = []
    for _ in range(2):
        layer = nn.Linear(40, 40)
        torch.set_rng_state(state)
        getattr(pruning, method)(layer, "weight", 0.5, **extra, generator=torch.Generator().manual_seed(3))
        assert torch.equal(torch.get_rng_state(), state)
        masks.append(layer.weight_mask)
    assert torch.equal(*masks)
    getattr(pruning, method)(layer, "bias" if not extra else "weight", 0.5, **extra)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("library", LIBRARIES)
def test_07_bf16_draws_reach_the_whole_tensor(library: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    library.random_unstructured(layer, "weight", 0.001)
    pruned = (layer.weight_mask.reshape(-1) == 0).nonzero()
    assert pruned.numel() == 1000
    assert pruned.max() > 900_000
    assert 400_000 < pruned.double().mean() < 600_000


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("method", ["l1_unstructured", "random_unstructured"])
def test_08_channels_last_and_transposed_parameters(library: Any, method: str) -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    getattr(library, method)(conv, "weight", 0.5)
    assert int((conv.weight_mask == 0).sum()) == 54
    layer = nn.Linear(3, 5)
    layer.weight = nn.Parameter(torch.rand(3, 5).t())
    getattr(library, method)(layer, "weight", 5)
    assert int((layer.weight == 0).sum()) == 5


@pytest.mark.parametrize("library", LIBRARIES)
def test_08_global_pruning_of_channels_last(library: Any) -> None:
    conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    magnitudes = torch.arange(1.0, 17.0).view(2, 2, 2, 2)
    with torch.no_grad():
        conv.weight.copy_(magnitudes)
    library.global_unstructured([(conv, "weight")], library.L1Unstructured, amount=5)
    assert torch.equal(conv.weight_mask, (magnitudes > 5).float())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_09_a_pruned_nan_is_zero(library: Any, bad: float) -> None:
    layer = linear([[bad, 2.0]])
    library.custom_from_mask(layer, "weight", torch.tensor([[0, 1]]))
    assert layer.weight.tolist() == [[0, 2]]
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight_orig.grad.tolist() == [[0, 1]]
    library.remove(layer, "weight")
    assert layer.weight.tolist() == [[0, 2]]


def test_09_a_keeper_zeroes_a_nan_that_training_made() -> None:
    layer = linear([[1.0, 2.0]])
    keeper = pruning.MaskKeeper(layer, pruning.MaskSet({"weight": torch.tensor([[0, 1]])}))
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    keeper.enforce()
    assert layer.weight.tolist() == [[0, 2]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_09_nan_scores_are_refused_by_name(library: Any) -> None:
    good, bad = two_layers()
    with torch.no_grad():
        bad.weight[0, 0] = float("nan")
    for prune in (
        lambda: library.l1_unstructured(bad, "weight", 1),
        lambda: library.ln_structured(bad, "weight", 1, n=2, dim=0),
        lambda: library.global_unstructured([(good, "weight"), (bad, "weight")], library.L1Unstructured, amount=1),
    ):
        with pytest.raises(ValueError, match=r"Linear\.weight.*NaN"):
            prune()
    assert not library.is_pruned(good)
    assert not library.is_pruned(bad)


@pytest.mark.parametrize("library", LIBRARIES)
def test_10_attention_out_proj_trains_pruned(library: Any) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    library.l1_unstructured(attention.out_proj, "weight", 0.5)
    inputs = torch.randn(2, 3, 4)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    before = attention(inputs, inputs, inputs)[0]
    for _ in range(2):
        optimizer.zero_grad()
        attention(inputs, inputs, inputs)[0].square().sum().backward()
        optimizer.step()
    assert not torch.allclose(attention(inputs, inputs, inputs)[0], before)
    assert torch.equal(attention.out_proj.weight == 0, attention.out_proj.weight_mask == 0)


OPTIMIZERS = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_11_pruned_entries_stay_put_under_optimizers(name: str) -> None:
    """In torch, `weight_orig` changes: momentum from before the pruning continues, and weight decay shrinks it."""
    moved: dict[str, float] = {}
    mask = torch.eye(6)
    for library in ("pruning", "torch"):
        keeper = None
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        optimizer = OPTIMIZERS[name](layer.parameters())
        for step in range(12):
            optimizer.zero_grad()
            layer(torch.randn(8, 6)).square().sum().backward()
            optimizer.step()
            if keeper is not None:
                keeper.enforce()
            if step == 1 and library == "torch":
                torch_prune.custom_from_mask(layer, "weight", mask)  # type: ignore[no-untyped-call]
                start = layer.weight_orig.detach().clone()
            elif step == 1:
                keeper = pruning.MaskKeeper(layer, pruning.MaskSet({"weight": mask}))
                start = layer.weight.detach().clone()
        end = layer.weight_orig if library == "torch" else layer.weight
        moved[library] = (end - start)[mask == 0].abs().max().item()
    assert moved["pruning"] == 0
    assert moved["torch"] > 0


@pytest.mark.parametrize("pruning_method", [pruning.LnStructured, pruning.RandomStructured])
def test_13_structured_pruning_across_modules(pruning_method: Any) -> None:
    assert not hasattr(torch_prune, "global_structured")
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 5, 1))
    pruning.global_structured([(m, "weight") for m in model], pruning_method, amount=0.5)
    dead = [int((m.weight_mask.sum((1, 2, 3)) == 0).sum()) for m in model]
    assert sum(dead) == 4


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("as_list", [False, True])
def test_14_a_container_takes_methods_or_an_iterable_of_them(library: Any, as_list: bool) -> None:
    methods = (library.L1Unstructured(1), library.RandomUnstructured(0.5))
    container = library.PruningContainer(list(methods)) if as_list else library.PruningContainer(*methods)
    assert tuple(container) == methods
    assert len(container) == 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_15_removing_by_the_method_leaves_a_working_module(library: Any) -> None:
    layer = linear([[1.0, 2.0]])
    library.L1Unstructured.apply(layer, "weight", 1).remove(layer)
    assert layer.weight.tolist() == [[0, 2]]
    assert not library.is_pruned(layer)
    assert layer(torch.ones(1, 2)).item() == pytest.approx(2 + layer.bias.item())
    assert not layer._forward_pre_hooks
