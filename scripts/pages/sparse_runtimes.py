"""One dense or pruned layer on several runtimes, for the measurements of scripts/does_it_pay."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.library import library
from scripts.pages.pay_cells import COMPILED, ONNX, OPENVINO, PYTORCH, SPARSE

BF16 = "OpenVINO bf16"
Weights = tuple[Tensor, Tensor]
"""Weight and bias."""
Answer = Callable[[], Tensor]
"""Runs a layer on its inputs, and returns its outputs."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, or with `kernel` a convolution of `size` x `size` inputs; `batch` examples at once."""

    inputs: int
    outputs: int
    batch: int
    kernel: int = 0
    size: int = 0

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.title}, batch {self.batch}"

    @property
    def title(self) -> str:
        """Name without the batch size."""
        shape = f"{self.inputs}→{self.outputs}"
        if not self.kernel:
            return f"linear {shape}"
        return f"conv {self.kernel}x{self.kernel} {shape} on {self.size}x{self.size}"

    def example(self) -> Tensor:
        """Return inputs, equal at each call."""
        draw = torch.Generator().manual_seed(1)
        shape = (self.inputs, self.size, self.size) if self.kernel else (self.inputs,)
        return torch.randn(self.batch, *shape, generator=draw)

    def weights(self) -> Weights:
        """Return dense weights, equal at each call, scaled to keep the variance."""
        draw = torch.Generator().manual_seed(0)
        shape = (self.outputs, self.inputs, *(self.kernel, self.kernel)[: 2 if self.kernel else 0])
        weight = torch.randn(shape, generator=draw) / (self.inputs * max(1, self.kernel) ** 2) ** 0.5
        return weight, torch.randn(self.outputs, generator=draw)

    def apply(self, example: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the outputs, computed by PyTorch."""
        if self.kernel:
            return F.conv2d(example, weight, bias, padding=self.kernel // 2)
        return F.linear(example, weight, bias)

    def module(self, weights: Weights) -> nn.Module:
        """Return the layer as PyTorch's module, with a copy of the weights."""
        outputs, kernel = len(weights[0]), self.kernel
        layer = (
            nn.Conv2d(self.inputs, outputs, kernel, padding=kernel // 2) if kernel else nn.Linear(self.inputs, outputs)
        )
        layer.weight, layer.bias = (nn.Parameter(each.clone(), requires_grad=False) for each in weights)
        return layer.eval()


def pruned(layer: Layer, pattern: str, sparsity: float) -> Weights:
    """Return the layer's weights with the smallest fraction set to zero, or removed for the pattern `channels`."""
    weight, bias = layer.weights()
    if pattern == "channels":
        kept = weight.flatten(1).norm(dim=1).argsort(descending=True)[: round(layer.outputs * (1 - sparsity))]
        return weight[kept.sort().values].contiguous(), bias[kept.sort().values]
    module = nn.Linear(weight[0].numel(), layer.outputs)
    module.weight = nn.Parameter(weight.flatten(1))
    if pattern == "2:4":
        pruning.prune(module, "n_m")
    else:
        pruning.l1_unstructured(module, "weight", amount=sparsity)
    pruning.remove_all(module)
    return module.weight.detach().reshape(weight.shape), bias


@dataclass(frozen=True)
class Runtime:
    """A way to run a layer."""

    name: str
    packages: tuple[str, ...]
    make: Callable[[Layer, Weights, Tensor, float], Answer]
    """Builds the runner from layer, weights, inputs, and the fraction of weights that are zero."""
    reads_zeros: bool = False
    """Whether the runtime claims to skip zeros."""
    runs_dense: bool = True
    """Whether the runtime is one for dense layers, too; else pruned layers are compared with PyTorch's dense layer."""
    shrinks: bool = True
    """Whether layers with removed channels are measured; not for CSR, which gains nothing there over eager."""
    rebuilt: bool = True
    """Whether each block of a measurement builds the runner again."""
    tolerance: float = 1e-4
    """Largest allowed difference of outputs, relative to the largest output."""


def _eager(layer: Layer, weights: Weights, example: Tensor, _: float) -> Answer:
    return partial(layer.module(weights), example.clone())


def _compiled(layer: Layer, weights: Weights, example: Tensor, _: float) -> Answer:
    return partial(torch.compile(layer.module(weights), dynamic=False), example.clone())


def _sparse(layer: Layer, weights: Weights, example: Tensor, _: float) -> Answer:
    """Choose the kernel here, before the layer is timed."""
    return partial(pruning.to_sparse(layer.module(weights), example), example.clone())


def _csr(layer: Layer, weights: Weights, example: Tensor, _: float) -> Answer:
    """Run the layer as the product of a CSR matrix and its inputs; a convolution unfolds its inputs at each call."""
    weight, bias = weights[0].flatten(1).to_sparse_csr(), weights[1].clone()[:, None]
    held = example.clone()
    if not layer.kernel:
        return lambda: (weight @ held.t() + bias).t()

    def run() -> Tensor:
        columns = F.unfold(held, layer.kernel, padding=layer.kernel // 2).transpose(0, 1).flatten(1)
        return (weight @ columns + bias).view(-1, layer.batch, layer.size, layer.size).transpose(0, 1)

    return run


def graph_of(layer: Layer, weights: Weights) -> bytes:
    """Return the layer as an ONNX model of one operation, input `x`, output `y`."""
    from onnx import TensorProto, helper, numpy_helper

    shape = [layer.batch, layer.inputs, *[layer.size, layer.size][: 2 if layer.kernel else 0]]
    outputs = [layer.batch, len(weights[0]), *shape[2:]]
    if layer.kernel:
        node = helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[layer.kernel // 2] * 4)
    else:
        node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
        [numpy_helper.from_array(each.numpy(), name) for each, name in zip(weights, "wb", strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def _onnxruntime(layer: Layer, weights: Weights, example: Tensor, _: float) -> Answer:
    return in_onnxruntime(graph_of(layer, weights), example)


def in_onnxruntime(graph: bytes | str, example: Tensor) -> Answer:
    """Return what runs a graph of one input, given as its content or its path, in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    held = {session.get_inputs()[0].name: example.numpy().copy()}
    return lambda: torch.from_numpy(session.run(None, held)[0])


def _openvino(layer: Layer, weights: Weights, example: Tensor, zeros: float, *, precision: str) -> Answer:
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision}
    if zeros:  # from this share of zeros on, weights are kept without them and written out as they are used
        settings["CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"] = 0.9 * zeros
    return in_openvino(graph_of(layer, weights), example, settings)


def in_openvino(graph: bytes | str, example: Tensor, settings: Mapping[str, Any]) -> Answer:
    """Return what runs a graph of one input, given as its content or its path, in OpenVINO, for this size of inputs."""
    import openvino

    core = openvino.Core()
    model = core.read_model(graph)
    model.reshape(list(example.shape))
    threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(model, "CPU", {**threads, **settings}).create_infer_request()
    request.set_input_tensor(openvino.Tensor(example.numpy().copy()))

    def run() -> Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor().data)

    return run


RUNTIMES = (
    Runtime(PYTORCH, ("torch",), _eager),
    Runtime(COMPILED, ("torch",), _compiled, rebuilt=False),  # a compilation in each block would take minutes
    Runtime("CSR (torch.sparse)", ("torch",), _csr, reads_zeros=True, runs_dense=False, shrinks=False),
    Runtime(ONNX, ("onnxruntime", "onnx"), _onnxruntime),
    Runtime(OPENVINO, ("openvino", "onnx"), partial(_openvino, precision="f32"), reads_zeros=True),
    Runtime(BF16, ("openvino", "onnx"), partial(_openvino, precision="bf16"), reads_zeros=True, tolerance=3e-2),
    Runtime(SPARSE, ("torch",), _sparse, reads_zeros=True, runs_dense=False),
)


def absent() -> Mapping[str, str]:
    """Return runtime -> reason, for the runtimes that cannot be measured here."""
    found = not_installed({runtime.name: runtime.packages for runtime in RUNTIMES})
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        found[COMPILED] = "its inductor needs a C++ compiler, and this machine has none"
    if BF16 not in found:
        import openvino

        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            found[BF16] = f"the processor ({platform.machine()}) has no bfloat16"
    return found | without_kernels(SPARSE)


def not_installed(packages: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return runtime -> reason, for the runtimes whose packages are missing."""
    found = {}
    for runtime, names in packages.items():
        missing = [package for package in names if importlib.util.find_spec(package) is None]
        if missing:
            found[runtime] = f"{' and '.join(missing)} not installed; scripts/install export installs what it needs"
    return found


def without_kernels(runtime: str) -> dict[str, str]:
    """Return runtime -> reason if the sparse kernels cannot be compiled here; else nothing."""
    try:
        library()
    except KernelsUnavailable as error:
        return {runtime: str(error).rstrip(".")}
    return {}
