"""The dense network in each runtime that is installed, and the fastest of them for some inputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from orchestrator.catalogue import formats as catalogue
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import call, difference, first_line
from orchestrator.workloads.tasks.batch import outputs_of
from pruning.graph.tracing import Example, quiet
from pruning.measure.latency import Call, Make, calling

GRAPHS = ("onnx", "openvino")
"""Formats of other runtimes, in which the dense network is written."""
TURNS, TURN, WARMUP = 7, 0.02, 3
"""Turns in which runtimes are timed to choose the fastest, the least seconds of each, and the untimed calls before."""


class DenseRuntimes:
    """The dense network in PyTorch, torch.compile, and the runtimes of `GRAPHS` that are installed.

    Args:
        network: the dense network in evaluation mode, on the CPU.
        example: its inputs, a batch of 2 or more.
        folder: where graphs are written.
        threads: threads of each runtime.
    """

    def __init__(self, network: nn.Module, example: Example, folder: Path, threads: int) -> None:
        self.left_out: dict[str, str] = {}
        """Runtime that is installed and cannot run the network -> why."""
        self._network, self._folder, self._threads = network, folder, threads
        self._written: list[str] = []
        for name in GRAPHS:
            if catalogue.FORMATS[name].missing_packages():
                continue
            try:
                CODECS[name].write(network, example, folder / name)
                self._written.append(name)
            except Exception as error:  # each runtime raises its own types
                self._leave_out(CODECS[name].row.packages[-1], error)

    def pytorch(self, example: Example) -> Make:
        """Return a function that makes a call of the dense network in PyTorch."""
        return calling(self._network, example)

    def fastest(self, example: Example) -> tuple[str, Make | None]:
        """Return the name and version of the fastest runtime for an example, and its call; None for PyTorch."""
        eager = f"torch {version('torch')}"
        others = dict(self._others(example))
        makes = {eager: self.pytorch(example), **others}
        calls = {name: make() for name, make in makes.items()}
        counts: dict[str, int] = {}
        for name, each in calls.items():
            seconds = min(_seconds(each) for _ in range(WARMUP))
            counts[name] = max(1, round(TURN / seconds))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, each in calls.items():
                times[name].append(_seconds(each, counts[name]))
        best = min(times, key=lambda name: min(times[name]))  # other processes only add time
        return best, others.get(best)

    def _others(self, example: Example) -> Iterator[tuple[str, Make]]:
        """Yield each runtime besides PyTorch that computes its outputs."""
        with torch.no_grad():
            expected = outputs_of(call(self._network, example))
        runs: dict[str, Callable[[Example], Make]] = {f"torch.compile {version('torch')}": self._compiled}
        for name in self._written:
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
        def make() -> Call:
            return partial(CODECS[name].load(self._folder / name, self._threads), copy.deepcopy(example))

        return make

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


def _seconds(run: Call, count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return max((time.perf_counter() - start) / count, 1e-9)
