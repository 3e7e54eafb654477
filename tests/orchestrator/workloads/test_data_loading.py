"""Data loading: fixed splits, every return value a target may have, one copy a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from orchestrator.config.config_groups import schema_of
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.workloads import data_loading
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import LoaderSplit, Split, TensorSplit

HERE = __name__
N = 20


class Items(Dataset[tuple[Tensor, int]]):
    """User's Dataset with `classes`, as in torchvision."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2, 3), float(index)), index % 3


class Unlabelled(Items):
    def __getitem__(self, index: int) -> Any:
        return "text", 0


class Augmented(Items):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2, 3), float(index)) + random.random(), index % 3


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


ITEMS = Items()


def pair(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.arange(n, dtype=torch.float32).view(n, 1), torch.arange(n) % 4


def returned(shape: str) -> Any:
    """Data target that returns the value called `shape`."""
    x, y = pair()
    other = (x + N, y)
    arrays, others = ((inputs.numpy(), y.numpy().astype(np.uint8)) for inputs in (x, x + N))
    split = TensorSplit(x, y)
    shapes: dict[str, Any] = {
        "dict": {"train": (x, y), "test": other},
        "tuple": ((x, y), other),
        "arrays": (arrays, others),
        "tensor datasets": [TensorDataset(x, y), TensorDataset(*other)],
        "three": ((x, y), (x[:3], y[:3]), other),
        "data": Data(split, split, TensorSplit(*other), (1,), 4),
        "equal": ((x, y), (x, y)),
        "equal in another order": ((x, y), (x.flip(0), y.flip(0))),
        "equal as data": Data(split, TensorSplit(*other), split, (1,), 4),
        "one Dataset": (ITEMS, ITEMS),
        "parts of a Dataset": {"train": Subset(ITEMS, range(9)), "test": Subset(ITEMS, range(6, N)), "classes": 3},
        "apart": {"train": Subset(ITEMS, range(9)), "test": Subset(ITEMS, range(9, N)), "classes": 3},
        "shared": ((x, y), (torch.cat([x[:3], x + N]), torch.cat([y[:3], y]))),
        "other labels": ((x, y), (torch.cat([x[:3], x + N]), torch.cat([y[:3] + 1, y]))),
        "datasets": {"train": Items(), "test": Items()},
        "augmented": {"train": Augmented(), "test": Items()},
        "augmented with val": (Augmented(), Items(), Items()),
        "classes": {"train": Items(), "test": Items(), "classes": 9},
        "random": {"train": (torch.rand(N, 1), y), "test": (x, y)},
        "number": 3,
        "four": ((x, y),) * 4,
        "one split": (x, y),
        "no test": {"train": (x, y)},
        "unequal": ((x, y[:5]), (x, y)),
        "loader": (DataLoader(Items()), Items()),
        "stream": (Stream(), Items()),
        "text": (Unlabelled(), Items()),
        "empty": ((x, y), (x[:0], y[:0])),
        "no example": ((x[:0], y[:0]), (x, y)),
        "one example": (Subset(Items(), [0]), Items()),
    }
    return shapes[shape]


def load(shape: str, **changes: Any) -> Data:
    return data_loading.load({"_target_": f"{HERE}.returned", "shape": shape, **changes})


def tensors(split: Split) -> TensorSplit:
    assert isinstance(split, TensorSplit)
    return split


def digits(**changes: Any) -> Data:
    return data_loading.load({**vars(schema_of("data", "digits")()), **changes})


def test_digits_are_scikit_learns_each_in_one_split() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    found = digits()
    splits = [tensors(split) for split in (found.train, found.val, found.test)]
    images = torch.cat([split.images for split in splits]).flatten(1)
    rows = torch.cat([(images * 0.3760 + 0.3053) * 16, torch.cat([s.labels for s in splits]).unsqueeze(1)], 1)

    assert [len(split) for split in splits] == [1222, 216, 359]
    assert (found.input_shape, found.classes) == ((1, 8, 8), 10)
    expected = np.column_stack([pixels, labels]).astype(int)
    assert sorted(map(tuple, rows.round().int().tolist())) == sorted(map(tuple, expected.tolist()))


def test_digits_are_read_where_scikit_learn_keeps_its_file_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.workloads.data_sets import named

    direct = named._digits_table()
    monkeypatch.setattr(Path, "is_file", lambda self: False)

    assert np.array_equal(named._digits_table(), direct)


def test_a_set_whose_files_have_changed_is_read_again() -> None:
    config = {"kind": "digits", "val_size": 100}
    first = data_loading.load(config, {"files": {"a": "1"}})

    assert data_loading.load(config, {"files": {"a": "1"}}) is first
    assert data_loading.load(config, {"files": {"a": "2"}}) is not first


def test_split_seed_moves_the_validation_split_and_nothing_else() -> None:
    first, second = digits(), digits(split_seed=1)

    assert torch.equal(tensors(first.test).images, tensors(second.test).images)
    assert not torch.equal(tensors(first.val).images, tensors(second.val).images)


def test_the_split_does_not_depend_on_global_generators() -> None:
    torch.manual_seed(1)
    first = load("random", split_seed=2)
    data_loading._load.cache_clear()
    torch.manual_seed(9)

    assert torch.equal(tensors(load("random", split_seed=2).train).images, tensors(first.train).images)


def test_a_process_loads_a_set_once_whatever_it_is_called() -> None:
    assert digits(name="one") is digits(name="two")
    assert digits() is not digits(split_seed=3)


@pytest.mark.parametrize("kind", ["dict", "tuple", "arrays", "tensor datasets"])
def test_validation_is_cut_from_train(kind: str) -> None:
    found = load(kind, val_size=5)
    train, val = tensors(found.train), tensors(found.val)

    assert (len(train), len(val), len(found.test)) == (15, 5, N)
    assert sorted(torch.cat([train.images, val.images]).flatten().tolist()) == list(range(N))
    assert torch.equal(train.labels, train.images.flatten().long() % 4)
    assert train.labels.dtype == torch.int64
    assert (found.input_shape, found.classes) == ((1,), 4)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("dict", 0),
        ("shared", 3),
        ("other labels", 0),
        ("data", 0),
        ("parts of a Dataset", 3),
        ("apart", 0),
        ("datasets", None),
    ],
)
def test_examples_that_test_and_training_share_are_counted(kind: str, count: int | None) -> None:
    assert load(kind).shared == count


@pytest.mark.parametrize(("changes", "size"), [({}, 2), ({"val_fraction": 0.25}, 5), ({"val_size": 1}, 1)])
def test_size_of_the_cut(changes: dict[str, Any], size: int) -> None:
    assert len(load("dict", **changes).val) == size


def test_a_validation_split_of_the_targets_own_is_kept() -> None:
    assert len(load("three").val) == 3
    assert load("data").classes == 4
    for kind in ("three", "data"):
        with pytest.raises(DataError, match=r"`data\.val_size` \(=2\) must be null"):
            load(kind, val_size=2)


def test_a_users_dataset_becomes_a_loader_split_with_its_classes() -> None:
    found = load("datasets", val_size=4, num_workers=0)

    assert isinstance(found.train, LoaderSplit)
    assert (len(found.train), len(found.val), len(found.test)) == (16, 4, N)
    assert (found.input_shape, found.classes) == ((2, 3), 3)
    seen = [
        int(x[0, 0])
        for split in (found.train, found.val)
        for images, _ in split.batches(3, device=torch.device("cpu"))
        for x in images
    ]
    assert sorted(seen) == list(range(N))
    assert load("classes").classes == 9
    assert isinstance(load("augmented with val").train, LoaderSplit)


def test_only_the_set_that_was_asked_for_last_lies_on_a_device() -> None:
    meta = torch.device("meta")
    moved = tensors(load("dict").train).to(meta)
    assert tensors(load("dict").train).to(meta) is moved

    load("tuple")

    assert tensors(load("dict").train).to(meta) is not moved


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("number", {}, ["data._target_", "train and test", "not int"]),
        ("four", {}, ["data._target_", "not a tuple of 4"]),
        ("one split", {}, ["(Tensor, Tensor)", "(train, test)", "pair (inputs, labels)", "did you return one split?"]),
        ("no test", {}, ["data._target_", "a dict of ['train']"]),
        ("unequal", {}, ["train split", "20 inputs but 5 labels", "give each input one label"]),
        ("loader", {}, ["train split", "DataLoader", "Dataset"]),
        ("stream", {}, ["data.steps_per_epoch", "=null", "training stream"]),
        ("text", {}, ["(input tensor, label)", "(str, int)", "ToTensor"]),
        ("empty", {}, ["test split", "empty"]),
        ("no example", {}, ["data._target_", "at least 2 examples in its train split", "gives 0;"]),
        ("one example", {"val_fraction": 0.5}, ["data._target_", "at least 2 examples", "gives 1;"]),
        ("equal", {}, ["data._target_", "a test split of its own", "its 20 test examples are those of the training"]),
        ("equal", {"val_fraction": 0.5}, ["its 20 test examples"]),
        ("equal in another order", {}, ["its 20 test examples"]),
        ("equal as data", {}, ["its 20 test examples"]),
        ("one Dataset", {}, ["its 20 test examples"]),
        ("augmented", {}, ["data._target_", "draws random numbers", "`transform`"]),
        ("absent", {}, ["data._target_", "KeyError"]),
        ("dict", {"val_size": 20}, ["data.val_size", "=20", "19"]),
        ("dict", {"val_fraction": 0.01}, ["val_fraction=0.01", "19"]),
        ("dict", {"val_fraction": 1.5}, ["data.val_fraction", "=1.5", "(0, 1)"]),
        ("dict", {"val_fraction": 0.5, "val_size": 3}, ["both", "data.val_size=null"]),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(kind: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OrchestratorError) as caught:
        load(kind, **changes)

    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_dataset_without_classes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Items, "classes")

    with pytest.raises(DataError, match="number of classes is unknown"):
        load("datasets", split_seed=77)
