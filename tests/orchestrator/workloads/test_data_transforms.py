"""Transforms of training examples, collate functions, and loaders that are reused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from orchestrator.core.errors import DataError
from orchestrator.workloads import data_loading
from orchestrator.workloads.splits import LoaderSplit, Split

HERE, CPU = __name__, torch.device("cpu")


class Lengths(Dataset[Any]):
    """Dataset whose example i is i + 1 ones."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(index + 1), index


class Processes(Dataset[Any]):
    """Dataset whose examples are the id of the process that reads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(os.getpid())]), index


def noise(inputs: Tensor) -> Tensor:
    return inputs + torch.rand(())


def padded(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*examples, strict=True)
    return pad_sequence(list(inputs), batch_first=True), torch.tensor(labels)


def tensors(**_: Any) -> dict[str, Any]:
    inputs, labels = torch.arange(20.0).view(20, 1), torch.arange(20) % 2
    return {"train": (inputs, labels), "test": (inputs + 20, labels), "transform": noise}


def lengths(**_: Any) -> dict[str, Any]:
    return {"train": Lengths(), "test": Lengths(), "classes": 12, "collate": padded}


def as_rows(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*examples, strict=True)
    return -torch.stack(inputs), torch.stack(labels)


def gathered(**_: Any) -> dict[str, Any]:
    return {**tensors(), "collate": as_rows, "tests": {"more": tensors()["test"]}}


def wrong(key: str, **_: Any) -> dict[str, Any]:
    return {**lengths(), key: "flip"}


def inputs_of(split: Split, seed: int | None = None) -> Tensor:
    return torch.cat([inputs for inputs, _ in split.batches(3, device=CPU, seed=seed)])


def test_training_examples_alone_get_the_transform_and_it_follows_from_the_seed() -> None:
    found = data_loading.load({"_target_": f"{HERE}.tensors", "val_fraction": 0.2})
    train = found.train.batches(4, device=CPU, seed=1)
    first, again, second = (
        {int(value): value % 1 for inputs, _ in train.epoch(number) for value in inputs.flatten().tolist()}
        for number in (0, 0, 1)
    )

    assert all(fraction > 0 for fraction in first.values())
    assert first == again
    assert first.keys() == second.keys()
    assert first != second
    for split in (found.val, found.test):
        assert torch.equal(inputs_of(split), inputs_of(split).round())


def test_batches_are_made_by_the_collate_of_the_target() -> None:
    found = data_loading.load({"_target_": f"{HERE}.lengths"})
    (inputs, labels), *_ = found.test.batches(3, device=CPU)

    assert labels.tolist() == [0, 1, 2]
    assert inputs.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert len(found.train) + len(found.val) == 12


def test_batches_of_tensors_are_made_by_the_collate_too() -> None:
    found = data_loading.load({"_target_": f"{HERE}.gathered"})

    assert found.classes == 2
    for split in (found.val, found.test, found.tests["more"]):
        assert (inputs_of(split) <= 0).all()
    assert inputs_of(found.test).flatten().tolist() == [-float(value) for value in range(20, 40)]
    assert (inputs_of(found.train) < 0).all()  # the transform comes before the collate


@pytest.mark.parametrize("key", ["transform", "collate"])
def test_what_cannot_be_called_is_told(key: str) -> None:
    with pytest.raises(DataError, match=rf"must return a `{key}` that can be called with .*, not str"):
        data_loading.load({"_target_": f"{HERE}.wrong", "key": key})


def test_the_workers_of_an_evaluation_serve_the_next() -> None:
    split = LoaderSplit(Processes(), num_workers=1)
    first, second = (inputs_of(split) for _ in range(2))

    assert torch.equal(first, second)
    assert os.getpid() not in first
    left = iter(split.batches(3, device=CPU))
    assert torch.equal(next(left)[0], first[:3])  # reads one batch and stops, as the preflight does
    assert torch.equal(inputs_of(split), first)
