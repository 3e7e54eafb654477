"""A layer of a sparse network as a module for inference, and the choice of its kernels by measurement."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.kernels.library import CompiledCall
from pruning.kernels.sparse_weight import ByteScale, Kernel, LayerShape, Run, Setting, SparseWeight

Key = TypeVar("Key")


@dataclass(frozen=True)
class KernelChoice:
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

    @property
    def rounds(self) -> bool:
        """Whether the kernel rounds weights and inputs."""
        return KERNELS[self.kernel].rounds


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is computed: its numbers, the choices by batch size, and the arrays of each choice."""

    layer: LayerShape
    choices: tuple[KernelChoice, ...]
    arrays: tuple[tuple[int, ...], ...]
    """KernelChoice -> places of its arrays among all arrays of the layer."""

    def bind(self, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
        """Return the call for a shape of inputs, by the kernel chosen for the nearest batch size.

        The call takes a tensor to add of any shape that broadcasts to the outputs.

        Raises:
            ValueError: the layer does not take inputs of this shape.
        """
        run, shape_added = self.run(arrays, bias, shape), self.shape_added(shape)

        def call(x: Tensor, added: Tensor | None) -> Tensor:
            if added is None:
                return run(x, None)
            added = checked(added, self.layer.added_dtype)
            if self.layer.added and added.shape != shape_added:
                raise ValueError(f"bytes of shape {tuple(added.shape)} are added; it must be {tuple(shape_added)}.")
            return run(x, widened(added, shape_added))

        return call

    def shape_added(self, shape: torch.Size) -> torch.Size:
        """Return the shape of a tensor that kernels add, for a shape of inputs."""
        return torch.Size(replace(self.layer, made=self.layer.added).output(shape))

    def run(self, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
        """Return the kernel's own call for a shape of inputs, which takes what `checked` and `widened` return."""
        self.layer.check(shape)
        outputs = torch.Size(self.layer.output(shape))
        if not outputs.numel():
            return lambda x, _added: x.new_empty(outputs, dtype=self.layer.output_dtype)
        examples = self.layer.examples(shape)
        place = min(range(len(self.choices)), key=lambda n: _distance(self.choices[n].examples, examples))
        choice = self.choices[place]
        own = [arrays[each] for each in self.arrays[place]]
        with torch.device("cpu"):  # kernels make tensors, whatever torch.set_default_device says
            return kernel_named(choice.kernel).bind(self.layer, choice.setting, own, bias, shape)

    def text(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> LayerPlan:
        """Return the plan of a JSON text that `text` made."""
        held = json.loads(text)
        shape = {name: _value(each) for name, each in held["layer"].items()}
        return cls(
            LayerShape(**shape),
            tuple(KernelChoice(**each) for each in held["choices"]),
            tuple(map(tuple, held["arrays"])),
        )


def _value(held: Any) -> Any:
    """Return a value of `LayerShape` from JSON."""
    return tuple(held) if isinstance(held, list) else ByteScale(**held) if isinstance(held, dict) else held


def widened(added: Tensor, outputs: torch.Size) -> Tensor:
    """Return a tensor to add in the shape of the outputs, contiguous.

    Raises:
        ValueError: it does not broadcast to this shape.
    """
    if added.shape == outputs:
        return added
    try:
        return added.expand(outputs).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"a tensor of shape {tuple(added.shape)} is added to a sparse layer's output; it must broadcast to the "
            f"output's shape {tuple(outputs)}."
        ) from error


def _distance(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


def kernels_of(layer: LayerShape) -> list[str]:
    """Return the names of a layer's kernels: those of bytes and dense alone if it takes or makes bytes."""
    found = [(name, row) for name, row in KERNELS.items() if layer.kind in row.kinds]
    return [name for name, row in found if row.rounds or name == DENSE or not layer.in_bytes]


@cache
def kernel_named(name: str) -> Kernel:
    """Return a kernel of the catalogue."""
    kernel: Kernel = KERNELS[name].load()
    return kernel


@cache
def _plan_of(text: str) -> LayerPlan:
    return LayerPlan.of_text(text)


def is_recorded() -> bool:
    """Return whether calls are recorded or transformed (torch.compile, jit.trace, torch.func): none sees C code."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def checked(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return inputs, or a tensor to add, in the layout that kernels read.

    Raises:
        ValueError: they have another dtype, or are not on the CPU.
        RuntimeError: a gradient is wanted.
    """
    if x.dtype is not dtype or not x.is_cpu:
        raise ValueError(
            f"the input (={x.dtype} on {x.device}) of a sparse layer must be {str(dtype).removeprefix('torch.')} on "
            "the CPU; convert it, or run the network that `to_sparse` was given."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "a sparse layer computes no gradients; run it under torch.no_grad(), and train the network that "
            "`to_sparse` was given."
        )
    return (x.resolve_neg() if x.is_neg() else x).contiguous()


@torch.library.custom_op("pruning::sparse_layer", mutates_args=(), device_types="cpu")
def sparse_layer(x: Tensor, arrays: Sequence[Tensor], bias: Tensor, added: Tensor | None, plan: str) -> Tensor:
    """Compute a layer from its nonzero weights; `plan` is a `LayerPlan` as JSON."""
    held = checked(x, _plan_of(plan).layer.input_dtype)
    return _plan_of(plan).bind(arrays, bias, held.shape)(held, added)


@sparse_layer.register_fake
def _(x: Tensor, arrays: Sequence[Tensor], bias: Tensor, added: Tensor | None, plan: str) -> Tensor:  # noqa: ARG001
    layer = _plan_of(plan).layer
    layer.check(x.shape)
    return x.new_empty(layer.output(x.shape), dtype=layer.output_dtype)


def check_conversion(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise ValueError if a conversion changes the dtype, the device or the positions of weights."""
    values, positions = torch.ones(8), torch.arange(8, dtype=torch.int32)
    for given, found in ((values, fn(values)), (positions, fn(positions.clone()))):
        if found.dtype is not given.dtype or found.device != given.device:
            raise ValueError(
                f"a sparse layer (to {found.dtype} on {found.device}) must stay float32 on the CPU; convert the "
                "network that `to_sparse` was given."
            )
        if given is positions and not torch.equal(given, found):
            raise ValueError("a sparse layer must keep the positions of its weights; call `to_sparse` again.")


class SparseLayer(nn.Module):
    """A linear layer or convolution that runs on its nonzero weights, in float32 on the CPU, without gradients.

    Args:
        layer: the layer's numbers.
        weight: the nonzero weights.
        bias: shape (outputs,).
        choices: a kernel for each batch size; the nearest one serves other sizes.
        keep: keep `weight` for `weight()`, unless an array has all weights.
    """

    def __init__(
        self,
        layer: LayerShape,
        weight: SparseWeight,
        bias: Tensor,
        choices: Sequence[KernelChoice],
        *,
        keep: bool = True,
    ) -> None:
        super().__init__()
        self._kept = weight if keep and all(choice.kernel != DENSE for choice in choices) else None
        self.sparsity, self.shape = weight.sparsity, weight.shape
        arrays: list[Tensor] = []
        made: dict[str, tuple[int, ...]] = {}
        keys = [f"{choice.kernel} {sorted(choice.setting.items())}" for choice in choices]
        for key, choice in zip(keys, choices, strict=True):
            if key not in made:
                own = kernel_named(choice.kernel).pack(weight, layer, choice.setting)
                made[key] = tuple(range(len(arrays), len(arrays) + len(own)))
                arrays += own
        self.plan = LayerPlan(layer, tuple(choices), tuple(made[key] for key in keys))
        self._text = self.plan.text()
        self.count = len(arrays)
        for place, array in enumerate(arrays):
            self.register_buffer(f"array_{place}", array)
        self.register_buffer("bias", bias.detach().float().contiguous())
        self._runs: dict[torch.Size, Run] = {}
        self._held = (0, 0)

    @property
    def arrays(self) -> list[Tensor]:
        """Arrays of all choices."""
        return [getattr(self, f"array_{place}") for place in range(self.count)]

    def weight(self) -> SparseWeight:
        """Return the nonzero weights.

        Raises:
            ValueError: the layer was loaded from a file, and keeps only the arrays of its kernels.
        """
        for choice, places in zip(self.plan.choices, self.plan.arrays, strict=True):
            if choice.kernel == DENSE:
                return SparseWeight.of(self.arrays[places[0]])
        if self._kept is None:
            raise ValueError("a sparse layer that was loaded keeps no weights; use those in its file.")
        return self._kept

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the outputs for inputs of any batch size; `added` is added before the clamp."""
        if type(x) is not Tensor or is_recorded():
            found: Tensor = sparse_layer(x, self.arrays, self.bias_tensor(), added, self._text)
            return found
        x = checked(x, self.plan.layer.input_dtype)
        run = self._runs.get(x.shape)
        if run is None or self.held() != self._held:
            run = self._bind(x.shape)
        return run(x, added)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of inputs and of a tensor to add."""
        return self.plan.layer.input_dtype, self.plan.layer.added_dtype

    def compiled(self, given: Sequence[tuple[torch.Size, torch.dtype]]) -> CompiledCall | None:
        """Return the call for shape and dtype of inputs and of a tensor to add; None if C cannot compute it."""
        (shape, dtype), *added = given
        run, other = self.plan.run(self.arrays, checked(self.bias_tensor()), shape), self.plan.shape_added(shape)
        fits = dtype is self.dtypes[0] and all(each == (other, self.dtypes[1]) for each in added)
        return run if fits and isinstance(run, CompiledCall) else None

    def held(self) -> tuple[int, int]:
        """Return what tells the tensors that calls hold from others: the bias, and its address, which torch may move.

        Calls keep their bias alive, so that no other one has its identity.
        """
        bias = self._buffers["bias"]
        return id(bias), bias.data_ptr()  # type: ignore[union-attr]

    def bias_tensor(self) -> Tensor:
        """Return the bias, which may be another one under torch.func.functional_call."""
        bias = self._buffers["bias"]
        assert bias is not None
        return bias

    def _bind(self, shape: torch.Size) -> Run:
        """Make the call for a shape; calls made for other arrays, as in torch.func.functional_call, are dropped."""
        if len(self._runs) >= MOST_SHAPES or self.held() != self._held:
            self._runs, self._held = {}, self.held()
        run = self._runs[shape] = self.plan.bind(self.arrays, checked(self.bias_tensor()), shape)
        return run

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLayer:
        """Convert the arrays, and drop the calls, which hold addresses of arrays."""
        check_conversion(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._runs = {}
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Load values into the arrays; positions must be the layer's own, as kernels read wherever they say."""
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            if own is None or given is None or own.is_floating_point():
                continue
            if given.dtype is not own.dtype or given.device != own.device or not torch.equal(given, own):
                raise ValueError(
                    f"the state's `{prefix}{name}` differs from the positions of this layer's weights; load a state of "
                    "the same sparse network, or the dense network's state before `to_sparse`."
                )
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}  # calls hold addresses of arrays
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runs": {}, "_held": (0, 0)}

    def extra_repr(self) -> str:
        """Return the layer's sparsity and kernels."""
        kernels = ", ".join(f"{each.kernel} at {each.examples}" for each in self.plan.choices)
        return f"{tuple(self.shape)}, sparsity={self.sparsity:.3f}, {kernels}"


MOST_SHAPES = 64
"""Shapes of inputs whose calls a layer keeps."""


TURNS = 7
"""Timed turns; the fastest of a candidate's turns decides."""
TURN = 3e-4
"""Least seconds of a turn, in which a fast candidate is called several times."""
WORTHWHILE = 0.97
"""A sparse kernel is chosen if it takes at most this fraction of the dense time."""
HOPELESS = 1.5
"""A candidate this many times slower than the best in a first call is not timed further."""


def chosen(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> KernelChoice:
    """Return the fastest kernel for a layer and its inputs.

    Args:
        weight: the nonzero weights.
        layer: the layer's numbers.
        bias: shape (outputs,).
        x: inputs.
        added: tensor to add before the clamp, or None.

    Raises:
        ValueError: the layer does not take these inputs.
    """
    layer.check(x.shape)
    x = checked(x)
    added = None if added is None else widened(checked(added), torch.Size(layer.output(x.shape)))
    candidates = list(_candidates(weight, layer, bias, x))
    dense = next(place for place, (name, _, _) in enumerate(candidates) if name == DENSE)
    hopeless = {place: math.inf if place == dense else HOPELESS for place in range(len(candidates))}
    with torch.inference_mode():
        calls = {place: partial(run, x, added) for place, (_, _, run) in enumerate(candidates)}
        fastest = fastest_seconds(calls, TURNS, TURN, hopeless)
    best = min(fastest, key=lambda place: fastest[place])
    if fastest[best] > WORTHWHILE * fastest[dense]:
        best = dense
    name, setting, _ = candidates[best]
    return KernelChoice(layer.examples(x.shape), name, dict(setting), fastest[best], fastest[dense])


def dense_choice(examples: int) -> KernelChoice:
    """Return the choice of PyTorch's operation without a measurement."""
    return KernelChoice(examples, DENSE, {}, 1.0, 1.0)


def _candidates(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor) -> Iterator[tuple[str, Setting, Run]]:
    for name in kernels_of(layer):
        kernel = kernel_named(name)
        for setting in kernel.settings(weight, layer, layer.examples(x.shape)):
            yield name, setting, kernel.bind(layer, setting, kernel.pack(weight, layer, setting), bias, x.shape)


def fastest_seconds(
    calls: Mapping[Key, Callable[[], object]], turns: int, turn: float, hopeless: Mapping[Key, float] | None = None
) -> dict[Key, float]:
    """Time functions in turns: return the seconds of a call in the fastest turn, as other processes only add time.

    Args:
        calls: key -> function.
        turns: number of turns.
        turn: least seconds of a turn, in which a fast function is called several times.
        hopeless: key -> how many times slower than the fastest function, in first calls, this one may be to be timed;
            None times all.
    """
    first = {key: min(_seconds(call, 1), _seconds(call, 1)) for key, call in calls.items()}
    limits = {key: math.inf if hopeless is None else hopeless[key] * min(first.values()) for key in calls}
    counts = {key: max(1, round(turn / max(each, 1e-7))) for key, each in first.items() if each <= limits[key]}
    times = [{key: _seconds(calls[key], count) for key, count in counts.items()} for _ in range(turns)]
    return {key: min(each[key] for each in times) for key in counts}


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
