"""Dynamics as users write them: the class that docs/how-to/sparse-training.md shows, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pruning

PAGE = Path(__file__).parents[3] / "docs/how-to/sparse-training.md"
(SHOWN,) = re.findall(r"```python own\n(.*?)```", PAGE.read_text(), re.S)
_names: dict[str, Any] = {}
exec(SHOWN, _names)
Rotating = _names["Rotating"]


class Failing(pruning.dynamics.Dynamics):
    """Raise an error at the first step."""

    def after_step(self) -> None:
        raise KeyError("no such layer")


class Losing(pruning.dynamics.Dynamics):
    """Drop an entry of each tensor after each step, although the class says that counts stay."""

    keeps_counts = True

    def after_step(self) -> None:
        self.change({name: _less(kept) for name, kept in self.kept.items()})


class Pruning(pruning.dynamics.Dynamics):
    """Prune to a sparsity halfway, by position."""

    nested = True

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity

    def after_step(self) -> None:
        if self.step == self.length // 2:
            self.change({name: _first(kept, self.sparsity) for name, kept in self.kept.items()})


class Returning(pruning.dynamics.Dynamics):
    """Keep one half after three steps and the other half after six, although the class says that nothing returns."""

    nested = True

    def after_step(self) -> None:
        if self.step in (3, 6):
            half = {name: _first(kept, 0.5) for name, kept in self.kept.items()}
            self.change(half if self.step == 3 else {name: ~mask for name, mask in half.items()})


class Asking(pruning.dynamics.Dynamics):
    """Fail when asked for gradients."""

    def wants_dense(self) -> bool:
        return bool(1 / (self.step - self.step))


class Unsure(pruning.dynamics.Dynamics):
    """Fail when asked whether masks are final."""

    @property
    def is_at_target(self) -> bool:
        return bool(1 / (self.step - self.step))


def _less(kept: torch.Tensor) -> torch.Tensor:
    return kept.flatten().index_fill(0, kept.flatten().nonzero()[0], False).view(kept.shape)


def _first(kept: torch.Tensor, sparsity: float) -> torch.Tensor:
    places = torch.arange(kept.numel(), device=kept.device).view(kept.shape)
    return places >= round(sparsity * kept.numel())


def function(every: int) -> None:
    """Not a class."""


class Tied(nn.Module):
    """Embedding and head that share a weight; the head's name is the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(10, 16)
        self.inside = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inside(self.token(x.long()).mean(1))))
        return out


def frozen() -> nn.Module:
    """Return a network whose first layer is not trained."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 10))
    model[0].weight.requires_grad_(False)
    return model


def numbers() -> dict[str, Any]:
    """Return vectors of four digits, labelled by the first."""
    drawn = torch.Generator().manual_seed(0)
    parts = {name: torch.randint(10, (200, 4), generator=drawn).float() for name in ("train", "val", "test")}
    return {**{name: (part, part[:, 0].long()) for name, part in parts.items()}, "classes": 10}


# --- training functions ---


def _steps(model: Any, task: Any, data: Any, config: Any, context: Any, optimizers: Any, count: int) -> Any:
    """Take steps, all optimizers for each batch; yield the number of each."""
    batches = data.train.batches(config.batch_size, device=context.device, seed=context.seed)
    taken = 0
    for epoch in range(100):
        for batch in batches.epoch(epoch):
            if taken == count:
                return
            model.zero_grad()
            task.loss(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            taken += 1
            yield taken


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def plainly(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    optimizer = _sgd(model.parameters())
    context.attach(optimizer)
    list(_steps(model, task, data, config, context, [optimizer], 20))


def by_two_optimizers(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    weights = [each for name, each in model.named_parameters() if name.endswith("weight")]
    biases = [each for name, each in model.named_parameters() if not name.endswith("weight")]
    optimizers = [_sgd(biases), _sgd(weights)]
    for optimizer in optimizers:
        context.attach(optimizer)
    list(_steps(model, task, data, config, context, optimizers, 20))


def unattached(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    context.report(20, {})


def twice(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    for _ in range(2):
        context.attach(_sgd(model.parameters()))


def early(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    optimizer = _sgd(model.parameters())
    context.attach(optimizer)
    list(_steps(model, task, data, config, context, [optimizer], 5))


def without_steps(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    context.attach(_sgd(model.parameters()), steps=0)


def forgetting_masks(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    _earlier(model, task, data, config, context, restore=False)


def best_of_two(model: Any, task: Any, data: Any, config: Any, context: Any) -> None:
    _earlier(model, task, data, config, context, restore=True)


def _earlier(model: Any, task: Any, data: Any, config: Any, context: Any, *, restore: bool) -> None:
    """End with the weights of step 6."""
    optimizer = _sgd(model.parameters())
    context.attach(optimizer)
    for step in _steps(model, task, data, config, context, [optimizer], 20):
        if step == 6:
            saved, masks = {name: each.clone() for name, each in model.state_dict().items()}, context.masks
    if restore:
        context.restore_masks(masks)
    model.load_state_dict(saved)
