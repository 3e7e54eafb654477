"""Statistics of the inputs of stacked experts: those of the tokens that a mixture routes to each expert."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pruning.holding.parameter import hooked
from pruning.layouts import required_layout
from pruning.mixtures.routing import ProductsOfStacks, Routed, routed_of
from pruning.reconstruction.layer_problem import InputStatistics, SeenTensor, product_of

Wanted = Mapping[str, Collection[int]]
"""Name of a stack -> experts."""


def passes_of(stacks: Mapping[str, nn.Module], dtype: torch.dtype, limit: int | None) -> list[Wanted]:
    """Return the experts whose statistics each pass of the batches collects; one pass if all fit.

    Args:
        stacks: name of a stack -> the module that holds it.
        dtype: dtype of the statistics.
        limit: bytes of statistics; a pass has one expert if a single one needs more. None: all fit.
    """
    found: list[dict[str, list[int]]] = [{}]
    used = 0
    for module in dict.fromkeys(stacks.values()):
        names = [name for name, each in stacks.items() if each is module]
        size = sum(_width(name, module) ** 2 * dtype.itemsize for name in names)
        for expert in range(len(module.get_parameter(names[0].rpartition(".")[2]))):
            if limit is not None and used and used + size > limit:
                found.append({})
                used = 0
            used += size
            for name in names:
                found[-1].setdefault(name, []).append(expert)
    return found  # type: ignore[return-value]


@dataclass
class ExpertCollector:
    """Statistics of the matrices of stacked experts, while batches run through a part of a network.

    Where padding or tokens of other experts matter, the experts are called once more, with the tokens that count.

    Args:
        stacks: name of a stack -> the module that holds it.
        wanted: experts whose statistics are collected.
        dtype: dtype of the sums.
        all_tokens: each token counts for each expert, whatever the router says.
        counts: bool of (examples, positions), False where a position of the batch is padding; None: all count.
        found: name of a stack -> each expert that is wanted -> the statistics of its inputs, which may be none.
    """

    stacks: Mapping[str, nn.Module]
    wanted: Wanted
    dtype: torch.dtype
    all_tokens: bool = False
    counts: Tensor | None = None
    found: dict[str, dict[int, InputStatistics]] = field(init=False)
    _call: Routed | None = None
    _last: tuple[SeenTensor, Tensor] | None = None
    _is_asking: bool = False
    _heard: set[nn.Module] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._widths = {name: _width(name, module) for name, module in self.stacks.items()}
        self.found = {name: {each: InputStatistics(self.dtype) for each in own} for name, own in self.wanted.items()}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Read the inputs of the experts in one forward pass inside the context."""
        if not self.stacks:  # the mode would slow down each operation of a network without experts
            yield
            return
        self._heard.clear()
        modules = dict.fromkeys(self.stacks.values())
        handles = (each.register_forward_pre_hook(self._ask, with_kwargs=True) for each in modules)
        with hooked(handles), ProductsOfStacks(self.stacks, self._read):
            yield
        self._last = self._call = None

    def _ask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call experts with the tokens that count, if these are others than those of the network's own call."""
        if self._is_asking:
            return
        self._heard.discard(module)
        try:
            whole = routed_of(args, kwargs)
        except ValueError as error:
            if self.all_tokens:
                raise ValueError(
                    f"`calibrate_all_experts` (=True) does not fit {type(module).__name__}: {error}"
                ) from error
            return
        self._call = call = whole.without_padding(self.counts)
        is_other = self.all_tokens or call is not whole
        if is_other and len(call.experts):
            self._is_asking = True
            try:
                self._ask_again(module, call)
            finally:
                self._is_asking = False
        if is_other:
            self._heard.add(module)

    def _ask_again(self, module: nn.Module, call: Routed) -> None:
        if not self.all_tokens:
            module(call.hidden, call.experts, call.weights)
            return
        one = call.experts[:, :1]
        for expert in sorted(
            {each for name, own in self.wanted.items() if self.stacks[name] is module for each in own}
        ):
            self._call = Routed(call.hidden, torch.full_like(one, expert), torch.ones_like(call.weights[:, :1]))
            module(self._call.hidden, self._call.experts, self._call.weights)

    def _read(self, name: str, expert: int, inputs: Tensor, in_order: bool) -> None:
        if self.stacks[name] in self._heard or expert not in self.wanted.get(name, ()):
            return
        if in_order:
            inputs = inputs[self._tokens(expert, inputs)]
        if inputs.shape[-1] == self._widths[name] and len(inputs):
            own = self.found[name][expert]
            own.add(self._product(inputs), len(inputs))
            own.padded |= not in_order and self.counts is not None and not self._is_asking

    def _product(self, inputs: Tensor) -> Tensor:
        """Return X^T X, (1, inputs, inputs); stacks that get one tensor after another share it."""
        if self._last is None or not self._last[0].is_still(inputs):
            self._last = SeenTensor(inputs), product_of(inputs[None], self.dtype)
        return self._last[1]

    def _tokens(self, expert: int, inputs: Tensor) -> Tensor:
        """Return which of all tokens in their order an expert gets: rows of zeros are none."""
        found = inputs.any(dim=1)
        if self._call is not None and len(self._call.experts) == len(inputs):
            found &= (self._call.experts == expert).any(dim=1)
        if self.counts is not None and self.counts.numel() == len(inputs):
            found &= self.counts.flatten().to(found.device)
        return found


def _width(name: str, module: nn.Module) -> int:
    """Return the number of inputs of a stack's matrices."""
    leaf = name.rpartition(".")[2]
    return required_layout(module, leaf).row_entries(module.get_parameter(leaf).shape)
