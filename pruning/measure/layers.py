"""Layer rules: how often a layer applies its weights in one call, by type of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.rnn import PackedSequence


class Use(NamedTuple):
    """Use of a weight, or of some of its rows: how often each entry is applied in one call."""

    weight: str
    times: int
    rows: slice = slice(None)


@dataclass(frozen=True)
class Call:
    """Call of a layer: positional arguments, keyword arguments, and output."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any

    def argument(self, position: int, name: str) -> Any:
        return self.inputs[position] if position < len(self.inputs) else self.keywords[name]


Rule = Callable[[Any, Call], list[Use]]
"""(layer, call) -> uses of its weights."""


def _features_last(_module: Any, call: Call) -> list[Use]:
    return [Use("weight", call.output.numel() // max(1, call.output.shape[-1]))]


def _convolution(module: Any, call: Call) -> list[Use]:
    return [Use("weight", call.output.numel() // module.out_channels)]


def _transposed_convolution(module: Any, call: Call) -> list[Use]:
    return [Use("weight", call.argument(0, "input").numel() // module.in_channels)]


def _recurrent(module: Any, call: Call) -> list[Use]:
    sequence = call.argument(0, "input")
    entries = sequence.data.numel() if isinstance(sequence, PackedSequence) else sequence.numel()
    names = [
        f"weight_{kind}_l{layer}{direction}"
        for layer in range(module.num_layers)
        for direction in ("", "_reverse")[: 1 + module.bidirectional]
        for kind in ("ih", "hh", "hr")[: 2 + (module.proj_size > 0)]
    ]
    return [Use(name, entries // module.input_size) for name in names]


def _recurrent_cell(module: Any, call: Call) -> list[Use]:
    times = call.argument(0, "input").numel() // module.input_size
    return [Use("weight_ih", times), Use("weight_hh", times)]


def _attention(module: nn.MultiheadAttention, call: Call) -> list[Use]:
    query, key, value = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    size = module.embed_dim
    queries, keys, values = query.numel() // size, key.numel() // module.kdim, value.numel() // module.vdim
    if module._qkv_same_embed_dim:
        starts = zip((0, size, 2 * size), (queries, keys, values), strict=True)
        uses = [Use("in_proj_weight", times, slice(start, start + size)) for start, times in starts]
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        uses = [Use(name, times) for name, times in zip(names, (queries, keys, values), strict=True)]
    return [*uses, Use("out_proj.weight", queries)]


RULES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Rule], ...] = (
    (_ConvTransposeNd, _transposed_convolution),
    (_ConvNd, _convolution),
    ((nn.Linear, nn.Bilinear), _features_last),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _recurrent_cell),
    (nn.MultiheadAttention, _attention),
)


def rule_of(module: nn.Module) -> Rule | None:
    if type(module).__name__ == "Conv1D":  # transformers' linear layer with a transposed weight
        return _features_last
    return next((rule for kind, rule in RULES if isinstance(module, kind)), None)
