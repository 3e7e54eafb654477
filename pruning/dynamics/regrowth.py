"""Dynamics that drop the smallest weights of each tensor and regrow as many: SET at random, RigL by gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pruning.choices.axes import blocks_of
from pruning.dynamics.changing_masks import Dynamics
from pruning.selection.random_subset import prune_random_
from pruning.selection.smallest import prune_smallest_


class Set(Dynamics):
    """Drop the weights nearest to 0 after every `every` steps but the last, and regrow as many at random.

    In each tensor, with n+ positive weights and n- negative ones,

        drop floor(fraction n+) of the positive and floor(fraction n-) of the negative ones, those nearest to 0
        regrow as many of all entries that are not kept, with values of N(0, scale^2)

    A weight of exactly 0 counts as positive, and is dropped first. Just dropped entries may regrow, as new ones. Dense
    tensors stay dense.

    Args:
        every: steps between two updates; in the paper an epoch. It must be given, except in a sweep.
        fraction: fraction of the weights that is dropped.
        scale: standard deviation of the values of regrown weights.
        until: place after which masks stay: a fraction of the training up to 1, else a step.

    Source: Mocanu et al. 2018, arXiv 1707.04780.
    """

    keeps_counts = True

    def __init__(self, every: int | None = None, fraction: float = 0.3, scale: float = 0.1, until: float = 1.0) -> None:
        self.every, self.fraction, self.scale, self.until = every or 0, fraction, scale, until
        self.new_values = (-10 * scale, 10 * scale)  # almost surely

    def begin(self) -> None:
        """Raise ValueError if the steps between two updates are unknown."""
        if not self.every:
            raise ValueError("`every` (=None) must be the number of steps between two updates; pass those of an epoch.")

    def after_step(self) -> None:
        """Drop and regrow after every `every` steps, but not at the end."""
        if self.step % self.every or self.step >= min(self.length, self.place_of(self.until)):
            return
        masks, grown, values = {}, {}, {}
        for name, kept in self.kept.items():
            if kept.all() or not self.parameter(name).requires_grad:
                continue  # a dense layer has no place for regrowth, and a frozen one keeps its values
            weight = self.parameter(name).detach()
            with named(name):
                masks[name], grown[name] = self._moved(weight, kept)
            count = int(torch.count_nonzero(grown[name]))
            values[name] = (torch.randn(count, generator=self.generator) * self.scale).to(weight)
        self.change(masks, grown=grown)
        for name, drawn in values.items():
            self.parameter(name).detach().masked_scatter_(grown[name], drawn)

    def _moved(self, weight: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return which entries are kept after an update, and which of them were regrown."""
        negative = kept & (weight < 0)
        positive = kept & ~negative
        count = 0
        for side, values in ((positive, weight), (negative, -weight)):
            dropped = math.floor(self.fraction * int(torch.count_nonzero(side)))
            prune_smallest_(side, values, dropped)
            count += dropped
        left = positive | negative
        grown = ~left
        rest = grown.clone()
        prune_random_(rest, count, generator=self.generator)
        grown &= ~rest
        return left | grown, grown


class RigL(Dynamics):
    """Replace the smallest weights by the entries of largest gradient, in place of one optimizer step in `every`.

    Before step t = begin, begin + every, ... < until, in each tensor with n kept entries,

        f = fraction / 2 (1 + cos(pi (t - begin) / (until - begin)))
        drop the floor(f n) kept entries of smallest |w|
        regrow as many of the entries that are not kept, those of largest |gradient|; ties: lowest index first

    The counts of each tensor stay. A regrown weight begins at 0, and the optimizer's state of it at 0; a weight that is
    dropped and regrown at once keeps both. The optimizer takes no step then (all gradients become None), but the step
    counts, and a schedule of the learning rate goes on. A tensor without a gradient keeps its mask. If the optimizer is
    given a closure, it is evaluated once, before the update. A step that a GradScaler skips is no step: the update
    happens in the next one.

    Args:
        every: steps between two updates.
        until: place from which masks stay: a fraction of the training up to 1, else a step.
        fraction: fraction of the kept entries that the first update drops.
        begin: place of the first update, like `until`.
        size: blocks of `size` consecutive inputs go and return together, by the sums of |w| and |gradient|; 1: single
            entries.
        outputs: number of consecutive outputs of a block.

    Source: Evci et al. 2020, arXiv 1911.11134.
    """

    keeps_counts = True
    replaces_steps = True
    new_values = (0.0, 0.0)

    def __init__(
        self,
        every: int = 100,
        until: float = 0.75,
        fraction: float = 0.3,
        begin: float = 0,
        size: int = 1,
        outputs: int = 1,
    ) -> None:
        self.every, self.until, self.fraction, self.first = every, until, fraction, begin
        self.unit = blocks_of(size, outputs)

    def begin(self) -> None:
        """Raise ValueError for masks that cut blocks."""
        for part in self.parts(self.unit):
            kept = self.kept[part.name]
            if not torch.equal(part.by_entry(part.by_unit(kept).any(1)), kept):
                raise ValueError(
                    f"`masks` (with {part.name!r}) must keep or prune each block of `size` (={self.unit.size}) inputs "
                    f"and `outputs` (={self.unit.outputs}) outputs; make them with unit='block'."
                )

    def wants_dense(self) -> bool:
        """Return whether the next step is replaced by an update."""
        begin, until = self.place_of(self.first), self.place_of(self.until)
        return begin <= self.step < until and (self.step - begin) % self.every == 0

    def before_step(self) -> bool:
        """Drop and regrow in place of a step."""
        if not self.wants_dense():
            return False
        begin, until = self.place_of(self.first), self.place_of(self.until)
        fraction = self.fraction / 2 * (1 + math.cos(math.pi * (self.step - begin) / (until - begin)))
        masks = {}
        for part in self.parts(self.unit):
            parameter = self.parameter(part.name)
            if parameter.grad is not None:
                weight, gradient = (part.by_unit(each.detach().abs()).sum(1) for each in (parameter, parameter.grad))
                with named(part.name):
                    left = regrown(weight, gradient, part.by_unit(self.kept[part.name]).any(1), fraction)
                masks[part.name] = part.by_entry(left)
        self.change(masks)
        return True


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Add the parameter's name to an error, for example about NaN."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Changing the mask of {name}: {error}") from error


def regrown(weight: Tensor, gradient: Tensor, kept: Tensor, fraction: float) -> Tensor:
    """Return the mask after an update of `RigL`: bool, with as many kept entries as before."""
    count = math.floor(fraction * int(torch.count_nonzero(kept)))
    left = prune_smallest_(kept.clone(), weight, count, magnitude=True)
    rest = ~left
    prune_smallest_(rest, -gradient.abs(), count)
    return ~rest
