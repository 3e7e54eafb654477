"""Deployment formats: how a network is written and loaded, with which packages, and how close its outputs must be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from orchestrator.catalogue import formats as catalogue
from orchestrator.core.errors import OrchestratorError
from orchestrator.workloads.tasks.batch import LABELS, arguments, outputs_of
from pruning.graph.tracing import Example, plain_copy, quiet
from pruning.measure.latency import Call
from pruning.measure.macs import in_mode

Run: TypeAlias = Callable[[Example], Tensor]
"""Takes the network's inputs, as `called_with` returns them, and returns its outputs."""
Stepper: TypeAlias = Callable[[Path, int, Example], Call | None]
"""See `Codec.stepper`."""


class ExportError(OrchestratorError):
    """A network cannot be written in a format, or has other outputs there."""

    exit_status = 2


@dataclass(frozen=True)
class Codec:
    """Functions that write a network in a format and load it.

    Args:
        writer: writes a network that returns a tensor into a folder: (network, example, folder).
        loader: (folder, threads) -> function that runs the network.
        files: names of the files that `writer` writes.
        arrays: library of the input arrays, torch or numpy.
        snippet: Python code that loads the network from the working directory without this project, after an import
            of `arrays`, and sets `outputs`; `{call}` and `{feed}` stand for the inputs, see `Codec.code`, and `{kind}`
            for the class of the network.
        calibration: number of training examples that `writer` needs for calibration; 0: any batch of 2 or more will do.
        runs_code: whether a file of this format can hold code that `loader` runs; load only files that this process
            has written.
        takes_batch_sizes: whether `writer` takes `batch_sizes`, for which it makes the network fast.
        against_fastest: whether networks are measured against the dense network in the fastest runtime that is
            installed, instead of the dense network in the same format.
        smaller: builds the smaller network that `writer` takes, with an example but without a trace; None:
            `pruning.shrink` does.
        stepper: (folder, threads, example) -> a call that computes one token after the example's tokens, from the keys
            and values of those before; it returns None if the network generates nothing. None: no such networks.
        needs_engine: whether `snippet` needs the package `pruning` of this project.
        row: row of the catalogue, which the table `CODECS` sets.
    """

    writer: Callable[..., None]
    loader: Callable[[Path, int], Run]
    files: tuple[str, ...]
    arrays: Literal["torch", "numpy"]
    snippet: str
    calibration: int = 0
    runs_code: bool = False
    takes_batch_sizes: bool = False
    against_fastest: bool = False
    smaller: Callable[[nn.Module, Example], nn.Module] | None = None
    stepper: Stepper | None = None
    needs_engine: bool = False
    row: catalogue.FormatRow = catalogue.FORMATS[catalogue.SHRINK]

    @property
    def name(self) -> str:
        """Name of the format, which `--to` takes."""
        return self.row.name

    def write(self, network: nn.Module, example: Example, folder: Path, *, batch_sizes: Sequence[int] = ()) -> None:
        """Write a network's `files` into a folder, for batches of any size; masked entries are stored as zeros.

        Args:
            network: the network in evaluation mode; it is not changed. If it returns an object, its logits are kept.
            example: the network's inputs, see `called_with`: a batch of 2 or more, or of `calibration` examples.
            folder: created if it is missing.
            batch_sizes: batch sizes that the network will run at most; none: 1 and the example's.

        Raises:
            ExportError: a package is missing or broken, or the network cannot be traced or written
        """
        self.check_packages()
        if not all(isinstance(each, Tensor) for each in call_values(example)):
            raise ExportError(
                f"{type(network).__name__} cannot be exported, since its inputs must all be tensors; give each tensor "
                "an argument of its own in its `forward`."
            )
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"batch_sizes": batch_sizes} if self.takes_batch_sizes else {}
        self.writer(with_outputs_alone(plain_copy(network), example), example, folder, **sizes)

    def load(self, folder: Path, threads: int = 1) -> Run:
        """Return a function that runs the network in a folder on `threads` CPU threads; raise as `write` does."""
        self.check_packages()
        return self.loader(folder, threads)

    def code(self, network: nn.Module, example: Example) -> str:
        """Return the snippet; its inputs are variables named as the arguments of the network's forward, see `zeros`."""
        names = input_names(network, example)
        call = [f"{name}={name}" for name in names] if isinstance(example, Mapping) else names
        feed = ", ".join(f'"{name}": {name}' for name in names)
        kind = type(getattr(network, "network", network)).__name__
        return self.snippet.format(call=", ".join(call), feed=f"{{{feed}}}", kind=kind)

    def zeros(self, network: nn.Module, example: Example) -> str:
        """Return Python code that makes the inputs of `code`: a batch of two examples, all zeros."""
        lines = []
        for name, value in zip(input_names(network, example), call_values(example), strict=True):
            kind = str(value.dtype).replace("torch.", f"{self.arrays}.")
            lines.append(f"{name} = {self.arrays}.zeros({(2, *value.shape[1:])}, dtype={kind})\n")
        return "".join(lines)

    def check_packages(self) -> None:
        """Raise ExportError if a package is missing, or is installed and cannot be imported."""
        if missing := self.row.missing_packages():
            raise ExportError(
                f"the format {self.name} needs {' and '.join(missing)}; install the extra `{self.row.extra}`, as by "
                f"pip install 'pruning-orchestrator[{self.row.extra}]'."
            )
        for name in self.row.packages:
            try:
                import_module(name)
            except Exception as error:  # a broken package can raise anything
                raise ExportError(
                    f"the format {self.name} needs {name}, which is installed and cannot be imported "
                    f"({first_line(error)}); install it again: pip install --force-reinstall {name}"
                ) from error


def called_with(network: nn.Module, batch: Any) -> Example:
    """Return a network's inputs for a batch of a task, without labels: a tuple, or a dict by argument name."""
    given, named = arguments(network, batch, labels=False)
    return named or tuple(given)


def call(network: Callable[..., Any], example: Example) -> Any:
    """Call a network with an example, and return its result."""
    if isinstance(example, Mapping):
        return network(**example)
    return network(*example) if isinstance(example, tuple) else network(example)


def fed(example: Example, names: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of an example by the names of a graph's inputs."""
    if isinstance(example, Mapping):
        return {name: example[name].numpy() for name in names}
    return {name: value.numpy() for name, value in zip(names, call_values(example), strict=True)}


def input_names(network: nn.Module, example: Example) -> list[str]:
    """Return the name that the network's forward has for each input of an example."""
    if isinstance(example, Mapping):
        return list(example)
    bound = inspect.signature(network.forward).bind(*call_values(example))
    found = []
    for name, value in bound.arguments.items():
        found += [f"{name}_{place}" for place in range(len(value))] if isinstance(value, tuple) else [name]
    return found


def call_values(example: Example) -> list[Any]:
    """Return the inputs in an example as a list."""
    if isinstance(example, Mapping):
        return list(example.values())
    return list(example) if isinstance(example, tuple) else [example]


def cut(example: Example, size: int, start: int = 0) -> Example:
    """Return the examples `start` to `start + size` of a batch."""
    if isinstance(example, Tensor):
        return example[start : start + size]
    if isinstance(example, tuple):
        return tuple(each[start : start + size] for each in example)
    return {name: each[start : start + size] for name, each in example.items()}


CALIBRATION, BATCH = 256, 32
"""Number of training examples for the ranges of activations, and the batch size in which they run."""


def calibration_batches(example: Example) -> list[Example]:
    """Return the examples in batches of `BATCH`."""
    return [cut(example, BATCH, start) for start in range(0, len(call_values(example)[0]), BATCH)]


def resized(example: Example, size: int) -> Example:
    """Return an example with `size` examples, which repeat if it has fewer."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim]
    count = max(map(len, tensors), default=size)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != count:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % count]

    found: Example = tree_map(filled, example)
    return found


PART = 2**22
"""Number of outputs that are compared in float64 at a time."""


def difference(outputs: Tensor, expected: Tensor) -> float:
    """Return the largest difference of outputs, relative to the largest expected output.

    It is infinite if the shapes differ, or if different entries are finite.
    """
    if outputs.shape != expected.shape or not torch.equal(outputs.isfinite(), expected.isfinite()):
        return float("inf")
    furthest, largest = 0.0, torch.finfo(torch.float32).tiny
    parts = (torch.split(each.flatten(), PART) for each in (outputs, expected))
    for one, other in zip(*parts, strict=True):
        finite = other.isfinite()
        if finite.any():
            found, due = one[finite].double(), other[finite].double()
            furthest, largest = max(furthest, float((found - due).abs().max())), max(largest, float(due.abs().max()))
    return furthest / largest


class _Around(nn.Module):
    """Wrapper around a network, with the network's parameters."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def _around(network: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    """Return a wrapper around a network with another forward of the same signature."""
    forward.__signature__ = inspect.signature(type(network).forward)  # type: ignore[attr-defined]  # torch.export reads it
    return type("OutputsAlone", (_Around,), {"forward": forward})(network)  # type: ignore[no-any-return]


def with_outputs_alone(network: nn.Module, example: Example) -> nn.Module:
    """Return a network that returns only the tensor of outputs: `network`, or a wrapper with the same signature."""
    with torch.no_grad(), quiet(), in_mode(network, training=False):
        if isinstance(call(network, example), Tensor):
            return network

    def forward(self: _Around, *args: Any, **kwargs: Any) -> Tensor:
        return outputs_of(self.network(*args, **kwargs))

    return _around(network, forward)


def running_as(network: nn.Module, run: Run) -> nn.Module:
    """Return a module that a task can measure like `network`, and whose outputs `run` computes."""

    def forward(_: _Around, *args: Any, **kwargs: Any) -> Tensor:
        return run({name: value for name, value in kwargs.items() if name not in LABELS} or args)

    return _around(network, forward)


def running(network: Callable[..., Any]) -> Run:
    """Return a function that runs a network of PyTorch."""

    def run(example: Example) -> Tensor:
        with torch.no_grad():
            return outputs_of(call(network, example))

    return run


def first_line(error: Exception) -> str:
    """Return the type of an error of another library and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
