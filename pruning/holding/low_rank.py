"""Low-rank updates of linear layers (LoRA) under masks, so that merging them revives no pruned entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pruning.holding.parameter import place
from pruning.holding.reparam import masked
from pruning.layouts import LINEAR, TRANSPOSED_LINEAR, kind_of, required_layout

_WEIGHT = "weight"


class LowRankUpdates:
    """Train a network by low-rank updates of its linear layers, under its masks.

        weight = mask * (W + (alpha / rank) B A)        (A: (rank, inputs), B: (outputs, rank))

    Only A and B are trained: W and all other parameters are frozen. Each forward computes the weight from W, A and B.
    So the merged network computes what the trained one did, and pruned entries stay exactly 0. A is drawn from
    U(-1/sqrt(inputs), 1/sqrt(inputs)) and B begins at 0, so that the network begins unchanged.

    Linear layers are `nn.Linear` and `Conv1D` of transformers. Layers whose weight another module shares are left out.

    Args:
        model: a plain network on its device; entries that `masks` prune must be 0 in it.
        masks: name of a parameter -> mask of its shape; a layer without a mask gets a dense update.
        rank: rows of A, at least 1.
        alpha: scale of the update, times `rank`.
        targets: patterns of fnmatch on the names of the weights to update.
        generator: source of the draws, on the CPU; None: torch's global generator.

    Raises:
        ValueError: no layer matches, or a mask does not fit the network. The network is unchanged then.

    Paper: Hu et al. 2021, arXiv 2106.09685; under masks: Zimmer et al. 2023, arXiv 2312.15230.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        rank: int,
        alpha: float,
        targets: Sequence[str] = ("*",),
        generator: torch.Generator | None = None,
    ) -> None:
        by_place: dict[tuple[int, str], Tensor] = {}
        for name, mask in masks.items():
            module, leaf = place(model, name, mask.shape)
            by_place[id(module), leaf] = mask
        layers = dict(_linear_layers(model))
        self.names = tuple(name for name in layers if any(fnmatchcase(name, each) for each in targets))
        """Names of the updated weights, in the order of the network."""
        if not self.names:
            held = f"has {', '.join(layers)}" if layers else "has none whose weight is its own"
            raise ValueError(
                f"`targets` (={list(targets)}) must match the weight of a linear layer, but the network {held}."
            )
        self._trainable = [(each, each.requires_grad) for each in model.parameters()]
        for parameter, _ in self._trainable:
            parameter.requires_grad_(False)
        self._layers = [layers[name] for name in self.names]
        self._orders = [list(layer._parameters) for layer in self._layers]
        for layer in self._layers:
            update = _Update(layer, by_place.get((id(layer), _WEIGHT)), rank, alpha / rank, generator)
            parametrize.register_parametrization(layer, _WEIGHT, update)

    @torch.no_grad()
    def merge(self) -> None:
        """Write the updated weights into the network, which is plain again, with the parameters trainable as before."""
        for layer, order in zip(self._layers, self._orders, strict=True):
            value = getattr(layer, _WEIGHT)
            parametrize.remove_parametrizations(layer, _WEIGHT, leave_parametrized=False)
            layer.get_parameter(_WEIGHT).copy_(value)
            held = dict(layer._parameters)
            layer._parameters.clear()  # the weight came last; saved states rely on the order
            layer._parameters.update({name: held[name] for name in order})
        for parameter, trains in self._trainable:
            parameter.requires_grad_(trains)


class _Update(nn.Module):
    """Parametrization of a weight: the masked sum of the weight and its low-rank update."""

    def __init__(
        self, layer: nn.Module, mask: Tensor | None, rank: int, scale: float, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        weight = layer.get_parameter(_WEIGHT)
        layout = required_layout(layer)
        self._transposed = layout.outputs == 1
        outputs, inputs = weight.shape[layout.outputs], weight.shape[layout.inputs]
        drawn = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        self.a = nn.Parameter(drawn.to(weight))
        self.b = nn.Parameter(weight.new_zeros(outputs, rank))
        self._scale = scale
        self._mask = None if mask is None else mask.to(weight)  # no buffer, which each copy of the state would hold

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight that the layer uses, in the weight's dtype also under autocast."""
        with torch.autocast(weight.device.type, enabled=False):
            update = self.a.T @ self.b.T if self._transposed else self.b @ self.a
            changed = weight + self._scale * update
        return changed if self._mask is None else masked(changed, self._mask)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name of the weight, layer) for each linear layer whose weight no other module has."""
    holders: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        weight = module._parameters.get(_WEIGHT)
        if weight is None or holders[id(weight)] > 1:
            continue
        if kind_of(module) in (LINEAR, TRANSPOSED_LINEAR):
            yield f"{name}.{_WEIGHT}" if name else _WEIGHT, module
