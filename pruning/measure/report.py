"""Report on a pruned model: sparsity, parameters, bytes, multiply-accumulates, latency.

Masked weights that are stored densely are no smaller and no faster: their zeros are stored and multiplied like other
numbers. Packed bytes, CSR bytes and remaining multiply-accumulates are those of a format and a kernel that skip zeros;
`latency` is the time of the model itself, which multiplies the zeros.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from pruning.holding.parameter import plain_weights
from pruning.masks.mask_set import MaskSet
from pruning.measure.latency import call_of, timed
from pruning.measure.macs import LayerMacs as LayerMacs
from pruning.measure.macs import Macs as Macs
from pruning.measure.macs import in_mode
from pruning.measure.macs import macs as macs
from pruning.mixtures.finding import experts_left, mixtures

CAVEAT = (
    "Masked weights are stored and multiplied densely, so they save no memory and no time. "
    "Fewer bytes and MACs need a format and kernels that skip zeros."
)


COMPUTED = "zeros of {} do not reach the product: the forward computes another tensor from the masked weight"
"""Sentence on layers whose masks save no multiplication."""
A_TOKEN = "of the {1} parameters that one token uses, {0} remain"
"""Line on the active parameters of a mixture of experts."""


@dataclass(frozen=True)
class TensorSize:
    """Bytes of one tensor in three formats, including its values."""

    entries: int
    kept: int
    dense: int
    packed: int
    """Bytes of the kept values, and one bit per entry that marks them."""
    csr: int
    """Bytes as compressed sparse rows: kept values, a 4-byte column per value, a 4-byte start per row (dimension 0)."""


@dataclass(frozen=True)
class Latency:
    """Seconds of one call: the median and the quartiles of `samples` calls."""

    median: float
    lower: float
    upper: float
    samples: int


@dataclass(frozen=True)
class Report:
    """Measures of one model; `str` formats them as a table."""

    parameters: int
    remaining_parameters: int
    active_parameters: int
    remaining_active: int
    sparsities: dict[str, float]
    sparsity: float
    sizes: dict[str, TensorSize]
    macs: Macs
    latency: Latency
    dead: tuple[str, ...]

    @property
    def has_experts(self) -> bool:
        """Whether one token uses fewer parameters than the model has."""
        return self.active_parameters < self.parameters

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
                *([A_TOKEN.format(self.remaining_active, self.active_parameters)] if self.has_experts else []),
                f"MACs {self.macs.total}, of unmasked weights {self.macs.remaining}{saved}",
                "latency {:.3f} ms, quartiles {:.3f} to {:.3f}".format(*milliseconds),
                *([f"entirely masked: {', '.join(self.dead)}"] if self.dead else []),
                *([COMPUTED.format(", ".join(self.macs.computed))] if self.macs.computed else []),
                CAVEAT,
            ]
        )


def unreached(model: nn.Module, example: Any, masks: MaskSet | None = None) -> str:
    """Return a sentence on weights whose zeros do not reach a product of `model(example)`; empty if there are none."""
    try:
        computed = macs(model, example, masks).computed
    except ValueError as error:
        return f"whether zeros reach the products is unknown: {error}"
    return f"{COMPUTED.format(', '.join(computed))}; leave it out of `parameters`." if computed else ""


def parameters(model: nn.Module) -> int:
    """Return the number of entries of all parameters, masked or not; tied parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def remaining_parameters(model: nn.Module, masks: MaskSet | None = None) -> int:
    """Return the number of unmasked entries of all parameters; a tied parameter counts once, by its first name."""
    masks = MaskSet.collect(model) if masks is None else masks
    kept = masks.kept()
    return sum(kept.get(name, parameter.numel()) for name, parameter in _named(model))


def active_parameters(model: nn.Module, masks: MaskSet | None = None) -> int:
    """Return the number of unmasked entries of all parameters that one token uses; a tied parameter counts once.

    Of stacked experts these are as many as a token is routed to, each with the mean of those that are left; experts
    without entries, of which the router has no row either, are removed. All other parameters count.
    """
    masks = MaskSet.collect(model) if masks is None else masks
    kept = {name: parameter.numel() for name, parameter in _named(model)} | masks.kept()
    unused = 0
    for mixture in mixtures(model):
        left = int(experts_left(mixture.count, mixture.removable, masks))
        of_experts = sum(kept.get(name, 0) for name in mixture.stacks)
        unused += of_experts - round(of_experts * min(mixture.top_k or left, left) / left)
    return remaining_parameters(model, masks) - unused


def sizes(model: nn.Module, masks: MaskSet | None = None) -> dict[str, TensorSize]:
    """Return name -> bytes of every masked parameter: dense, bit-packed and CSR."""
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
    """Return the names of tensors that are entirely masked: only the bias passes through such a layer."""
    masks = model if isinstance(model, MaskSet) else MaskSet.collect(model)
    return tuple(name for name, mask in masks.items() if mask.numel() and not mask.any())


def latency(model: nn.Module, example: Any, *, samples: int = 30, warmup: int = 5) -> Latency:
    """Time `model(example)` in evaluation mode, without gradients.

    Args:
        model: any module.
        example: input of the model; a plain tuple is unpacked to positional arguments, a mapping to keyword arguments.
        samples: number of timed calls, at least 2; on a GPU each call waits for its result.
        warmup: number of untimed calls before the timed ones.

    Raises:
        ValueError: `samples` is below 2.
    """
    if samples < 2:
        raise ValueError(f"`samples` (={samples}) must be at least 2, because one call has no spread.")
    call = call_of(model, example)
    with in_mode(model, training=False):
        seconds = [timed(call, time.perf_counter) for _ in range(warmup + samples)]
    lower, median, upper = statistics.quantiles(seconds[warmup:], n=4, method="inclusive")
    return Latency(median, lower, upper, samples)


def report(model: nn.Module, example: Any, masks: MaskSet | None = None, *, samples: int = 30) -> Report:
    """Compute all measures of `model(example)`: sizes, sparsity, multiply-accumulates, latency and dead tensors.

    Warn of layers that multiply by a tensor computed from their masked weight, in which masked entries are not 0.
    """
    masks = MaskSet.collect(model) if masks is None else masks
    counted = macs(model, example, masks)
    if counted.computed:
        warnings.warn(COMPUTED.format(", ".join(counted.computed)), stacklevel=2)
    return Report(
        parameters=parameters(model),
        remaining_parameters=remaining_parameters(model, masks),
        active_parameters=active_parameters(model, MaskSet({})),
        remaining_active=active_parameters(model, masks),
        sparsities=masks.sparsities(),
        sparsity=masks.sparsity(),
        sizes=sizes(model, masks),
        macs=counted,
        latency=latency(model, example, samples=samples),
        dead=dead(masks),
    )


def _named(model: nn.Module) -> Collection[tuple[str, nn.Parameter]]:
    """Return (name in a plain model, parameter), each parameter once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, _, _, parameter in plain_weights(model):
        found.setdefault(id(parameter), (name, parameter))
    return found.values()
