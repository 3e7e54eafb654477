"""Taylor scores: of entries, of filters, and of gates after a layer or a BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.scores.readings.network import BatchNormMode, Network, batch_norms, network
from pruning.scores.readings.per_example import passed
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    gradients,
    joined,
    loss_of,
    mean_over_batches,
    weighed,
    wide,
)

Form: TypeAlias = Literal["entry", "filter", "gate", "bn"]


def taylor(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
    form: Form = "entry",
    per_example: bool = False,
) -> dict[str, Tensor]:
    """Score by the squared change of the loss to first order (Molchanov et al. 2019, arXiv 1906.10771).

        entry       (w g)^2
        filter      sum of (v g)^2 over the entries of a unit
        gate        (dL/dz)^2 of a gate z = 1 after the unit = (sum of v g + b g_b)^2
        bn          (gamma g_gamma + beta g_beta)^2, the gate after a BatchNorm

    Squares are taken of each batch's gradient, and averaged over batches. Units are outputs of linear and convolutional
    layers, or channels of a BatchNorm: these forms return a tensor of one dimension for each weight's name.

    Args:
        form: what is scored.
        per_example: with "gate", squares are taken of each example's gradient instead.

    Raises:
        ValueError: "bn" is asked of a network without BatchNorm, or `per_example` of others
            than gates.
    """
    if per_example and form != "gate":
        raise ValueError(f"`per_example` (=True) must go with form='gate', not {form!r}; leave it out.")
    if form == "bn":
        scored = scales(given.model, given.parameters, "taylor(form='bn')")
    else:
        scored = list(given.weights())
        if form != "entry":
            scored = [name for name in scored if name.rpartition(".")[2] == "weight"]  # not an attention's projections
    biases = [] if form in ("entry", "filter") or per_example else _biases(given.model, scored)
    with network(given.model, given.masks, [*scored, *biases], batch_norm=batch_norm) as net:
        if per_example:
            return _gates_of_examples(net, given)

        def squares(batch: Any) -> Sequence[Tensor]:
            slopes = gradients(loss_of("taylor", given.loss, net.model, batch), list(net.parameters.values()))
            return _squares(net, dict(zip(net.parameters, slopes, strict=True)), scored, form)

        return dict(
            zip(
                scored,
                mean_over_batches("taylor", joined("taylor", net, given.batches, several=True), given.size, squares),
                strict=True,
            )
        )


def _squares(net: Network, slopes: Mapping[str, Tensor], scored: Sequence[str], form: Form) -> list[Tensor]:
    found = []
    for name in scored:
        owner, g = net.weights[name], wide(slopes[name])
        if form == "entry":
            found.append((owner.stored * g).to(torch.float64).square_())
        elif form == "filter":
            found.append(by_unit((owner.value * g).to(torch.float64).square_(), owner.module))
        else:
            products = (owner.value * g).to(torch.float64)
            gate = products if form == "bn" else by_unit(products, owner.module)
            bias = _bias(name)
            if bias in slopes:
                gate = gate + net.weights[bias].value * wide(slopes[bias])
            found.append(gate.square_())
    return found


def _gates_of_examples(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    def forward(batch: Any) -> Tensor:
        return loss_of("taylor", given.loss, net.model, batch)

    totals: dict[str, Tensor] = {}
    weights = 0.0
    for batch, weight in weighed("taylor", given.batches, given.size):
        for done, share in passed(net, batch, weight, forward, given.size):
            weights += share
            for name in net.parameters:
                squares = (done.gates(name).to(torch.float64) * done.count).square_().mean(0) * share
                totals[name] = totals[name] + squares if name in totals else squares
    return {name: total.div_(weights) for name, total in totals.items()}


def by_unit(values: Tensor, module: nn.Module) -> Tensor:
    """Return the sum of a weight's entries for each output of its layer."""
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, kernel)
        return values.reshape(module.groups, -1, values.shape[1], values[0, 0].numel()).sum((1, 3)).flatten()
    if type(module).__name__ == "Conv1D":
        return values.sum(0)
    return values.flatten(1).sum(1)


def scales(model: nn.Module, parameters: Iterable[str] | None, score: str) -> list[str]:
    """Return the names of BatchNorm's scales, or of those that are named; refuse a network that has none."""
    known = [f"{path}.weight" if path else "weight" for path in batch_norms(model)]
    if not known:
        raise ValueError(
            f"`model` ({type(model).__name__}) must have BatchNorm layers with a scale for `{score}`; choose a score "
            "that does without."
        )
    chosen = known if parameters is None else list(parameters)
    if others := [name for name in chosen if name not in known]:
        raise ValueError(
            f"`parameters` (={others[0]!r}) must name scales of BatchNorm for `{score}`: {', '.join(known)}."
        )
    return chosen


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _biases(model: nn.Module, names: Iterable[str]) -> list[str]:
    return [_bias(name) for name in names if model.get_submodule(name.rpartition(".")[0]).bias is not None]
