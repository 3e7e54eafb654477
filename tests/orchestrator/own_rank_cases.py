"""Training functions of the user's own in several processes: as the page shows one, and such as make mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training_cases import CLASSES, job, settings

from orchestrator.core.records import CurvePoint
from orchestrator.training.loop.own_loop import Context, run_own_loop
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.state.train_state import TrainState
from orchestrator.training.team.ranks import Processes, Ranks
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks.task import Measured
from pruning import MaskKeeper, MaskSet

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def shown(page: str, name: str) -> str:
    """Return the Python block of a how-to page with a name."""
    (found,) = re.findall(rf"^```python {name}\n(.*?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def divided(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """Train as the page shows it; then rank 0 alone measures, and all ranks gather."""
    names: dict[str, Any] = {}
    exec(shown("several-processes.md", "several"), names)
    names["train"](model, task, data, config, context)
    if context.rank == 0:
        assert context.evaluate() == {"loss": 1.0}
    assert context.gather(torch.tensor(0.5) + context.rank) == [0.5 + rank for rank in range(context.world_size)]


def drawing(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """Draw differently often on each rank, and go on from a checkpoint."""
    optimizer = instantiate(config.optimizer, model.parameters())
    context.attach(optimizer)
    wrapped = context.wrap(model)
    if (saved := context.resumed()) is not None:
        optimizer.load_state_dict(saved["optimizer"])
    batches = data.train.batches(config.batch_size, device=context.device, seed=context.seed)
    for inputs, labels in batches.epoch(0, context.steps):
        context.checkpoint(lambda: {"optimizer": optimizer.state_dict()})
        own = slice(context.rank, None, context.world_size)
        noise = torch.randn(len(labels[own]) + context.rank).mean()
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs[own] + noise), labels[own]).backward()
        optimizer.step()


def unwrapped(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """Forget `context.wrap`."""
    optimizer = instantiate(config.optimizer, model.parameters())
    context.attach(optimizer)
    for inputs, labels in data.train.batches(config.batch_size, device=context.device, seed=context.seed):
        own = slice(context.rank, None, context.world_size)
        cross_entropy(model(inputs[own]), labels[own]).backward()
        optimizer.step()


def raising_on(rank: int, model: nn.Module, data: Any, config: Any, context: Context) -> None:
    """Raise on one rank in the second step."""
    optimizer = instantiate(config.optimizer, model.parameters())
    context.attach(optimizer)
    wrapped = context.wrap(model)
    for inputs, labels in data.train.batches(config.batch_size, device=context.device, seed=context.seed):
        if context.rank == rank and context.steps == 1:
            raise KeyError("mine")
        cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()


def raising_on_first(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """Raise on rank 0."""
    raising_on(0, model, data, config, context)


def raising_on_last(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """Raise on the last rank."""
    raising_on(context.world_size - 1, model, data, config, context)


def tidy(model: nn.Module, task: Any, data: Any, config: Any, context: Context) -> None:
    """End the process group, as some libraries do in the end."""
    torch.distributed.destroy_process_group()
    context.report(1, {})


MISTAKES: tuple[Callable[..., Any], ...] = (unwrapped, raising_on_first, raising_on_last, tidy)


def own(
    function: Callable[..., Any] | str, model: nn.Module, data: Data, ranks: Processes, **options: Any
) -> tuple[dict[str, Tensor], tuple[CurvePoint, ...]]:
    """Train a network with a function, half of its weights pruned, which stay 0; return its weights and the curve."""
    torch.manual_seed(1)
    names = [name for name, each in model.named_parameters() if each.ndim > 1]
    masks = MaskSet({name: torch.rand(model.get_parameter(name).shape) < 0.5 for name in names})
    keeper = MaskKeeper(model, masks)
    target = function if isinstance(function, str) else f"{__name__}.{function.__name__}"
    given = {"where": "finetune", "masks": masks, "on_optimizer": keeper.attach, "ranks": ranks, **options}
    work = job(model, CLASSES, settings(_target_=target), data=data, **given)
    found = run_own_loop(work, lambda: Measured({"loss": 1.0}))
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())
    return model.state_dict(), found.curve


def gone_on(make: Callable[[], nn.Module], data: Data, ranks: Ranks) -> dict[str, Tensor]:
    """Train with `drawing` up to its fourth step, and go on in another network; return its weights."""
    left, kept = [3], [TrainState()]

    def cancelled() -> bool:
        left[0] -= 1
        return left[0] < 0

    def keep(current: Callable[[], TrainState], ending: bool) -> None:
        if ending and ranks.leads:
            state = current()
            kept[0] = TrainState({name: each.clone() for name, each in state.tensors.items()}, state.values)

    with suppress(Cancelled):
        own(drawing, make(), data, ranks, cancelled=cancelled, keep=keep)
    state = ranks.state_of_leader(kept[0] if ranks.leads else None)
    return own(drawing, make(), data, ranks, state=state)[0]
