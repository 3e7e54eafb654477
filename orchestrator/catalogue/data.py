"""Catalogue of data sets. A row's code is (**options) -> the splits described in `workloads.data_loading`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, Rule, is_int, named, one_of, whole, within


@dataclass(frozen=True)
class DataSet(Row):
    """Row of a data set.

    Args:
        of_text: examples are blocks of a text.
        labelled: the thing that has a label, as in rows of tasks; empty if that follows from the files.
        files: options that name the user's own images with boxes, whose content is in keys.
    """

    FAMILY: ClassVar[str] = "data"

    of_text: bool = False
    labelled: str = "example"
    files: tuple[str, ...] = ()


TEST_FRACTION = within(": reports use the test split")
TEST = re.compile(r"[A-Za-z0-9]\w{0,39}")
"""Pattern of the names of further test splits."""
TEST_NAMES = Rule(
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) and TEST.fullmatch(name) for name in value),
    "name each text by at most 40 letters, digits and underscores",
)
PUBLISHED = one_of(
    *("uoft-cs/cifar10", "uoft-cs/cifar100", "ylecun/mnist", "zalando-datasets/fashion_mnist"),
    *("ufldl-stanford/svhn", "zh-plus/tiny-imagenet", "ILSVRC/imagenet-1k"),
)
"""Rule for a hub's data set that a saved sweep names: a request for it carries the reader's token."""
SHAPES = ("circle", "square", "triangle", "cross", "ring")
"""Shapes that `shapes` draws."""
SOME_SHAPES = Rule(
    lambda value: isinstance(value, list) and bool(value) and len({*value} & {*SHAPES}) == len(value),
    f"be a list of different shapes, of {', '.join(SHAPES)}",
)
IMAGE_SIZE = Rule(
    lambda value: isinstance(value, list) and len(value) == 2 and all(is_int(side) and side >= 8 for side in value),
    "be [height, width], each an integer of at least 8",
)
_ROOT = Option("root", str, "data", "Directory for `mnist/` or `fashion-mnist/`.")
_DOWNLOAD = Option("download", bool, True, "Download missing files.")


def _normalisation(mean: float, std: float) -> tuple[Option, Option]:
    return (
        Option("mean", list[float], [mean], "Mean to subtract from pixels in [0, 1]."),
        Option("std", list[float], [std], "Standard deviation by which pixels are divided after `mean` is subtracted."),
    )


DATA: Mapping[str, DataSet] = named(
    (
        DataSet(
            "digits",
            "orchestrator.workloads.data_sets.named:digits",
            "1,797 handwritten digits of 8x8 pixels from scikit-learn; needs no download.",
            (
                Option("test_fraction", float, 0.2, "Fraction of all examples for the test split.", (TEST_FRACTION,)),
                *_normalisation(0.3053, 0.3760),
            ),
            in_sweeps={"val_fraction": 0.15},
        ),
        DataSet(
            "mnist",
            "orchestrator.workloads.data_sets.named:mnist",
            "MNIST; the four idx .gz files are read from `root`/mnist, or downloaded to it.",
            (_ROOT, _DOWNLOAD, *_normalisation(0.1307, 0.3081)),
            "LeCun et al. 1998",
            in_sweeps={"val_size": 5000},
            when_stored={"download": False},
        ),
        DataSet(
            "fashion_mnist",
            "orchestrator.workloads.data_sets.named:fashion_mnist",
            "Fashion-MNIST; the four idx .gz files are read from `root`/fashion-mnist, or downloaded to it.",
            (_ROOT, _DOWNLOAD, *_normalisation(0.2860, 0.3530)),
            "Xiao et al. 2017, arXiv 1708.07747",
            in_sweeps={"val_size": 5000},
            when_stored={"download": False},
        ),
        DataSet(
            "huggingface",
            "orchestrator.workloads.data_sets.huggingface:huggingface",
            "Image classification data from Hugging Face `datasets`, from the hub or a path; CIFAR-10 by default.",
            (
                Option("path", str, "uoft-cs/cifar10", "Name on the hub, or a local path.", stored=PUBLISHED),
                Option("subset", str | None, None, "Configuration of the data set; null: the only one."),
                Option("revision", str | None, None, "Branch, tag or commit on the hub."),
                Option("train_split", str, "train", "Name of the training split."),
                Option("test_split", str, "test", "Name of the test split."),
                Option("image_key", str, "img", "Column of the images."),
                Option("label_key", str, "label", "Column of the labels."),
                Option("mode", str, "RGB", "RGB, or L for greyscale."),
                Option(
                    "size",
                    list[int] | None,
                    None,
                    "[height, width] after resizing; null: no resizing, which needs images of one size.",
                ),
                Option(
                    "mean",
                    list[float] | None,
                    None,
                    "Mean to subtract from each channel of pixels in [0, 1]; null: computed from the training split.",
                ),
                Option(
                    "std",
                    list[float] | None,
                    None,
                    "Standard deviation by which each channel is then divided; null: computed from the training split.",
                ),
            ),
            packages=("datasets",),
            extra="hf",
            in_sweeps={"val_fraction": 0.1},
            labelled="",
            version=2,
        ),
        DataSet(
            "text",
            "orchestrator.workloads.data_sets.text:text",
            "Blocks of tokens of a text, each with the next tokens as labels; its ends are for validation and test.",
            (
                Option("root", str, "", "Text file, directory of .txt files, or pattern such as books/*.txt."),
                Option(
                    "tokenizer",
                    str,
                    "characters",
                    "`characters`, `bytes`, a file of the package tokenizers, or `model`: that of the network.",
                ),
                Option("block", int, 128, "Number of tokens in an example.", (whole(1),)),
                Option(
                    "test_fraction",
                    float,
                    0.1,
                    "Fraction at the end of the text for the test split.",
                    (TEST_FRACTION,),
                ),
                Option(
                    "tests",
                    dict[str, str],
                    {},
                    "Further texts to test on: name -> text file or directory, as in +data.tests.plays=plays.txt.",
                    (TEST_NAMES,),
                    later=True,
                ),
                Option(
                    "test_size",
                    int | None,
                    None,
                    "Number of blocks in each test split, in place of `test_fraction`; null: the fraction.",
                    (whole(1).or_null(),),
                    later=True,
                ),
            ),
            in_sweeps={"val_fraction": 0.1},
            unlisted=("content",),
            of_text=True,
            labelled="token",
        ),
        DataSet(
            "shapes",
            "orchestrator.workloads.data_sets.shapes:shapes",
            "Drawn shapes on noise, with boxes, for `task=detection`; made from a seed, and needs no download.",
            (
                Option("size", int, 64, "Pixels of a side of the images.", (whole(32),)),
                Option("train", int, 2000, "Number of images to train on.", (whole(1),)),
                Option("val", int, 400, "Number of images for validation.", (whole(1),)),
                Option("test", int, 400, "Number of images in the test split.", (whole(1),)),
                Option("objects", int, 4, "Largest number of shapes in an image; some images have none.", (whole(1),)),
                Option(
                    "kinds",
                    list[str],
                    ["circle", "square", "triangle"],
                    "Shapes to draw, of circle, square, triangle, cross and ring; their labels count from 1.",
                    (SOME_SHAPES,),
                ),
                Option("seed", int, 0, "Seed of the images, independent of a trial's `seed`.", (whole(0),)),
            ),
            labelled="box",
        ),
        DataSet(
            "boxes",
            "orchestrator.workloads.data_sets.box_files:boxes",
            "Images with boxes for `task=detection`: JSON files in COCO's form, or directories with YOLO's labels.",
            (
                Option("train", str, "", "JSON file in COCO's form, or directory of images beside one of labels."),
                Option("test", str, "", "The same for the test split."),
                Option("val", str | None, None, "The same for validation; null: cut from `train`."),
                Option("images", str | None, None, "Directory of the images of JSON files; null: that of each file."),
                Option("size", list[int], [640, 640], "[height, width] of the letterboxed images.", (IMAGE_SIZE,)),
                *_normalisation(0.0, 1.0),
            ),
            labelled="box",
            files=("train", "test", "val"),
            version=2,
        ),
    )
)
"""Name -> data set."""
