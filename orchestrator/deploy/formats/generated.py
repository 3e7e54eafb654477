"""The format `safetensors`: weights, and a module in plain PyTorch that is generated to hold and load them."""

from __future__ import annotations

import keyword
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from orchestrator.deploy.formats import two_of_four
from orchestrator.deploy.formats.format import Codec, ExportError, Run, call
from orchestrator.workloads.weights import write_state
from pruning.graph.tracing import Example, Traced, traced

MODULE, WEIGHTS = "network.py", "network.safetensors"
SNIPPET = """\
import network

module = network.load()
with torch.no_grad():
    outputs = module({call})
"""
EXPANDED = """\
    for name in {names}:
        values, indices = tensors.pop(f"{{name}}.values"), tensors.pop(f"{{name}}.indices")
        tensors[name] = _expanded(values, indices, PARAMETERS[name][0])
"""
TEMPLATE = '''\
"""{title} as plain PyTorch, written by pruning-orchestrator. Its weights lie beside it.

    module = load()
    outputs = module({inputs})

It is the network in evaluation: no dropout, BatchNorm by its statistics.
"""

import operator
from math import inf, nan
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

aten = torch.ops.aten

PARAMETERS = {{
{parameters}}}
BUFFERS = {{
{buffers}}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        for name, (shape, dtype) in PARAMETERS.items():
            tensor = torch.empty(shape, dtype=dtype)
            parameter = nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
            self._owner(name).register_parameter(name.split(".")[-1], parameter)
        for name, (shape, dtype) in BUFFERS.items():
            self._owner(name).register_buffer(name.split(".")[-1], torch.empty(shape, dtype=dtype))

    def _owner(self, name):
        module = self
        for step in name.split(".")[:-1]:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        return module

    def forward(self, {inputs}):
{forward}

{expanding}def load(path=None):
    """Return the network with its weights; path: of their file."""
    network = Network()
    tensors = load_file(path or Path(__file__).with_name("{weights}"))
{expanded}    network.load_state_dict(tensors)
    return network.eval()
'''


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the weights that the network's operations read, and the module that does these operations."""
    try:
        trace = traced(network, example, any_batch=True)
    except ValueError as error:
        raise ExportError(str(error)) from error
    tensors, names = _tensors(trace)
    parameters = {id(parameter) for parameter in trace.model.parameters()}
    learned = {name: tensor for name, tensor in tensors.items() if id(tensor) in parameters}
    fours = {name: two_of_four.compressed(tensor) for name, tensor in learned.items()}
    short = {name: parts for name, parts in fours.items() if parts is not None}
    inputs = [str(node.target) for node in trace.graph.graph.find_nodes(op="placeholder")]
    text = TEMPLATE.format(
        title=type(network.network if hasattr(network, "network") else network).__name__,
        inputs=", ".join(inputs),
        parameters=_sizes(learned),
        buffers=_sizes({name: tensor for name, tensor in tensors.items() if name not in learned}),
        forward="".join(f"        {line}\n" for line in _lines(trace.graph.graph, names)),
        weights=WEIGHTS,
        expanding=two_of_four.LOADING if short else "",
        expanded=EXPANDED.format(names=list(short)) if short else "",
    )
    (folder / MODULE).write_text(text)
    held = {name: tensor.detach() for name, tensor in tensors.items() if name not in short}
    for name, (values, indices) in short.items():
        held |= {f"{name}.values": values, f"{name}.indices": indices}
    with (folder / WEIGHTS).open("wb") as file:
        write_state(held, file)


def load(folder: Path, threads: int) -> Run:
    """Return what runs the module; it is code that is executed, so load what you have written yourself."""
    torch.set_num_threads(threads)
    network: nn.Module = runpy.run_path(str(folder / MODULE))["load"]()

    def run(example: Example) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = call(network, example)
            return outputs

    return run


def _tensors(trace: Traced) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors that the graph reads, each once by the name that it has, and attribute -> that name."""
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    of: dict[int, str] = {}
    for node in trace.graph.graph.find_nodes(op="get_attr"):
        tensor = trace.tensor(node.target)
        name = of.setdefault(id(tensor), node.target.removeprefix("network."))
        tensors[name], names[node.target] = tensor, name
    return tensors, names


def _sizes(tensors: Mapping[str, Tensor]) -> str:
    return "".join(f"    {name!r}: ({tuple(tensor.shape)}, {tensor.dtype}),\n" for name, tensor in tensors.items())


def _lines(graph: fx.Graph, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the operations of a graph as Python, under the names of the modules that they belong to."""
    written = {node: str(node.target) for node in graph.find_nodes(op="placeholder")}
    written |= {node: _path(names[node.target]) for node in graph.find_nodes(op="get_attr")}
    last = {used: node for node in graph.nodes for used in node.all_input_nodes}
    before = None
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {_text(node.args[0], written)}"
        if node.op != "call_function":
            continue
        stack = list(node.meta.get("nn_module_stack", {}).values())
        inside = stack[-1][0].removeprefix("network").lstrip(".") if stack else None
        if inside and inside != before:
            yield f"# {inside}"
        before = inside or before
        given = [_text(each, written) for each in node.args]
        given += [f"{name}={_text(each, written)}" for name, each in node.kwargs.items()]
        result = node.name if node in last else "_"
        yield f"{result} = {_operation(node.target)}({', '.join(given)})"
        ended = [used.name for used in node.all_input_nodes if last[used] is node and used.op == "call_function"]
        if ended:
            yield f"del {', '.join(ended)}"


def _operation(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        packet, _, overload = str(target).rpartition(".")
        space, _, name = packet.partition(".")
        return f"{'aten' if space == 'aten' else f'torch.ops.{space}'}.{name}.{overload}"
    module = {"_operator": "operator", "builtins": ""}.get(target.__module__, target.__module__)
    if module not in ("", "operator", "math", "torch"):
        raise ExportError(
            f"the operation {module}.{target.__qualname__} of the network has no form in the format safetensors; "
            "take the format torch."
        )
    return f"{module}.{target.__name__}" if module else str(target.__name__)


def _text(value: Any, written: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return written.get(value, value.name)
    if isinstance(value, list | tuple):
        inner = ", ".join(_text(each, written) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({_text(value.start, written)}, {_text(value.stop, written)}, {_text(value.step, written)})"
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)


def _path(name: str) -> str:
    """Return how an attribute is reached in Python: `getattr(layers, "0").weight` of layers.0.weight."""
    path = "self"
    for step in name.split("."):
        plain = step.isidentifier() and not keyword.iskeyword(step)
        path = f"{path}.{step}" if plain else f"getattr({path}, {step!r})"
    return path


CODEC = Codec(write, load, (MODULE, WEIGHTS), "torch", SNIPPET)
