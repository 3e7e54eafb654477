"""Scores of whole experts of a mixture: one score for each expert, from its weights or from the tokens routed to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pruning.mixtures.finding import Mixture, mixtures
from pruning.mixtures.routing import Routed, expert_outputs, routed, without_tokens
from pruning.mixtures.survivors import route_among, survivors
from pruning.scores.readings.network import Network
from pruning.scores.readings.scoring_data import ScoringInput, call_network, mean_loss, weighted_batches


def expert_frequency(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the number of tokens that are routed to it.

    `loss` calls the network; if None, the network is called with a batch's first tensor, or with the items of a dict as
    keyword arguments. Tokens where the `attention_mask` of a dict is 0 do not count.

    Raises:
        ValueError: the network has no mixture whose experts are stacked, or its experts are called without the experts
            of each token and their weights.
    """
    return _by_tokens(given, "expert_frequency", gate=0, power=0)


def router_weight(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the sum of its gate weights over the tokens that are routed to it.

    Gate weights are those that the network multiplies the outputs of experts with. Tokens are those of
    `expert_frequency`.

    Raises:
        ValueError: as `expert_frequency`.
    """
    return _by_tokens(given, "router_weight", gate=1, power=0)


def ean(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the sum of its outputs' norms: expert activation norm (arXiv 2504.05586).

        score_j = sum over tokens x routed to j of ||f_j(x)||           f_j(x) the output before its gate weight

    Raises:
        ValueError: as `expert_frequency`.
    """
    return _by_tokens(given, "ean", gate=0, power=1)


def man(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the mean of its outputs' norms over the tokens routed to it (arXiv 2606.15716).

    The outputs are those before their gate weights. Experts without tokens score 0.

    Raises:
        ValueError: as `expert_frequency`.
    """
    return _by_tokens(given, "man", gate=0, power=1, mean=True)


def msan(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the mean of its outputs' squared norms over the tokens routed to it (arXiv 2606.15716).

    The outputs are those before their gate weights. Experts without tokens score 0.

    Raises:
        ValueError: as `expert_frequency`.
    """
    return _by_tokens(given, "msan", gate=0, power=2, mean=True)


def reap(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the mean norm of what it adds to a token: REAP (arXiv 2510.13999).

        score_j = mean over tokens x routed to j of g_j(x) ||f_j(x)||   0 without tokens

    g_j is the gate weight that the network multiplies with, and f_j the output before it.

    Raises:
        ValueError: as `expert_frequency`.
    """
    return _by_tokens(given, "reap", gate=1, power=1, mean=True)


def expert_magnitude(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the norm of all its weights; no data.

    Raises:
        ValueError: the network has no mixture whose experts are stacked.
    """
    with given.network() as net, torch.no_grad():
        return {
            names[0]: sum(net.parameters[n].double().square().flatten(1).sum(1) for n in names).sqrt()  # type: ignore[union-attr]
            for _, names in _scored(net, "expert_magnitude")
        }


def left_out_expert(given: ScoringInput) -> dict[str, Tensor]:
    """Score each expert by the loss of the network that routes among the others, less that of the network.

        score_j = L(network without expert j) - L(network)

    The loss is computed once for each expert: for small mixtures. Experts that are removed already score 0, and so do
    all experts of a mixture that has no more than its tokens are routed to.

    Raises:
        ValueError: there is no loss, the network has no mixture whose experts are stacked, or a router chooses among
            groups of experts.
    """
    loss_of_batches = mean_loss("left_out", given)
    with given.network() as net, torch.no_grad():
        if grouped := [each.path for each in mixtures(net.model) if each.groups > 1]:
            raise ValueError(
                f"`left_out` cannot score the experts of {grouped[0]!r}, whose router chooses among groups of equally "
                "many: without one of them they are unequal; type score='reap'."
            )
        alive = {mixture.experts: survivors(mixture) for mixture in mixtures(net.model)}
        whole, scores = loss_of_batches(net.model), {}
        for mixture, names in _scored(net, "left_out"):
            scores[names[0]] = own = torch.zeros(mixture.count, dtype=torch.float64)
            here = alive[mixture.experts]
            for expert in here.nonzero().flatten() if int(here.sum()) > (mixture.top_k or 1) else ():
                route_among(net.model, {**alive, mixture.experts: here.index_fill(0, expert, value=False)})
                own[expert] = loss_of_batches(net.model) - whole
        return scores


def _by_tokens(given: ScoringInput, score: str, *, gate: int, power: int, mean: bool = False) -> dict[str, Tensor]:
    """Score experts by their tokens.

    score_j = sum or mean over tokens x routed to j of g_j(x)^gate ||f_j(x)||^power
    """
    with given.network() as net, torch.no_grad():
        scored = _scored(net, score)
        key = ["tokens of experts", *(mixture.experts for mixture, _ in scored)]
        sums = given.remembered(key, partial(_sums_over_tokens, net, given, score))
        found = {names[0]: sums[mixture.experts] for mixture, names in scored}
        counts = {name: each[:, 0, 0].long().tolist() for name, each in found.items()}
        here = {n: {e: counts[n][e] for e in survivors(m).nonzero().flatten().tolist()} for m, (n, *_) in scored}
        if not given.noted:  # a re-scoring sees fewer batches and experts
            said = without_tokens(here, "scored 0, to go first")
            given.noted.update({"tokens": counts} | ({"limits": said} if said else {}))
        return {n: each[:, gate, power] / (each[:, 0, 0].clamp(min=1) if mean else 1) for n, each in found.items()}


def _scored(net: Network, score: str) -> list[tuple[Mixture, list[str]]]:
    """Return each mixture with the names of its scored stacks; the first one stands for all in scores."""
    found = [(each, [name for name in net.parameters if name in each.stacks]) for each in mixtures(net.model)]
    if not any(names for _, names in found):
        raise ValueError(
            f"`model` (a {type(net.model).__name__}) must have a mixture whose experts are stacked in parameters among "
            f"those to score, for `{score}`; choose another score, such as 'magnitude'."
        )
    return [(mixture, names) for mixture, names in found if names]


def _sums_over_tokens(net: Network, given: ScoringInput, score: str) -> dict[str, Tensor]:
    """Return module of experts -> sums of g^a ||f||^p over the tokens of each: float64 of (experts, a, p)."""
    found, batches = mixtures(net.model), list[Any]()
    sums = {each.experts: torch.zeros(each.count, 2, 3, dtype=torch.float64) for each in found}
    with ExitStack() as hooks:
        for each in found:
            experts = net.model.get_submodule(each.experts)
            hooks.enter_context(routed(net.model, each, partial(_add_tokens, experts, sums[each.experts], batches)))
        for batch, _ in weighted_batches(score, given.batches, given.size):
            batches[:] = [batch]
            call_network(net.model, given.loss, batch)
    return sums


def _add_tokens(experts: nn.Module, sums: Tensor, batches: list[Any], call: Routed) -> None:
    """Add the gate weights and the norms of outputs of one call, slot by slot, without padding."""
    mask = batches[-1].get("attention_mask") if isinstance(batches[-1], Mapping) else None
    call = call.without_padding(mask if isinstance(mask, Tensor) else None)
    for slot in range(call.experts.shape[1] if len(call.hidden) else 0):
        norms = expert_outputs(experts, call, slot).double().norm(dim=-1).cpu()
        powers = norms[:, None] ** torch.arange(3)
        gates = call.weights[:, slot].double().cpu()[:, None] ** torch.arange(2)
        chosen = call.experts[:, slot].cpu()
        real = chosen < len(sums)  # a router may choose to compute nothing, by a number beyond the experts
        sums.index_add_(0, chosen[real], (gates[:, :, None] * powers[:, None, :])[real])
