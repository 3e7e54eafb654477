"""The catalogue of data sets. A row's code is (**options) -> the splits that `workloads.data_loading` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, named
from pruning.catalogue.value_rules import whole, within


class DataSet(Row):
    """A data set."""

    FAMILY: ClassVar[str] = "data"


TEST_FRACTION = within(": the test split is what is reported")
_ROOT = Option("root", str, "data", "The directory that holds, or is to hold, `mnist/` or `fashion-mnist/`.")
_DOWNLOAD = Option("download", bool, True, "Download the files where they are absent.")


def _normalisation(mean: float, std: float) -> tuple[Option, Option]:
    return (
        Option("mean", list[float], [mean], "Subtracted from pixels in [0, 1]."),
        Option("std", list[float], [std], "Divides pixels after `mean` is subtracted."),
    )


DATA: Mapping[str, DataSet] = named(
    (
        DataSet(
            "digits",
            "orchestrator.workloads.images.named:digits",
            "scikit-learn's 1,797 handwritten digits of 8x8 pixels; needs no download.",
            (
                Option(
                    "test_fraction", float, 0.2, "Fraction of all examples that is the test split.", (TEST_FRACTION,)
                ),
                *_normalisation(0.3053, 0.3760),
            ),
            in_sweeps={"val_fraction": 0.15},
        ),
        DataSet(
            "mnist",
            "orchestrator.workloads.images.named:mnist",
            "MNIST: `root`/mnist holds the four idx .gz files, or they are downloaded to there.",
            (_ROOT, _DOWNLOAD, *_normalisation(0.1307, 0.3081)),
            "LeCun et al. 1998",
            in_sweeps={"val_size": 5000},
        ),
        DataSet(
            "fashion_mnist",
            "orchestrator.workloads.images.named:fashion_mnist",
            "Fashion-MNIST: `root`/fashion-mnist holds the four idx .gz files, or they are downloaded to there.",
            (_ROOT, _DOWNLOAD, *_normalisation(0.2860, 0.3530)),
            "Xiao et al. 2017, arXiv 1708.07747",
            in_sweeps={"val_size": 5000},
        ),
        DataSet(
            "huggingface",
            "orchestrator.workloads.images.huggingface:huggingface",
            "An image classification set of Hugging Face `datasets`, from the hub or a path; CIFAR-10 as it stands.",
            (
                Option("path", str, "uoft-cs/cifar10", "A name on the hub, or a local path."),
                Option("subset", str | None, None, "Which configuration of the set; null: its only one."),
                Option("revision", str | None, None, "Branch, tag or commit on the hub."),
                Option("train_split", str, "train", "Name of the training split."),
                Option("test_split", str, "test", "Name of the test split."),
                Option("image_key", str, "img", "Column of the images."),
                Option("label_key", str, "label", "Column of the labels."),
                Option("mode", str, "RGB", "RGB, or L for grey."),
                Option("size", list[int] | None, None, "[height, width] to resize to; null needs images of one size."),
                Option(
                    "mean",
                    list[float] | None,
                    None,
                    "Subtracted from each channel of pixels in [0, 1]; null computes it from the training split.",
                ),
                Option(
                    "std",
                    list[float] | None,
                    None,
                    "Divides each channel after `mean` is subtracted; null computes it from the training split.",
                ),
            ),
            packages=("datasets",),
            extra="hf",
            in_sweeps={"val_fraction": 0.1},
            version=2,
        ),
        DataSet(
            "text",
            "orchestrator.workloads.text:text",
            "Blocks of tokens of a text, each with the tokens that follow; validation and test are the ends of it.",
            (
                Option("root", str, "", "A text file, or a directory of .txt files."),
                Option("tokenizer", str, "characters", "`characters`, `bytes`, or a file of the package tokenizers."),
                Option("block", int, 128, "Tokens of an example.", (whole(1),)),
                Option(
                    "test_fraction",
                    float,
                    0.1,
                    "Fraction of the text, its end, that is the test split.",
                    (TEST_FRACTION,),
                ),
            ),
            in_sweeps={"val_fraction": 0.1},
            unlisted=("content",),
        ),
    )
)
"""Name -> data set."""
