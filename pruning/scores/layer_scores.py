"""Scores of whole layers of a transformer: how much a layer changes the residual stream, and the loss without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pruning.dependencies.families.family_groups import unit_groups
from pruning.dependencies.families.stock_transformer import StockTransformer, require_unit
from pruning.scores.readings.network import Network
from pruning.scores.readings.scoring_data import ScoringInput, call_network, weighted_batches, without_padding


def block_influence(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each layer by how much it turns the residual stream: ShortGPT (Men et al. 2024, arXiv 2403.03853).

        score_i = 1 - mean over tokens t of cos(x_it, x_(i+1)t)         x_it the stream before layer i

    Each entry of a layer has an equal part of the layer's score, so that their sum is the score. `loss` calls the
    network; if None, the network is called with a batch's first tensor, or with the items of a dict. Tokens where the
    `attention_mask` of a dict is 0 do not count.

    Raises:
        ValueError: the network is no stock transformer, its configuration cannot express fewer layers, or all tokens
            are padding.
    """
    found = require_unit(given.model, "layer")
    turned, tokens = [0.0] * len(found.layers), [0] * len(found.layers)
    with given.network() as net, torch.no_grad():
        with _streams(net.model, found) as streams:
            for batch, _ in weighted_batches("block_influence", given.batches, given.size):
                streams.clear()
                call_network(net.model, given.loss, batch)
                for number, stream in streams.items():
                    before, after = (without_padding(batch, each).double() for each in stream)
                    cosines = torch.cosine_similarity(before, after, dim=-1)
                    turned[number] += float((1 - cosines).sum())
                    tokens[number] += cosines.numel()
        if not all(tokens):
            raise ValueError(
                "`batches` (with an `attention_mask` of zeros) must hold tokens, which `block_influence` reads; pass "
                "masks with 1 for each token."
            )
        return _spread(net, found, [each / count for each, count in zip(turned, tokens, strict=True)])


def left_out(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each layer by the loss of the network without it.

        score_i = L(network without layer i) - L(network)

    The layer is left out as its mask does: all its parameters are 0, except the norms of a network that normalises
    after each addition. With one layer a round, the choice is greedy and exact. Each entry of a layer has an equal part
    of the layer's score.

    Raises:
        ValueError: there is no loss, the network is no stock transformer, or its configuration cannot express fewer
            layers.
    """
    found = require_unit(given.model, "layer")
    if given.loss is None:
        raise ValueError("`loss` (=None) must be a function (model, batch) -> mean loss for `left_out`; pass one.")
    (group,) = unit_groups(found, "layer")
    emptied: list[list[str]] = [[] for _ in found.layers]
    for member in group.members:
        if member.masked:
            emptied[int(member.channels.flatten()[0])].append(member.tensor)
    batches = list(weighted_batches("left_out", given.batches, given.size))
    total = sum(weight for _, weight in batches)
    with given.network() as net, torch.no_grad():

        def mean_loss() -> float:
            return sum(weight * float(given.loss(net.model, batch)) for batch, weight in batches) / total  # type: ignore[misc]

        whole, without = mean_loss(), []
        for names in emptied:
            with _zeros(net.model, names):
                without.append(mean_loss() - whole)
        return _spread(net, found, without)


@contextmanager
def _streams(model: nn.Module, found: StockTransformer) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record the residual stream before and after each layer: number of the layer -> (before, after)."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def recorded(number: int) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
            before = given[0] if given else named["hidden_states"]
            seen[number] = before, output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [
        model.get_submodule(layer).register_forward_hook(recorded(number), with_kwargs=True)
        for number, layer in enumerate(found.layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _zeros(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Replace parameters of a copy by zeros inside the context."""
    held = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if (parameter := module._parameters.get(leaf)) is not None:
            held.append((module, leaf, parameter))
            module._parameters[leaf] = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
    try:
        yield
    finally:
        for module, leaf, parameter in held:
            module._parameters[leaf] = parameter


def _spread(net: Network, found: StockTransformer, scores: list[float]) -> dict[str, Tensor]:
    """Divide the score of each layer among its scored entries; entries outside of the layers score 0."""
    inside = [{name for name in net.parameters if name.startswith(f"{layer}.")} for layer in found.layers]
    each = dict.fromkeys(net.parameters, 0.0)
    for names, score in zip(inside, scores, strict=True):
        entries = sum(net.parameters[name].numel() for name in names)
        each |= dict.fromkeys(names, score / max(entries, 1))
    return {n: torch.full(p.shape, each[n], dtype=torch.float64, device=p.device) for n, p in net.parameters.items()}
