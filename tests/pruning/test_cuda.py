"""Engine on a GPU and on the CPU: equal masks, exact counts, masked training, masks moved between devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pruning
from pruning import MaskSet

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
pytestmark = pytest.mark.parametrize("device", DEVICES)
Prune = Callable[..., object]
EXACT: dict[str, Prune] = {
    "l1_unstructured": lambda module, **given: pruning.l1_unstructured(module, "weight", 0.3, **given),
    "ln_structured": lambda module, **given: pruning.ln_structured(module, "weight", 0.25, n=2, dim=0, **given),
}
RANDOM: dict[str, Prune] = {
    "random_unstructured": lambda module, **given: pruning.random_unstructured(module, "weight", 0.3, **given),
    "random_structured": lambda module, **given: pruning.random_structured(module, "weight", 0.25, dim=0, **given),
}


def layer(device: str) -> nn.Linear:
    module = nn.Linear(50, 40)
    with torch.no_grad():
        values = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
        module.weight.copy_(values)
    return module.to(device)


def network(device: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 10))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return model.to(device)


@pytest.mark.parametrize("method", EXACT)
def test_what_is_chosen_by_size_is_what_the_cpu_chooses(method: str, device: str) -> None:
    here, there = layer(device), layer("cpu")
    for _ in range(3):
        EXACT[method](here)
        EXACT[method](there)

    assert here.weight.device.type == device
    assert MaskSet.collect(here) == MaskSet.collect(there)
    assert torch.equal(here.weight.cpu(), there.weight)


@pytest.mark.parametrize("method", RANDOM)
def test_what_is_drawn_follows_from_the_seed_in_the_exact_number(method: str, device: str) -> None:
    def drawn(seed: int) -> nn.Linear:
        module = layer(device)
        RANDOM[method](module, generator=torch.Generator(device).manual_seed(seed))
        return module

    kept = int((drawn(0).weight != 0).sum())
    assert kept == 2000 - {"random_unstructured": 600, "random_structured": 500}[method]
    assert torch.equal(drawn(0).weight, drawn(0).weight)
    assert not torch.equal(drawn(0).weight, drawn(1).weight)


def test_tensors_are_ranked_as_one(device: str) -> None:
    models = [network(device), network("cpu")]
    for model in models:
        pairs = [(model[0], "weight"), (model[2], "weight")]
        pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.9)

    assert MaskSet.collect(models[0]) == MaskSet.collect(models[1])
    assert sum(MaskSet.collect(models[0]).kept().values()) == 240


def test_training_leaves_what_is_pruned_at_zero(device: str) -> None:
    model = network(device)
    masks = MaskSet({"0.weight": torch.arange(2000).view(40, 50) % 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruning.MaskKeeper(model, masks).attach(optimizer)
    inputs, labels = torch.randn(32, 50, device=device), torch.randint(10, (32,), device=device)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    assert torch.equal(model[0].weight.cpu() != 0, masks["0.weight"])


def test_masks_travel_from_one_device_to_another(device: str) -> None:
    model, plain = network(device), network("cpu")
    pruning.l1_unstructured(model[0], "weight", 0.5)
    masks = MaskSet.from_bytes(MaskSet.collect(model).to_bytes())
    masks.apply(plain)

    assert torch.equal(plain[0].weight, model[0].weight.cpu())


@pytest.mark.parametrize("method", ["magnitude", "snip", "force", "obs", "n_m", "l1_unstructured", "random_structured"])
def test_published_methods_are_put_in_force_where_the_network_is(device, method):
    plain = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 12)).to(device)
    batches = [(torch.randn(16, 48).to(device), torch.randint(12, (16,)).to(device))]
    given = {} if method == "n_m" else {"sparsity": 0.5}
    for _ in range(2):  # the second time on top of masks
        pruning.prune(
            plain,
            method,
            **given,
            batches=batches,
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            generator=torch.Generator().manual_seed(0),
        )
    assert plain[0].weight_mask.device.type == device
    expected = 0.4 if method == "random_structured" else 0.5  # which spares the outputs
    assert pruning.sparsity(plain) == pytest.approx(expected)
    pruning.remove_all(plain)
    assert plain(batches[0][0]).isfinite().all()
