"""Layouts of weights: which dimensions of a parameter are outputs, inputs, kernel positions, or a stack of matrices.

`KINDS` has a row for each kind of layer. `kind_of` finds the row of a module, and `layout_of` the layout of a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

Role: TypeAlias = Literal["stack", "output", "input", "position", "unknown"]
"""Meaning of a dimension; "unknown": outputs or inputs, which structure does not tell."""


_POSITION: Role = "position"


@dataclass(frozen=True)
class WeightLayout:
    """Meaning of a weight's dimensions.

    Args:
        roles: role of each dimension of the parameter.
        split: number of independent matrices of equal size that lie one after another along dimension 0: the groups of
            a convolution, the gates of an LSTM, or queries, keys and values of a packed projection.
    """

    roles: tuple[Role, ...]
    split: int = 1

    @property
    def is_oriented(self) -> bool:
        """Whether outputs and inputs are known."""
        return "unknown" not in self.roles

    @property
    def outputs(self) -> int:
        """Dimension of the parameter that counts outputs, within one matrix of a stack."""
        return self.roles.index("output")

    @property
    def inputs(self) -> int:
        """Last dimension of the parameter that counts inputs."""
        return len(self.roles) - 1 - self.roles[::-1].index("input")

    @property
    def stacked(self) -> int:
        """Number of dimensions of `unfolded` that count matrices."""
        return self._roles.count("stack")

    @cached_property
    def by_output(self) -> tuple[int, ...]:
        """Dimensions of `unfolded` in the order matrices, outputs, inputs, positions: entries of an output together."""
        return self._dims("stack", "output", "input", "position")

    @cached_property
    def by_position(self) -> tuple[int, ...]:
        """Dimensions as `by_output`, with the inputs at one kernel position together."""
        return self._dims("stack", "output", "position", "input")

    def dim(self, number: int) -> int:
        """Return the dimension of the parameter that counts outputs (0), inputs (1) or positions (2 and on).

        A stack, and a weight whose outputs are not known, have the dimensions of the parameter.
        """
        if "stack" in self.roles or not self.is_oriented or not -len(self.roles) <= number < len(self.roles):
            return number % len(self.roles)
        order = [dim for role in ("output", "input", "position") for dim, own in enumerate(self.roles) if own == role]
        return order[number]

    def unfolded(self, shape: Sequence[int]) -> torch.Size:
        """Return the parameter's shape with a dimension of its own for the matrices along dimension 0."""
        return torch.Size((self.split, shape[0] // self.split, *shape[1:]) if self.split > 1 else shape)

    def row_entries(self, shape: Sequence[int]) -> int:
        """Return the number of weights of one output."""
        whole = self.unfolded(shape)
        return prod(size for size, role in zip(whole, self._roles, strict=True) if role in ("input", "position"))

    def sums(self, tensor: Tensor) -> Tensor:
        """Return the sum over the weights of each output, shape (outputs of all matrices,)."""
        dims = self._dims("input", "position")
        return tensor.reshape(self.unfolded(tensor.shape)).sum(dims).flatten()

    def is_depthwise(self, shape: Sequence[int]) -> bool:
        """Return whether each output reads one channel of the input, as in a depthwise convolution."""
        return "position" in self.roles and tuple(shape[:2]) == (self.split, 1)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape as (matrices, outputs, weights of an output)."""
        whole = self.unfolded(tensor.shape)
        sizes = [prod(whole[dim] for dim in self._dims(role)) for role in ("stack", "output")]
        return tensor.reshape(whole).permute(self.by_output).reshape(*sizes, self.row_entries(tensor.shape))

    def parameter(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor of the parameter's shape that `rows` laid out."""
        whole, order = self.unfolded(shape), self.by_output
        inverse = [order.index(dim) for dim in range(len(order))]
        return rows.reshape([whole[dim] for dim in order]).permute(inverse).reshape(shape)

    @property
    def _roles(self) -> tuple[Role, ...]:
        return ("stack", *self.roles) if self.split > 1 else self.roles

    def _dims(self, *roles: Role) -> tuple[int, ...]:
        return tuple(dim for role in roles for dim, own in enumerate(self._roles) if own == role)


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Kind of layer, a row of `KINDS`.

    Args:
        fits: (module) -> whether the module is of this kind, if it is of no earlier one.
        layout: (module, name of its own parameter) -> layout; None for parameters that are no weights.
        by_call: whether a call of the layer multiplies its one input by its one weight, `weight`.
        shape: (module) -> shape of `weight` by the sizes that the module names; a derived class that stores another one
            computes with it in its own way.
    """

    fits: Callable[[nn.Module], bool]
    layout: Callable[[Any, str], WeightLayout | None]
    by_call: bool = False
    shape: Callable[[Any], tuple[int, ...]] | None = None


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the kind of a layer; None for other modules."""
    return next((kind for kind in KINDS if kind.fits(module)), None)


def layout_of(module: nn.Module, leaf: str) -> WeightLayout | None:
    """Return the layout of a module's own parameter, pruned or not; None if it is no weight of a known layer."""
    kind = kind_of(module)
    layout = None if kind is None else kind.layout(module, leaf)
    if layout is None:
        return None
    value = getattr(module, leaf, None)
    if not isinstance(value, Tensor) or isinstance(value, UninitializedParameter):
        return layout
    try:
        told = value.shape if kind is None or kind.shape is None else kind.shape(module)
    except AttributeError:  # a derived class need not name its sizes
        told = value.shape
    return layout if value.ndim == len(layout.roles) and told == value.shape else None


def required_layout(module: nn.Module, leaf: str = "weight") -> WeightLayout:
    """Return the layout of a weight.

    Raises:
        ValueError: the parameter is no weight of a known layer, or its outputs are not known.
    """
    layout = layout_of(module, leaf)
    if layout is None or not layout.is_oriented:
        raise ValueError(
            f"`{type(module).__name__}.{leaf}` must be a weight whose outputs and inputs are known, of a layer such as "
            "nn.Linear; leave it out of `parameters`, in a sweep by prune.exclude."
        )
    return layout


def has_plain_forward(module: nn.Module) -> bool:
    """Return whether the forward of a layer is torch's, or that of transformers' Conv1D, not of a derived class."""
    definer = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return definer.__module__.startswith("torch.nn.modules.") or _is_conv1d(definer)


def multiplies(module: Any, inputs: Tensor) -> bool:
    """Return whether the weight of a linear layer or a convolution can multiply its input.

    A forward of a derived class may multiply another tensor, which it makes of the input.
    """
    if not isinstance(module, _ConvNd):
        return inputs.shape[-1:] == (required_layout(module).row_entries(module.weight.shape),)
    spatial = len(module.kernel_size)
    return inputs.ndim - spatial in (1, 2) and inputs.shape[-1 - spatial] == module.in_channels


def natural_layout(dims: int) -> WeightLayout:
    """Return the layout of a tensor of unknown origin: outputs, inputs, positions; a vector is one row."""
    return WeightLayout(("output", "input", *[_POSITION] * (dims - 2)) if dims > 1 else ("input",))


# --- the kinds --------------------------------------------------------------------------------------------------------


def _of_class(*classes: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


def _weight(*roles: Role) -> Callable[[nn.Module, str], WeightLayout | None]:
    layout = WeightLayout(roles)
    return lambda _, leaf: layout if leaf == "weight" else None


def _convolution(module: _ConvNd, leaf: str) -> WeightLayout | None:
    first: tuple[Role, Role] = ("input", "output") if isinstance(module, _ConvTransposeNd) else ("output", "input")
    roles = (*first, *[_POSITION] * len(module.kernel_size))
    return WeightLayout(roles, module.groups) if leaf == "weight" else None


def _convolution_shape(module: _ConvNd) -> tuple[int, ...]:
    first, second = module.out_channels, module.in_channels
    first, second = (second, first) if isinstance(module, _ConvTransposeNd) else (first, second)
    return (first, second // module.groups, *module.kernel_size)


def _attention(_: nn.Module, leaf: str) -> WeightLayout | None:
    packed = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
    return WeightLayout(("output", "input"), packed[leaf]) if leaf in packed else None


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, leaf: str) -> WeightLayout | None:
    """Return the layout of a weight with one matrix for each gate; a projection `weight_hr` has no gates."""
    if not re.fullmatch(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?", leaf):
        return None
    gates = 1 if leaf.startswith("weight_hr") else getattr(module, leaf).shape[0] // module.hidden_size
    return WeightLayout(("output", "input"), gates)


def _is_transformers_linear(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, or of a class derived from it."""
    return any(map(_is_conv1d, type(module).__mro__))


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


LINEAR = LayerKind(_of_class(nn.Linear), _weight("output", "input"), True, attrgetter("out_features", "in_features"))
TRANSPOSED_LINEAR = LayerKind(_is_transformers_linear, _weight("input", "output"), True, attrgetter("nx", "nf"))
TRANSPOSED_CONVOLUTION = LayerKind(_of_class(_ConvTransposeNd), _convolution, True, _convolution_shape)
CONVOLUTION = LayerKind(_of_class(_ConvNd), _convolution, True, _convolution_shape)
BILINEAR = LayerKind(
    _of_class(nn.Bilinear),
    _weight("output", "input", "input"),
    shape=attrgetter("out_features", "in1_features", "in2_features"),
)
ATTENTION = LayerKind(_of_class(nn.MultiheadAttention), _attention)
RECURRENT = LayerKind(_of_class(nn.RNNBase), _recurrent)
RECURRENT_CELL = LayerKind(_of_class(nn.RNNCellBase), _recurrent)
EMBEDDING = LayerKind(_of_class(nn.Embedding, nn.EmbeddingBag), _weight("output", "input"))
EXPERTS = LayerKind(lambda layer: bool(_expert_layouts(layer)), lambda layer, leaf: _expert_layouts(layer).get(leaf))
"""Experts of a mixture whose matrices are stacked in parameters of one module."""
KINDS = (
    *(LINEAR, TRANSPOSED_LINEAR, TRANSPOSED_CONVOLUTION, CONVOLUTION, BILINEAR),
    *(ATTENTION, RECURRENT, RECURRENT_CELL, EMBEDDING, EXPERTS),
)


# --- experts ----------------------------------------------------------------------------------------------------------

Stack: TypeAlias = tuple[int, int, int]
"""Numbers of matrices, rows and columns."""


def _expert_layouts(module: nn.Module) -> Mapping[str, WeightLayout]:
    """Return name -> layout of a module's parameters that hold one matrix for each expert; empty for other modules.

    Parameters of shape (experts, rows, columns) are such stacks if the inputs of one are the outputs of the others, or
    their halves, or if sizes that the module names fit. Parameters of shape (experts * rows, columns) are, if the
    module names the number of its experts. The outputs are those of the module's own flag `is_transposed`; else those
    that fit the sizes, the biases, and the linear layer beside them whose outputs are the experts.
    """
    own = {name.removesuffix("_orig"): each for name, each in module._parameters.items() if each is not None}
    own = {name: each for name, each in own.items() if not isinstance(each, UninitializedParameter)}
    stacks: dict[str, Stack] = {n: tuple(p.shape) for n, p in own.items() if p.ndim == 3 and min(p.shape) > 1}  # type: ignore[misc]
    if not stacks:
        return _merged_experts(module, own)
    if len({stack[0] for stack in stacks.values()}) > 1:
        return {}
    ways = [turned for turned in (False, True) if _fits(module, _sizes(stacks.values(), turned))]
    told = [turned for turned in ways if _is_told(module, own, stacks, turned)]
    flag = getattr(module, "is_transposed", None)
    if not ways or (all(rows == columns for _, rows, columns in stacks.values()) and flag is None and not told):
        return {}
    ways = [flag] if isinstance(flag, bool) else told or ways
    roles: tuple[Role, Role] = ("unknown", "unknown")
    if len(ways) == 1:
        roles = ("input", "output") if ways[0] else ("output", "input")
    return dict.fromkeys(stacks, WeightLayout(("stack", *roles)))


def _merged_experts(module: nn.Module, own: Mapping[str, Tensor]) -> Mapping[str, WeightLayout]:
    """Return the layouts of matrices in which all experts lie one after another, whose outputs are not known."""
    counts = [n for name, n in vars(module).items() if "expert" in name and type(n) is int and n > 1]
    for count in counts:
        found = [n for n, p in own.items() if p.ndim == 2 and p.shape[0] > count and p.shape[0] % count == 0]
        if len(found) > 1:
            return dict.fromkeys(found, WeightLayout(("unknown", "unknown"), count))
    return {}


def _sizes(stacks: Iterable[Stack], turned: bool) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each stack, with outputs in the columns if `turned`."""
    return [(columns, rows) if turned else (rows, columns) for _, rows, columns in stacks]


def _fits(module: nn.Module, sizes: Sequence[tuple[int, int]]) -> bool:
    """Return whether stacks of these sizes can be experts."""
    named = vars(module).items()
    sides = [[n for name, n in named if re.match(f"{side}(put)?_", name)] for side in ("out", "in")]
    return _width(sizes) is not None or all(outputs in sides[0] and inputs in sides[1] for outputs, inputs in sizes)


def _width(sizes: Sequence[tuple[int, int]]) -> int | None:
    """Return the outputs of the last stack that can read what all others write, who read as many; None if none can."""
    for index, (outputs, inputs) in reversed([*enumerate(sizes)]):
        others = [*sizes[:index], *sizes[index + 1 :]]
        if others and all(other in ((inputs, outputs), (2 * inputs, outputs)) for other in others):
            return outputs
    return None


def _is_told(module: nn.Module, own: Mapping[str, Tensor], stacks: Mapping[str, Stack], turned: bool) -> bool:
    """Return whether the biases of the stacks, or the inputs of a router, show that outputs are there."""
    sizes = dict(zip(stacks, _sizes(stacks.values(), turned), strict=True))
    biases = {name: own[f"{name}_bias"].shape[-1] for name in stacks if f"{name}_bias" in own}
    if biases:
        return all(sizes[name][0] == size for name, size in biases.items())
    count = next(iter(stacks.values()))[0]
    routers = [each for each in module.children() if isinstance(each, nn.Linear) and each.out_features == count]
    return _width([*sizes.values()]) in {router.in_features for router in routers}
