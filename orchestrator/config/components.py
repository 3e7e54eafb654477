"""What the built-in models, data sets and trainings are configured by: plain dataclasses, no torch.

`orchestrator.config.schema` puts them into Hydra's ConfigStore. What is built in is named by its `kind`; a model, data
set or method of the user's own needs none of this: a YAML file with a `_target_` and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class Train:
    """How a network is trained (`train`) or fine-tuned after each pruning round (`finetune`)."""

    epochs: int | None = 15
    """Passes over the training split; exactly one of `epochs` and `steps` is given, 0 trains nothing."""
    steps: int | None = None
    """Optimizer steps."""
    batch_size: int = 64
    eval_batch_size: int = 512
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is smaller than `batch_size`."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """`_target_` and arguments, as in `torch.optim.SGD`; `optimizer@train.optimizer=adam` picks a ready one."""
    scheduler: dict[str, Any] | None = None
    """`_target_` and arguments; a `T_max`, `total_steps` or `total_iters` that is null becomes the number of steps."""
    scheduler_interval: str = "step"
    """The scheduler advances after each `step` or each `epoch`; ReduceLROnPlateau after each evaluation."""
    loss: dict[str, Any] | None = None
    """`_target_` and arguments of a callable (outputs, labels) -> loss; null is cross-entropy."""
    precision: str = "fp32"
    """fp32, or autocast to bf16 or fp16; fp16 scales the loss and needs CUDA."""
    clip_norm: float | None = None
    """Largest L2 norm of all gradients taken as one vector."""
    eval_every: int | None = None
    """Steps between two evaluations on the validation split; null is once an epoch. The last step is always one."""
    select: str = "best"
    """Which weights are kept: the `best` on the validation split (the earliest of equals), or the `last`."""
    monitor: str = "accuracy"
    """What best means, for `select` and `patience`: highest `accuracy` or lowest `loss`."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a new best; null trains to the end."""
    depends: list[str] = field(default_factory=list)
    """Files and directories that an own optimizer, scheduler or loss reads: their contents are part of the results."""


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
class Model(Component):
    """What every network takes; null is filled in from the data set."""

    input_shape: list[int] | None = None
    classes: int | None = None


@dataclass
class Mlp(Model):
    """Fully connected layers with ReLU."""

    kind: str | None = "mlp"
    hidden: list[int] = field(default_factory=lambda: [256, 128])
    dropout: float = 0.0


@dataclass
class Cnn(Model):
    """3x3 convolutions, each with batch normalisation, ReLU and 2x2 max pooling, then linear layers."""

    kind: str | None = "cnn"
    channels: list[int] = field(default_factory=lambda: [32, 64])
    hidden: list[int] = field(default_factory=list)
    batch_norm: bool = True
    dropout: float = 0.0


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
    width: int = 16


@dataclass
class DataSet(Component):
    """What every data set takes: how the validation split is cut from the training split.

    Exactly one of `val_fraction` and `val_size` (examples) is given. The cut follows `split_seed`, not a trial's seed.
    """

    val_fraction: float | None = None
    val_size: int | None = None
    split_seed: int = 0


@dataclass
class Digits(DataSet):
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; needs no download."""

    kind: str | None = "digits"
    val_fraction: float | None = 0.15
    test_fraction: float = 0.2
    mean: list[float] = field(default_factory=lambda: [0.3053])
    std: list[float] = field(default_factory=lambda: [0.3760])


@dataclass
class Mnist(DataSet):
    """MNIST from its four idx files in `root`/mnist, downloaded when absent."""

    kind: str | None = "mnist"
    val_size: int | None = 5000
    root: str = "data"
    download: bool = True
    mean: list[float] = field(default_factory=lambda: [0.1307])
    std: list[float] = field(default_factory=lambda: [0.3081])


@dataclass
class FashionMnist(DataSet):
    """Fashion-MNIST from its four idx files in `root`/fashion-mnist, downloaded when absent."""

    kind: str | None = "fashion_mnist"
    val_size: int | None = 5000
    root: str = "data"
    download: bool = True
    mean: list[float] = field(default_factory=lambda: [0.2860])
    std: list[float] = field(default_factory=lambda: [0.3530])


@dataclass
class HuggingFace(DataSet):
    """An image classification set of Hugging Face `datasets`, from the hub or a local path."""

    kind: str | None = "huggingface"
    val_fraction: float | None = 0.1
    path: str = "uoft-cs/cifar10"
    subset: str | None = None
    revision: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    image_key: str = "img"
    label_key: str = "label"
    mode: str = "RGB"
    """RGB, or L for grey."""
    size: list[int] | None = None
    """[height, width] to resize to; null needs images of one size."""
    mean: list[float] | None = None
    std: list[float] | None = None
    """Per channel, of pixels in [0, 1]; null computes them from the training split."""


@dataclass
class Method(Component):
    """How entries are chosen: a `pruning.BasePruningMethod` and whether tensors are ranked apart or as one."""

    scope: str = "layer"


@dataclass
class RandomStructured(Method):
    """Random channels along `dim`."""

    kind: str | None = "random_structured"
    dim: int = 0


@dataclass
class LnStructured(Method):
    """Channels along `dim` of smallest L_n norm; `n` is a number, inf, -inf, fro or nuc."""

    kind: str | None = "ln_structured"
    n: Any = 2
    dim: int = 0


MODELS: Mapping[str, type] = {
    "mlp": Mlp,
    "cnn": Cnn,
    "lenet_300_100": Lenet300100,
    "lenet5": Lenet5,
    "resnet20": Resnet20,
}
DATA: Mapping[str, type] = {
    "digits": Digits,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "huggingface": HuggingFace,
}
METHODS: Mapping[str, type] = {
    "identity": Method,
    "random_unstructured": Method,
    "l1_unstructured": Method,
    "random_structured": RandomStructured,
    "ln_structured": LnStructured,
}
BUILT_IN: Mapping[str, Mapping[str, type]] = {"model": MODELS, "data": DATA, "method": METHODS}
"""Group -> kind -> its keys. What a kind stands for: `workloads.models`, `workloads.data`, `pruning.METHODS`."""


@dataclass(frozen=True)
class _Rule:
    holds: Callable[[Any], bool]
    text: str


def _one_of(*choices: str) -> _Rule:
    return _Rule(lambda value: value in choices, f"be one of {', '.join(choices)}")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_COUNT = _Rule(lambda value: _is_int(value, 1), "be an integer of at least 1")
_OPTIONAL_COUNT = _Rule(lambda value: value is None or _is_int(value, 1), "be an integer of at least 1, or null")
_LENGTH = _Rule(
    lambda value: value is None or _is_int(value, 0), "be an integer of at least 0, or null; pass 0 to train nothing"
)
_FLAG = _Rule(lambda value: isinstance(value, bool), "be true or false")
_OPTIONAL_TARGET = _Rule(
    lambda value: value is None or _has_target(value), "have a `_target_`; add one, or pass null for the default"
)
_RULES: Mapping[str, _Rule] = {
    "epochs": _LENGTH,
    "steps": _LENGTH,
    "batch_size": _COUNT,
    "eval_batch_size": _COUNT,
    "drop_last": _FLAG,
    "optimizer": _Rule(lambda value: _has_target(value), "have a `_target_`; pass one, as in torch.optim.SGD"),
    "scheduler": _OPTIONAL_TARGET,
    "scheduler_interval": _one_of("step", "epoch"),
    "loss": _OPTIONAL_TARGET,
    "precision": _one_of(*PRECISIONS),
    "clip_norm": _Rule(
        lambda value: value is None or (isinstance(value, int | float) and value > 0),
        "be greater than 0; pass null to clip nothing",
    ),
    "eval_every": _OPTIONAL_COUNT,
    "select": _one_of("best", "last"),
    "monitor": _one_of("accuracy", "loss"),
    "patience": _OPTIONAL_COUNT,
}


def _has_target(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str) and bool(value["_target_"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rate(optimizer: Any) -> Any:
    """The learning rate that one of torch's optimizers is given."""
    return optimizer.get("lr") if _has_target(optimizer) and optimizer["_target_"].startswith("torch.optim.") else None


def violations(where: str, train: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the plain `Train` node named `where` breaks; absent keys are defaults."""
    values = vars(Train())
    for key in sorted(set(train) - set(values)):
        yield f"`{where}.{key}` (={train[key]!r}) is not known; the keys are {', '.join(sorted(values))}."
    values |= {key: value for key, value in train.items() if key in values}
    for key, rule in _RULES.items():
        if not rule.holds(values[key]):
            yield f"`{where}.{key}` (={values[key]}) must {rule.text}."
    if (lr := _rate(values["optimizer"])) is not None and not (_is_number(lr) and lr >= 0):
        yield f"`{where}.optimizer.lr` (={lr}) must be a number of at least 0: the learning rate; pass 0.001, say."
    if (values["epochs"] is None) == (values["steps"] is None):
        given = "neither" if values["epochs"] is None else "both"
        other = "epochs" if given == "both" else "steps"
        yield (
            f"`{where}.epochs` (={values['epochs']}) and `{where}.steps` (={values['steps']}) are {given} given; pass "
            f"exactly one" + (f": add `{where}.{other}=null`." if given == "both" else ".")
        )


_SIZES = _Rule(
    lambda value: isinstance(value, list) and all(_is_int(item, 1) for item in value),
    "be a list of integers of at least 1",
)
_MODEL_RULES: Mapping[str, _Rule] = {
    "hidden": _SIZES,
    "channels": _SIZES,
    "input_shape": _Rule(lambda value: value is None or _SIZES.holds(value), f"{_SIZES.text}, or null"),
    "classes": _OPTIONAL_COUNT,
    "width": _COUNT,
    "dropout": _Rule(lambda value: isinstance(value, int | float) and 0 <= value < 1, "lie in [0, 1)"),
}


def model_violations(where: str, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the plain node `where` of a built-in network breaks."""
    if model.get("kind"):
        for key, rule in _MODEL_RULES.items():
            if key in model and not rule.holds(model[key]):
                yield f"`{where}.{key}` (={model[key]}) must {rule.text}."


def split_violations(where: str, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the validation cut of the plain data node named `where` breaks."""
    fraction, size = data.get("val_fraction"), data.get("val_size")
    if fraction is not None and size is not None:
        yield (
            f"`{where}.val_fraction` (={fraction}) and `{where}.val_size` (={size}) are both given; "
            f"pass exactly one: add `{where}.val_fraction=null` or `{where}.val_size=null`."
        )
    if fraction is not None and not (isinstance(fraction, int | float) and 0.0 < fraction < 1.0):
        yield f"`{where}.val_fraction` (={fraction}) must lie in (0, 1): models are selected on the validation split."
    if size is not None and not _is_int(size, 1):
        yield f"`{where}.val_size` (={size}) must be an integer of at least 1: models are selected on these examples."
    seed, test = data.get("split_seed", 0), data.get("test_fraction", 0.2)
    if not _is_int(seed, 0) or seed >= 2**63:
        yield f"`{where}.split_seed` (={seed}) must be an integer in [0, 2^63)."
    if data.get("kind") == "digits" and not (isinstance(test, int | float) and 0.0 < test < 1.0):
        yield f"`{where}.test_fraction` (={test}) must lie in (0, 1): the test split is what is reported."
