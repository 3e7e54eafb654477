"""Image data sets of Hugging Face `datasets`; decoded pixels of a hub's set are stored once per node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads import node_cache
from orchestrator.workloads.data_sets.named import Normalisation, by_split, splits_of

CHUNK = 256
"""Number of examples that are decoded at a time."""


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
    """Load an image classification set of Hugging Face `datasets`, in memory or, if it is large, mapped from a file.

    Few examples are decoded at a time; a set from the hub is decoded once per node.

    Args:
        path: name of the set on the hub, or a directory.
        subset: configuration of the set, if it has several.
        revision: branch, tag or commit on the hub.
        train_split: name of the training split.
        test_split: name of the test split.
        image_key: column of the images.
        label_key: column of the labels.
        mode: RGB, or L for grey.
        size: [height, width] to resize to; None requires images of one size.
        mean: mean per channel of pixels in [0, 1]; None computes it from the training split.
        std: standard deviation per channel of pixels in [0, 1]; None computes it from the training split.

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
        pixels, labels = zip(*(_read(path, rows, image_key, label_key, mode, size) for rows in parts), strict=True)
        return by_split(pixels, labels) | (_mean_and_std(pixels[0]) if measured else {})

    options = [train_split, test_split, image_key, label_key, mode, size and list(size), measured, _pillow_version()]
    files = [node_cache.stamp(file["filename"]) for rows in parts for file in rows.cache_files]
    source = {"arrow": options, "files": files}
    # Rows of a local directory may point to images there; their changes would not be noticed here.
    found = node_cache.shared(source, prepare) if files and not Path(path).exists() else prepare()
    mean, std = mean or found["mean"].tolist(), std or found["std"].tolist()
    return {**splits_of(found, Normalisation.of(mean, std, channels=found["train"].shape[1])), "classes": classes}


def _pillow_version() -> str:
    """Return the version of Pillow, which decodes and resizes."""
    from PIL import __version__

    return __version__


def _read(path: str, rows: Any, image_key: str, label_key: str, mode: str, size: Sequence[int] | None) -> list[Tensor]:
    """Return the images of a split as uint8 (examples, channels, height, width), and its labels."""
    if mode not in ("RGB", "L"):
        raise DataError(f"`data.mode` (={mode}) must be RGB or L.")
    pixels, labels, sizes = torch.empty(0), [], set()
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        labels.append(torch.tensor(list(chunk[label_key])))
        for place, image in enumerate(chunk[image_key], start):
            converted = image.convert(mode)
            array = np.array(converted if size is None else converted.resize((size[1], size[0])))
            sizes.add(array.shape[:2])
            if not len(pixels):
                pixels = node_cache.room((len(rows), 1 if mode == "L" else 3, *array.shape[:2]))
            if len(sizes) == 1:
                pixels[place] = torch.from_numpy(array if mode == "L" else array.transpose(2, 0, 1))
    if not sizes:
        raise DataError(f"`data.path` (={path}) must have examples in its training and test splits.")
    if len(sizes) > 1:
        raise DataError(
            f"`data.size` (=null) requires images of one size, but those of {path} have {len(sizes)}, from "
            f"{list(min(sizes))} to {list(max(sizes))}; pass data.size=[height,width] to resize them."
        )
    return [pixels, torch.cat(labels)]


def _mean_and_std(pixels: Tensor) -> dict[str, Tensor]:
    """Return mean and standard deviation per channel of pixels scaled to [0, 1], computed from exact sums."""
    total, squares = torch.zeros(2, pixels.shape[1], dtype=torch.int64)
    for chunk in torch.split(pixels, CHUNK // 16 or 1):  # squares take eight times the memory of pixels
        total += chunk.sum((0, 2, 3))
        squares += chunk.int().square().sum((0, 2, 3))
    count = pixels[:, 0].numel()
    sums = [(int(one), int(two)) for one, two in zip(total, squares, strict=True)]
    variance = [(count * two - one**2) / (count * 255) ** 2 for one, two in sums]
    mean = [one / (count * 255) for one, _ in sums]
    return {"mean": torch.tensor(mean, dtype=torch.float64), "std": torch.tensor(variance, dtype=torch.float64).sqrt()}
