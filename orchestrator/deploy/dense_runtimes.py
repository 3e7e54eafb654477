"""The dense network in each runtime that is installed, and the fastest of them for some inputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from orchestrator.catalogue import formats as catalogue
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import Run, call, difference, first_line
from orchestrator.deploy.formats.programs import INT8_FILE, in_onnx_runtime, in_openvino
from orchestrator.workloads.tasks.batch import outputs_of
from pruning.graph.tracing import Example, quiet
from pruning.measure.latency import Call, Make, calling

GRAPHS = ("onnx", "openvino")
"""Formats of other runtimes, in which the dense network is written."""
INT8 = "onnx_int8"
IN_INT8: Mapping[str, Callable[[Path, int], Run]] = {"onnxruntime": in_onnx_runtime, "openvino": in_openvino}
"""Package -> what loads the graph of `INT8` in this runtime."""
TURNS, TURN, WARMUP = 7, 0.02, 3
"""Turns in which runtimes are timed to choose the fastest, the least seconds of each, and the untimed calls before."""


class DenseRuntimes:
    """The dense network in PyTorch, torch.compile, and the runtimes of `GRAPHS` that are installed.

    Args:
        network: the dense network in evaluation mode, on the CPU.
        example: its inputs, a batch of 2 or more.
        folder: where graphs are written.
        threads: threads of each runtime.
        int8: also write the network in 8 bits, for `fastest_int8`. The example calibrates it, as times do not depend on
            the ranges of activations.
    """

    def __init__(self, network: nn.Module, example: Example, folder: Path, threads: int, *, int8: bool = False) -> None:
        self.left_out: dict[str, str] = {}
        """Runtime that is installed and cannot run the network -> why."""
        self._network, self._folder, self._threads = network, folder, threads
        self._written: list[str] = []
        for name in (*GRAPHS, INT8) if int8 else GRAPHS:
            if missing := catalogue.FORMATS[name].missing_packages():
                if name == INT8:
                    self.left_out["8 bits"] = f"{' and '.join(missing)} not installed; install the extra `export`"
                continue
            try:
                CODECS[name].write(network, example, folder / name)
                self._written.append(name)
            except Exception as error:  # each runtime raises its own types
                self._leave_out(f"{CODECS[name].row.packages[-1]}{' int8' if name == INT8 else ''}", error)

    def pytorch(self, example: Example) -> Make:
        """Return a function that makes a call of the dense network in PyTorch."""
        return calling(self._network, example)

    def fastest(self, example: Example) -> tuple[str, Make | None]:
        """Return the name and version of the fastest runtime for an example, and its call; None for PyTorch."""
        eager = f"torch {version('torch')}"
        others = dict(self._others(example))
        best = _fastest({eager: self.pytorch(example), **others})
        return best, others.get(best)

    def fastest_int8(self, example: Example) -> tuple[str, Make] | None:
        """Return the name and version of the fastest runtime in 8 bits, and its call; None if none runs the network."""
        found: dict[str, Make] = {}
        for package, load in IN_INT8.items() if INT8 in self._written else ():
            if find_spec(package) is None:
                continue
            name = f"{package} {version(package)} int8"
            make = partial(_bound, partial(load, self._folder / INT8 / INT8_FILE, self._threads), example)
            try:
                make()()
                found[name] = make
            except Exception as error:  # each runtime raises its own types
                self._leave_out(name, error)
        best = _fastest(found) if found else ""
        return (best, found[best]) if found else None

    def _others(self, example: Example) -> Iterator[tuple[str, Make]]:
        """Yield each runtime besides PyTorch that computes its outputs."""
        with torch.no_grad():
            expected = outputs_of(call(self._network, example))
        runs: dict[str, Callable[[Example], Make]] = {f"torch.compile {version('torch')}": self._compiled}
        for name in [each for each in self._written if each != INT8]:
            package = CODECS[name].row.packages[-1]
            runs[f"{package} {version(package)}"] = partial(self._graph, name)
        for name, makes in runs.items():
            try:
                make = makes(example)
                off = difference(outputs_of(make()()), expected)
                if off > catalogue.RUNTIME:
                    raise ValueError(f"its outputs differ by {off:.2g} of the largest")
                yield name, make
            except Exception as error:  # each runtime raises its own types
                self._leave_out(name, error)

    def _graph(self, name: str, example: Example) -> Make:
        return partial(_bound, partial(CODECS[name].load, self._folder / name, self._threads), example)

    def _compiled(self, example: Example) -> Make:
        """Compile the network once; each call gets new memory for weights and inputs."""
        torch._dynamo.reset()
        network = copy.deepcopy(self._network)
        with quiet(), torch._inductor.config.patch(compile_threads=1), torch.no_grad():
            compiled = torch.compile(network, dynamic=False)
            call(compiled, example)

        def make() -> Call:
            for each in (*network.parameters(), *network.buffers()):
                each.data = each.data.clone()
            inputs = copy.deepcopy(example)

            def run() -> object:
                with torch.no_grad():
                    return call(compiled, inputs)

            return run

        return make

    def _leave_out(self, name: str, error: Exception) -> None:
        self.left_out[name] = first_line(error)


def _fastest(makes: Mapping[str, Make]) -> str:
    """Return the name of the fastest call; all are timed in turns."""
    calls = {name: make() for name, make in makes.items()}
    counts: dict[str, int] = {}
    for name, each in calls.items():
        seconds = min(_seconds(each) for _ in range(WARMUP))
        counts[name] = max(1, round(TURN / seconds))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, each in calls.items():
            times[name].append(_seconds(each, counts[name]))
    return min(times, key=lambda name: min(times[name]))  # other processes only add time


def _bound(load: Callable[[], Run], example: Example) -> Call:
    """Load a graph again, and return its call for a copy of the inputs."""
    return partial(load(), copy.deepcopy(example))


def _seconds(run: Call, count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return max((time.perf_counter() - start) / count, 1e-9)
