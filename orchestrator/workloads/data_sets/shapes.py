"""Images of drawn shapes with boxes and labels, made from a seed: a detector learns them in minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchestrator.core.seeding import derive
from orchestrator.workloads.data_sets.box_images import BoxImages, Target, in_a_batch, target
from orchestrator.workloads.data_sets.named import Normalisation

Offsets = NDArray[np.float32]
Inside = Callable[[Offsets, Offsets], NDArray[np.bool_]]
"""Horizontal and vertical offsets from the centre, in radii -> whether a pixel belongs to the shape."""
SHAPES: Mapping[str, Inside] = {
    "circle": lambda x, y: x**2 + y**2 <= 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 0.85,
    "triangle": lambda x, y: (2 * abs(x) <= y + 1) & (y <= 1),
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) <= 0.3,
    "ring": lambda x, y: (x**2 + y**2 <= 1) & (x**2 + y**2 >= 0.4),
}
"""Name of a shape -> its pixels within a square of two radii."""
RADII = (0.1, 0.2)
"""Smallest and largest radius of a shape, as fractions of the image."""
OVERLAP = 0.3
"""Largest fraction of a new shape's box that lies in the box of an earlier shape; a shape with more is left out."""
CONTRAST = 0.35
"""Smallest difference of a shape's colour from the background in at least one channel."""
NOISE = 0.05
"""Standard deviation of the noise on pixels in [0, 1]."""


def shapes(
    size: int = 64,
    train: int = 2000,
    val: int = 400,
    test: int = 400,
    objects: int = 4,
    kinds: Sequence[str] = ("circle", "square", "triangle"),
    seed: int = 0,
) -> dict[str, Any]:
    """Return drawn images of 3 x `size` x `size` with boxes; the number of shapes is even from 0 to `objects`.

    Splits are drawn from different seeds. Labels count `kinds` from 1, as 0 is the background of torchvision's
    detectors.

    Args:
        size: pixels of a side.
        train, val, test: number of images in the splits.
        objects: largest number of shapes in an image; later shapes that hide earlier ones are left out.
        kinds: names of shapes, see `SHAPES`.
        seed: seed of the images.
    """
    counts = {"train": train, "val": val, "test": test}
    splits = {name: _drawn(count, size, objects, kinds, derive(seed, name)) for name, count in counts.items()}
    return {**splits, "classes": len(kinds) + 1, "collate": in_a_batch}


def _drawn(count: int, size: int, objects: int, kinds: Sequence[str], seed: int) -> BoxImages:
    """Return the images of a split."""
    draws = torch.Generator().manual_seed(seed)
    pixels = np.empty((count, 3, size, size), np.uint8)
    targets = [_draw(pixels[number], number, objects, kinds, draws) for number in range(count)]
    return BoxImages(torch.from_numpy(pixels).__getitem__, targets, Normalisation.of([0.0], [1.0], channels=3))


def _draw(pixels: NDArray[np.uint8], number: int, objects: int, kinds: Sequence[str], draws: torch.Generator) -> Target:
    """Draw an image into `pixels`, and return its target."""
    size = pixels.shape[-1]
    background, *colours = torch.rand(objects + 1, 3, 1, 1, generator=draws).numpy()
    placed = torch.rand(objects, 4, generator=draws).numpy()
    chosen = torch.randint(len(kinds), (objects,), generator=draws).tolist()
    wanted = int(torch.randint(objects + 1, (), generator=draws))
    noise = NOISE * torch.randn(pixels.shape, generator=draws).numpy()
    image = background
    boxes: list[list[float]] = []
    labels: list[int] = []
    for kind, colour, (wide, high, left, top) in zip(chosen[:wanted], colours, placed, strict=False):
        radii = [size * (RADII[0] + (RADII[1] - RADII[0]) * each) for each in (wide, high)]
        inside, box = _placed(kinds[kind], size, (left, top), radii)
        if any(_shared(box, other) > OVERLAP for other in boxes):
            continue
        if abs(colour - background).max() < CONTRAST:
            colour = 1 - background.round()
        image = np.where(inside, colour, image)
        boxes.append(box)
        labels.append(kind + 1)
    np.copyto(pixels, (255 * (image + noise).clip(0, 1)).round(), casting="unsafe")
    return target(number, boxes, labels)


def _placed(
    kind: str, size: int, place: Sequence[float], radii: Sequence[float]
) -> tuple[NDArray[np.bool_], list[float]]:
    """Return the pixels of a shape, and their box.

    Args:
        kind: name of the shape.
        size: pixels of a side of the image.
        place: horizontal and vertical place, from 0 at one side of the image to 1 at the other.
        radii: horizontal and vertical radius in pixels.
    """
    middles = [radius + each * (size - 2 * radius) for each, radius in zip(place, radii, strict=True)]
    pixels = np.arange(size, dtype=np.float32) + 0.5
    across, down = ((pixels - middle) / radius for middle, radius in zip(middles, radii, strict=True))
    inside = SHAPES[kind](across, down[:, None]) & (abs(across) <= 1) & (abs(down[:, None]) <= 1)
    rows, columns = (np.flatnonzero(inside.any(axis)).tolist() for axis in (1, 0))
    return inside, [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def _shared(box: Sequence[float], other: Sequence[float]) -> float:
    """Return the intersection of two boxes as a fraction of the smaller one."""
    width = max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
    height = max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
    areas = [(each[2] - each[0]) * (each[3] - each[1]) for each in (box, other)]
    return width * height / min(areas)
