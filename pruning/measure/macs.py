"""Multiply-accumulates of one forward pass, layer by layer, and how many of them unmasked weights take part in.

A weight takes part in one multiplication for each position it is applied at, so a layer's count is

    MACs = sum over its weights of (applications of the weight),      remaining = the same over unmasked weights

Counted are Linear, Bilinear, convolutions (transposed ones too), transformers' Conv1D, RNN, LSTM, GRU and their cells,
and MultiheadAttention; and under the module that computes them the matrix products and convolutions of other forwards,
above all the two of attention: queries by keys, and what that gives by values, each query by each key whether a mask
hides it or not. A product of two activations has no weights: it remains unless masks have left one of its factors 0 as
a whole, as all queries or all values of a head are once nothing of it is left. Biases, normalisation, activations and
embeddings are not counted.

A masked weight is known in such a product by its storage: one that is multiplied by a copy, as under autocast, counts
as a whole. Of a class derived from one of the layers above the layer's product is counted, and no other of its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruning.holding.parameter import plain_modules, unwrapped
from pruning.holding.reparam import held
from pruning.masks.mask_set import MaskSet
from pruning.measure.layers import Call, rule_of
from pruning.measure.matrix_products import Product, Products

COMPILING = {"torch._dynamo", "torch.nn.attention.flex_attention"}
"""Modules, one of which is there where a forward is compiled, or compiles; the first takes a second to import."""


@dataclass(frozen=True)
class LayerMacs:
    """Multiply-accumulates of one layer: of all its weights, and of the unmasked ones."""

    total: int
    remaining: int


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by qualified layer name, in the order of the first call."""

    layers: Mapping[str, LayerMacs]

    @property
    def total(self) -> int:
        """Of the dense model."""
        return sum(layer.total for layer in self.layers.values())

    @property
    def remaining(self) -> int:
        """Of unmasked weights alone: what a kernel that skips every zero would compute."""
        return sum(layer.remaining for layer in self.layers.values())


def macs(model: nn.Module, example: Any, masks: MaskSet | None = None) -> Macs:
    """Count the multiply-accumulates of `model(example)`.

    The model runs once, in evaluation mode and without gradients, and is left as it was. Masked weights that a
    forward itself multiplies by a copy of count as a whole; of a class derived from a layer that layer's product alone
    is counted.

    Args:
        model: any module.
        example: what to call the model with; a plain tuple is unpacked into arguments, a dict into named ones. Give a
            batch of one example for the count of one example.
        masks: the masks to count unmasked weights by; None collects those that the model holds. Weights that they mask
            have to be 0 in the model for the products of activations that have become 0.
    """
    counter = _Counter(model, MaskSet.collect(model) if masks is None else masks)
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        for path, module in counter.modules.items():
            enter, leave = partial(counter.enter, path), partial(counter.leave, path)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)  # it calls no layers
        stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))  # others pad features
        if COMPILING & sys.modules.keys():  # what is compiled computes its products out of sight
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(in_mode(model, training=False))
        with torch.no_grad(), Products(counter.product):
            plain = unwrapped(model)
            plain(**example) if type(example) is dict else plain(*arguments_of(example))
    return Macs(counter.layers)


def arguments_of(example: Any) -> tuple[Any, ...]:
    """Return the arguments that `example` stands for: several for a plain tuple, one for anything else."""
    return example if type(example) is tuple else (example,)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put every module into training or evaluation mode, and back as it was."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, reparam in held(model):
            reparam.refresh(module)  # what ran without gradients has left tensors without a history


class _Counter:
    """Counts what modules do between their `enter` and `leave`."""

    def __init__(self, model: nn.Module, masks: MaskSet) -> None:
        self.layers: dict[str, LayerMacs] = {}
        self.modules, self._masks, self._masked = dict(plain_modules(model)), masks, masks.sparsity() > 0
        self._running: list[tuple[str, nn.Module]] = []

    def enter(self, path: str, module: nn.Module, _inputs: object) -> None:
        """Note a module whose forward begins."""
        self._running.append((path, module))

    def leave(
        self, path: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Count the weights of a layer whose forward ends."""
        while self._running.pop()[1] is not module:  # what failed inside, and was caught
            pass
        rule = rule_of(module)
        for use in rule(module, Call(inputs, keywords, output)) if rule else []:
            size = attrgetter(use.weight)(module)[use.rows].numel()
            mask = self._masks.get(_joined(path, use.weight))
            kept = size if mask is None else int(mask[use.rows].count_nonzero())
            self._add(path, use.times * size, use.times * kept)

    def product(self, product: Product) -> None:
        """Count a product that no rule of a layer counts."""
        layer = next((each for each in self._running if rule_of(each[1])), None)
        if layer is None:
            self._add(self._running[-1][0], product.macs, self._remaining(product))
        elif isinstance(layer[1], nn.MultiheadAttention) and _is_of_heads(product):
            self._add(layer[0], product.macs, self._remaining(product))

    def _add(self, path: str, total: int, remaining: int) -> None:
        earlier = self.layers.get(path, LayerMacs(0, 0))
        self.layers[path] = LayerMacs(earlier.total + total, earlier.remaining + remaining)

    def _remaining(self, product: Product) -> int:
        """Return how many of a product's multiply-accumulates unmasked weights, or heads that are not empty, have."""
        one, other, total = product
        if not self._masked or one.is_meta:
            return total
        for factor in (one, other):
            kept = self._kept(factor)
            if kept is not None:
                return total // max(1, factor.numel()) * kept
        if one.ndim != 3 or other.ndim != 3:
            return total if one.any() and other.any() else 0
        alive = one.any(-1).any(-1) & other.any(-1).any(-1)
        return total // max(1, len(one)) * int(alive.sum())

    def _kept(self, factor: Tensor) -> int | None:
        """Return how many entries of a factor are unmasked where it is a masked weight, or a view of one."""
        place = factor.untyped_storage().data_ptr()
        for name, mask in self._masks.items():
            path, _, leaf = name.rpartition(".")
            tensor = getattr(self.modules.get(path), leaf, None)
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == place:
                laid_out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bool).copy_(mask)
                start = factor.storage_offset() - tensor.storage_offset()
                return int(laid_out.as_strided(factor.shape, factor.stride(), start).count_nonzero())
        return None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_of_heads(product: Product) -> bool:
    """Say whether a product is one of activations: a weight is no batch, or the same for all of it."""
    return all(factor.ndim == 3 and factor.stride(0) > 0 for factor in product[:2])
