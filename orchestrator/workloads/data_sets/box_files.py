"""Images with boxes in files: annotations in COCO's form, or YOLO's labels; letterboxed to one size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.core.errors import DataError
from orchestrator.planning.file_places import box_places
from orchestrator.workloads.data_sets.box_images import Target, in_a_batch, target
from orchestrator.workloads.data_sets.named import Normalisation

GREY = 114
"""Value of the pixels around a letterboxed image, as in YOLO."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
Row = tuple[int, list[float], float, bool]
"""Label, box as x1, y1, x2, y2, area, and whether it is a crowd."""


@dataclass(frozen=True)
class Labelled:
    """Image file, and its boxes in pixels or, if `relative`, in fractions of its sides."""

    path: Path
    rows: Sequence[Row]
    relative: bool


@dataclass(frozen=True)
class Letterboxed(Dataset[tuple[Tensor, Target]]):
    """Images scaled to fit into `size`, [height, width], in the middle of a grey image."""

    images: Sequence[Labelled]
    size: Sequence[int]
    normalise: Normalisation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        from PIL import Image

        labelled = self.images[index]
        image = _opened(labelled.path)
        sides = np.array(image.size)
        whole = np.array(self.size)[::-1]
        fitted = (sides * min(whole / sides)).round().astype(int).clip(1)
        corner = (whole - fitted) // 2
        (left, top), (width, height) = corner, fitted
        pixels = np.full((*self.size, 3), GREY, np.uint8)
        scaled = image.resize((int(width), int(height)), Image.Resampling.BILINEAR)
        pixels[top : top + height, left : left + width] = np.array(scaled)
        scale, rows = np.tile(fitted / (1 if labelled.relative else sides), 2), labelled.rows
        boxes = np.reshape([row[1] for row in rows], (-1, 4)) * scale + np.tile(corner, 2)
        areas = [row[2] * float(scale[0] * scale[1]) for row in rows]
        labels, crowds = [row[0] for row in rows], [int(row[3]) for row in rows]
        known = target(index, boxes.tolist(), labels, area=areas, iscrowd=crowds)
        return self.normalise(torch.from_numpy(pixels.transpose(2, 0, 1)).unsqueeze(0))[0], known


def _opened(path: Path) -> Any:
    """Return an image in RGB, upright as its camera says, with the upper 8 of 16 bits."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I;16"):  # of which Pillow would clip values above 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"`data` (=boxes) cannot read {path} ({error}); save it again, or take it out.") from None


def boxes(
    train: str,
    test: str,
    val: str | None = None,
    images: str | None = None,
    size: Sequence[int] = (640, 640),
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> dict[str, Any]:
    """Return letterboxed images of `size`; crowds are in no training example, and boxes without an area in none at all.

    Labels are the category ids of COCO's form, and YOLO's classes plus one, since 0 is the background.

    Args:
        train, test, val: JSON file in COCO's form, or directory of images with YOLO's labels, see `box_places`; without
            `val`, it is cut from `train`.
        images: directory of the images that JSON files name; None for the directory of each file.
        size: [height, width] of the images.
        mean, std: normalisation of pixels in [0, 1].
    """
    normalise = Normalisation.of(mean, std, channels=3)
    found, labels = dict[str, Letterboxed](), [0]
    for name, place in (("train", train), ("test", test), ("val", val)):
        if place is not None:
            notes, folder = map(Path, box_places(place, images))
            read = _coco(notes, folder) if notes.is_file() else _yolo(notes, folder)
            kept = [replace(each, rows=_counted(each.rows, train=name == "train")) for each in read]
            labels += [row[0] for each in kept for row in each.rows]
            found[name] = Letterboxed(kept, size, normalise)
    return {**found, "classes": max(labels) + 1, "collate": in_a_batch}


def _counted(rows: Sequence[Row], *, train: bool) -> list[Row]:
    return [row for row in rows if row[1][2] > row[1][0] and row[1][3] > row[1][1] and not (train and row[3])]


def _coco(file: Path, folder: Path) -> Iterator[Labelled]:
    """Yield the images of a JSON file in COCO's form."""
    try:
        found = json.loads(file.read_bytes())
        rows: dict[Any, list[Row]] = {image["id"]: [] for image in found["images"]}
        if len(rows) < len(found["images"]):
            raise ValueError("two images have one id")
        for place, each in enumerate(found["annotations"]):
            if each["image_id"] not in rows:
                raise ValueError(f"annotations[{place}].image_id={each['image_id']!r} is no image's id")
            rows[each["image_id"]].append(_annotation(each, f"annotations[{place}]"))
        named = [(folder / image["file_name"], rows[image["id"]]) for image in found["images"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"`data` (=boxes) cannot read {file} ({type(error).__name__}: {error}); it must be JSON with `images` (id, "
            "file_name) and `annotations` (image_id, category_id from 1, bbox: [x, y, width, height]), as COCO's."
        ) from None
    for path, own in named:
        if not path.is_file():
            raise DataError(f"`data` (=boxes): {file} names {path}, which is missing; pass data.images=DIRECTORY.")
        yield Labelled(path, own, relative=False)


def _annotation(given: Any, where: str) -> Row:
    """Read an annotation in COCO's form; raise ValueError for a category below 1 or a box that is no numbers."""
    x, y, width, height = map(float, given["bbox"])
    category, area = float(given["category_id"]), float(given.get("area", width * height))
    if category < 1 or category % 1:
        raise ValueError(
            f"{where}.category_id={given['category_id']!r}: 0 is the background of detectors; add 1 to all"
        )
    if not np.isfinite([x, y, width, height, area]).all():
        raise ValueError(f"{where} has the box {given['bbox']} with the area {area}")
    return int(category), [x, y, x + width, y + height], area, bool(int(given.get("iscrowd") or 0))


def _yolo(labels: Path, folder: Path) -> Iterator[Labelled]:
    """Yield the images of a directory; an image without a file of labels has no boxes."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(
            f"`data` (=boxes): no images ({', '.join(SUFFIXES)}) are in {folder}; pass a directory of images, as "
            "images/train beside labels/train."
        )
    for path in paths:
        file = (labels / path.relative_to(folder)).with_suffix(".txt")
        try:
            lines = file.read_text("utf-8-sig").splitlines() if file.is_file() else []
        except UnicodeDecodeError as error:
            raise DataError(f"`data` (=boxes) cannot read {file} ({error}); save it as UTF-8.") from None
        found = [_row(line, f"line {n} of {file}") for n, line in enumerate(lines, 1) if line.strip()]
        yield Labelled(path, found, relative=True)


def _row(line: str, where: str) -> Row:
    try:
        kind, x, y, width, height = map(float, line.split())
        if kind < 0 or kind % 1 or not all(0 <= each <= 1 for each in (x, y, width, height)):
            raise ValueError
    except ValueError:
        raise DataError(
            f"`data` (=boxes): {where} is {line.strip()!r}; it must hold a class from 0 and four fractions from 0 to "
            "1: x and y of the box's centre, its width and height."
        ) from None
    return int(kind) + 1, [x - width / 2, y - height / 2, x + width / 2, y + height / 2], width * height, False
