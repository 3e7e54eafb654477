"""Plain loops of each dynamics, written from the papers on flat lists of numbers: the reference of the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pruning.selection.random_subset import prune_random_

Values = dict[str, Tensor]
PRUNED = ("first.weight", "second.weight")


def gradients(values: Values, batch: tuple[Tensor, Tensor]) -> Values:
    """Return the gradients of the loss of a network of two layers, at these values."""
    x, y = batch
    held = {name: value.clone().requires_grad_() for name, value in values.items()}
    hidden = torch.tanh(x @ held["first.weight"].T + held["first.bias"])
    loss = torch.nn.functional.cross_entropy(hidden @ held["second.weight"].T + held["second.bias"], y)
    found = torch.autograd.grad(loss, list(held.values()))
    return dict(zip(held, found, strict=True))


@dataclass
class Sgd:
    """SGD with momentum and weight decay."""

    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-3
    state: dict[str, list[Tensor]] = field(default_factory=dict)

    def step(self, values: Values, found: Values) -> None:
        for name, value in values.items():
            gradient = found[name] + self.decay * value
            if name not in self.state:
                self.state[name] = [torch.zeros_like(value)]
            velocity = self.state[name][0]
            velocity.mul_(self.momentum).add_(gradient)
            value.sub_(self.rate * velocity)


@dataclass
class Adam:
    """Adam, with its number of steps."""

    rate: float = 1e-2
    steps: int = 0
    state: dict[str, list[Tensor]] = field(default_factory=dict)

    def step(self, values: Values, found: Values) -> None:
        self.steps += 1
        for name, value in values.items():
            first, second = self.state.setdefault(name, [torch.zeros_like(value), torch.zeros_like(value)])
            first.mul_(0.9).add_(0.1 * found[name])
            second.mul_(0.999).add_(0.001 * found[name] ** 2)
            right = (first / (1 - 0.9**self.steps)) / ((second / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            value.sub_(self.rate * right)


Plain = Sgd | Adam


def forget(optimizer: Plain, name: str, entries: list[int]) -> None:
    for tensor in optimizer.state.get(name, []):
        for entry in entries:
            tensor.view(-1)[entry] = 0


def masked_step(values: Values, masks: Values, optimizer: Plain, found: Values) -> None:
    for name in masks:
        found[name] = torch.where(masks[name], found[name], 0.0)
    optimizer.step(values, found)
    for name in masks:
        values[name][~masks[name]] = 0


def entries_of(mask: Tensor) -> list[int]:
    return [entry for entry, kept in enumerate(mask.view(-1).tolist()) if kept]


def change(values: Values, masks: Values, optimizer: Plain, name: str, kept: set[int], new: set[int]) -> None:
    """Set the mask; forget what is not kept and what is new."""
    mask = torch.zeros(values[name].numel(), dtype=torch.bool)
    mask[sorted(kept)] = True
    masks[name] = mask.view(values[name].shape)
    values[name][~masks[name]] = 0
    forget(optimizer, name, [entry for entry in range(mask.numel()) if entry not in kept or entry in new])


def rigl(
    values: Values, masks: Values, optimizer: Plain, batches: list[tuple[Tensor, Tensor]], every: int, end: int
) -> None:
    for step, batch in enumerate(batches):
        found = gradients(values, batch)
        if step % every or step >= end:
            masked_step(values, masks, optimizer, found)
            continue
        fraction = 0.3 / 2 * (1 + math.cos(math.pi * step / end))
        for name in PRUNED:
            weight, gradient = values[name].view(-1).tolist(), found[name].view(-1).tolist()
            before = entries_of(masks[name])
            count = math.floor(fraction * len(before))
            dropped = sorted(before, key=lambda entry: (abs(weight[entry]), entry))[:count]
            left = set(before) - set(dropped)
            rest = [entry for entry in range(len(weight)) if entry not in left]
            grown = set(sorted(rest, key=lambda entry: (-abs(gradient[entry]), entry))[:count])
            change(values, masks, optimizer, name, left | grown, grown - set(before))


def sets(
    values: Values,
    masks: Values,
    optimizer: Plain,
    batches: list[tuple[Tensor, Tensor]],
    every: int,
    generator: torch.Generator,
) -> None:
    for step, batch in enumerate(batches, 1):
        masked_step(values, masks, optimizer, gradients(values, batch))
        if step % every or step == len(batches):
            continue
        moved: dict[str, tuple[list[int], Tensor]] = {}
        for name in PRUNED:
            weight, before = values[name].view(-1).tolist(), entries_of(masks[name])
            positive = sorted((entry for entry in before if weight[entry] >= 0), key=lambda e: (weight[e], e))
            negative = sorted((entry for entry in before if weight[entry] < 0), key=lambda e: (-weight[e], e))
            dropped = positive[: math.floor(0.3 * len(positive))] + negative[: math.floor(0.3 * len(negative))]
            left = set(before) - set(dropped)
            free = torch.tensor([entry not in left for entry in range(len(weight))])
            drawn = free & ~prune_random_(free.clone(), len(dropped), generator=generator)
            grown = entries_of(drawn)
            change(values, masks, optimizer, name, left | set(grown), set(grown))
            moved[name] = grown, torch.randn(len(grown), generator=generator) * 0.1
        for name, (grown, drawn_values) in moved.items():
            values[name].view(-1)[grown] = drawn_values.double()


def cubic(end: float, step: int, last: int, start: float = 0.0) -> float:
    return end - (end - start) * (1 - step / last) ** 3


def gradual(
    values: Values,
    masks: Values,
    optimizer: Plain,
    batches: list[tuple[Tensor, Tensor]],
    every: int,
    last: int,
    together: bool,
) -> None:
    for step, batch in enumerate(batches, 1):
        masked_step(values, masks, optimizer, gradients(values, batch))
        if step > last or (step % every and step != last):
            continue
        target = cubic(0.9, step, last)
        for names in [PRUNED] if together else [(name,) for name in PRUNED]:
            places = [(name, entry) for name in names for entry in entries_of(masks[name])]
            entries = sum(values[name].numel() for name in names)
            order = sorted(places, key=lambda place: abs(float(values[place[0]].view(-1)[place[1]])))
            kept = order[round(target * entries) - (entries - len(places)) :]
            for name in names:
                change(values, masks, optimizer, name, {entry for other, entry in kept if other == name}, set())


def windows(weight: Tensor, n: int, m: int) -> Tensor:
    flat = weight.reshape(-1, m)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    for row, window in enumerate(flat.abs().tolist()):
        for entry in sorted(range(m), key=lambda place: (window[place], place))[m - n :]:
            mask[row, entry] = True
    return mask.view(weight.shape)


def straight_through(
    values: Values,
    masks: Values,
    optimizer: Plain,
    batches: list[tuple[Tensor, Tensor]],
    decay: float,
) -> None:
    """Train dense values; leave m w in them."""
    for batch in batches:
        for name in PRUNED:
            masks[name] = windows(values[name], 2, 4)
        found = gradients({**values, **{name: masks[name] * values[name] for name in PRUNED}}, batch)
        for name in PRUNED:
            found[name] = found[name] + decay * (~masks[name] * values[name])
        optimizer.step(values, found)
    for name in PRUNED:
        masks[name] = windows(values[name], 2, 4)
        values[name] *= masks[name]


def _scored(
    values: Values,
    masks: Values,
    optimizer: Plain,
    batches: list[tuple[Tensor, Tensor]],
    scores: Values,
    moved: Callable[[Tensor, Tensor, int], Tensor],
    chosen: Callable[[str, int], Tensor | None],
) -> None:
    """Train by m w, with values that are not kept as they were; scores follow `moved`, masks follow `chosen`."""
    for step, batch in enumerate(batches, 1):
        now = {**values, **{name: masks[name] * values[name] for name in PRUNED}}
        found = gradients(now, batch)
        for name in PRUNED:
            scores[name] -= moved(found[name] * values[name], scores[name], step - 1)
        before = {name: values[name].clone() for name in PRUNED}
        masked_step(now, masks, optimizer, found)
        for name in values:
            values[name] = torch.where(masks[name], now[name], before[name]) if name in PRUNED else now[name]
        for name in PRUNED:
            mask = chosen(name, step)
            if mask is not None:
                new, masks[name] = mask & ~masks[name], mask
                forget(optimizer, name, entries_of(~mask | new))
    for name in PRUNED:
        values[name] *= masks[name]


def movement(
    values: Values, masks: Values, optimizer: Plain, batches: list[tuple[Tensor, Tensor]], every: int, last: int
) -> None:
    scores = {name: torch.zeros_like(values[name]) for name in PRUNED}

    def chosen(name: str, step: int) -> Tensor | None:
        if step > last or (step % every and step != last):
            return None
        flat = scores[name].view(-1).tolist()
        order = sorted(range(len(flat)), key=lambda entry: (flat[entry], entry))
        mask = torch.ones(len(flat), dtype=torch.bool)
        mask[order[: round(cubic(0.8, step, last) * len(flat))]] = False
        return mask.view(scores[name].shape)

    _scored(values, masks, optimizer, batches, scores, lambda moved, _scores, _step: moved, chosen)


def soft_movement(
    values: Values, masks: Values, optimizer: Plain, batches: list[tuple[Tensor, Tensor]], last: int
) -> None:
    scores = {name: torch.zeros_like(values[name]) for name in PRUNED}

    def moved(movement: Tensor, held: Tensor, step: int) -> Tensor:
        if step >= last:
            return torch.zeros_like(held)
        soft = 1 / (1 + (-held).exp())
        return 0.5 * (movement + 0.006 * soft * (1 - soft))

    def chosen(name: str, step: int) -> Tensor | None:
        return 1 / (1 + (-scores[name]).exp()) > 0.45 if step <= last else None

    _scored(values, masks, optimizer, batches, scores, moved, chosen)
