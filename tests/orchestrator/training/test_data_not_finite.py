"""Losses that are not finite: data with NaN or infinity are blamed first, then the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_training_stages import chain, run
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from training_cases import BATCH, CPU, TRAIN, fit, job, points, problem, settings

from orchestrator.config.training import Train
from orchestrator.core.errors import DataError
from orchestrator.core.seeding import derive
from orchestrator.store.store import Store
from orchestrator.training import pruning_rounds
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.own_loop import Context, run_own_loop
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import require_finite, spoilt, spoilt_in
from orchestrator.workloads.splits import LoaderSplit, TensorSplit
from orchestrator.workloads.streamed_splits import StreamSplit
from orchestrator.workloads.tasks.task import Measured

AT = 17
"""Index of the broken example."""


def broken(value: float = torch.nan, count: int = TRAIN) -> TensorSplit:
    split = points(count, 0)
    images = split.images.clone()
    images[AT, 2] = value
    return TensorSplit(images, split.labels)


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of the broken points."""

    def __init__(self, count: int = TRAIN) -> None:
        self.split = broken(count=count)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.split.images[index], self.split.labels[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        items = Items()
        yield from (items[index] for index in range(len(items)))


def step_of(seed: int, accumulate: int = 1) -> int:
    """Return the step that first reads the broken example."""
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(derive(seed, "order"))).tolist()
    return int(order.index(AT)) // (BATCH * accumulate) + 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_step_that_reads_nan_names_the_example(workers: int | None, accumulate: int) -> None:
    train = broken() if workers is None else LoaderSplit(Items(), workers)
    step = step_of(4, accumulate)

    with pytest.raises(DataError) as caught:
        fit(nn.Linear(4, 3), seed=4, data=replace(problem(), train=train), accumulate=accumulate)

    assert str(caught.value) == (
        f"the training loss is nan at step {step}: `data` must give finite numbers, but the inputs of example {AT} "
        "(counted from 0) of its train split contain nan; replace such values, or leave the example out."
    )


def test_a_stream_is_named_without_an_index() -> None:
    train = StreamSplit(Stream(), steps=5)

    with pytest.raises(DataError, match=r"nan at step 3: .*the inputs of an example of its train split contain nan"):
        fit(nn.Linear(4, 3), data=replace(problem(), train=train))


def test_an_infinity_that_the_loss_of_its_own_step_hides_is_found_at_the_next() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # type: ignore[operator, union-attr]

    with pytest.raises(DataError, match=rf"example {AT} .* contain -inf") as caught:
        fit(model, seed=4, data=replace(problem(), train=broken(-torch.inf)), lr=0.01)

    assert f"at step {step_of(4) + 1}:" in str(caught.value), "the example's gradient is NaN, but its loss is finite"


def test_the_validation_split_is_named_by_its_example() -> None:
    with pytest.raises(DataError, match=rf"^the validation loss is nan at step 7: .* example {AT} .* its val split"):
        fit(nn.Linear(4, 3), data=replace(problem(), val=broken(count=30)), eval_batch_size=8)


def test_a_learning_rate_is_blamed_where_the_data_are_finite() -> None:
    with pytest.raises(training_loop.Diverged, match=r"training diverged; lower `train\.optimizer\.lr`"):
        fit(nn.Linear(4, 3), lr=float("inf"))


def reporting(model: nn.Module, task: Any, data: Any, config: Train, context: Context) -> None:
    del config
    for batch in data.train.batches(TRAIN, device=CPU):
        context.report(1, {"train/loss": task.loss(model, batch).item()})


@pytest.mark.parametrize(("data", "error"), [(broken(), DataError), (broken(1e38), training_loop.Diverged)])
def test_a_training_function_is_told_of_its_data_too(data: TensorSplit, error: type[Exception]) -> None:
    model, config = nn.Linear(4, 3), {**settings(), "_target_": f"{__name__}.reporting"}
    nn.init.constant_(model.weight, 10.0)
    nn.init.constant_(model.weight[0], -10.0)

    with pytest.raises(error, match=r"train/loss is (nan|inf) at step 1: "):
        run_own_loop(job(model, config=config, data=replace(problem(), train=data)), lambda: Measured({}))


def test_a_pruned_network_s_loss_is_blamed_on_the_validation_split() -> None:
    def blame(said: str) -> None:
        require_finite({"val": broken()}, 8, CPU, said)

    with pytest.raises(DataError, match=rf"^the loss of the pruned network is nan before .*: `data` .* {AT} .* val"):
        pruning_rounds.hold_finite({"loss": torch.nan}, "finetune", blame)


def with_a_broken_test() -> dict[str, Any]:
    train = points(TRAIN, 0)
    return {"train": (train.images, train.labels), "test": Items(), "classes": 3}


def test_a_dataset_to_test_by_is_named_by_its_example(store: Store) -> None:
    model = {"kind": "mlp", "input_shape": None, "classes": None, "hidden": [8]}

    with pytest.raises(
        DataError, match=rf"^the test loss is nan: `data` .* example {AT} .* of its test split contain nan"
    ):
        run(store, chain(data={"_target_": f"{__name__}.with_a_broken_test", "val_fraction": 0.15}, model=model))


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((torch.tensor([[1.0], [torch.inf]]), torch.tensor([0, 1])), (1, "inputs", torch.inf)),
        ((torch.ones(3, 2), torch.tensor([0.0, 1.0, -torch.inf])), (2, "labels", -torch.inf)),
        ({"pixels": torch.full((2, 2), torch.inf), "labels": torch.zeros(2)}, (0, "inputs", torch.inf)),
        ((torch.arange(4), torch.ones(4)), None),
    ],
)
def test_what_is_not_finite_is_found_in_any_form_of_batch(batch: Any, found: tuple[Any, ...] | None) -> None:
    seen = spoilt(batch)

    assert (seen and (seen.index, seen.part, seen.value)) == found


def test_batches_are_counted_through() -> None:
    found = spoilt_in(broken().batches(4, device=CPU), 4)

    assert found is not None
    assert found.index == AT
    assert spoilt_in(Data(*[points(9, 0)] * 3, (4,), 3).val.batches(4, device=CPU), 4) is None
