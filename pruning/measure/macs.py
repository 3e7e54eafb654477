"""Multiply-accumulates of one forward pass, layer by layer, and how many of them unmasked weights take part in.

A weight takes part in one multiplication for each position it is applied at, so a layer's count is

    MACs = sum over its weights of (applications of the weight),      remaining = the same over unmasked weights

Counted are Linear, Bilinear, convolutions (transposed ones too), transformers' Conv1D, RNN, LSTM, GRU and their cells,
and MultiheadAttention with its two products of activations. Biases, normalisation, activations, embeddings, and
products that a model's own forward computes outside of these layers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.rnn import PackedSequence

from pruning.holding.parameter import plain_modules
from pruning.holding.reparam import held
from pruning.masks.mask_set import MaskSet


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

    The model runs once, in evaluation mode and without gradients, and is left as it was.

    Args:
        model: any module.
        example: what to call the model with; a plain tuple is unpacked into arguments, a dict into named ones. Give a
            batch of one example for the count of one example.
        masks: the masks to count unmasked weights by; None collects those that the model holds.
    """
    masks = MaskSet.collect(model) if masks is None else masks
    layers: dict[str, LayerMacs] = {}
    fast = torch.backends.mha.get_fastpath_enabled()
    handles = [
        module.register_forward_hook(partial(_count, layers, masks, path, rule), with_kwargs=True)
        for path, module in plain_modules(model)
        if (rule := _rule_of(module)) is not None
    ]
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it calls no layers
        with in_mode(model, training=False), torch.no_grad():
            model(**example) if type(example) is dict else model(*arguments_of(example))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()
    return Macs(layers)


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


# --- how often each layer applies its weights -------------------------------------------------------------------------


class _Use(NamedTuple):
    """How often every entry of a weight, or of some rows of it, is applied in one call."""

    weight: str
    times: int
    rows: slice = slice(None)


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its arguments by position and by name, and what it returned."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any

    def argument(self, position: int, name: str) -> Any:
        return self.inputs[position] if position < len(self.inputs) else self.keywords[name]


Rule = Callable[[Any, _Call], tuple[list[_Use], int]]
"""(layer, call) -> uses of its weights, and multiply-accumulates that no weight takes part in."""


def _count(
    layers: dict[str, LayerMacs],
    masks: MaskSet,
    path: str,
    rule: Rule,
    module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    output: Any,
) -> None:
    uses, weightless = rule(module, _Call(inputs, keywords, output))
    total = remaining = weightless
    for use in uses:
        weight: Tensor = attrgetter(use.weight)(module)
        mask = masks.get(f"{path}.{use.weight}" if path else use.weight)
        size = weight[use.rows].numel()
        total += use.times * size
        remaining += use.times * (size if mask is None else int(mask[use.rows].count_nonzero()))
    earlier = layers.get(path, LayerMacs(0, 0))
    layers[path] = LayerMacs(earlier.total + total, earlier.remaining + remaining)


def _features_last(_module: Any, call: _Call) -> tuple[list[_Use], int]:
    return [_Use("weight", call.output.numel() // max(1, call.output.shape[-1]))], 0


def _convolution(module: Any, call: _Call) -> tuple[list[_Use], int]:
    return [_Use("weight", call.output.numel() // module.out_channels)], 0


def _transposed_convolution(module: Any, call: _Call) -> tuple[list[_Use], int]:
    return [_Use("weight", call.argument(0, "input").numel() // module.in_channels)], 0


def _recurrent(module: Any, call: _Call) -> tuple[list[_Use], int]:
    sequence = call.argument(0, "input")
    entries = sequence.data.numel() if isinstance(sequence, PackedSequence) else sequence.numel()
    names = [
        f"weight_{kind}_l{layer}{direction}"
        for layer in range(module.num_layers)
        for direction in ("", "_reverse")[: 1 + module.bidirectional]
        for kind in ("ih", "hh", "hr")[: 2 + (module.proj_size > 0)]
    ]
    return [_Use(name, entries // module.input_size) for name in names], 0


def _recurrent_cell(module: Any, call: _Call) -> tuple[list[_Use], int]:
    times = call.argument(0, "input").numel() // module.input_size
    return [_Use("weight_ih", times), _Use("weight_hh", times)], 0


def _attention(module: nn.MultiheadAttention, call: _Call) -> tuple[list[_Use], int]:
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    size = module.embed_dim
    queries, keys, values = query.numel() // size, key.numel() // module.kdim, value.numel() // module.vdim
    if module._qkv_same_embed_dim:
        starts = zip((0, size, 2 * size), (queries, keys, values), strict=True)
        uses = [_Use("in_proj_weight", times, slice(start, start + size)) for start, times in starts]
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        uses = [_Use(name, times) for name, times in zip(names, (queries, keys, values), strict=True)]
    batch = 1 if key.dim() == 2 else key.shape[0 if module.batch_first else 1]
    attended = keys // max(1, batch) + (module.bias_k is not None) + module.add_zero_attn
    # Each query meets each key once, and each value once, in all `embed_dim` features of the heads together.
    return [*uses, _Use("out_proj.weight", queries)], 2 * queries * attended * size


RULES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Rule], ...] = (
    (_ConvTransposeNd, _transposed_convolution),
    (_ConvNd, _convolution),
    ((nn.Linear, nn.Bilinear), _features_last),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _recurrent_cell),
    (nn.MultiheadAttention, _attention),
)


def _rule_of(module: nn.Module) -> Rule | None:
    if type(module).__name__ == "Conv1D":  # transformers' linear layer with a transposed weight
        return _features_last
    return next((rule for kind, rule in RULES if isinstance(module, kind)), None)
