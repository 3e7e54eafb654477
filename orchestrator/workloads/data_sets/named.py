"""Built-in image data sets: normalised float32 inputs of shape (examples, channels, height, width), int64 labels.

Large sets keep their pixels in uint8, stored once per node, and normalise each batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads import node_cache
from orchestrator.workloads.data_sets import idx_files
from orchestrator.workloads.splits import TensorSplit


def by_split(images: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return images and labels of (train, test) under the names of their stored tensors."""
    return {"train": images[0], "train_labels": labels[0], "test": images[1], "test_labels": labels[1]}


def splits_of(kept: Mapping[str, Tensor], normalise: Normalisation) -> dict[str, TensorSplit]:
    """Return the splits of the tensors that `by_split` named."""
    labels = {name: kept[f"{name}_labels"] for name in ("train", "test")}
    labels = {name: each if each.is_floating_point() else each.long() for name, each in labels.items()}
    return {name: TensorSplit(kept[name], labels[name], normalise) for name in labels}


@dataclass(frozen=True)
class Normalisation:
    """Normalise uint8 pixels (examples, channels, height, width): (pixels / largest - mean) / std in float32."""

    mean: Tensor
    std: Tensor
    largest: int = 255

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], *, channels: int, largest: int = 255) -> Normalisation:
        """Build a normalisation from `mean` and `std`, each with one entry, or with one entry per channel."""
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise DataError(f"`data.{name}` (={list(values)}) must have 1 or {channels} entries, one per channel.")
        if min(std) <= 0:
            raise DataError(f"`data.std` (={list(std)}) must be positive; pass [1.0] to keep the scale.")
        centre, scale = (torch.tensor(list(values)).view(1, -1, 1, 1) for values in (mean, std))
        return cls(centre, scale, largest)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(self.largest).sub_(self.mean).div_(self.std)


def digits(
    test_fraction: float = 0.2, mean: Sequence[float] = (0.3053,), std: Sequence[float] = (0.3760,)
) -> dict[str, Any]:
    """Return scikit-learn's handwritten digits (1,797 of 1x8x8), always with the same random examples as test split."""
    if not 0.0 < test_fraction < 1.0:
        raise DataError(f"`data.test_fraction` (={test_fraction}) must lie in (0, 1); pass 0.2 to test on a fifth.")
    table = _digits_table()
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(table[:, :-1]).view(-1, 1, 8, 8)
    images = Normalisation.of(mean, std, channels=1, largest=16)(pixels)
    labels = torch.from_numpy(table[:, -1]).long()
    size = round(test_fraction * len(table))
    test, train = order[:size].sort().values, order[size:].sort().values
    return {"train": (images[train], labels[train]), "test": (images[test], labels[test]), "classes": 10}


def _digits_table() -> NDArray[np.uint8]:
    """Read 64 pixels and the label per row, without `sklearn.datasets`: its import takes each worker 1.3 s."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("`data` (=digits) needs scikit-learn, which is not installed: pip install scikit-learn.")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        return np.loadtxt(path, delimiter=",", dtype=np.uint8)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels]).astype(np.uint8)


def mnist(
    root: str = "data", download: bool = True, mean: Sequence[float] = (0.1307,), std: Sequence[float] = (0.3081,)
) -> dict[str, Any]:
    """Return MNIST (60,000 and 10,000 of 1x28x28; LeCun et al. 1998) from its idx files in `root`/mnist."""
    return _idx(idx_files.MNIST, root, download, mean, std)


def fashion_mnist(
    root: str = "data", download: bool = True, mean: Sequence[float] = (0.2860,), std: Sequence[float] = (0.3530,)
) -> dict[str, Any]:
    """Return Fashion-MNIST (60,000 and 10,000 of 1x28x28; arXiv 1708.07747) from its files in `root`/fashion-mnist."""
    return _idx(idx_files.FASHION_MNIST, root, download, mean, std)


def _idx(
    published: idx_files.IdxSet, root: str, download: bool, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Any]:
    normalise = Normalisation.of(mean, std, channels=1)
    paths = idx_files.find(published, Path(root).expanduser(), download=download)

    def prepare() -> dict[str, Tensor]:
        train, train_labels, test, test_labels = (torch.tensor(array) for array in idx_files.read(published, paths))
        return by_split((train.unsqueeze(1), test.unsqueeze(1)), (train_labels, test_labels))

    source = {"idx": dict(published.md5), "files": [node_cache.stamp(path) for path in paths]}
    return {**splits_of(node_cache.shared(source, prepare), normalise), "classes": 10}
