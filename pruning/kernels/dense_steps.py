"""Operations between sparse layers, computed in C in their sequence: activations, layer normalisation, attention.

    gelu(x) = x * (1 + erf(x / sqrt(2))) / 2
    gelu_tanh(x) = x * sigmoid(sqrt(8 / pi) * (x + 0.044715 x^3));  silu(x) = x * sigmoid(x)
    layer_norm(x) = (x - mean(x)) / sqrt(variance(x) + number) * weight + bias, over the last dimension
    attention(q, k, v) = softmax(number * q k^T) v for each head

Each has the same bits on all instruction sets, and differs from PyTorch's by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.library import CompiledCall, compiled_call
from pruning.kernels.sparse_layer import check_conversion, checked, is_recorded
from pruning.kernels.sparse_weight import LayerShape

LARGEST_NUMBER = 1e30
"""Largest number of a plan; files hold no infinite ones."""
Form: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class StepPlan:
    """A step's numbers, as plain data.

    Args:
        operation: its row of `OPERATIONS`.
        heads: heads of an attention.
        number: epsilon of a normalisation, factor of an attention's products.
    """

    operation: str
    heads: int = 1
    number: float = 0.0


@dataclass(frozen=True)
class Operation:
    """A kind of step.

    Args:
        kernel: name of the C function.
        inputs: number of tensors that it reads.
        arrays: whether it has weight and bias.
        constants: from a plan's number, those of the C function.
        sizes: from the heads and the shapes of the inputs, the numbers of the C function; None if PyTorch computes it.
        in_torch: the same from a plan, the inputs, weight and bias, by PyTorch.
    """

    kernel: str
    in_torch: Callable[..., Tensor]
    constants: Callable[[float], Sequence[float]] = lambda _: ()
    sizes: Callable[[int, Sequence[torch.Size]], tuple[int, ...] | None] = lambda _, shapes: (1, shapes[0].numel())
    inputs: int = 1
    arrays: bool = False


def _rows(_heads: int, shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    return shapes[0].numel() // shapes[0][-1], shapes[0][-1]


def _heads(heads: int, shapes: Sequence[torch.Size]) -> tuple[int, ...] | None:
    queries, keys, values = shapes
    if keys != values or (queries[0], queries[2]) != (keys[0], keys[2]) or len(queries) != 3 or queries[2] % heads:
        return None
    return queries[0], queries[1], keys[1], heads, queries[2] // heads


def _attention(plan: StepPlan, *given: Tensor) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:2], plan.heads, x.shape[2] // plan.heads).transpose(1, 2) for x in given)
    return F.scaled_dot_product_attention(q, k, v, scale=plan.number).transpose(1, 2).flatten(2)


def _norm(plan: StepPlan, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, plan.number)


SLOPE = math.sqrt(8 / math.pi)
OPERATIONS = {
    "gelu": Operation("gelu", lambda _, x: F.gelu(x)),
    "gelu_tanh": Operation(
        "gated", lambda _, x: F.gelu(x, approximate="tanh"), constants=lambda _: (SLOPE, SLOPE * 0.044715)
    ),
    "silu": Operation("gated", lambda _, x: F.silu(x), constants=lambda _: (1.0, 0.0)),
    "layer_norm": Operation("layer_norm", _norm, constants=lambda number: [number], sizes=_rows, arrays=True),
    "attention": Operation("attention", _attention, constants=lambda number: [number], sizes=_heads, inputs=3),
}


def step_call(plan: StepPlan, given: Sequence[Form], tensors: Sequence[Tensor]) -> CompiledCall | None:
    """Return the call of a step for the forms of its inputs; None if PyTorch computes them, or refuses them."""
    row, shapes = OPERATIONS[plan.operation], [shape for shape, dtype in given if dtype is torch.float32]
    if len(shapes) < len(given) or not all(shape.numel() and len(shape) == len(shapes[0]) > 0 for shape in shapes):
        return None
    first, sizes = shapes[0], row.sizes(plan.heads, shapes)
    own = [(each.shape, each.dtype, each.is_cpu and each.is_contiguous()) for each in tensors]
    if sizes is None or own != [((first[-1],), torch.float32, True)] * len(own):
        return None
    constants = torch.tensor(row.constants(plan.number), dtype=torch.float32, device="cpu")
    layer = LayerShape("linear", *first[-1:] * 2)
    try:
        return compiled_call(row.kernel, sizes, (constants, *tensors), layer, first)
    except KernelsUnavailable:
        return None


@torch.library.custom_op("pruning::dense_step", mutates_args=(), device_types="cpu")
def dense_step(given: Sequence[Tensor], tensors: Sequence[Tensor], operation: str, heads: int, number: float) -> Tensor:
    """Compute a step of these numbers, see `StepPlan`, from its inputs and its weight and bias."""
    plan, read = StepPlan(operation, heads, number), [checked(x) for x in given]
    call = step_call(plan, [(x.shape, x.dtype) for x in read], tensors)
    return OPERATIONS[operation].in_torch(plan, *read, *tensors) if call is None else call(*read)


@dense_step.register_fake
def _(given: Sequence[Tensor], *_: Any) -> Tensor:
    return given[0].new_empty(given[0].shape)


class DenseStep(nn.Module):
    """An operation on float32 tensors that a sequence computes; its outputs have the shape of its first input.

    Args:
        plan: its numbers.
        tensors: weight and bias of a normalisation, each float32 (width,).
    """

    dtypes = (torch.float32, torch.float32, torch.float32)

    def __init__(self, plan: StepPlan, *tensors: Tensor) -> None:
        super().__init__()
        self.plan = plan
        for name, tensor in zip(("weight", "bias"), tensors, strict=False):
            self.register_buffer(name, tensor.detach().contiguous().clone())

    def forward(self, *given: Tensor) -> Tensor:
        """Return the outputs."""
        if all(type(x) is Tensor for x in given) and not is_recorded():
            given = tuple(map(checked, given))
            for each in self._tensors():
                checked(each)
        found: Tensor = dense_step(given, self._tensors(), self.plan.operation, self.plan.heads, self.plan.number)
        return found

    def compiled(self, given: Sequence[Form]) -> CompiledCall | None:
        """Return the call for the forms of inputs; None if C cannot compute it."""
        return step_call(self.plan, given, self._tensors())

    def held(self) -> tuple[int, ...]:
        """Return what tells the tensors that calls hold from others, see `SparseLayer.held`."""
        return tuple(number for each in self._tensors() for number in (id(each), each.data_ptr()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DenseStep:
        check_conversion(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Load values into the tensors, as C reads float32 on the CPU."""
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _tensors(self) -> list[Tensor]:
        return [each for each in self._buffers.values() if each is not None]

    def extra_repr(self) -> str:
        """Return the plan."""
        return str(self.plan)
