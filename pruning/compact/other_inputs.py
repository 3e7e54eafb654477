"""Agreement of a smaller network with the masked one on inputs of other sizes than the example's, and in training."""

from __future__ import annotations

import io
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.compact.branching_sizes import Change, ConditionsMet, changes_of_batch, noted_call
from pruning.compact.traced_network import TracedNetwork
from pruning.compact.training_calls import outputs_in_training
from pruning.compact.tried_inputs import Axis, other_arguments, other_inputs
from pruning.graph.input_guard import REASON
from pruning.graph.tracing import caching_configs, difference_told, first_line, output_difference, outputs_of
from pruning.holding.copies import to_run
from pruning.holding.parameter import hooked
from pruning.measure.macs import Inputs

LARGEST_BATCH = 300
"""Largest batch that is tried whatever memory it takes, if the forward may branch there."""
MOST_ENTRIES = 2**26
"""Number of entries of a tensor up to which larger inputs are tried: 256 MB in float32."""
MOST_BRANCHES = 24
"""Number of inputs that are tried because conditions have another outcome there."""
BRANCHES = "sizes at which the forward may branch"
TOO_LARGE = "which would take too much memory"
Run: TypeAlias = Callable[[nn.Module, Inputs], list[Tensor]]
"""Way of calling a network: `outputs_of` or `outputs_in_training`."""
Wider: TypeAlias = Callable[[Inputs], tuple[nn.Module, nn.Module, Inputs]]
"""Takes inputs; returns the masked network, the smaller one and the inputs in a wider dtype."""


@dataclass(frozen=True)
class Call:
    """A call of the masked network.

    Args:
        run: way of calling it.
        given: inputs.
        expected: its outputs.
        flag: the flag or number in which the call differs from the example's, such as `skip=True`; "": none.
    """

    run: Run
    given: Inputs
    expected: list[Tensor]
    flag: str = ""

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """Return a network's outputs; a flag may make it print."""
        with redirect_stdout(io.StringIO()) if self.flag else nullcontext():
            return self.run(model, self.given)

    @property
    def training(self) -> bool:
        """Whether the training flag is set."""
        return self.run is outputs_in_training

    def __str__(self) -> str:
        leaves = [leaf for leaf in tree_leaves(self.given) if isinstance(leaf, Tensor)]
        shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves)
        flag = f", `{self.flag}`" if self.flag else ""
        return f"inputs of {shapes}{flag}{' with the training flag set' * self.training}"


class OtherInputs:
    """Outputs of a masked network on inputs of other sizes, dtypes and flags, and in training, as far as it runs so.

    Args:
        model: the masked network in evaluation mode.
        given: inputs of the example.
        rules: conditions on the size of the batch, from a trace.
    """

    def __init__(self, model: nn.Module, given: Inputs, rules: Iterable[str]) -> None:
        self._model = model = to_run(model)
        self.untried: dict[str, str] = {}
        """Inputs at which outputs are not compared -> why."""
        self.flags: dict[str, str] = {}
        """Flag with which the smaller network computes something else -> how it differs."""
        self._calls: list[Call] = []
        self._cached = given if caching_configs(model) and not _failure(model, given) else None
        self._left_out: dict[str, str] = {}
        self._add_sizes(given, changes_of_batch(rules, given))
        with suppress(Exception):  # a forward may raise anything
            self._calls.append(Call(outputs_in_training, given, outputs_in_training(model, given)))
        for each, flag in other_arguments(model, given):
            with suppress(Exception, SystemExit):  # a flag may end the program
                call = Call(outputs_of, each, [], flag)
                self._calls.append(replace(call, expected=call.outputs(model)))

    def _add_sizes(self, given: Inputs, batches: set[Change]) -> None:
        """Add calls with other inputs, and with those at which the conditions of these calls have another outcome."""
        waiting, met, left = deque([given, *other_inputs(given)]), ConditionsMet(), MOST_BRANCHES
        known = {_form(each) for each in waiting}
        widest = max((size for each in self._model.parameters() for size in each.shape), default=1)
        while waiting:
            each = waiting.popleft()
            try:
                noted = noted_call(to_run(self._model) if each is given else self._model, each)
            except Exception:  # a forward may raise anything for inputs that it was not written for
                continue
            if each is given and noted.failure:
                self._left_out[BRANCHES] = f"which are unknown ({noted.failure})"
            self._calls += [] if each is given else [Call(outputs_of, each, noted.outputs)]
            for axis, new in [*met.unmet(noted), *(batches if each is given else [])]:
                if not _fits(axis, new, each, widest):
                    self._left_out.setdefault(f"{axis.named(new)}, at which the forward may branch", TOO_LARGE)
                elif left and _form(resized := axis.resized(each, new)) not in known:
                    known.add(_form(resized))
                    waiting.appendleft(resized)
                    left -= 1
        if not left:
            self._left_out[f"more than {MOST_BRANCHES} {BRANCHES}"] = "of which there may be further ones"

    def relax(self, smaller: TracedNetwork, tolerance: float) -> None:
        """Drop conditions that exclude one size, as `x.shape[0] != 1`, where the outputs agree at that size, too.

        A forward may branch on a size only to repeat a tensor along the batch.
        """
        found = [(re.fullmatch(r"(\w+\.shape\[\d+\]) (!= \d+|> 1)", rule), rule) for rule in smaller.guard.rules]
        for place in dict.fromkeys(match[1] for match, _ in found if match):
            strict, excluding = smaller.guard, {rule for match, rule in found if match and match[1] == place}
            smaller.guard = replace(strict, rules=tuple(each for each in strict.rules if each not in excluding))
            inputs = [each.given for each in self._calls if strict.refusal(*each.given)]
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
        graphs = sum(isinstance(each, TracedNetwork) for each in smaller.modules())  # these refuse what they cannot run
        self.untried, self.flags = {} if isinstance(smaller, TracedNetwork) else dict(self._left_out), {}
        for call in self._calls:
            if not (graphs and call.training):
                reason = self._difference(call, smaller, tolerance, wider)
                if reason and not call.flag:
                    return f"{reason} for {call}"
                self.flags |= {call.flag: reason} if reason else {}
        return ""

    def _difference(self, call: Call, smaller: nn.Module, tolerance: float, wider: Wider | None) -> str:
        """Return how a smaller network differs in a call; empty if it agrees or refuses the input."""
        masked = self._model
        try:
            found = call.outputs(smaller)
            if call.flag and [each.shape for each in found] != [each.shape for each in call.expected]:
                self.untried[f"`{call.flag}`"] = "whose outputs have other shapes"
                return ""
            difference = output_difference(found, call.expected)
            if difference > tolerance and wider:
                masked, other, given = wider(call.given)
                call = replace(call, given=given)
                call = replace(call, expected=call.outputs(masked))
                difference = output_difference(call.outputs(other), call.expected)
        except Exception as error:  # as above
            return "" if str(error).endswith(REASON) else first_line(error)  # a part may refuse the input
        if difference <= tolerance:
            return ""
        moved = _by_chance(masked, call)
        if not (moved > tolerance if call.training else difference <= 2 * moved):
            return difference_told(difference)
        self.untried[str(call)] = "where rounding or chance changes the outputs"
        return ""


def _fits(axis: Axis, new: int, given: Inputs, widest: int) -> bool:
    """Return whether tensors would have at most `MOST_ENTRIES` entries at another size.

    The estimate is an input's entries times the width of the widest layer, or those of attention in 8 heads.
    """
    if new <= (2 * axis.size if axis.inner else LARGEST_BATCH):
        return True
    leaves, most = tree_leaves(given), 0.0
    for number, dims in Counter(number for number, _ in axis.places).items():
        entries = leaves[number].numel() * (new / axis.size) ** dims
        most = max(most, entries * widest, 8 * len(leaves[number]) * new**2 if axis.inner else 0)
    return most <= MOST_ENTRIES


def _form(given: Inputs) -> tuple[Any, ...]:
    """Return what makes two inputs of one network alike: sizes and dtypes."""
    return tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _by_chance(model: nn.Module, call: Call) -> float:
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
        found = outputs_in_training(model, call.given, seed=1) if call.training else outputs_of(model, call.given)
        return output_difference(found, call.expected)


def _failure(model: nn.Module, given: Inputs) -> str:
    """Return why a network fails where it also returns caches, which other calls leave out; "" if it runs."""
    try:
        outputs_of(model, given, caching=True)
    except Exception as error:  # as above
        return first_line(error)
    return ""
