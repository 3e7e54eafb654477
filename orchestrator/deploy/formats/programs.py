"""Format `torch`: a program of `torch.export` in a .pt2 file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from orchestrator.deploy.formats.format import Codec, ExportError, Run, call
from pruning.graph.tracing import Example, arguments_of, exported, quiet

FILE = "network.pt2"
SNIPPET = """\
network = torch.export.load("network.pt2").module()
outputs = network({call})
"""


def program_of(network: nn.Module, example: Example) -> ExportedProgram:
    """Return the program of a network for batches of any size; raise ExportError if the network cannot be traced."""
    try:
        with quiet():
            return exported(network, *arguments_of(example), any_batch=True)
    except ValueError as error:
        raise ExportError(str(error)) from error


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the program without its example inputs and without file paths of this machine."""
    program = program_of(network, example)
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with quiet():
        torch.export.save(program, folder / FILE)


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the program."""
    torch.set_num_threads(threads)
    with quiet():
        network = torch.export.load(folder / FILE).module()

    def run(example: Example) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = call(network, example)
            return outputs

    return run


CODEC = Codec(write, load, (FILE,), "torch", SNIPPET, runs_code=True)
