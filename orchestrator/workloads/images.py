"""The named image sets: normalised float32 inputs of shape (examples, channels, height, width), labels as int64.

The large ones keep their pixels as they are stored, in uint8 and once a node, and normalise each batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads import idx_files, node_cache
from orchestrator.workloads.splits import TensorSplit


def digits(
    test_fraction: float = 0.2, mean: Sequence[float] = (0.3053,), std: Sequence[float] = (0.3760,)
) -> dict[str, Any]:
    """Return scikit-learn's handwritten digits (1,797 of 1x8x8); the same random examples are always the test split."""
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
    """Read 64 pixels and the label a row. `sklearn.datasets` is not imported: that takes each worker 1.3 s."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("`data` digits is a part of scikit-learn, which is not installed: pip install scikit-learn.")
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
        return _prepared((train.unsqueeze(1), test.unsqueeze(1)), (train_labels, test_labels))

    source = {"idx": dict(published.md5), "files": [node_cache.stamp(path) for path in paths]}
    return {**_splits(node_cache.shared(source, prepare), normalise), "classes": 10}


def huggingface(
    path: str,
    subset: str | None = None,
    revision: str | None = None,
    train_split: str = "train",
    test_split: str = "test",
    image_key: str = "image",
    label_key: str = "label",
    mode: str = "RGB",
    size: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return an image classification set of Hugging Face `datasets`, held in memory: of the hub's, once a node.

    Args:
        path: of the set on the hub, or of a directory.
        subset: which configuration of the set, where it has several.
        revision: branch, tag or commit on the hub.
        train_split: name of the split to train on.
        test_split: name of the split to test on.
        image_key: column of the images.
        label_key: column of the labels.
        mode: RGB, or L for grey.
        size: [height, width] to resize to; None needs images of one size.
        mean: per channel, of pixels in [0, 1]; None takes the training split's.
        std: likewise.

    Raises:
        DataError: `datasets` is not installed, a column is absent, or the images differ in size.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "`data` huggingface needs the package datasets, which is not installed: "
            "pip install 'pruning-orchestrator[hf]'."
        ) from error
    parts, classes = [], None
    for split in (train_split, test_split):
        rows = load_dataset(path, subset, split=split, revision=revision)
        for name, key in (("image_key", image_key), ("label_key", label_key)):
            if key not in rows.column_names:
                raise DataError(
                    f"`data.{name}` (={key}) is no column of {path}; it has {', '.join(rows.column_names)}."
                )
        parts.append(rows)
        classes = getattr(rows.features[label_key], "num_classes", None)

    measured = mean is None or std is None

    def prepare() -> dict[str, Tensor]:
        pixels = [_stacked(path, rows[image_key], mode, size) for rows in parts]
        prepared = _prepared(pixels, [torch.tensor(list(rows[label_key])) for rows in parts])
        if measured:
            spread, centre = torch.std_mean(pixels[0].double() / 255, dim=(0, 2, 3), correction=0)
            prepared |= {"mean": centre, "std": spread}
        return prepared

    options = [train_split, test_split, image_key, label_key, mode, size and list(size), measured, _pillow()]
    files = [node_cache.stamp(file["filename"]) for rows in parts for file in rows.cache_files]
    source = {"arrow": options, "files": files}
    # Rows of a local directory may point to images there, which nothing here would see change.
    found = node_cache.shared(source, prepare) if files and not Path(path).exists() else prepare()
    mean, std = mean or found["mean"].tolist(), std or found["std"].tolist()
    return {**_splits(found, Normalisation.of(mean, std, channels=found["train"].shape[1])), "classes": classes}


def _pillow() -> str:
    """Return the version that decodes and resizes."""
    from PIL import __version__

    return __version__


def _prepared(images: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"train": images[0], "train_labels": labels[0], "test": images[1], "test_labels": labels[1]}


def _splits(prepared: Mapping[str, Tensor], normalise: Normalisation) -> dict[str, TensorSplit]:
    labels = {name: prepared[f"{name}_labels"] for name in ("train", "test")}
    labels = {name: each if each.is_floating_point() else each.long() for name, each in labels.items()}
    return {name: TensorSplit(prepared[name], labels[name], normalise) for name in labels}


def _stacked(path: str, images: Iterable[Any], mode: str, size: Sequence[int] | None) -> Tensor:
    """Return PIL images as uint8 (examples, channels, height, width)."""
    if mode not in ("RGB", "L"):
        raise DataError(f"`data.mode` (={mode}) must be RGB or L.")
    arrays = []
    for image in images:
        converted = image.convert(mode)
        arrays.append(np.asarray(converted if size is None else converted.resize((size[1], size[0]))))
    sizes = sorted({array.shape[:2] for array in arrays})
    if len(sizes) > 1:
        raise DataError(
            f"`data.size` (=null) needs images of one size, but those of {path} have {len(sizes)}, from "
            f"{list(sizes[0])} to {list(sizes[-1])}; pass data.size=[height,width] to resize them."
        )
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.unsqueeze(1) if mode == "L" else stacked.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Normalisation:
    """uint8 pixels (examples, channels, height, width) -> (pixels / largest - mean) / std in float32."""

    mean: Tensor
    std: Tensor
    largest: int = 255

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], *, channels: int, largest: int = 255) -> Normalisation:
        """Return the one with this `mean` and `std`, each of one entry or of one a channel."""
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise DataError(f"`data.{name}` (={list(values)}) must have 1 or {channels} entries, one a channel.")
        if min(std) <= 0:
            raise DataError(f"`data.std` (={list(std)}) must be positive; pass [1.0] to leave the scale as it is.")
        centre, scale = (torch.tensor(list(values)).view(1, -1, 1, 1) for values in (mean, std))
        return cls(centre, scale, largest)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(self.largest).sub_(self.mean).div_(self.std)
