"""Digests of data sets: different for different data, at a cost that does not grow with the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from orchestrator.core.errors import DataError
from orchestrator.workloads import data_loading, inspection
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import Split, TensorSplit

HERE, N = __name__, 100
CHANGED: dict[str, Any] = {}
"""Changes to what the data target returns."""


def pair(seed: int, n: int = N) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 4


def tensors() -> dict[str, Any]:
    splits: dict[str, Any] = {name: pair(seed) for seed, name in enumerate(("train", "val", "test", "noisy"))}
    if "split" in CHANGED:
        splits[CHANGED["split"]][CHANGED["part"]][CHANGED["row"]] += 1
    return {**{name: splits[name] for name in ("train", "val", "test")}, "tests": {"noisy": splits["noisy"]}}


class Items(Dataset[tuple[Tensor, int]]):
    """Dataset with random examples, from torch's global generator or from a generator of its own."""

    classes = ("a", "b")
    read: list[int]

    def __init__(self) -> None:
        self.read, self.own = [], np.random.default_rng(CHANGED.get("seed", 0))

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        own = self.own.normal() if "own" in CHANGED else 0.0
        return torch.full((2,), float(index)) + torch.rand(2) + own, index % 2


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for number in range(10**9):
            yield torch.full((2,), float(number + CHANGED.get("shift", 0))), number % 2


class Ours:
    """Split of the user's own class."""

    def __len__(self) -> int:
        return N

    def batches(self, batch_size: int, *, device: torch.device, **_: Any) -> Any:
        return [(torch.full((batch_size, 2), float(CHANGED.get("shift", 0))), torch.zeros(batch_size).long())]


def of(form: str) -> Any:
    if form == "tensors":
        return tensors()
    if form == "data":
        given: list[Split] = [Ours(), TensorSplit(*pair(1)), TensorSplit(*pair(2))]
        return Data(given[0], given[1], given[2], (2,), 4)
    if form == "transform":
        draw = np.random.default_rng(CHANGED.get("seed", 0))
        return {**tensors(), "transform": lambda inputs: inputs + float(draw.normal())}
    train = {"items": Items, "stream": Stream}[form]()
    return {"train": train, "val": pair(1), "test": pair(2), "classes": 2} | (
        {"steps_per_epoch": 3} if form == "stream" else {}
    )


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    CHANGED.clear()
    yield
    CHANGED.clear()


def anew(form: str, **changes: Any) -> Data:
    CHANGED.clear()
    CHANGED.update(changes)
    return data_loading.load_anew({"_target_": f"{HERE}.of", "form": form})


@pytest.mark.parametrize("form", ["tensors", "data", "transform", "items", "stream"])
def test_the_same_data_have_the_same_digest_whatever_the_global_generators_hold(form: str) -> None:
    digests = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = torch.get_rng_state()
        digests.append(anew(form).digest)
        assert torch.equal(before, torch.get_rng_state())

    assert digests[0] == digests[1]
    assert len(digests[0]) == 64


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("split", ["train", "val", "test", "noisy"])
def test_any_value_of_a_split_in_memory_counts_and_only_for_that_split(split: str, part: int) -> None:
    first, second = anew("tensors").digests, anew("tensors", split=split, part=part, row=N - 1).digests

    assert set(first) == {"train", "val", "test", "noisy test"}
    assert [name for name in first if first[name] != second[name]] == ["noisy test" if split == "noisy" else split]


@pytest.mark.parametrize(
    ("form", "changes", "split"),
    [
        ("items", {"own": True}, "train"),
        ("stream", {"shift": 1}, "train"),
        ("data", {"shift": 1}, "train"),
        ("transform", {"seed": 1}, "train"),
    ],
)
def test_what_is_read_example_by_example_counts_by_a_few(form: str, changes: dict[str, Any], split: str) -> None:
    first, second = anew(form).digests, anew(form, **changes).digests

    assert [name for name in first if first[name] != second[name]] == [split]


@pytest.mark.slow
def test_of_a_large_split_evenly_spaced_inputs_are_read_and_all_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "MOST", N * 8)  # enough for the labels and two thirds of the inputs
    first = anew("tensors", split="train", part=0, row=0).digest
    seen = {row: anew("tensors", split="train", part=0, row=row).digest != anew("tensors").digest for row in range(N)}
    labels = anew("tensors", split="train", part=1, row=97).digest

    assert first != anew("tensors").digest
    assert sum(seen.values()) == N * 8 // 12
    assert labels != anew("tensors").digest


def test_the_rows_of_a_split_count_and_not_all_that_is_stored() -> None:
    stored = pair(0)
    part = torch.arange(40, 80)
    splits = {
        "part": TensorSplit(*stored, rows=part),
        "same": TensorSplit(*(each[part] for each in stored)),
        "other": TensorSplit(*stored, rows=part.flip(0)),
    }

    found = inspection.digests_of(splits)

    assert found["part"] == found["same"] != found["other"]


def test_a_few_examples_of_a_dataset_are_read_however_many_it_has() -> None:
    found = anew("items")
    dataset = found.train.dataset  # type: ignore[attr-defined]

    assert len(set(dataset.read)) <= 1 + inspection.FEW
    assert max(dataset.read) >= N * 7 // 8


def test_what_is_built_in_has_none() -> None:
    assert data_loading.load({"kind": "digits"}).digest == ""


class Torn(Items):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index > 50:
            raise OSError("no such image")
        return super().__getitem__(index)


def torn() -> Any:
    return {"train": pair(0), "test": Torn(), "classes": 2}


def test_an_example_that_cannot_be_read_is_told_as_that() -> None:
    with pytest.raises(DataError, match=r"^`data`: examples of the test split cannot be read: OSError: no such image;"):
        data_loading.load_anew({"_target_": f"{HERE}.torn"})
