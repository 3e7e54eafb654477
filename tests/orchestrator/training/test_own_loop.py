"""Training functions of the user's own: the same stages as with the built-in loop, under the same checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from test_training_stages import chain, run
from torch import Tensor, nn
from training_cases import CLASSES, job, network, same, settings, state

from orchestrator.config.training import Train
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.store.store import Store
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.own_loop import Context, run_own_loop
from orchestrator.training.loop.training_job import FitResult
from orchestrator.training.pruning_rounds import LawBroken
from orchestrator.training.state.train_state import TrainState
from orchestrator.workloads.tasks.task import Measured
from pruning import MaskKeeper, MaskSet


def plain(model: nn.Module, task: Any, data: Any, config: Train, context: Context) -> None:
    """Train like the built-in loop without its options."""
    optimizer = instantiate(config.optimizer, model.parameters())
    context.attach(optimizer)
    batches = data.train.batches(config.batch_size, device=context.device, seed=context.seed)
    for epoch in range(config.epochs or 0):
        for batch in batches.epoch(epoch):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
        context.report(context.steps, {"val/loss": context.evaluate()["loss"]})


def resumable(model: nn.Module, task: Any, data: Any, config: Train, context: Context) -> None:
    """Train like `plain`, from the last checkpoint."""
    optimizer = instantiate(config.optimizer, model.parameters())
    context.attach(optimizer)
    batches = data.train.batches(config.batch_size, device=context.device, seed=context.seed)
    saved = context.resumed()
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in range(context.steps // len(batches), config.epochs or 0):
        for batch in batches.epoch(epoch, context.steps % len(batches)):
            context.checkpoint(lambda: {"optimizer": optimizer.state_dict()})
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        context.report(context.steps, {"val/loss": context.evaluate()["loss"]})


def forgetful(model: nn.Module, task: Any, data: Any, config: Train, context: Context) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)


def failing(*_: object) -> None:
    raise KeyError("no such thing")


def exploding(model: nn.Module, *_: object) -> None:
    nn.init.constant_(next(model.parameters()), torch.inf)


def reshaping(model: nn.Module, *_: object) -> None:
    model.half()


SEEN: list[Any] = []


def watching(_model: nn.Module, _task: Any, data: Any, _config: Train, context: Context) -> None:
    SEEN.append(data)
    context.report(1, {})


def idle(*_: object) -> None:
    """Take no step."""


def freezing(model: nn.Module, task: Any, data: Any, config: Train, context: Context) -> None:
    plain(model, task, data, config, context)
    model.requires_grad_(False)


def keeping_nothing(_model: nn.Module, _task: Any, _data: Any, _config: Train, context: Context) -> None:
    context.checkpoint(None)  # type: ignore[arg-type]


class Looping:
    """Class, not a function."""


def named(function: Callable[..., Any]) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{function.__name__}"}


def trained(specs: tuple[StageSpec, ...], **changes: Any) -> tuple[StageSpec, ...]:
    """Return the stages of `specs` with another training."""
    found: list[StageSpec] = []
    for spec in specs:
        node = spec.training
        fields = {**spec.fields, node: {**spec.fields[node], **changes}}
        found.append(StageSpec(spec.kind, fields, {NETWORK: found[-1].key} if found else {}))
    return tuple(found)


def test_a_function_that_trains_as_the_built_in_loop_gives_its_bits(store: Store) -> None:
    specs = trained(chain(0.5, 0.75), select="last")

    theirs = run(store, specs)
    ours = run(store, trained(specs, **named(plain)))

    assert [record.weights_digest for record in ours] == [record.weights_digest for record in theirs]
    assert [record.after for record in ours] == [record.after for record in theirs]
    assert [record.steps for record in ours] == [record.steps for record in theirs]
    assert [point.metrics["val/loss"] for point in ours[2].curve] == [ours[2].after["val/loss"]]
    assert ours[2].sparsity == pytest.approx(0.75, abs=0.01)


class Stop:
    """Cancels before the `at`-th step and stores the state at that moment."""

    def __init__(self, at: int) -> None:
        self.left, self.state = at, TrainState()

    def cancelled(self) -> bool:
        self.left -= 1
        return self.left < 0

    def keep(self, get: Callable[[], TrainState], ending: bool) -> None:
        if ending:
            self.state = get()
            self.state = TrainState(
                {name: each.clone() for name, each in self.state.tensors.items()}, self.state.values
            )


MASKS = MaskSet({"0.weight": torch.arange(64).view(16, 4) % 3 != 0})


def own(
    function: Callable[..., Any], model: nn.Module, masks: Mapping[str, Tensor] = MASKS, **options: Any
) -> FitResult:
    """Train `model` with a function, under masks."""
    keeper = MaskKeeper(model, masks)
    given = {"where": "finetune", "masks": MaskSet(masks), "on_optimizer": keeper.attach, **options}
    work = job(model, CLASSES, {**settings(), **named(function)}, **given)
    return run_own_loop(work, lambda: Measured({"loss": 1.0}))


@pytest.mark.parametrize("at", [0, 4, 7, 11])
def test_a_function_goes_on_from_its_checkpoint_bit_for_bit(at: int) -> None:
    """The network draws random numbers in dropout and changes buffers in batch normalisation."""
    whole, left, gone_on = network(), network(), network()
    expected, stop = own(resumable, whole), Stop(at)
    with pytest.raises(training_loop.Cancelled):
        own(resumable, left, cancelled=stop.cancelled, keep=stop.keep)

    found = own(resumable, gone_on, state=stop.state)

    assert same(state(gone_on), state(whole))
    assert [(point.step, point.epoch) for point in found.curve] == [(7, 1.0), (14, 2.0)]
    assert found.steps == expected.steps == 14


def test_a_function_without_checkpoints_ends_at_its_next_step() -> None:
    with pytest.raises(training_loop.Cancelled):
        own(plain, network(), cancelled=Stop(3).cancelled)


def test_a_function_that_would_begin_anew_is_refused() -> None:
    stop = Stop(4)
    with pytest.raises(training_loop.Cancelled):
        own(resumable, network(), cancelled=stop.cancelled, keep=stop.keep)

    with pytest.raises(training_loop.TrainingError, match=r"must call `context\.resumed` before its first step"):
        own(plain, network(), state=stop.state)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (forgetful, LawBroken, r"must keep pruned weights at 0, but those of 0\.weight are not; call `context\.attach"),
        (failing, training_loop.TrainingError, r"failed after 0 steps with KeyError: 'no such thing'; fix the"),
        (exploding, training_loop.Diverged, r"^0\.weight is infinite or NaN after `finetune\._target_`"),
        (reshaping, training_loop.TrainingError, r"shapes and dtypes of .* unchanged, but changed 0\.weight"),
        (
            idle,
            training_loop.TrainingError,
            r"must call `context\.attach\(optimizer\)` before its first step, but no step",
        ),
        (
            keeping_nothing,
            training_loop.TrainingError,
            r"`parts` \(=NoneType\) of `context\.checkpoint` must be a function",
        ),
        (
            Looping,
            training_loop.TrainingError,
            r"must be a function \(model, task, data, config, context\).*not a class",
        ),
    ],
)
def test_what_a_function_may_not_do_is_told_in_a_sentence(
    function: Callable[..., Any], error: type[OrchestratorError], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        own(function, network())

    assert str(raised.value).count("\n") == 0
    assert f"(={__name__}.{function.__name__})" in str(raised.value) or function is keeping_nothing


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e151])
def test_a_point_that_no_record_can_hold_is_a_training_that_diverged(value: float) -> None:
    context = Context(job(network()), lambda: Measured({}))

    with pytest.raises(training_loop.Diverged, match=f"train/loss is {value} at step 3".replace("+", r"\+")):
        context.report(3, {"train/loss": value})


@pytest.mark.parametrize(
    ("step", "epoch"), [(-1, None), (1.5, None), (torch.tensor(1), None), (True, None), (1, torch.nan), (1, -1)]
)
def test_a_point_that_no_record_holds_is_refused_at_once(step: Any, epoch: Any) -> None:
    context = Context(job(network()), lambda: Measured({}))

    with pytest.raises(training_loop.TrainingError, match=r"of `context\.report` must be"):
        context.report(step, {}, epoch)
    assert context.curve == []


def test_what_a_function_freezes_trains_again_in_the_next_round() -> None:
    model = network()
    next(model.parameters()).requires_grad_(False)  # frozen by the model's constructor
    own(freezing, model)

    assert [parameter.requires_grad for parameter in model.parameters()][:2] == [False, True]


def test_a_function_sees_no_test_split() -> None:
    SEEN.clear()

    own(watching, network())

    assert {"train", "val"} <= set(dir(SEEN[0]))
    assert not {"test", "tests"} & set(dir(SEEN[0]))
