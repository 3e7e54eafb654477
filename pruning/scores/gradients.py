"""First-order scores: gradient magnitude, SNIP and GraSP, and the Taylor scores of entries, filters and gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruning.layouts import required_layout
from pruning.scores.readings.network import BatchNormMode, Network, batch_norms, in_single_precision, network
from pruning.scores.readings.per_example import example_passes
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    at_least_float32,
    checked_batches,
    gradients,
    loss_of,
    mean_gradient,
    mean_over_batches,
    outputs_through,
    weighted_batches,
)


def gradient(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry, pruned or not, by the magnitude of its gradient.

    score_i = |g_i|,        g = dL/dv, L the mean loss over all batches, v = m w
    """
    with given.network(batch_norm) as net:
        return {name: g.abs_().to(torch.float64) for name, g in mean_gradient("gradient", net, given).items()}


def snip(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry by the sensitivity of the loss to its mask: SNIP (Lee et al. 2019, arXiv 1810.02340).

        score_i = |dL/dm_i| = |w_i g_i|,        g = dL/dv at v = m w, L the mean loss over all batches

    The paper divides by the sum of all scores, which changes no ranking. In a pruned network, a pruned entry is scored
    by the value that the model still stores: FORCE (de Jorge et al. 2021, arXiv 2006.09081) lets such entries return,
    iterative SNIP does not.
    """
    with given.network(batch_norm) as net:
        means = mean_gradient("snip", net, given)
        return {
            name: at_least_float32(g).mul_(net.weights[name].stored).abs_().to(torch.float64)
            for name, g in means.items()
        }


def grasp(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
    temperature: float = 200.0,
) -> dict[str, Tensor]:
    """Score each entry by its contribution to the gradient flow: GraSP (Wang et al. 2020, arXiv 2002.07376); signed.

        score_i = w_i (H g)_i,      L the mean loss of outputs / temperature, g and H in the scored weights only

    The paper prunes the highest S = -w (H g), which are the same entries. Removing entry i changes |g|^2 by about
    -2 score_i.

    The model must return a tensor, or an object or mapping with a tensor `logits`.

    Args:
        temperature: above 0.
    """
    with given.network(batch_norm) as net, sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
        in_single_precision(net.model)
        batches = checked_batches("grasp", net, given.batches)
        held = [batch for batch, _ in weighted_batches("grasp", batches, given.size)]
        weights = list(net.parameters.values())

        def slopes(batch: Any, *, create_graph: bool = False) -> Sequence[Tensor]:
            with outputs_through("grasp", net.model, lambda outputs: outputs / temperature):
                value = loss_of("grasp", given.loss, net.model, batch)
            return gradients(value, weights, create_graph=create_graph)

        mean = mean_over_batches("grasp", held, given.size, slopes) if len(held) > 1 else None

        def hessian_products(batch: Any) -> Sequence[Tensor]:
            own = slopes(batch, create_graph=True)
            along = [g.detach().to(w.dtype) for g, w in zip(own if mean is None else mean, weights, strict=True)]
            product = torch.stack([torch.sum(a * b) for a, b in zip(own, along, strict=True)]).sum()
            return gradients(product, weights) if product.requires_grad else [torch.zeros_like(w) for w in weights]

        products = mean_over_batches("grasp", held, given.size, hessian_products)
        owners = net.weights.values()
        scores = [p.mul_(owner.stored).to(torch.float64) for p, owner in zip(products, owners, strict=True)]
        return dict(zip(net.weights, scores, strict=True))


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

        batches = checked_batches("taylor", net, given.batches, several=True)
        return dict(zip(scored, mean_over_batches("taylor", batches, given.size, squares), strict=True))


def _squares(net: Network, slopes: Mapping[str, Tensor], scored: Sequence[str], form: Form) -> list[Tensor]:
    found = []
    for name in scored:
        owner, g = net.weights[name], at_least_float32(slopes[name])
        if form == "entry":
            found.append((owner.stored * g).to(torch.float64).square_())
        elif form == "filter":
            found.append(required_layout(owner.module, owner.leaf).sums((owner.value * g).to(torch.float64).square_()))
        else:
            products = (owner.value * g).to(torch.float64)
            gate = products if form == "bn" else required_layout(owner.module, owner.leaf).sums(products)
            bias = _bias(name)
            if bias in slopes:
                gate = gate + net.weights[bias].value * at_least_float32(slopes[bias])
            found.append(gate.square_())
    return found


def _gates_of_examples(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    weights = 0.0
    for done, share in example_passes("taylor", net, given):
        weights += share
        for name in net.parameters:
            squares = (done.gates(name).to(torch.float64) * done.count).square_().mean(0) * share
            totals[name] = totals[name] + squares if name in totals else squares
    return {name: total.div_(weights) for name, total in totals.items()}


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
