"""Masks and weights over 300 steps are those of plain loops, for SGD with momentum and for Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_loops import PRUNED, Adam, Plain, Sgd, Values, gradual, movement, rigl, sets, soft_movement, straight_through
from torch import Tensor, nn

import pruning
from pruning.dynamics import Dynamics

STEPS = 300
Batch = tuple[Tensor, Tensor]
Loop = Callable[[Values, Values, Plain, list[Batch]], None]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> Network:
    torch.manual_seed(0)
    return Network().double()


def batches(count: int = STEPS) -> list[Batch]:
    generator = drawn(1)
    x = torch.randn(count, 10, 8, generator=generator, dtype=torch.float64)
    return list(zip(x, (x[..., :4] + x[..., 4:]).argmax(-1), strict=True))


def masks(density: float) -> dict[str, Tensor]:
    shapes = {name: each.shape for name, each in network().named_parameters() if name in PRUNED}
    generator = drawn(2)
    return {name: torch.rand(shape, generator=generator) < density for name, shape in shapes.items()}


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def trained(dynamics: Dynamics, model: nn.Module, steps: torch.optim.Optimizer, given: list[Batch]) -> None:
    for x, y in given:
        steps.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        steps.step()


CASES: dict[str, tuple[Callable[[], Dynamics], float, Loop]] = {
    "rigl": (
        lambda: pruning.dynamics.rigl(every=10, until=220),
        0.4,
        lambda values, held, plain, given: rigl(values, held, plain, given, 10, 220),
    ),
    "set": (
        lambda: pruning.dynamics.set(every=25),
        0.4,
        lambda values, held, plain, given: sets(values, held, plain, given, 25, drawn(3)),
    ),
    "gradual": (
        lambda: pruning.dynamics.gradual(0.9, every=20, until=210),
        1.0,
        lambda values, held, plain, given: gradual(values, held, plain, given, 20, 210, False),
    ),
    "gradual global": (
        lambda: pruning.dynamics.gradual(0.9, every=20, until=210, scope="global"),
        1.0,
        lambda values, held, plain, given: gradual(values, held, plain, given, 20, 210, True),
    ),
    "sr_ste": (
        lambda: pruning.dynamics.sr_ste(decay=1e-2),
        1.0,
        lambda values, held, plain, given: straight_through(values, held, plain, given, 1e-2),
    ),
    "ste": (
        lambda: pruning.dynamics.ste(),
        1.0,
        lambda values, held, plain, given: straight_through(values, held, plain, given, 0.0),
    ),
    "movement": (
        lambda: pruning.dynamics.movement(0.8, every=15, until=200),
        1.0,
        lambda values, held, plain, given: movement(values, held, plain, given, 15, 200),
    ),
    "soft_movement": (
        lambda: pruning.dynamics.soft_movement(threshold=0.45, penalty=0.006, rate=0.5, until=200),
        1.0,
        lambda values, held, plain, given: soft_movement(values, held, plain, given, 200),
    ),
}


ALTERNATELY = [
    pytest.param(case, kind, id=f"{case}-{kind}", marks=() if (number + place) % 2 else pytest.mark.slow)
    for number, case in enumerate(CASES)
    for place, kind in enumerate(("sgd", "adam"))
]
"""Each case with one of the optimizers; with the other one, it is slow."""


@pytest.mark.parametrize(("case", "kind"), ALTERNATELY)
def test_masks_and_weights_are_those_of_a_plain_loop(case: str, kind: str) -> None:
    make, density, loop = CASES[case]
    model, plain = network(), network()
    values = {name: each.detach().clone() for name, each in plain.named_parameters()}
    begun = masks(density)
    for name, mask in begun.items():
        values[name] *= mask
    held = {name: mask.clone() for name, mask in begun.items()}
    loop(values, held, Sgd() if kind == "sgd" else Adam(), batches())

    dynamics, steps = make(), optimizer(kind, model)
    dynamics.attach(model, begun, steps, length=STEPS, generator=drawn(3))
    trained(dynamics, model, steps, batches())
    dynamics.release()

    assert 0.05 < dynamics.masks.sparsity() < 1
    for name, mask in held.items():
        assert torch.equal(dynamics.masks[name], mask), name
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, values[name], rtol=0, atol=1e-10), name


def test_every_dynamics_has_a_plain_loop() -> None:
    assert {name.split()[0] for name in CASES} | {"static"} == set(pruning.dynamics.DYNAMICS)


def test_a_regrown_entry_begins_at_the_value_of_its_method() -> None:
    starts: dict[str, Any] = {}
    for name, options in (("rigl", {"every": 10}), ("set", {"every": 10})):
        model = network()
        steps, dynamics = optimizer("sgd", model), getattr(pruning.dynamics, name)(**options)
        dynamics.attach(model, masks(0.4), steps, length=STEPS, generator=drawn(3))
        given = batches(11)
        trained(dynamics, model, steps, given[:9])
        before = dynamics.masks["first.weight"]
        trained(dynamics, model, steps, given[9:10] if name == "set" else given[9:])
        grown = dynamics.masks["first.weight"] & ~before
        starts[name] = model.first.weight.detach()[grown]
        assert len(starts[name]) > 5
        assert not steps.state[model.first.weight]["momentum_buffer"][grown].any()
    assert not starts["rigl"].any()
    assert starts["set"].abs().min() > 0
