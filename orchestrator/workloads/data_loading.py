"""Load a data set, built-in or from any `_target_`, as three splits that all trials of a process share.

A target returns `Data`; or a dict with `train` and `test` (and `val`, and `classes`); or a tuple (train, test) or
(train, val, test). A split is a pair of tensors or arrays (inputs, labels), a Dataset of these pairs, or a stream of
them (an IterableDataset). Without `val`, a validation split is cut from `train` by `val_fraction` or `val_size` and
`split_seed`; a stream cannot be cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from orchestrator.catalogue.data import DATA, TEST
from orchestrator.config.config_groups import violations_of
from orchestrator.core.errors import DataError
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.seeding import seeded
from orchestrator.workloads.data_sets.text import TextCodec
from orchestrator.workloads.inspection import digests_of, first, shared_examples
from orchestrator.workloads.splits import LoaderSplit, Split, TensorSplit
from orchestrator.workloads.streamed_splits import StreamSplit
from orchestrator.workloads.targets import create, given, returned_function
from orchestrator.workloads.tasks.batch import tensors

NAMED = ("train", "val", "test", "tests", "classes", "transform", "collate", "steps_per_epoch", "codec")
"""Keys allowed in the dict that a target returns."""
OURS = ("val_fraction", "val_size", "split_seed", "num_workers", "steps_per_epoch")
"""Keys of a data node that apply to the target's splits; the target does not get them."""
Made = TensorSplit | LoaderSplit | StreamSplit
"""Types of splits that this module makes."""
VAL_FRACTION = 0.1
"""Default fraction of the training split that is cut off for validation."""
_last_requested: list[TensorSplit] = []
"""Splits of the data set that was requested last; only these may have a copy on a device."""


@dataclass(frozen=True)
class Data:
    """Splits of a data set: `train` to learn from, `val` to select by, `test` to read once."""

    train: Split
    val: Split
    test: Split
    input_shape: tuple[int, ...]
    """Shape of one example."""
    classes: int
    """Number of classes, or of outputs if the labels are real numbers."""
    tests: Mapping[str, Split] = field(default_factory=dict)
    """Further test splits, read as often as `test`."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Split -> digest of its examples, for the user's own data; published data sets are pinned by their keys."""

    shared: int | None = None
    """Number of test examples that are training or validation examples, too, of the user's own data; None if it is
    unknown."""
    codec: TextCodec | None = None
    """Conversion between a text and its tokens; None if the data are no text, or the target does not give it."""

    @property
    def digest(self) -> str:
        """Digest that differs between loads of different data; empty for a built-in data set."""
        return digest(canonical_json(self.digests)) if self.digests else ""

    @property
    def splits(self) -> dict[str, Split]:
        """All splits, by their names in messages."""
        tests = {f"{name} test": split for name, split in self.tests.items()}
        return {"train": self.train, "val": self.val, "test": self.test, **tests}


def load(config: Mapping[str, Any], sources: Mapping[str, Any] | None = None) -> Data:
    """Return the data set that `config` describes; a process caches its last four and shares them between trials.

    Data sets that were requested earlier release their copies on devices.

    Args:
        config: `kind` or `_target_`, its arguments, and `val_fraction` or `val_size`, `split_seed`, `num_workers`
            (of a Dataset's loader), `steps_per_epoch` (of a training stream). `name` is for display.
        sources: fingerprint of the code and files that the data set depends on; another fingerprint is another data
            set.

    Raises:
        OrchestratorError: the target fails or does not return splits, or a split is empty.
    """
    named = {key: value for key, value in config.items() if key != "name"}
    found = _load(canonical_json(named), canonical_json(sources))
    splits = [split for split in (found.train, found.val, found.test) if isinstance(split, TensorSplit)]
    for other in _last_requested:
        if not any(other is split for split in splits):
            other.leave_device()
    _last_requested[:] = splits
    return found


@lru_cache(maxsize=4)
def _load(node: str, _sources: str) -> Data:
    return load_anew(json.loads(node))


def load_anew(config: Mapping[str, Any]) -> Data:
    """Load the data set that `config` describes, without cache or sharing."""
    found, kind = _read(config), config.get("kind")
    return replace(found, digests=digests_of(found.splits)) if kind is None or DATA[kind].files else found


def _read(config: Mapping[str, Any]) -> Data:
    for sentence in violations_of("data", config):
        raise DataError(sentence)
    seed = int(config.get("split_seed", 0))
    with seeded(seed):
        returned = create("data", {key: value for key, value in config.items() if key not in OURS}, kinds=DATA)
    if isinstance(returned, Data):
        _refuse_cut(config)
        return replace(returned, shared=_shared(returned.splits, config))
    named = _named(returned, config)
    workers = int(config.get("num_workers", 0))
    collate = returned_function("collate", "a list of examples", named, config)
    given_splits = {key: named[key] for key in ("train", "val", "test") if named.get(key) is not None}
    splits = {key: _split(key, value, workers, collate) for key, value in given_splits.items()}
    splits["train"] = _with_steps(splits["train"], named, config)
    if "val" in splits:
        _refuse_cut(config)
    else:
        splits["train"], splits["val"] = _cut(splits["train"], config, seed)
    tests = {name: _split(f"{name} test", value, workers, collate) for name, value in _tests(named, config).items()}
    for key, split in (splits | tests).items():
        if split.empty() if isinstance(split, StreamSplit) else len(split) == 0:
            raise DataError(f"{given('data', config)} must give every split examples, but its {key} split is empty.")
    classes, shared = _classes(named, splits), _shared(splits, config)
    splits, tests = ({key: _collated(split, collate, workers) for key, split in of.items()} for of in (splits, tests))
    train = _with_transform(splits["train"], named, config, workers)
    return Data(
        train, splits["val"], splits["test"], _shape(train), classes, tests, codec=named.get("codec"), shared=shared
    )


def _shared(splits: Mapping[str, Split], config: Mapping[str, Any]) -> int | None:
    """Return how many test examples of the user's own data are training or validation examples; None if unknown."""
    if not config.get("_target_"):
        return None
    return shared_examples(splits["train"], splits["val"], splits["test"], given("data", config))


def _refuse_cut(config: Mapping[str, Any]) -> None:
    for key in ("val_fraction", "val_size"):
        if config.get(key) is not None:
            raise DataError(
                f"`data.{key}` (={config[key]}) must be null, because {given('data', config)} returns a validation "
                "split of its own."
            )


def _named(returned: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the returned splits by name."""
    if isinstance(returned, list | tuple) and len(returned) in (2, 3):
        keys = ("train", "test") if len(returned) == 2 else ("train", "val", "test")
        if any(isinstance(each, Tensor | np.ndarray) for each in returned):
            raise DataError(
                f"{given('data', config)} returned ({', '.join(type(each).__name__ for each in returned)}) instead "
                f"of ({', '.join(keys)}), each a pair (inputs, labels); did you return one split?"
            )
        return dict(zip(keys, returned, strict=True))
    if isinstance(returned, Mapping) and {"train", "test"} <= set(returned) <= {*NAMED}:
        return returned
    kind = f"a dict of {sorted(map(str, returned))}" if isinstance(returned, Mapping) else type(returned).__name__
    kind = f"a {kind} of {len(returned)}" if isinstance(returned, list | tuple) else kind
    raise DataError(
        f"{given('data', config)} must return a dict with train and test (and val, tests, classes, transform, "
        f"collate, steps_per_epoch, codec), or a tuple (train, test) or (train, val, test), not {kind}."
    )


def _with_transform(train: Made, named: Mapping[str, Any], config: Mapping[str, Any], workers: int) -> Made:
    """Return the training split with its transform, which no other split gets."""
    transform = returned_function("transform", "the inputs of a training example", named, config)
    return train if transform is None else replace(_as_loader_split(train, workers), transform=transform)


def _collated(split: Made, collate: Callable[[list[Any]], Any] | None, workers: int) -> Made:
    return split if collate is None else replace(_as_loader_split(split, workers), collate=collate)


def _as_loader_split(split: Made, workers: int) -> LoaderSplit | StreamSplit:
    """Return a split that is read example by example."""
    if isinstance(split, TensorSplit):
        return LoaderSplit(TensorDataset(*split.take(torch.arange(len(split)))), workers)
    return split


def _tests(named: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the further test splits by name."""
    tests = named.get("tests") or {}
    if not isinstance(tests, Mapping) or not all(isinstance(name, str) and TEST.fullmatch(name) for name in tests):
        found = list(tests) if isinstance(tests, Mapping) else type(tests).__name__
        raise DataError(
            f"{given('data', config)} must return `tests` as a dict of splits by names of letters, digits and "
            f'underscores, as in {{"corrupted": split}}, not {found}.'
        )
    return tests


def _with_steps(train: Made, named: Mapping[str, Any], config: Mapping[str, Any]) -> Made:
    """Return the training split; a stream gets its number of steps per epoch."""
    steps = named.get("steps_per_epoch") if config.get("steps_per_epoch") is None else config["steps_per_epoch"]
    if isinstance(train, StreamSplit):
        return train.in_steps(train.steps if steps is None else steps, given("data", config))
    if steps is not None:
        raise DataError(
            f"`data.steps_per_epoch` (={steps}) must be null, because the train split of {given('data', config)} has a "
            "length; leave it out, or return a stream (an IterableDataset)."
        )
    return train


def _split(key: str, value: Any, workers: int, collate: Callable[[list[Any]], Any] | None = None) -> Made:
    if isinstance(value, TensorSplit | LoaderSplit | StreamSplit):
        return value
    if isinstance(value, TensorDataset) and len(value.tensors) == 2:
        value = value.tensors
    if isinstance(value, list | tuple) and len(value) == 2:
        images, labels = (each if isinstance(each, Tensor) else torch.tensor(np.asarray(each)) for each in value)
        if len(images) != len(labels):
            raise DataError(
                f"`data`: the {key} split has {len(images)} inputs but {len(labels)} labels; give each input one label."
            )
        return TensorSplit(images, labels if labels.is_floating_point() else labels.long())
    reads = isinstance(value, Dataset) or (hasattr(value, "__getitem__") and not isinstance(value, Mapping | Sequence))
    if isinstance(value, IterableDataset):
        return StreamSplit(value, num_workers=workers, collate=collate)
    if reads and hasattr(value, "__len__"):
        return LoaderSplit(value, workers, collate=collate)
    raise DataError(
        f"`data`: the {key} split is of type {type(value).__name__}; return a pair of tensors or arrays (inputs, "
        "labels), a Dataset with a length or an IterableDataset. The orchestrator makes the DataLoader, so that its "
        "order follows from the trial's seed."
    )


def _cut(train: Made, config: Mapping[str, Any], seed: int) -> tuple[Made, Made]:
    """Cut a validation split from `train`: random examples, or the end of a text.

    The remaining examples keep their order.
    """
    if isinstance(train, StreamSplit):
        raise DataError(
            f"{given('data', config)} returns a training stream, from which no validation split can be cut; return "
            "a dict with `val` besides `train` and `test`."
        )
    if len(train) < 2:
        raise DataError(
            f"{given('data', config)} must give at least 2 examples in its train split, from which the validation "
            f"split is cut, but gives {len(train)}; return more examples, or return (train, val, test)."
        )
    if isinstance(train, LoaderSplit) and train.draws():
        raise DataError(
            f"{given('data', config)} draws random numbers when it reads a training example, so a validation split "
            "cut from it would be augmented, too; return a dict with the random part as `transform`, which only "
            "training examples get, or with a `val` that is not random."
        )
    fraction = config.get("val_fraction")
    size = config.get("val_size") or round(len(train) * (VAL_FRACTION if fraction is None else fraction))
    if not 0 < size < len(train):
        raise DataError(
            f"`data.val_size` (={size}, from data.val_fraction={fraction}) must lie between 1 and {len(train) - 1}, "
            "one less than the size of the training split; pass another val_size or val_fraction."
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    if isinstance(train, TensorSplit) and train.in_order:
        order = torch.arange(len(train)).flip(0)
    val, rest = order[:size].sort().values, order[size:].sort().values
    return train.subset(rest), train.subset(val)


def _shape(split: Split) -> tuple[int, ...]:
    """Return the input shape of one example; with several inputs, the shape of the first."""
    return tuple(next(tensors(first(split))).shape[1:])


def _classes(named: Mapping[str, Any], splits: Mapping[str, Made]) -> int:
    """Return the number of classes, or the number of outputs per example if the labels are real numbers.

    The target gives the number of classes, or the Dataset's `classes` does; otherwise it is the largest label plus one.
    """
    if named.get("classes") is not None:
        return int(named["classes"])
    listed = getattr(named["train"], "classes", None)
    if listed is not None:
        return len(listed)
    held = [split for split in splits.values() if isinstance(split, TensorSplit)]
    if len(held) == len(splits) and held[0].labels.is_floating_point():
        return held[0].labels[0].numel()
    if len(held) == len(splits):
        return 1 + max(int(split.labels.max()) for split in held)
    raise DataError(
        "`data`: the number of classes is unknown; return a dict with `classes`, or give the Dataset a `classes` list."
    )
