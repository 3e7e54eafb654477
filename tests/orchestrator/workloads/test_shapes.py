"""Drawn shapes: equal for equal seeds, with boxes that fit the drawn pixels exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator.catalogue.data import SHAPES as NAMES
from orchestrator.core.errors import DataError
from orchestrator.workloads import data_loading
from orchestrator.workloads.data_sets import shapes as drawing
from orchestrator.workloads.splits import LoaderSplit

CPU = torch.device("cpu")
FEW = {"kind": "shapes", "train": 40, "val": 8, "test": 8, "size": 48}


def batch(split: Any, size: int = 40) -> Any:
    return next(iter(split.batches(size, device=CPU)))


def test_images_and_boxes_follow_from_the_seed_alone() -> None:
    data, again, other = (data_loading.load_anew({**FEW, "seed": seed}) for seed in (3, 3, 4))
    images, targets = batch(data.train)

    assert (data.input_shape, data.classes) == ((3, 48, 48), 4)
    assert images.shape == (40, 3, 48, 48)
    assert torch.equal(images, batch(again.train)[0])
    assert not torch.equal(images, batch(other.train)[0])
    assert not torch.equal(batch(data.val)[0], batch(data.test)[0])
    assert {len(target["labels"]) for target in targets} >= {0, 1, 2}, "some images are empty"
    assert [int(target["image_id"]) for target in targets] == list(range(40))
    assert {int(label) for target in targets for label in target["labels"]} == {1, 2, 3}


def test_the_box_of_a_shape_is_where_its_pixels_differ_from_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "NOISE", 0.0)
    data = data_loading.load_anew({**FEW, "objects": 1, "kinds": [*NAMES], "seed": 5})
    assert isinstance(data.train, LoaderSplit)
    images, targets = batch(data.train)

    assert [*drawing.SHAPES] == [*NAMES]
    for image, target in zip(images, targets, strict=True):
        drawn = (image != image[:, :1, :1]).any(0).nonzero()
        assert target["boxes"].tolist() == (
            [[*drawn.min(0).values.flip(0).tolist(), *(drawn.max(0).values.flip(0) + 1).tolist()]] if len(drawn) else []
        )


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("kinds", ["circle", "star"], r"`data\.kinds` .* must be a list of different shapes"),
        ("kinds", [], r"`data\.kinds` \(=\[\]\)"),
        ("size", 8, r"`data\.size` \(=8\) must be an integer of at least 32"),
        ("val_size", 3, r"`data\.val_size` \(=3\) must be null"),
    ],
)
def test_options_that_cannot_be(option: str, value: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        data_loading.load_anew({**FEW, option: value})
