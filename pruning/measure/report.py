"""What pruning has bought: sparsity, parameters, bytes, multiply-accumulates, latency.

Masked weights that are stored densely are no smaller and no faster: the zeros are kept in memory and multiplied like
any other number. Bytes and multiply-accumulates here say what a format or a kernel that skips zeros could save;
`latency` says what the model takes as it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pruning.holding.parameter import plain_modules, pruned_names
from pruning.holding.reparam import orig_name
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import LayerMacs as LayerMacs
from pruning.measure.macs import Macs as Macs
from pruning.measure.macs import arguments_of, in_mode
from pruning.measure.macs import macs as macs

CAVEAT = (
    "Masked weights are stored and multiplied densely: they save no memory and no time as they are. "
    "Smaller bytes and fewer MACs need a format and kernels that skip zeros."
)


@dataclass(frozen=True)
class TensorSize:
    """Bytes of one tensor, values included, in three formats."""

    entries: int
    kept: int
    dense: int
    packed: int
    """Kept values, and one bit an entry that says which they are."""
    csr: int
    """Compressed sparse rows: kept values, a 4-byte column each, a 4-byte start a row; dimension 0 are the rows."""


@dataclass(frozen=True)
class Latency:
    """Seconds of one call: the median and the quartiles of `samples` calls."""

    median: float
    lower: float
    upper: float
    samples: int


@dataclass(frozen=True)
class Report:
    """All measures of one model; `str` makes it a table."""

    parameters: int
    remaining_parameters: int
    sparsities: dict[str, float]
    sparsity: float
    sizes: dict[str, TensorSize]
    macs: Macs
    latency: Latency
    dead: tuple[str, ...]

    def __str__(self) -> str:
        width = max([len(name) for name in self.sizes] + [6])
        row = f"{{:<{width}}} {{:>12}} {{:>9}} {{:>12}} {{:>12}} {{:>12}}".format
        lines = [row("tensor", "entries", "sparsity", "dense B", "packed B", "CSR B")]
        for name, size in self.sizes.items():
            sparsity = f"{self.sparsities.get(name, 0.0):.4f}"
            lines.append(row(name, size.entries, sparsity, size.dense, size.packed, size.csr))
        saved = f" (1/{self.macs.total / self.macs.remaining:.1f} of dense)" if self.macs.remaining else ""
        milliseconds = (1e3 * t for t in (self.latency.median, self.latency.lower, self.latency.upper))
        return "\n".join(
            [
                *lines,
                f"sparsity {self.sparsity:.4f}; {self.remaining_parameters} of {self.parameters} parameters remain",
                f"MACs {self.macs.total}, of unmasked weights {self.macs.remaining}{saved}",
                "latency {:.3f} ms, quartiles {:.3f} to {:.3f}".format(*milliseconds),
                *([f"entirely masked: {', '.join(self.dead)}"] if self.dead else []),
                CAVEAT,
            ]
        )


def parameters(model: nn.Module) -> int:
    """Return the number of entries of all parameters, masked or not; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def remaining_parameters(model: nn.Module, masks: MaskSet | None = None) -> int:
    """Return the number of entries of all parameters that are not masked; a tied one counts as its first name does."""
    masks = MaskSet.collect(model) if masks is None else masks
    kept = masks.kept()
    return sum(kept.get(name, parameter.numel()) for name, parameter in _named(model))


def sizes(model: nn.Module, masks: MaskSet | None = None) -> dict[str, TensorSize]:
    """Return name -> bytes of every masked parameter, dense, bit-packed and as CSR."""
    masks = MaskSet.collect(model) if masks is None else masks
    kept = masks.kept()
    by_name = {}
    for name, parameter in _named(model):
        if name in masks:
            size, count, width = parameter.numel(), kept[name], parameter.element_size()
            rows = parameter.shape[0] if parameter.dim() else 1
            packed, csr = count * width + (size + 7) // 8, count * (width + 4) + 4 * (rows + 1)
            by_name[name] = TensorSize(size, count, size * width, packed, csr)
    return by_name


def dead(model: nn.Module | MaskSet) -> tuple[str, ...]:
    """Return the names of the tensors that are entirely masked: nothing passes through such a layer but its bias."""
    return tuple(name for name, mask in _masks_of(model).items() if mask.numel() and not mask.any())


def latency(model: nn.Module, example: Any, *, samples: int = 30, warmup: int = 5) -> Latency:
    """Time `model(example)` in evaluation mode, without gradients.

    Args:
        model: any module.
        example: what to call the model with; a plain tuple is unpacked into arguments.
        samples: timed calls, at least 2; on a GPU each is waited for.
        warmup: calls before those.
    """
    if samples < 2:
        raise ValueError(f"`samples` (={samples}) must be at least 2: one call has no spread.")
    arguments = arguments_of(example)
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    seconds = []
    with in_mode(model, training=False), torch.no_grad():
        for _ in range(warmup + samples):
            for device in devices:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            model(*arguments)
            for device in devices:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    lower, median, upper = statistics.quantiles(seconds[warmup:], n=4, method="inclusive")
    return Latency(median, lower, upper, samples)


def report(model: nn.Module, example: Any, masks: MaskSet | None = None, *, samples: int = 30) -> Report:
    """Measure everything in this module, on `model(example)`."""
    masks = MaskSet.collect(model) if masks is None else masks
    return Report(
        parameters=parameters(model),
        remaining_parameters=remaining_parameters(model, masks),
        sparsities=masks.sparsities(),
        sparsity=masks.sparsity(),
        sizes=sizes(model, masks),
        macs=macs(model, example, masks),
        latency=latency(model, example, samples=samples),
        dead=dead(masks),
    )


def _masks_of(model: nn.Module | MaskSet) -> MaskSet:
    return model if isinstance(model, MaskSet) else MaskSet.collect(model)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter, once, under the name that it has in a plain model."""
    seen = set()
    for path, module in plain_modules(model):
        names = {orig_name(name): name for name in pruned_names(module)}
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield (f"{path}." if path else "") + names.get(key, key), parameter
