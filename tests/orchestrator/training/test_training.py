"""Training loop: bit-equal for equal seeds, selection on validation, cancellation."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_cases import (
    CLASSES,
    CPU,
    EPOCH,
    TRAIN,
    after_step,
    fit,
    job,
    metrics,
    network,
    points,
    problem,
    same,
    settings,
    state,
)

from orchestrator.config.config_groups import schema_of
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.seeding import derive
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.training.loop.training_job import TrainingError
from orchestrator.workloads import data_loading as data_sets
from orchestrator.workloads import model_building
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import LoaderSplit, TensorSplit
from orchestrator.workloads.tasks.regression import Regression


def test_reruns_are_bit_equal_whatever_the_global_generators_hold() -> None:
    runs = []
    for other in (1, 2):
        torch.manual_seed(other)
        random.seed(other)
        np.random.seed(other)  # noqa: NPY002
        model = network()
        runs.append((metrics(fit(model)), state(model)))

    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_the_global_generators_are_left_as_they_were() -> None:
    before = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    fit(network())

    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


@pytest.mark.parametrize(("dropout", "batch_size", "differ"), [(0.0, 8, True), (0.3, TRAIN, True), (0.0, TRAIN, False)])
def test_order_and_dropout_each_follow_the_seed(dropout: float, batch_size: int, differ: bool) -> None:
    """Without dropout only the order can differ; with one batch an epoch only dropout can."""
    found = []
    for seed in (0, 1):
        model = network()
        model[3].p = dropout
        fit(model, seed=seed, batch_size=batch_size, select="last")
        found.append(model[0].weight)

    assert torch.allclose(found[0], found[1], atol=1e-4) != differ


def test_full_batches_are_gradient_descent() -> None:
    """w <- w - lr X^T (softmax(Xw) - onehot(y)) / n, by hand in float64."""
    data = problem()
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    x, y = points(TRAIN, 0).images.double(), torch.eye(3, dtype=torch.float64)[torch.arange(TRAIN) % 3]
    w = torch.zeros(4, 3, dtype=torch.float64)
    for _ in range(5):
        w -= 0.3 * x.T @ (torch.softmax(x @ w, 1) - y) / TRAIN

    result = fit(model, data=data, lr=0.3, momentum=0.0, epochs=None, steps=5, batch_size=TRAIN, select="last")

    assert torch.allclose(model.weight.T.double(), w, atol=1e-6)
    assert result.curve[0].metrics["train/loss"] == pytest.approx(np.log(3))
    assert [point.epoch for point in result.curve] == [1, 2, 3, 4, 5]


def test_epochs_are_steps() -> None:
    first, second = network(), network()
    by_epochs = fit(first, epochs=2)
    by_steps = fit(second, epochs=None, steps=2 * EPOCH)

    assert by_epochs.steps == by_steps.steps == 2 * EPOCH
    assert metrics(by_epochs) == metrics(by_steps)
    assert same(state(first), state(second))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"epochs": 2}, [7, 14]),
        ({"epochs": 2, "drop_last": True}, [6, 12]),
        ({"epochs": None, "steps": 10}, [7, 10]),
        ({"epochs": None, "steps": 10, "eval_every": 4}, [4, 8, 10]),
        ({"epochs": 1, "eval_every": 7}, [7]),
        ({"epochs": 0}, []),
        ({"epochs": None, "steps": 0}, []),
    ],
)
def test_the_curve_has_a_point_every_so_often_and_at_the_end(options: dict[str, Any], steps: list[int]) -> None:
    seen: list[int] = []
    model = network()
    before = state(model)

    result = fit(model, **options, on_point=lambda point: seen.append(point.step))

    assert [point.step for point in result.curve] == seen == steps
    assert result.steps == (steps[-1] if steps else 0)
    assert bool(steps) or (result.best_step == 0 and same(before, state(model)))


def test_the_loss_of_a_point_is_the_mean_since_the_one_before() -> None:
    each = fit(network(), eval_every=1).curve
    epochs = fit(network()).curve

    for index, point in enumerate(epochs):
        losses = [p.metrics["train/loss"] for p in each[EPOCH * index : EPOCH * (index + 1)]]
        assert point.metrics["train/loss"] == pytest.approx(sum(losses) / EPOCH, rel=1e-12)


@pytest.mark.parametrize("monitor", ["accuracy", "loss"])
def test_the_best_weights_on_validation_are_kept(monitor: str) -> None:
    model = network()
    states: dict[int, list[Tensor]] = {}

    result = fit(
        model, lr=0.5, epochs=6, eval_every=3, monitor=monitor, on_point=lambda p: states.update({p.step: state(model)})
    )

    values = {point.step: point.metrics[f"val/{monitor}"] for point in result.curve}
    best = max(values.values()) if monitor == "accuracy" else min(values.values())
    assert result.best_step == next(step for step in values if values[step] == best) < result.steps
    assert same(state(model), states[result.best_step])
    val = evaluate(model, problem().val, CLASSES, device=CPU).figures
    assert val == {key: result.curve[list(values).index(result.best_step)].metrics[f"val/{key}"] for key in val}


def test_the_last_weights_are_kept_when_asked_for() -> None:
    model = network()
    states: list[list[Tensor]] = []

    result = fit(model, lr=1.0, epochs=4, select="last", on_point=lambda _: states.append(state(model)))

    assert result.best_step == result.steps
    assert same(state(model), states[-1])


def test_the_state_before_the_first_step_is_no_candidate() -> None:
    model = network()
    fit(model, epochs=20)
    before, good = state(model), evaluate(model, problem().val, CLASSES, device=CPU).figures["accuracy"]

    result = fit(model, lr=50.0, epochs=None, steps=1)

    assert result.curve[0].metrics["val/accuracy"] < good
    assert result.best_step == 1
    assert not same(before, state(model))


@pytest.mark.parametrize("select", ["best", "last"])
def test_patience_counts_evaluations_without_a_new_best_and_equals_are_none(select: str) -> None:
    frozen = fit(nn.Linear(4, 3), lr=0.0, epochs=9, patience=3, select=select)

    assert [point.step for point in frozen.curve] == [7, 14, 21, 28]
    assert frozen.best_step == (7 if select == "best" else 28)


def test_patience_starts_anew_with_each_best() -> None:
    result = fit(network(), lr=0.02, epochs=60, patience=2, monitor="loss")

    losses = [point.metrics["val/loss"] for point in result.curve]
    best = losses.index(min(losses))
    assert 0 < best == len(losses) - 3


def test_patience_that_is_never_used_up_changes_nothing() -> None:
    assert metrics(fit(network(), patience=99)) == metrics(fit(network()))


def test_cancelling_ends_at_the_next_batch() -> None:
    answers = iter([False, False, True])
    steps: list[int] = []

    with pytest.raises(training_loop.Cancelled):
        fit(network(), cancelled=lambda: next(answers), on_optimizer=after_step(lambda: steps.append(1)))

    assert len(steps) == 2


def test_what_is_attached_to_the_optimizer_comes_after_every_step_and_before_every_evaluation() -> None:
    model = nn.Linear(4, 3)
    steps: list[int] = []

    def mask() -> None:
        steps.append(1)
        with torch.no_grad():
            model.weight[:, 0] = 0

    fit(model, on_optimizer=after_step(mask), on_point=lambda _: steps.append(int(model.weight[:, 0].count_nonzero())))

    assert steps == ([1] * EPOCH + [0]) * 2
    assert torch.count_nonzero(model.weight[:, 0]) == 0


def test_the_training_modes_are_restored() -> None:
    model = network()
    model[1].eval()
    modes: list[bool] = []

    fit(model, on_point=lambda _: modes.append(model[3].training))
    assert modes == [True, True]
    assert [module.training for module in model] == [True, False, True, True, True]

    with pytest.raises(training_loop.Cancelled):
        fit(model.eval(), cancelled=lambda: True)
    assert not any(module.training for module in model.modules())


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    data = problem()
    broken = TensorSplit(points(TRAIN, 0).images.clone(), points(TRAIN, 0).labels)
    broken.images[17] = float("nan")
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(derive(4, "order"))).tolist()
    step = order.index(17) // 8 + 1

    with pytest.raises(
        DataError, match=rf"training loss is nan at step {step}: .* the inputs of example 17 "
    ) as caught:
        fit(nn.Linear(4, 3), seed=4, data=Data(broken, data.val, data.test, (4,), 3))

    assert isinstance(caught.value, OrchestratorError)


def test_a_validation_loss_that_is_not_finite_is_refused_too() -> None:
    with pytest.raises(training_loop.Diverged, match="validation loss is nan at step 1"):
        fit(nn.Linear(4, 3), lr=float("inf"), epochs=None, steps=1)


def test_a_training_of_finetune_names_its_own_keys() -> None:
    config = settings(lr=float("inf"), epochs=None, steps=1)
    with pytest.raises(
        training_loop.Diverged, match=r"lower `finetune\.optimizer\.lr`, or clip .*`finetune\.clip_norm=1\.0`"
    ):
        training_loop.fit(job(nn.Linear(4, 3), CLASSES, config, where="finetune"))


def test_divergence_between_evaluations_is_found_long_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "CHECK_EVERY", 5)
    steps: list[int] = []

    with pytest.raises(training_loop.Diverged, match="at step 2"):
        fit(
            nn.Linear(4, 3),
            lr=float("inf"),
            epochs=100,
            eval_every=600,
            on_optimizer=after_step(lambda: steps.append(1)),
        )

    assert len(steps) == 5


class Items(Dataset[tuple[Tensor, int]]):
    """Dataset of the training points, with noise from the global generators if asked for."""

    def __init__(self, noise: float) -> None:
        self.split, self.noise = points(TRAIN, 0), noise

    def __len__(self) -> int:
        return TRAIN

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shift = self.noise * (torch.randn(4) + random.random()) if self.noise else torch.zeros(4)
        return self.split.images[index] + shift, int(self.split.labels[index])


def loaded(noise: float, workers: int) -> Data:
    data = problem()
    return Data(LoaderSplit(Items(noise), workers), data.val, data.test, (4,), 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_trains_as_the_same_tensors_do(workers: int) -> None:
    first, second = network(), network()

    assert metrics(fit(first)) == metrics(fit(second, data=loaded(0.0, workers)))
    assert same(state(first), state(second))


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_the_seed(workers: int) -> None:
    curves: list[Any] = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(curves))
        random.seed(len(curves))
        curves.append(metrics(fit(network(), seed=seed, data=loaded(0.5, workers))))

    assert curves[0] == curves[1] != curves[2]
    assert curves[0] != metrics(fit(network()))


def test_workers_of_a_loader_end_with_the_training() -> None:
    before = active_children()
    gc.disable()  # a late collection would make torch wait five seconds for each loader
    try:
        fit(network(), data=loaded(0.0, 2))
        assert active_children() == before
    finally:
        gc.enable()


def test_what_an_evaluation_draws_is_the_same_each_time_and_no_draw_of_the_training() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] + torch.randn(len(x), 3)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = [evaluate(Noisy(), problem().val, CLASSES, device=CPU) for _ in range(2)]
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), before)

    data = problem()
    noisy = Data(data.train, LoaderSplit(Items(0.5)), data.test, (4,), 3)
    first, second = network(), network()
    fit(first, select="last")
    fit(second, data=noisy, select="last")
    assert same(state(first), state(second))


def test_a_regression_is_chosen_by_its_lowest_error() -> None:
    parts = [TensorSplit(split.images, split.images.sum(1, keepdim=True)) for split in (problem().train, problem().val)]
    data = Data(parts[0], parts[1], parts[1], (4,), 1)

    with pytest.raises(OrchestratorError, match=r"`task` \(=classification\) needs labels that are classes.*"):
        fit(nn.Linear(4, 1), data=data)
    with pytest.raises(OrchestratorError, match=r"`train.monitor` \(=accuracy\) must be one of rmse, mae, r2, loss"):
        fit(nn.Linear(4, 1), data=data, task=Regression(), monitor="accuracy")
    result = fit(nn.Linear(4, 1), data=data, task=Regression(), lr=0.01)
    assert result.best_step == min(result.curve, key=lambda point: point.metrics["val/rmse"]).step
    assert fit(nn.Linear(4, 1), data=data, task=Regression(), lr=0.01, select="last").best_step == result.steps


def test_a_metric_that_is_not_defined_on_a_split_is_no_divergence() -> None:
    train = TensorSplit(problem().train.images, problem().train.images.sum(1, keepdim=True))
    val = TensorSplit(problem().val.images, torch.ones(len(problem().val), 1))  # R2 of equal labels divides by zero
    data = Data(train, val, val, (4,), 1)

    with pytest.raises(TrainingError, match=r"`train.monitor` \(=r2\) must be finite on the validation split"):
        fit(nn.Linear(4, 1), data=data, task=Regression(), lr=0.01, monitor="r2")
    assert fit(nn.Linear(4, 1), data=data, task=Regression(), lr=0.01, monitor="r2", select="last").steps > 0


def test_a_metric_of_an_own_task_that_is_not_finite_is_blamed_on_its_measure() -> None:
    class Undefined:
        metrics = (Metric("mine", "", "higher", margin=0.1),)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        def size(self, batch: Any) -> int:
            return len(batch[1])

        def measure(self, model: nn.Module, batches: Any) -> dict[str, float]:
            return {"loss": 1.0, "mine": math.nan}

    with pytest.raises(TrainingError, match=r"fix `measure` of `task` \(=Undefined\), or pass train.monitor=loss"):
        fit(network(), task=Undefined())


def test_no_batch_beyond_the_last_is_loaded() -> None:
    class Counting(Items):
        loads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            Counting.loads += 1
            return super().__getitem__(index)

    data = problem()
    fit(nn.Linear(4, 3), data=Data(LoaderSplit(Counting(0.0)), data.val, data.test, (4,), 3), epochs=None, steps=3)

    assert Counting.loads == 24


def test_frozen_parameters_are_not_trained() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()

    fit(model)

    assert torch.equal(model[0].weight, before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_real_training_reaches_what_the_default_job_shows() -> None:
    """The default training on digits reaches 98% of the test digits or more."""
    digits = data_sets.load(vars(schema_of("data", "digits")()))
    cosine = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None}
    for seed in range(2):
        model = model_building.build(
            vars(schema_of("model", "cnn")()), input_shape=digits.input_shape, classes=digits.classes, seed=seed
        )
        config = settings(lr=0.05, epochs=15, batch_size=64, scheduler=cosine)
        training_loop.fit(job(model, CLASSES, config, data=digits, seed=seed))
        assert evaluate(model, digits.test, CLASSES, device=CPU).figures["accuracy"] > 0.98
