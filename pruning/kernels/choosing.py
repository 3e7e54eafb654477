"""Choice of a layer's kernel by measurement: all candidates timed in turns on the layer's own inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pruning.catalogue.kernels import DENSE, KERNELS
from pruning.kernels.kernel import Run, Setting
from pruning.kernels.sparse_layer import Choice, checked, kernel_named, widened
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

TURNS = 7
"""Timed turns; the fastest of a candidate's turns decides, because other processes only add time."""
TURN = 3e-4
"""Least seconds of a turn, in which a fast candidate is called several times."""
WORTHWHILE = 0.97
"""A sparse kernel is chosen if it takes at most this fraction of the dense time."""
HOPELESS = 1.5
"""A candidate this many times slower than the best in a first call is not timed further."""


def chosen(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor, added: Tensor | None) -> Choice:
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
    examples, runs = layer.examples(x.shape), dict[tuple[str, int], tuple[Setting, Run]]()
    for name, setting, run in _candidates(weight, layer, bias, x):
        runs[name, len(runs)] = setting, run
    with torch.inference_mode():
        first = {key: _seconds(partial(run, x, added)) for key, (_, run) in runs.items()}
        limit = HOPELESS * min(first.values())
        kept = [key for key in runs if key[0] == DENSE or first[key] <= limit]
        calls = {key: max(1, round(TURN / first[key])) for key in kept}
        times: dict[tuple[str, int], list[float]] = {key: [] for key in kept}
        for _ in range(TURNS):
            for key in kept:
                run, start = runs[key][1], time.perf_counter()
                for _ in range(calls[key]):
                    run(x, added)
                times[key].append((time.perf_counter() - start) / calls[key])
    fastest = {key: min(each) for key, each in times.items()}
    dense = next(key for key in kept if key[0] == DENSE)
    best = min(fastest, key=lambda key: fastest[key])
    if fastest[best] > WORTHWHILE * fastest[dense]:
        best = dense
    return Choice(examples, best[0], dict(runs[best][0]), fastest[best], fastest[dense])


def dense_choice(examples: int) -> Choice:
    """Return the choice of PyTorch's operation without a measurement."""
    return Choice(examples, DENSE, {}, 1.0, 1.0)


def _candidates(weight: SparseWeight, layer: LayerShape, bias: Tensor, x: Tensor) -> Iterator[tuple[str, Setting, Run]]:
    for name, row in KERNELS.items():
        if layer.kind not in row.kinds:
            continue
        kernel = kernel_named(name)
        for setting in kernel.settings(weight, layer, layer.examples(x.shape)):
            arrays = kernel.pack(weight, layer, setting)
            run = kernel.bind(layer, setting, arrays, bias, x.shape)
            yield name, setting, _holding(run, arrays)


def _holding(run: Run, arrays: list[Tensor]) -> Run:
    """Keep the arrays alive as long as the call."""

    def call(x: Tensor, added: Tensor | None, _arrays: list[Tensor] = arrays) -> Tensor:
        return run(x, added)

    return call


def _seconds(call: Callable[[], object]) -> float:
    """Return the faster of two calls, in seconds."""
    found = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return max(min(found), 1e-7)
