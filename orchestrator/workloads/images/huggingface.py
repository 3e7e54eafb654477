"""Image sets of Hugging Face `datasets`, those of the hub kept once a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads import node_cache
from orchestrator.workloads.images.pixels import Normalisation, by_split, splits_of


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
        made = by_split(pixels, [torch.tensor(list(rows[label_key])) for rows in parts])
        if measured:
            spread, centre = torch.std_mean(pixels[0].double() / 255, dim=(0, 2, 3), correction=0)
            made |= {"mean": centre, "std": spread}
        return made

    options = [train_split, test_split, image_key, label_key, mode, size and list(size), measured, _pillow()]
    files = [node_cache.stamp(file["filename"]) for rows in parts for file in rows.cache_files]
    source = {"arrow": options, "files": files}
    # Rows of a local directory may point to images there, which nothing here would see change.
    found = node_cache.shared(source, prepare) if files and not Path(path).exists() else prepare()
    mean, std = mean or found["mean"].tolist(), std or found["std"].tolist()
    return {**splits_of(found, Normalisation.of(mean, std, channels=found["train"].shape[1])), "classes": classes}


def _pillow() -> str:
    """Return the version that decodes and resizes."""
    from PIL import __version__

    return __version__


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
