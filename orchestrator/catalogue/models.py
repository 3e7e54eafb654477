"""The catalogue of networks. A row's code is (input_shape, classes, **options) -> nn.Module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pruning.catalogue.rows import Option, Row, named
from pruning.catalogue.value_rules import Rule, is_int, is_number, whole


class Model(Row):
    """A network."""

    FAMILY: ClassVar[str] = "model"


COUNT = whole(1)
SIZES = Rule(
    lambda value: isinstance(value, list) and all(is_int(item) and item >= 1 for item in value),
    "be a list of integers of at least 1",
)
DROPOUT = Rule(lambda value: is_number(value) and 0 <= value < 1, "lie in [0, 1)")
_AUTO = Rule(
    lambda name: name.startswith("AutoModel"),
    "be one of transformers' Auto classes, such as AutoModelForCausalLM or AutoModelForImageClassification",
)


def _heads_divide_width(where: str, values: Mapping[str, Any]) -> Iterator[str]:
    heads, width = values.get("heads", 4), values.get("width", 128)
    if width % heads:
        yield f"`{where}.heads` (={heads}) must divide `{where}.width` (={width}); pass 4 heads for a width of 128."


MODELS: Mapping[str, Model] = named(
    (
        Model(
            "mlp",
            "orchestrator.workloads.networks.classifiers:mlp",
            "Fully connected layers with ReLU, for any input.",
            (
                Option("hidden", list[int], [256, 128], "Widths of the hidden layers.", (SIZES,)),
                Option("dropout", float, 0.0, "Fraction of a hidden layer's outputs that training drops.", (DROPOUT,)),
                Option("batch_norm", bool, False, "Normalise before each ReLU; the layers there have no biases then."),
                Option("bias", bool, True, "Whether the layers have biases."),
            ),
        ),
        Model(
            "cnn",
            "orchestrator.workloads.networks.classifiers:cnn",
            "3x3 convolutions, each with batch normalisation, ReLU and 2x2 max pooling, then linear layers: 21,280 "
            "prunable weights on digits.",
            (
                Option("channels", list[int], [32, 64], "Output channels of each convolution.", (SIZES,)),
                Option("hidden", list[int], [], "Widths of the linear layers before the last.", (SIZES,)),
                Option("batch_norm", bool, True, "Normalise after each convolution."),
                Option("dropout", float, 0.0, "Fraction of the linear layers' inputs that training drops.", (DROPOUT,)),
            ),
        ),
        Model(
            "lenet_300_100",
            "orchestrator.workloads.networks.classifiers:lenet_300_100",
            "LeNet-300-100: 266,200 prunable weights on 1x28x28.",
            paper="LeCun et al. 1998",
        ),
        Model(
            "lenet5",
            "orchestrator.workloads.networks.classifiers:lenet5",
            "LeNet-5 in the sizes of Caffe's: 430,500 prunable weights on 1x28x28.",
            paper="LeCun et al. 1998",
        ),
        Model(
            "resnet20",
            "orchestrator.workloads.networks.classifiers:resnet20",
            "ResNet-20 for small images, with parameter-free shortcuts: 0.27 million parameters on 3x32x32.",
            (
                Option(
                    "width",
                    int,
                    16,
                    "Channels of the first stage; the next have twice and four times as many.",
                    (COUNT,),
                ),
            ),
            "He et al. 2016, arXiv 1512.03385",
        ),
        Model(
            "gpt",
            "orchestrator.workloads.networks.gpt:gpt",
            "A small GPT for blocks of tokens, as of `data=text`: 0.8 million parameters with some hundred tokens; its "
            "head is apart from its embedding.",
            (
                Option("layers", int, 4, "Blocks of attention and MLP.", (COUNT,)),
                Option("heads", int, 4, "Heads of attention in each block; divides `width`.", (COUNT,)),
                Option("width", int, 128, "Size of the embedding.", (COUNT,)),
                Option(
                    "context",
                    int | None,
                    None,
                    "The most tokens that it looks back on; null is the length of a block.",
                    (COUNT.or_null(),),
                ),
                Option(
                    "dropout",
                    float,
                    0.0,
                    "Fraction that training drops, after the embedding and in each block.",
                    (DROPOUT,),
                ),
            ),
            check=_heads_divide_width,
        ),
        Model(
            "huggingface",
            "orchestrator.workloads.networks.libraries:huggingface",
            "The network that the config.json of a directory describes, built by transformers with random weights; "
            "`weights` gives it others.",
            (
                Option(
                    "path",
                    str,
                    "",
                    "A directory with a config.json, or a name on the hub whose files are on this machine.",
                ),
                Option(
                    "architecture",
                    str,
                    "AutoModelForCausalLM",
                    "The Auto class of transformers that builds it.",
                    (_AUTO,),
                ),
                Option("overrides", dict[str, Any], {}, "Keys of config.json that are to have other values."),
            ),
            packages=("transformers",),
            extra="transformers",
            unlisted=("content",),
        ),
        Model(
            "timm",
            "orchestrator.workloads.networks.libraries:timm",
            "A network that timm names, with random weights, for the images and classes of the data; `weights` gives "
            "it others.",
            (
                Option(
                    "architecture",
                    str,
                    "resnet18",
                    "A name of timm's.",
                    (Rule(bool, "be a name of timm's; pass resnet18"),),
                ),
                Option("options", dict[str, Any], {}, "Further arguments of timm.create_model."),
            ),
            packages=("timm",),
            extra="timm",
        ),
    )
)
"""Name -> network."""
