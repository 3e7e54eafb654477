"""What networks and data sets are configured by: plain dataclasses, no torch. `components` says which kind is which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.rules import Rule, is_int, is_number, key, whole, within

_COUNT = whole(1)
_SIZES = Rule(
    lambda value: isinstance(value, list) and all(is_int(item) and item >= 1 for item in value),
    "be a list of integers of at least 1",
)
_VAL_FRACTION = within(": models are selected on the validation split").or_null("")
_VAL_SIZE = whole(1, ": models are selected on these examples").or_null("")
_AUTO = "be one of transformers' Auto classes, such as AutoModelForCausalLM or AutoModelForImageClassification"
_DROPOUT = Rule(lambda value: is_number(value) and 0 <= value < 1, "lie in [0, 1)")


@dataclass
class Component:
    """What every model, data set and method has; exactly one of `kind` and `_target_` is given."""

    name: str | None = None
    """What reports call it; null: its kind. No part of what identifies a result."""
    kind: str | None = None
    """One that is built in."""
    _target_: str | None = None
    """The user's own: package.module.Thing, to be called with the other keys."""
    depends: list[str] = field(default_factory=list)
    """Files and directories that it reads: their contents are part of the results."""


@dataclass
class Network(Component):
    """What every network takes, the user's own too: the weights that it begins with."""

    weights: str | None = None
    """A .safetensors or .pt file, its URI, a folder or a name on the hub of Hugging Face; null: as initialised."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub."""
    reinitialise: list[str] = field(default_factory=list)
    """Patterns on the names of parameters and buffers that keep their initialisation, as in `fc.*`."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is said of weights that are not given."""
        for name in ("revision", "reinitialise"):
            if values.get(name) and values.get("weights") is None:
                yield (
                    f"`{where}.{name}` (={values[name]}) is about the weights that the network begins with; pass "
                    f"`{where}.weights`, or leave it out."
                )


@dataclass
class Model(Network):
    """What every network of ours takes; null is filled in from the data set."""

    input_shape: list[int] | None = key(None, _SIZES.or_null())
    """Shape of an example without its batch; null: that of the data set."""
    classes: int | None = key(None, _COUNT.or_null())
    """Number of outputs; null: that of the data set."""


@dataclass
class Mlp(Model):
    """Fully connected layers with ReLU."""

    kind: str | None = "mlp"
    hidden: list[int] = key([256, 128], _SIZES)
    """Widths of the hidden layers."""
    dropout: float = key(0.0, _DROPOUT)
    """Fraction of a hidden layer's outputs that training drops."""
    batch_norm: bool = False
    """Before each ReLU; the layers there have no biases then."""
    bias: bool = True
    """Whether the layers have biases."""


@dataclass
class Cnn(Model):
    """3x3 convolutions, each with batch normalisation, ReLU and 2x2 max pooling, then linear layers."""

    kind: str | None = "cnn"
    channels: list[int] = key([32, 64], _SIZES)
    """Output channels of each convolution."""
    hidden: list[int] = key([], _SIZES)
    """Widths of the linear layers before the last."""
    batch_norm: bool = True
    """After each convolution."""
    dropout: float = key(0.0, _DROPOUT)
    """Fraction of what the linear layers see that training drops."""


@dataclass
class Lenet300100(Model):
    """LeNet-300-100."""

    kind: str | None = "lenet_300_100"


@dataclass
class Lenet5(Model):
    """LeNet-5 as Caffe defined it."""

    kind: str | None = "lenet5"


@dataclass
class Resnet20(Model):
    """ResNet-20 for small images, with parameter-free shortcuts."""

    kind: str | None = "resnet20"
    width: int = key(16, _COUNT)
    """Channels of the first stage; the next have twice and four times as many."""


@dataclass
class Gpt(Model):
    """A small GPT for blocks of tokens, as of `data=text`; its head is apart from its embedding."""

    kind: str | None = "gpt"
    layers: int = key(4, _COUNT)
    """Blocks of attention and MLP."""
    heads: int = key(4, _COUNT)
    """Heads of attention in each block; divides `width`."""
    width: int = key(128, _COUNT)
    """Size of the embedding."""
    context: int | None = key(None, _COUNT.or_null())
    """The most tokens that it looks back on; null is the length of a block."""
    dropout: float = key(0.0, _DROPOUT)
    """Fraction that training drops, after the embedding and in each block."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the heads, and with weights that are not given."""
        yield from Network.across(where, values)
        heads, width = values.get("heads", 4), values.get("width", 128)
        if width % heads:
            yield f"`{where}.heads` (={heads}) must divide `{where}.width` (={width}); pass 4 heads for a width of 128."


@dataclass
class Transformers(Model):
    """What the config.json of a directory describes, built by transformers with random weights."""

    kind: str | None = "huggingface"
    path: str = ""
    """A directory with a config.json, or a name on the hub whose files are on this machine."""
    architecture: str = key("AutoModelForCausalLM", Rule(lambda name: name.startswith("AutoModel"), _AUTO))
    """The Auto class of transformers that builds it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that are to have other values."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is said of weights that are not given; a revision may be that of `path`."""
        yield from Network.across(where, {**values, "revision": None})


@dataclass
class Timm(Model):
    """A network that timm names, with random weights, for the images and classes of the data."""

    kind: str | None = "timm"
    architecture: str = key("resnet18", Rule(bool, "be a name of timm's; pass resnet18"))
    """A name of timm's."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of timm.create_model."""


@dataclass
class DataSet(Component):
    """What every data set takes: how the validation split is cut from the training split.

    Exactly one of `val_fraction` and `val_size` (examples) is given. The cut follows `split_seed`, not a trial's seed.
    """

    val_fraction: float | None = key(None, _VAL_FRACTION)
    """Fraction of the training split that is held out for validation; exactly one of this and `val_size` is given."""
    val_size: int | None = key(None, _VAL_SIZE)
    """Examples that are held out for validation."""
    split_seed: int = key(0, Rule(lambda value: is_int(value) and 0 <= value < 2**63, "be an integer in [0, 2^63)"))
    """The cut follows from it, and not from a trial's `seed`."""

    @staticmethod
    def across(where: str, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the two ways to say how large the validation split is."""
        fraction, size = values.get("val_fraction"), values.get("val_size")
        if fraction is not None and size is not None:
            yield (
                f"`{where}.val_fraction` (={fraction}) and `{where}.val_size` (={size}) are both given; "
                f"pass exactly one: add `{where}.val_fraction=null` or `{where}.val_size=null`."
            )


@dataclass
class Digits(DataSet):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; needs no download."""

    kind: str | None = "digits"
    val_fraction: float | None = key(0.15, _VAL_FRACTION)
    """Fraction of the training split that is held out for validation."""
    test_fraction: float = key(0.2, within(": the test split is what is reported"))
    """Fraction of all examples that is the test split."""
    mean: list[float] = field(default_factory=lambda: [0.3053])
    """Subtracted from pixels in [0, 1]."""
    std: list[float] = field(default_factory=lambda: [0.3760])
    """Divides them then."""


@dataclass
class Mnist(DataSet):
    """MNIST from its four idx files in `root`/mnist, downloaded when absent."""

    kind: str | None = "mnist"
    val_size: int | None = key(5000, _VAL_SIZE)
    root: str = "data"
    """The directory that holds, or is to hold, `mnist/` or `fashion-mnist/`."""
    download: bool = True
    """Download the files where they are absent."""
    mean: list[float] = field(default_factory=lambda: [0.1307])
    """Subtracted from pixels in [0, 1]."""
    std: list[float] = field(default_factory=lambda: [0.3081])
    """Divides them then."""


@dataclass
class FashionMnist(Mnist):
    """Fashion-MNIST from its four idx files in `root`/fashion-mnist, downloaded when absent."""

    kind: str | None = "fashion_mnist"
    mean: list[float] = field(default_factory=lambda: [0.2860])
    std: list[float] = field(default_factory=lambda: [0.3530])


@dataclass
class HuggingFace(DataSet):
    """An image classification set of Hugging Face `datasets`, from the hub or a local path."""

    kind: str | None = "huggingface"
    val_fraction: float | None = key(0.1, _VAL_FRACTION)
    path: str = "uoft-cs/cifar10"
    """A name on the hub, or a local path."""
    subset: str | None = None
    """Which configuration of the set; null: its only one."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    train_split: str = "train"
    """Name of the training split."""
    test_split: str = "test"
    """Name of the test split."""
    image_key: str = "img"
    """Column of the images."""
    label_key: str = "label"
    """Column of the labels."""
    mode: str = "RGB"
    """RGB, or L for grey."""
    size: list[int] | None = None
    """[height, width] to resize to; null needs images of one size."""
    mean: list[float] | None = None
    """Of each channel, subtracted from pixels in [0, 1]; null computes it from the training split."""
    std: list[float] | None = None
    """Of each channel, divides them then; null computes it from the training split."""


@dataclass
class Text(DataSet):
    """Blocks of tokens of a text, each with the tokens that follow; validation and test are the ends of it."""

    kind: str | None = "text"
    val_fraction: float | None = key(0.1, _VAL_FRACTION)
    root: str = ""
    """A text file, or a directory of .txt files."""
    tokenizer: str = "characters"
    """`characters`, `bytes`, or a file of the package tokenizers."""
    block: int = key(128, _COUNT)
    """Tokens of an example."""
    test_fraction: float = key(0.1, within(": the test split is what is reported"))
    """Fraction of the text, its end, that is the test split."""
