"""A layer of a sparse network: the kernels that were chosen for some batch sizes, as a module for inference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pruning.catalogue.kernels import KERNELS
from pruning.kernels.kernel import Kernel, Run, Setting
from pruning.kernels.sparse_weight import LayerShape, SparseWeight


@dataclass(frozen=True)
class Choice:
    """A kernel that was chosen for a batch size, as plain data.

    Args:
        examples: the batch size, see `LayerShape.examples`.
        kernel: name of the kernel.
        setting: the kernel's numbers.
        seconds: measured time of a call.
        dense_seconds: measured time of PyTorch's operation, in the same turns.
    """

    examples: int
    kernel: str
    setting: Setting
    seconds: float
    dense_seconds: float

    @property
    def speedup(self) -> float:
        """Speed-up over PyTorch's operation."""
        return self.dense_seconds / self.seconds


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is computed: its numbers, the choices by batch size, and the arrays of each choice."""

    layer: LayerShape
    choices: tuple[Choice, ...]
    arrays: tuple[tuple[int, ...], ...]
    """Choice -> places of its arrays among all arrays of the layer."""

    def bind(self, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
        """Return the call for a shape of inputs, by the kernel chosen for the nearest batch size."""
        examples = max(1, self.layer.examples(shape))
        place = min(range(len(self.choices)), key=lambda n: _distance(self.choices[n].examples, examples))
        choice = self.choices[place]
        own = [arrays[each] for each in self.arrays[place]]
        return kernel_named(choice.kernel).bind(self.layer, choice.setting, own, bias, shape)

    def text(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> LayerPlan:
        """Return the plan of a JSON text that `text` made."""
        held = json.loads(text)
        return cls(
            layer_shape(held["layer"]),
            tuple(Choice(**each) for each in held["choices"]),
            tuple(map(tuple, held["arrays"])),
        )


def layer_shape(held: Mapping[str, Any]) -> LayerShape:
    """Return a layer's numbers from plain JSON data."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in held.items()}
    return LayerShape(**fields)


def _distance(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


@cache
def kernel_named(name: str) -> Kernel:
    """Return a kernel of the catalogue."""
    kernel: Kernel = KERNELS[name].load()
    return kernel


@cache
def _plan_of(text: str) -> LayerPlan:
    return LayerPlan.of_text(text)


def checked(x: Tensor) -> Tensor:
    """Return inputs in the layout that kernels read.

    Raises:
        ValueError: they are not float32 on the CPU.
        RuntimeError: a gradient is wanted.
    """
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise ValueError(
            f"the input (={x.dtype} on {x.device}) of a sparse layer must be float32 on the CPU; convert it, or run "
            "the network that `to_sparse` was given."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a sparse layer computes no gradients; run it under torch.no_grad(), and train the network that "
            "`to_sparse` was given."
        )
    return x.contiguous()


@torch.library.custom_op("pruning::sparse_layer", mutates_args=(), device_types="cpu")
def sparse_layer(x: Tensor, arrays: Sequence[Tensor], bias: Tensor, added: Tensor | None, plan: str) -> Tensor:
    """Compute a layer from its nonzero weights; `plan` is a `LayerPlan` as JSON."""
    held = checked(x)
    run = _plan_of(plan).bind(arrays, bias, held.shape)
    return run(held, None if added is None else added.contiguous())


@sparse_layer.register_fake
def _(x: Tensor, arrays: Sequence[Tensor], bias: Tensor, added: Tensor | None, plan: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(_plan_of(plan).layer.output(x.shape))


class SparseLayer(nn.Module):
    """A linear layer or convolution that runs on its nonzero weights, in float32 on the CPU, without gradients.

    Args:
        layer: the layer's numbers.
        weight: the nonzero weights.
        bias: shape (outputs,).
        choices: a kernel for each batch size; the nearest one serves other sizes.
    """

    def __init__(self, layer: LayerShape, weight: SparseWeight, bias: Tensor, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.sparsity, self.shape = weight.sparsity, weight.shape
        arrays: list[Tensor] = []
        made: dict[str, tuple[int, ...]] = {}
        for choice in choices:
            key = f"{choice.kernel} {sorted(choice.setting.items())}"
            if key not in made:
                own = kernel_named(choice.kernel).pack(weight, layer, choice.setting)
                made[key] = tuple(range(len(arrays), len(arrays) + len(own)))
                arrays += own
        keys = [f"{choice.kernel} {sorted(choice.setting.items())}" for choice in choices]
        self.plan = LayerPlan(layer, tuple(choices), tuple(made[key] for key in keys))
        self._text = self.plan.text()
        self.count = len(arrays)
        for place, array in enumerate(arrays):
            self.register_buffer(f"array_{place}", array)
        self.register_buffer("bias", bias.detach().float().contiguous())
        self._runs: dict[torch.Size, Run] = {}

    @property
    def arrays(self) -> list[Tensor]:
        """Arrays of all choices."""
        return [getattr(self, f"array_{place}") for place in range(self.count)]

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the outputs for inputs of any batch size; `added` is added before the clamp."""
        if type(x) is not Tensor or torch.compiler.is_compiling():
            found: Tensor = sparse_layer(x, self.arrays, self._bias_tensor(), added, self._text)
            return found
        x = checked(x)
        run = self._runs.get(x.shape)
        if run is None:
            run = self._bind(x.shape)
        return run(x, added if added is None else added.contiguous())

    def _bias_tensor(self) -> Tensor:
        bias = self._buffers["bias"]
        assert bias is not None
        return bias

    def _bind(self, shape: torch.Size) -> Run:
        if len(self._runs) >= MOST_SHAPES:
            self._runs.clear()
        run = self._runs[shape] = self.plan.bind(self.arrays, self._bias_tensor(), shape)
        return run

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLayer:
        """Refuse other dtypes and devices, which no kernel computes; calls hold addresses, and are made again."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = [each for name, each in self._buffers.items() if each is not None and _differs(each, kept[name])]
        if moved:
            self._buffers.update(kept)
            raise ValueError(
                f"a sparse layer (to {moved[0].dtype} on {moved[0].device}) must stay float32 on the CPU; convert the "
                "network that `to_sparse` was given."
            )
        self._runs = {}
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runs": {}}

    def extra_repr(self) -> str:
        """Return the layer's sparsity and kernels."""
        kernels = ", ".join(f"{each.kernel} at {each.examples}" for each in self.plan.choices)
        return f"{tuple(self.shape)}, sparsity={self.sparsity:.3f}, {kernels}"


MOST_SHAPES = 64
"""Shapes of inputs whose calls a layer keeps."""


def _differs(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.dtype is not other.dtype or one.device != other.device)
