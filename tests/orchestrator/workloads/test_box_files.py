"""Boxes from files: COCO's form and YOLO's labels give the same images and boxes; wrong files are named."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.config import sources
from orchestrator.core.errors import DataError
from orchestrator.planning import pinned_content
from orchestrator.planning.file_places import Misplaced, box_places
from orchestrator.workloads import data_loading

CPU = torch.device("cpu")
BOXES = {
    "a.png": [(0, [10.0, 5.0, 20.0, 10.0]), (2, [0.0, 0.0, 40.0, 20.0])],
    "b.png": [],
    "c.png": [(1, [4.0, 8.0, 4.0, 16.0])],
}
"""Image -> class of YOLO, and x, y, width, height in pixels."""
SIDES = {"a.png": (40, 20), "b.png": (16, 16), "c.png": (16, 32)}


def write(root: Path) -> Path:
    """Write images in images/train, YOLO's labels in labels/train, and coco.json beside the images."""
    for folder in ("images", "labels"):
        (root / folder / "train").mkdir(parents=True)
    annotations: list[dict[str, Any]] = []
    for number, (name, (width, height)) in enumerate(SIDES.items()):
        Image.fromarray(np.full((height, width, 3), 50 * (number + 1), np.uint8)).save(root / "images/train" / name)
        lines = []
        for kind, (x, y, wide, high) in BOXES[name]:
            lines.append(f"{kind} {(x + wide / 2) / width} {(y + high / 2) / height} {wide / width} {high / height}")
            annotations.append({"image_id": number, "category_id": kind + 1, "bbox": [x, y, wide, high]})
        if lines:
            (root / "labels/train" / name).with_suffix(".txt").write_text("\n".join(lines) + "\n")
    images = [{"id": number, "file_name": name} for number, name in enumerate(SIDES)]
    found = {"images": images, "annotations": annotations}
    (root / "images/train/coco.json").write_text(json.dumps(found))
    return root


def data(train: Path, **options: Any) -> dict[str, Any]:
    return {"kind": "boxes", "train": str(train), "val": str(train), "test": str(train), "size": [32, 64], **options}


def batch(split: Any) -> Any:
    return next(iter(split.batches(4, device=CPU)))


def test_both_forms_give_the_same_letterboxed_images(tmp_path: Path) -> None:
    root = write(tmp_path)
    coco = data_loading.load_anew(data(root / "images/train/coco.json"))
    yolo = data_loading.load_anew(data(root / "images/train"))
    images, targets = batch(coco.train)

    assert (coco.input_shape, coco.classes, yolo.classes) == ((3, 32, 64), 4, 4)
    assert torch.equal(images, batch(yolo.train)[0])
    for mine, other in zip(targets, batch(yolo.train)[1], strict=True):
        for name, values in mine.items():
            torch.testing.assert_close(values, other[name], atol=1e-3, rtol=1e-5)
    assert targets[0]["boxes"].tolist() == [[16, 8, 48, 24], [0, 0, 64, 32]], (
        "scaled by 1.6 to the width, without a border"
    )
    assert targets[0]["area"].tolist() == pytest.approx([512, 2048])
    assert targets[1]["boxes"].shape == (0, 4)
    assert targets[2]["boxes"].tolist() == [[28, 8, 32, 24]], "in the middle, with 24 grey pixels on both sides"
    border, inside = images[2, :, :, 23] * 255, images[2, :, :, 24] * 255
    assert border.unique().tolist() == pytest.approx([114])
    assert inside.unique().tolist() == pytest.approx([150])


def test_crowds_are_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    file = write(tmp_path) / "images/train/coco.json"
    found = json.loads(file.read_text())
    found["annotations"][0]["iscrowd"] = 1
    found["annotations"][1]["bbox"] = [3, 3, 0, 5]
    file.write_text(json.dumps(found))
    loaded = data_loading.load_anew(data(file))

    assert len(batch(loaded.train)[1][0]["boxes"]) == 0
    assert batch(loaded.test)[1][0]["iscrowd"].tolist() == [1], "the box without an area is left out"


def test_the_key_follows_from_annotations_and_images_not_from_their_place(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")

    def key(root: Path) -> Any:
        pinned_content.look_again()
        sources.look_again()
        return pinned_content.pinned({"model": {}, "task": {}, "data": data(root / "images/train")})

    parts, places = key(one)
    assert parts == key(other)[0]
    assert places["data"]["train"] == str(one / "images/train")
    (other / "labels/train/b.txt").write_text("0 0.5 0.5 0.5 0.5")
    assert parts != (relabelled := key(other)[0])
    Image.new("RGB", (16, 16)).save(other / "images/train/b.png")
    assert relabelled != key(other)[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 0.5 0.5 0.5", "line 1 of .*a.txt is '0 0.5 0.5 0.5'"),
        ("0.5 0 0 1 1", "class from 0"),
        ("0 9 9 4 4", "fractions"),
        ("0 nan 0.5 0.2 0.2", "fractions"),
    ],
)
def test_a_line_that_is_no_label(tmp_path: Path, line: str, said: str) -> None:
    (write(tmp_path) / "labels/train/a.txt").write_text(line)

    with pytest.raises(DataError, match=said):
        data_loading.load_anew(data(tmp_path / "images/train"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSONDecodeError"),
        ('{"images": [], "annotations": [{}]}', r"KeyError.* it must be JSON with `images` \(id, file_name\)"),
        ('{"images": [{"id": 1, "file_name": "z.png"}], "annotations": []}', r"names .*z.png, which is missing; pass"),
    ],
)
def test_a_file_that_is_not_in_cocos_form(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path) / "images/train/coco.json"
    file.write_text(text)

    with pytest.raises(DataError, match=said):
        data_loading.load_anew(data(file))


IMAGES = '{"images": [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}], "annotations": []}'


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"category_id": 0}, r"annotations\[0\]\.category_id=0: 0 is the background of detectors; add 1 to all"),
        ({"category_id": -1}, "category_id=-1"),
        ({"category_id": 1.7}, "category_id=1.7"),
        ({"bbox": [0, 0, math.nan, 1]}, r"annotations\[0\] has the box \[0, 0, nan, 1\]"),
        ({"image_id": 99}, r"annotations\[0\]\.image_id=99 is no image's id"),
    ],
)
def test_an_annotation_that_no_detector_can_learn_is_named(tmp_path: Path, changed: Any, said: str) -> None:
    file = write(tmp_path) / "images/train/coco.json"
    found = json.loads(file.read_text())
    found["annotations"][0] |= changed
    file.write_text(json.dumps(found))

    with pytest.raises(DataError, match=said):
        data_loading.load_anew(data(file))


def test_two_images_of_one_id_and_labels_in_another_encoding_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path)
    (root / "images/train/coco.json").write_text(IMAGES)
    with pytest.raises(DataError, match="two images have one id"):
        data_loading.load_anew(data(root / "images/train/coco.json"))
    (root / "labels/train/a.txt").write_bytes("0 0.5 0.5 0.2 0.2".encode("utf-16"))
    with pytest.raises(DataError, match=r"cannot read .*a\.txt .*; save it as UTF-8"):
        data_loading.load_anew(data(root / "images/train"))


def test_a_directory_without_images_is_told_what_to_pass(tmp_path: Path) -> None:
    root = write(tmp_path)
    with pytest.raises(DataError, match=r"no images \(\.jpg, .*\) are in .*labels/train; pass a directory of images"):
        data_loading.load_anew(data(root / "labels/train"))


def test_images_are_upright_and_of_16_bits_scaled(tmp_path: Path) -> None:
    root = write(tmp_path)
    turned, exif = Image.new("RGB", (20, 40), (150, 150, 150)), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees: 40 wide, 20 high, as all images of this directory
    turned.save(root / "images/train/a.png", exif=exif)
    deep = np.full((20, 40), 0x80FF, np.uint16)
    Image.fromarray(deep).save(root / "images/train/b.png")
    loaded = data_loading.load_anew(data(root / "images/train"))

    images, targets = batch(loaded.train)

    assert (images[0] * 255).unique().tolist() == pytest.approx([150]), "without a border"
    assert targets[0]["boxes"].tolist() == [[16, 8, 48, 24], [0, 0, 64, 32]]
    assert (images[1] * 255).unique().tolist() == pytest.approx([0x80])


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    root = write(tmp_path)
    (root / "images/train/a.png").write_bytes((root / "images/train/a.png").read_bytes()[:60])

    with pytest.raises(
        DataError, match=r"cannot read .*a\.png \(image file is truncated\); save it again, or take it out"
    ):
        data_loading.load_anew(data(root / "images/train"))


def test_places_of_annotations_and_images(tmp_path: Path) -> None:
    root = write(tmp_path)
    (root / "one/images").mkdir(parents=True)
    (root / "one/labels").mkdir()

    def found(*given: Any) -> Sequence[str]:
        return [str(Path(each).relative_to(root)) for each in box_places(*given)]

    assert found(f"{root}/images/train", None) == ["labels/train", "images/train"]
    assert found(f"{root}/one", None) == ["one/labels", "one/images"]
    assert found(f"{root}/images/train/coco.json", None) == ["images/train/coco.json", "images/train"]
    assert found(f"{root}/images/train/coco.json", f"{root}/one") == ["images/train/coco.json", "one"]
    with pytest.raises(Misplaced, match=r"must be given; pass a JSON file"):
        box_places("", None)
    with pytest.raises(Misplaced, match=r"needs .*/images/val, which does not exist; pass a JSON file"):
        box_places(f"{root}/images/val", None)
    (root / "data.yaml").write_text("path: .")
    with pytest.raises(
        Misplaced,
        match=r"needs a \.json file or a directory, and .*data\.yaml is neither; in place of .* pass the directories",
    ):
        box_places(f"{root}/data.yaml", None)
