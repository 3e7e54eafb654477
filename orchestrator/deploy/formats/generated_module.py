"""Format `safetensors`: the weights, and a generated module in plain PyTorch that loads them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import indent
from types import ModuleType

import torch
from torch import Tensor, fx, nn

from orchestrator.deploy.formats.format import Codec, ExportError, Run, running
from orchestrator.workloads.weight_files import write_state
from pruning.graph.tracing import Example, Traced, traced

LOADING = '''\
def _expanded(values, indices, shape):
    """Return the tensor from two values for each four inputs; two bits give the position of each value."""
    places = torch.stack([indices >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten()[: values.numel()]
    groups = torch.zeros(values.numel() // 2, 4, dtype=values.dtype)
    groups.scatter_(1, places.view(-1, 2).long(), values.view(-1, 2))
    return groups.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


'''
"""Code of the generated module that expands `compressed` tensors."""


def compressed(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the values and indices of a weight; None if four consecutive inputs have more than two non-zeros.

    Inputs are the second dimension. Groups of four are counted along it, for each output and each kernel position.
    Values are stored in the order of their positions in the group. Each uint8 of the indices holds four positions, 0 to
    3, the first in the lowest bits. In float32 a group takes 8.5 bytes instead of 16.
    """
    if tensor.ndim < 2 or not tensor.numel() or tensor.shape[1] % 4 or not tensor.is_floating_point():
        return None
    groups = tensor.detach().movedim(1, -1).reshape(-1, 4)
    used = groups != 0
    if int(used.sum(1).max()) > 2:
        return None
    places = used.int().argsort(dim=1, descending=True, stable=True)[:, :2].sort(dim=1).values
    flat = places.flatten().to(torch.uint8)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % 4)]).view(-1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return groups.gather(1, places).flatten(), (padded << shifts).sum(1, dtype=torch.uint8)


MODULE, WEIGHTS = "network.py", "network.safetensors"
SNIPPET = """\
import network

module = network.load()
with torch.no_grad():
    outputs = module({call})
"""
IMPORTED = ("inf", "nan", "NoneType", "device")
"""Names that torch.fx writes, and that need no further import in the module."""
EXPANDED = """\
    for name in {names}:
        values, indices = tensors.pop(f"{{name}}.values"), tensors.pop(f"{{name}}.indices")
        tensors[name] = _expanded(values, indices, PARAMETERS[name][0])
"""
TEMPLATE = '''\
"""{title} in plain PyTorch, written by pruning-orchestrator. The weights are in a file in the same folder.

    module = load()
    outputs = module({inputs})

The network is in evaluation mode: no dropout, and BatchNorm uses its running statistics.
"""

{imports}from math import inf, nan
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import device, nn

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

{forward}

{expanding}def load(path=None):
    """Return the network with its weights, loaded from `path`."""
    network = Network()
    tensors = load_file(path or Path(__file__).with_name("{weights}"))
{expanded}    network.load_state_dict(tensors)
    return network.eval()
'''


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the weights that the network's operations read, and the module with these operations."""
    try:
        trace = traced(network, example, sizes="batch")
    except ValueError as error:
        raise ExportError(str(error)) from error
    tensors, names = _tensors(trace)
    parameters = {id(parameter) for parameter in trace.model.parameters()}
    learned = {name: tensor for name, tensor in tensors.items() if id(tensor) in parameters}
    fours = {name: compressed(tensor) for name, tensor in learned.items()}
    short = {name: parts for name, parts in fours.items() if parts is not None}
    inputs = [str(node.target) for node in trace.graph.graph.find_nodes(op="placeholder")]
    forward, imports = forward_code(trace.graph.graph, names)
    text = TEMPLATE.format(
        title=type(network.network if hasattr(network, "network") else network).__name__,
        inputs=", ".join(inputs),
        parameters=_sizes(learned),
        buffers=_sizes({name: tensor for name, tensor in tensors.items() if name not in learned}),
        forward=forward,
        imports=imports,
        weights=WEIGHTS,
        expanding=LOADING if short else "",
        expanded=EXPANDED.format(names=list(short)) if short else "",
    )
    (folder / MODULE).write_text(text)
    held = {name: tensor.detach() for name, tensor in tensors.items() if name not in short}
    for name, (values, indices) in short.items():
        held |= {f"{name}.values": values, f"{name}.indices": indices}
    with (folder / WEIGHTS).open("wb") as file:
        write_state(held, file)


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the module. Loading executes the module's code, so only load your own files."""
    return loaded(folder / MODULE, threads)


def loaded(module: Path, threads: int) -> Run:
    """Return a function that runs the network of a generated module, whose code is executed."""
    torch.set_num_threads(threads)
    return running(runpy.run_path(str(module))["load"]())


def _tensors(trace: Traced) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return name -> tensor for the tensors that the graph reads, each once, and attribute -> name."""
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


def forward_code(graph: fx.Graph, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the code of a method with the operations of a graph, and the imports that it needs besides torch's."""
    for node in graph.find_nodes(op="get_attr"):
        node.target = names[node.target]
    graph.set_codegen(fx.graph.CodeGen())
    code = graph.python_code("self")
    return indent(code.src.strip(), "    ") + "\n", "".join(_imports(code.globals))


def _imports(used: Mapping[str, object]) -> Iterator[str]:
    """Yield imports of the functions that the operations call by names outside torch."""
    for name, thing in used.items():
        if isinstance(thing, ModuleType) or name in IMPORTED:
            continue
        home = str(getattr(thing, "__module__", ""))
        if home.partition(".")[0] not in ("_operator", "builtins", "math", "torch"):
            raise ExportError(
                f"the network's operation {home}.{getattr(thing, '__qualname__', name)} cannot be written in the "
                "format safetensors; take the format torch."
            )
        yield f"from {home} import {thing.__name__} as {name}\n"  # type: ignore[attr-defined]  # a function


CODEC = Codec(write, load, (MODULE, WEIGHTS), "torch", SNIPPET, runs_code=True)
