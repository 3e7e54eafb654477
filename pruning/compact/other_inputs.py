"""Agreement of a smaller network with the masked one on inputs of other sizes than the example's, and in training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.compact.traced_network import TracedNetwork
from pruning.compact.training_calls import outputs_in_training
from pruning.compact.tried_inputs import LARGEST_SIZE, failing_batches, other_inputs
from pruning.graph.input_guard import REASON
from pruning.graph.tracing import caching_configs, first_line, output_difference, outputs_of
from pruning.holding.copies import to_run
from pruning.holding.parameter import hooked
from pruning.measure.macs import Inputs

MOST_ENTRIES = 2**26
"""Number of entries of a tensor up to which large batches are tried: 256 MB in float32."""
Run: TypeAlias = Callable[[nn.Module, Inputs], list[Tensor]]
"""Way of calling a network: `outputs_of` or `outputs_in_training`."""
Wider: TypeAlias = Callable[[Inputs], tuple[nn.Module, nn.Module, Inputs]]
"""Takes inputs; returns the masked network, the smaller one and the inputs in a wider dtype."""


class OtherInputs:
    """Outputs of a masked network on inputs of other sizes and dtypes, and in training, as far as it runs so.

    Args:
        model: the masked network in evaluation mode.
        given: inputs of the example.
        rules: conditions on sizes, whose other sides are tried.
    """

    def __init__(self, model: nn.Module, given: Inputs, rules: Iterable[str]) -> None:
        self._model = model = to_run(model)
        self.untried: dict[str, str] = {}
        """Inputs at which outputs are not compared -> why."""
        self._expected: list[tuple[Run, Inputs, list[Tensor]]] = []
        self._cached = given if caching_configs(model) and not _failure(model, given) else None
        rules, most = [*rules], _largest_batch(model, given)
        large = [rule for rule in rules if (failing := failing_batches(rule)) and failing[0] > most]
        self._too_large = {f"batches at which {rule} fails": "which would take too much memory" for rule in large}
        others: Iterator[tuple[Run, Inputs]] = ((outputs_of, each) for each in other_inputs(given, rules, most))
        for run, each in chain(others, [(outputs_in_training, given)]):
            try:
                self._expected.append((run, each, run(model, each)))
            except Exception:  # a forward may raise anything for sizes that it was not written for
                continue

    def relax(self, smaller: TracedNetwork, tolerance: float) -> None:
        """Drop conditions that exclude one size, as `x.shape[0] != 1`, where the outputs agree at that size, too.

        A forward may branch on a size only to repeat a tensor along the batch.
        """
        found = [(re.fullmatch(r"(\w+\.shape\[\d+\]) (!= \d+|> 1)", rule), rule) for rule in smaller.guard.rules]
        for place in dict.fromkeys(match[1] for match, _ in found if match):
            strict, excluding = smaller.guard, {rule for match, rule in found if match and match[1] == place}
            smaller.guard = replace(strict, rules=tuple(each for each in strict.rules if each not in excluding))
            inputs = [given for _, given, _ in self._expected if strict.refusal(*given)]
            allowed = [given for given in inputs if not smaller.guard.refusal(*given)]
            if not allowed or self.disagreement(smaller, tolerance):
                smaller.guard = strict

    def disagreement(self, smaller: nn.Module, tolerance: float, wider: Wider | None = None) -> str:
        """Return where a smaller network differs by more than a tolerance; empty if it agrees or refuses the input.

        Args:
            smaller: the smaller network, whose buffers may change.
            tolerance: largest allowed difference, relative to the largest output.
            wider: networks of a wider dtype, for inputs on which these differ; None: there are none.
        """
        if self._cached and not isinstance(smaller, TracedNetwork) and (failure := _failure(smaller, self._cached)):
            return f"{failure} where the network returns a cache"
        is_class = not any(isinstance(each, TracedNetwork) for each in smaller.modules())  # a graph refuses both
        self.untried = dict(self._too_large) if is_class else {}
        for run, given, expected in self._expected:
            training, masked = run is outputs_in_training, self._model
            if training and not is_class:
                continue
            try:
                difference = output_difference(run(smaller, given), expected)
                if difference > tolerance and wider:
                    masked, other, given = wider(given)
                    expected = run(masked, given)
                    difference = output_difference(run(other, given), expected)
            except Exception as error:  # as above
                if str(error).endswith(REASON):  # the network, or a part of it, refuses the input
                    continue
                return f"{first_line(error)} for {_described(given, training)}"
            if difference <= tolerance:
                continue
            moved = _by_chance(masked, given, training, expected)
            if not (moved > tolerance if training else difference <= 2 * moved):
                return f"outputs differ by {difference:.2g} of the largest for {_described(given, training)}"
            self.untried[_described(given, training)] = "where rounding or chance changes the outputs"
        return ""


def _largest_batch(model: nn.Module, given: Inputs) -> int:
    """Return the largest batch whose tensors have at most `MOST_ENTRIES` entries, with the widest layer's width."""
    widest = max((size for each in model.parameters() for size in each.shape), default=1)
    row = max((leaf[:1].numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim), default=1)
    return max(LARGEST_SIZE, MOST_ENTRIES // max(1, row * widest))


def _by_chance(model: nn.Module, given: Inputs, training: bool, expected: list[Tensor]) -> float:
    """Return how far the masked network's outputs move if those of its layers move by rounding, with other draws.

    An image of one pixel, for example, ties all scores of a detector, whose order rounding then decides.
    """
    generator = torch.Generator().manual_seed(0)

    def rounded(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return output * (1 + torch.finfo(output.dtype).eps * noise)

    layers = (module for module in model.modules() if module._parameters)
    with hooked(module.register_forward_hook(rounded) for module in layers):
        found = outputs_in_training(model, given, seed=1) if training else outputs_of(model, given)
        return output_difference(found, expected)


def _failure(model: nn.Module, given: Inputs) -> str:
    """Return why a network fails where it also returns caches, which other calls leave out; "" if it runs."""
    try:
        outputs_of(model, given, caching=True)
    except Exception as error:  # as above
        return first_line(error)
    return ""


def _described(given: Inputs, training: bool) -> str:
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves)
    return f"inputs of {shapes}{' with the training flag set' * training}"
