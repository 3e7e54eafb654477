"""Golden masks, gradients and schedules of the dynamics, from an independent computation in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_network import BATCHES, NAMES, Golden, bits, loss
from torch import Tensor, nn

import pruning
from pruning.dynamics import Dynamics

STE = """-.083636495 -.055278103 .025621713 -.016809851 .056118403 .032981603 -.029700002 .0035427519
.015886905 .10293799 -.00093043765 .029068735 -.044021138 -.22664938 .074498098 -.053561607 -.051250555
.035194893 .07719823 .095123755 .01662633 -.070829959 .074893248 -.003779128 .034624226 .035635066 -.15209148
-.091344627"""
"""Dense gradient at the weights under 2:4 masks; W1 by rows, then W2."""


def ones(names: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    model = Golden()
    return {name: torch.ones_like(model.get_parameter(name)) for name in names}


def stepped(
    dynamics: Dynamics, masks: dict[str, Tensor], steps: int = 1, rate: float = 0.0, length: int = 100, **options: Any
) -> nn.Module:
    """Return the golden network after some steps of SGD."""
    model = Golden()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    dynamics.attach(model, masks, optimizer, length=length, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, BATCHES[0]).backward()
        optimizer.step()
    return model


def test_rigl_moves_two_weights() -> None:
    before = torch.tensor([int(bit) for bit in "1010100101100101"]).view(4, 4)
    dynamics = pruning.dynamics.rigl(every=1, until=1.0, fraction=0.3)
    model = stepped(dynamics, {"fc1.weight": before}, rate=1.0)

    after = dynamics.masks["fc1.weight"].flatten()
    assert "".join(str(int(bit)) for bit in after.tolist()) == "1110100101001100"
    assert not model.get_parameter("fc1.weight").flatten()[[1, 12]].any()
    assert torch.equal(model.get_parameter("fc2.weight"), Golden().fc2.weight)


def test_set_drops_one_positive_weight() -> None:
    before = torch.tensor([int(bit) for bit in "1010100101100101"]).view(4, 4)
    dynamics = pruning.dynamics.set(every=1, fraction=0.3, scale=10.0)
    generator = torch.Generator().manual_seed(0)
    model = stepped(dynamics, {"fc1.weight": before}, generator=generator)

    (update,) = dynamics.updates
    weight, begun = model.get_parameter("fc1.weight").flatten(), Golden().fc1.weight.flatten() * before.flatten()
    changed = (weight != begun).nonzero().flatten().tolist()
    assert 15 in changed
    assert len(changed) == 1 + update.grown
    assert update.kept == int(before.sum())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scope": "global"}, "1001111000000101110101100101"),
        ({}, "1001111000100101110001100101"),
    ],
)
def test_movement_keeps_weights_that_move_away_from_zero(options: dict[str, Any], expected: str) -> None:
    dynamics = pruning.dynamics.movement(0.5, every=1, begin=0, until=1 / 100, **options)
    stepped(dynamics, ones())
    assert bits(dynamics.masks) == expected


def test_n_m_masks_and_dense_gradients_of_straight_through() -> None:
    model, dynamics = Golden(), pruning.dynamics.ste()
    # W2 has 4 inputs, too: both weights have windows of 4
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dynamics.attach(model, ones(), optimizer, length=10)
    assert bits(dynamics.masks) == "1010100101100110101011000011"
    loss(model, BATCHES[0]).backward()
    found = torch.cat([model.get_parameter(name).grad.flatten() for name in NAMES])  # type: ignore[union-attr]
    expected = torch.tensor([float(each) for each in STE.split()], dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-7, atol=0)

    decayed, decaying = Golden(), pruning.dynamics.sr_ste(decay=2e-4)
    optimizer = torch.optim.SGD(decayed.parameters(), lr=1.0)
    decaying.attach(decayed, ones(), optimizer, length=10)
    loss(decayed, BATCHES[0]).backward()
    optimizer.step()
    dense = {name: decayed.get_parameter(name).detach() + decaying.own_state()[name] for name in NAMES}
    weight, mask = Golden().fc1.weight.detach(), torch.tensor([int(bit) for bit in "1010100101100110"]).view(4, 4)
    assert torch.allclose(
        dense["fc1.weight"], weight - expected[:16].view(4, 4) - 2e-4 * (1 - mask) * weight, rtol=0, atol=1e-8
    )


@pytest.mark.slow
def test_gradual_sparsities_and_the_cosine_of_rigl() -> None:
    wanted = {0: 0.0, 25: 0.5203125, 50: 0.7875, 75: 0.8859375, 100: 0.9}
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dynamics = pruning.dynamics.gradual(0.9, every=25, begin=0, until=1.0)
    dynamics.attach(model, {"weight": torch.ones(100, 100)}, optimizer, length=100)
    found = {}
    for step in range(101):
        if step in wanted:
            found[step] = dynamics.masks.sparsity()
        optimizer.step()
    assert found == pytest.approx(wanted, abs=5e-5)

    moved = {0: 0.3, 25: 0.256066017, 50: 0.15, 75: 0.0439339828}
    model = nn.Linear(1000, 1000)
    rigl = pruning.dynamics.rigl(every=25, until=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rigl.attach(model, {"weight": torch.rand(1000, 1000) < 0.1}, optimizer, length=100)
    for _ in range(100):
        kept = rigl.masks["weight"]
        model.weight.data.copy_(torch.where(kept, 1.0, 0.0))
        model.weight.grad = torch.where(kept, 0.0, 1.0)
        optimizer.step()
    count = rigl.masks.kept()["weight"]
    assert {each.step: each.grown / count for each in rigl.updates} == pytest.approx(moved, abs=2e-5)
