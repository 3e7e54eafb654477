"""Named networks, and a network from any `_target_`; which of its parameters are pruned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.catalogue.models import MODELS
from orchestrator.core.errors import ModelError
from orchestrator.core.seeding import seeded
from orchestrator.core.stage_fields import Prune
from orchestrator.workloads.targets import create, given

OURS = ("weights", "revision", "reinitialise")
"""Keys of a model node that say what is done with the network; the target does not get them."""


def build(config: Mapping[str, Any], *, input_shape: Sequence[int], classes: int, seed: int) -> nn.Module:
    """Build the network `config` describes, on the CPU.

    Keys named `input_shape` and `classes` that are null are filled in. The global generators are seeded with `seed` and
    restored, so the initial weights are those of `torch.manual_seed(seed)` followed by the constructor, anywhere.

    Args:
        config: `kind` or `_target_`, and its arguments; `name` is for display.
        input_shape: shape of one example, without the batch.
        classes: number of classes.
        seed: of the initialisation.

    Raises:
        OrchestratorError: the target fails, or returns no `nn.Module`.
    """
    found = {"input_shape": list(input_shape), "classes": classes}
    filled = {
        key: found[key] if key in found and value is None else value for key, value in config.items() if key not in OURS
    }
    with seeded(seed):
        model = create("model", filled, kinds=MODELS)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{given('model', config)} must return a torch.nn.Module, not {type(model).__name__}; "
            "name a class or a function that builds one."
        )
    return model


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (256, 128),
    dropout: float = 0.0,
    batch_norm: bool = False,
    bias: bool = True,
) -> nn.Sequential:
    """Return linear layers fc1, fc2, ... of the widths `hidden` with ReLU (and dropout) between; input is flattened.

    With `batch_norm` what goes into each ReLU is normalised, and the layers there have no biases.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    widths = (prod(input_shape), *hidden, classes)
    for index, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        inner = index < len(widths) - 1
        layers[f"fc{index}"] = nn.Linear(fan_in, fan_out, bias=bias and not (batch_norm and inner))
        if inner:
            if batch_norm:
                layers[f"bn{index}"] = nn.BatchNorm1d(fan_out)
            layers[f"relu{index}"] = nn.ReLU()
            if dropout:
                layers[f"dropout{index}"] = nn.Dropout(dropout)
    return nn.Sequential(layers)


def cnn(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (32, 64),
    hidden: Sequence[int] = (),
    batch_norm: bool = True,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return blocks conv1, conv2, ... (3x3, normalised, ReLU, 2x2 max pooling), then linear layers fc1, fc2, ..."""
    fan_in, height, width = _image("cnn", input_shape, least=2 ** len(channels))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, fan_out in enumerate(channels, start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=not batch_norm)
        if batch_norm:
            layers[f"bn{index}"] = nn.BatchNorm2d(fan_out)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
        fan_in, height, width = fan_out, height // 2, width // 2
    layers["classifier"] = mlp((fan_in, height, width), classes, hidden, dropout)
    return nn.Sequential(layers)


def lenet_300_100(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Return LeNet-300-100 (LeCun et al. 1998) with ReLU and Gaussian Glorot weights, as in arXiv 1803.03635."""
    return _Glorot.of(OrderedDict(mlp(input_shape, classes, hidden=(300, 100)).named_children()))


def lenet5(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Return LeNet-5 in the sizes of Caffe's: 20 and 50 5x5 filters, 2x2 max pooling, 500 units.

    With ReLU after every layer, as the pruning literature has it, and Gaussian Glorot weights; 430,500 at 1x28x28.
    """
    channels, height, width = _image("lenet5", input_shape, least=16)
    side = [((extent - 4) // 2 - 4) // 2 for extent in (height, width)]
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(channels, 20, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(50 * side[0] * side[1], 500),
        relu3=nn.ReLU(),
        fc2=nn.Linear(500, classes),
    )
    return _Glorot.of(layers)


class _Glorot(nn.Sequential):
    """Layers with weights from N(0, 2 / (fan_in + fan_out)) and biases of zero (Glorot & Bengio 2010)."""

    @classmethod
    def of(cls, layers: OrderedDict[str, nn.Module]) -> Self:
        (model := cls(layers)).reset_parameters()
        return model

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class _ByFanOut(_Glorot):
    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut; where the shape changes, it is subsampled and zero-padded."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.stride = stride
        self.extra = fan_out - fan_in

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        before = self.extra // 2
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, before, self.extra - before)))


def resnet20(input_shape: Sequence[int], classes: int, width: int = 16) -> nn.Sequential:
    """Return ResNet-20 for small images (He et al. 2016, arXiv 1512.03385, section 4.2) with shortcuts of option A.

    Three stages of three blocks with `width`, 2 `width` and 4 `width` channels; 0.27 million parameters at 3x32x32 and
    10 classes. Convolutions are initialised from N(0, 2 / fan_out).
    """
    channels, *_ = _image("resnet20", input_shape, least=4)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, width, 3, padding=1, bias=False), bn=nn.BatchNorm2d(width), relu=nn.ReLU()
    )
    fan_in = width
    for stage, fan_out in enumerate((width, 2 * width, 4 * width), start=1):
        blocks = [_Block(fan_in, fan_out, stride=2 if stage > 1 else 1), *(_Block(fan_out, fan_out, 1) for _ in (2, 3))]
        fan_in = fan_out
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(fan_in, classes)}
    return _ByFanOut.of(layers)


def _image(name: str, shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return channels, height and width; refuse shapes that are no images of at least `least` pixels a side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"`model.input_shape` (={list(shape)}) must be [channels, height, width] with at least {least} pixels a "
            f"side for {name}; choose another model, such as mlp, or larger images."
        )
    channels, height, width = shape
    return channels, height, width


@dataclass(frozen=True)
class Prunable:
    """A parameter to prune: `parameter` of `module`, called `name` in the whole network, as in conv1.weight."""

    module: nn.Module
    parameter: str
    name: str


def prunable(model: nn.Module, prune: Prune) -> list[Prunable]:
    """Return the parameters of `model` that `prune` selects, in the order of `named_parameters`, tied ones once.

    Args:
        model: a network, pruned before or not: a parameter that is, `weight_orig`, is called `weight`.
        prune: `types`, names of module classes or of their bases; `parameters`, patterns on the parameter's own name;
            `include` and `exclude`, patterns on its qualified name. Patterns are those of fnmatch.

    Raises:
        ModelError: nothing is left, or a name without wildcards in `include` or `exclude` is not in the network.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, Prunable] = {}
    for prefix, module in model.named_modules():
        typed = any(_matches(kind, prune.types) for kind in _types(module))
        for parameter, value in _parameters(module):
            name = f"{prefix}.{parameter}" if prefix else parameter
            names.setdefault(id(value), []).append(name)
            named = _matches(parameter, prune.parameters) and _matches(name, prune.include)
            if typed and named and value.numel():
                found.setdefault(id(value), Prunable(module, parameter, name))
    every = [name for tied in names.values() for name in tied]
    _require_known(prune, every)
    for key in [key for key in found if any(_matches(name, prune.exclude) for name in names[key])]:
        del found[key]
    if not found:
        raise ModelError(
            f"`prune` (types={list(prune.types)}, parameters={list(prune.parameters)}, "
            f"include={list(prune.include)}, exclude={list(prune.exclude)}) leaves nothing to prune; "
            f"choose among the network's {_listing(every)}."
        )
    return list(found.values())


def unmatched(model: nn.Module, prune: Prune) -> Iterator[tuple[str, str]]:
    """Yield (key, pattern) for each pattern of `prune` that no parameter of `model` matches, or no module's type."""
    modules = dict(model.named_modules())
    every = [f"{prefix}.{name}" if prefix else name for prefix, m in modules.items() for name, _ in _parameters(m)]
    names = {"include": every, "exclude": every, "parameters": [name.rpartition(".")[2] for name in every]}
    for key, known in names.items():
        for pattern in getattr(prune, key):
            if not any(fnmatchcase(name, pattern) for name in known):
                yield key, pattern


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters under the names they have in a network that is not pruned."""
    buffers = dict(module.named_buffers(recurse=False))
    for name, value in module.named_parameters(recurse=False):
        plain = name.removesuffix("_orig")
        yield plain if f"{plain}_mask" in buffers else name, value


def _require_known(prune: Prune, every: Sequence[str]) -> None:
    for key in ("include", "exclude"):
        for pattern in getattr(prune, key):
            if not any(letter in pattern for letter in "*?[") and pattern not in every:
                raise ModelError(
                    f"`prune.{key}` (={pattern!r}) names no parameter of the network; pass a qualified name or a "
                    f"pattern such as '{pattern}.*'. It has {_listing(every)}."
                )


def _types(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's class and bases; the Conv1D of transformers is a linear layer stored transposed."""
    for kind in type(module).__mro__:
        yield "Linear" if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") else kind.__name__


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listing(names: Sequence[str], most: int = 40) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} parameters: {', '.join(names[:most])}{more}"
