"""Taylor scores of entries, of filters, and of gates after a layer or a BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.scores.readings.network import BatchNormMode, Network, batch_norms, network
from pruning.scores.readings.per_example import batch_passes
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    at_least_float32,
    checked_batches,
    gradients,
    loss_of,
    mean_over_batches,
    weighted_batches,
)

Form: TypeAlias = Literal["entry", "filter", "gate", "bn"]


def taylor(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
    form: Form = "entry",
    per_example: bool = False,
) -> dict[str, Tensor]:
    """Score by the squared first-order change of the loss (Molchanov et al. 2019, arXiv 1906.10771).

        entry       (w g)^2
        filter      sum of (v g)^2 over the entries of a unit
        gate        (dL/dz)^2 for a gate z = 1 after the unit = (sum of v g + b g_b)^2
        bn          (gamma g_gamma + beta g_beta)^2, for a gate after a BatchNorm

    The score squares each batch's gradient and averages over batches. Units are the outputs of linear and convolutional
    layers, or the channels of a BatchNorm; all forms but "entry" return a tensor of shape (units,) for each weight.

    Args:
        form: "entry", "filter", "gate" or "bn", as above.
        per_example: square each example's gradient instead, for "gate" only.

    Raises:
        ValueError: `form` is "bn" and the network has no BatchNorm, or `per_example` is True and `form` is not "gate".
    """
    if per_example and form != "gate":
        raise ValueError(f"`per_example` (=True) must go with form='gate', not {form!r}; drop `per_example`.")
    if form == "bn":
        scored = batch_norm_scales(given.model, given.parameters, "taylor(form='bn')")
    else:
        scored = list(given.weights())
        if form != "entry":
            scored = [name for name in scored if name.rpartition(".")[2] == "weight"]  # drops attention projections
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
                mean_over_batches(
                    "taylor", checked_batches("taylor", net, given.batches, several=True), given.size, squares
                ),
                strict=True,
            )
        )


def _squares(net: Network, slopes: Mapping[str, Tensor], scored: Sequence[str], form: Form) -> list[Tensor]:
    found = []
    for name in scored:
        owner, g = net.weights[name], at_least_float32(slopes[name])
        if form == "entry":
            found.append((owner.stored * g).to(torch.float64).square_())
        elif form == "filter":
            found.append(by_unit((owner.value * g).to(torch.float64).square_(), owner.module))
        else:
            products = (owner.value * g).to(torch.float64)
            gate = products if form == "bn" else by_unit(products, owner.module)
            bias = _bias(name)
            if bias in slopes:
                gate = gate + net.weights[bias].value * at_least_float32(slopes[bias])
            found.append(gate.square_())
    return found


def _gates_of_examples(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    def forward(batch: Any) -> Tensor:
        return loss_of("taylor", given.loss, net.model, batch)

    totals: dict[str, Tensor] = {}
    weights = 0.0
    for batch, weight in weighted_batches("taylor", given.batches, given.size):
        for done, share in batch_passes(net, batch, weight, forward, given.size):
            weights += share
            for name in net.parameters:
                squares = (done.gates(name).to(torch.float64) * done.count).square_().mean(0) * share
                totals[name] = totals[name] + squares if name in totals else squares
    return {name: total.div_(weights) for name, total in totals.items()}


def by_unit(values: Tensor, module: nn.Module) -> Tensor:
    """Return the sum of a weight's entries for each output of its layer, shape (outputs,)."""
    if isinstance(module, _ConvTransposeNd):  # (in, out / groups, kernel)
        return values.reshape(module.groups, -1, values.shape[1], values[0, 0].numel()).sum((1, 3)).flatten()
    if type(module).__name__ == "Conv1D":
        return values.sum(0)
    return values.flatten(1).sum(1)


def batch_norm_scales(model: nn.Module, parameters: Iterable[str] | None, score: str) -> list[str]:
    """Return the names of the BatchNorm scales to score: all, or `parameters`; refuse a network without any."""
    known = [f"{path}.weight" if path else "weight" for path in batch_norms(model)]
    if not known:
        raise ValueError(
            f"`model` ({type(model).__name__}) must have BatchNorm layers with a scale for `{score}`; choose another "
            "score."
        )
    chosen = known if parameters is None else list(parameters)
    if others := [name for name in chosen if name not in known]:
        raise ValueError(
            f"`parameters` (={others[0]!r}) must name scales of BatchNorm layers for `{score}`; choose from "
            f"{', '.join(known)}."
        )
    return chosen


def _bias(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _biases(model: nn.Module, names: Iterable[str]) -> list[str]:
    return [_bias(name) for name in names if model.get_submodule(name.rpartition(".")[0]).bias is not None]
