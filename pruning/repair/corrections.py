"""Corrections after a pruning: survivors by least squares or Optimal Brain Surgeon, biases, BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from pruning.layouts import CONVOLUTION, LINEAR, TRANSPOSED_LINEAR, kind_of, layout_of, multiplies, required_layout
from pruning.refused import RefusedValue
from pruning.scores.curvature import FisherMatrix, fisher_matrix
from pruning.scores.readings.network import Network, Weight, layer_calls, network, weights_of
from pruning.scores.readings.per_example import patches
from pruning.scores.readings.scoring_data import Loss, ScoringInput, weighted_batches


def passes(repair: str, net: Network, given: ScoringInput) -> Iterator[float]:
    """Run each batch through the copy without gradients, then yield the batch's weight.

    Raises:
        ValueError: there is no data, or no loss to call the network.
    """
    for batch, weight in weighted_batches(repair, given.batches, given.size):
        run(repair, net.model, given.loss, batch)
        yield weight


def run(repair: str, model: nn.Module, loss: Loss, batch: Any) -> None:
    """Call the model on one batch by calling the loss."""
    if loss is None:
        raise ValueError(
            f"`loss` (=None) must be a function (model, batch) -> mean loss, with which `{repair}` calls the model."
        )
    with torch.no_grad():
        loss(model, batch)


def is_layer(module: nn.Module) -> bool:
    """Return whether `rows_of` supports a layer."""
    return kind_of(module) in (LINEAR, TRANSPOSED_LINEAR, CONVOLUTION) and layout_of(module, "weight") is not None


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the vectors that multiply the rows of a layer's weight: (groups, positions, weights of a row), float64.

    The vectors are the inputs of a linear layer, or the patches of a convolution's inputs.
    """
    return laid_out(module, inputs.detach().to(torch.float64))


def laid_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer as `rows_of`, in their own dtype."""
    if not isinstance(module, _ConvNd):
        return inputs.flatten(0, -2)[None]
    cut = patches(inputs, module)
    return cut.view(*cut.shape[:2], module.groups, -1).permute(2, 0, 1, 3).flatten(1, 2)


def bn_stats(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Recompute the running means and variances of BatchNorm layers in the pruned network, as means over the batches.

    Args:
        given: the network and masks before this pruning; all batches weigh the same.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.

    Returns:
        name of a buffer -> its new value.

    Raises:
        ValueError: the network has no BatchNorm layer that keeps statistics.
    """
    with network(given.model, {**(given.masks or {}), **kept}, kept, batch_norm="train") as net:
        layers = {
            path: module
            for path, module in net.model.named_modules()
            if isinstance(module, _BatchNorm) and isinstance(module.running_mean, Tensor)
        }
        if not layers:
            raise RefusedValue("repair.kind", "bn_stats").because(
                f"needs a BatchNorm layer with running statistics, and {type(given.model).__name__} has none; choose "
                "another repair."
            )
        for module in layers.values():
            module.reset_running_stats()
            module.momentum = None  # selects a cumulative mean
        for _ in passes("bn_stats", net, given):
            pass
        return {
            f"{path}.{name}" if path else name: buffer.detach().clone()
            for path, module in layers.items()
            for name, buffer in module.named_buffers(recurse=False)
            if name != "num_batches_tracked" and torch.is_tensor(buffer)
        }


CONSTANT = 1e-5
"""Deviation from a constant that counts as rounding, as a fraction of the largest input."""


def absorb_bias(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Set the biases of dead channels to 0 and move their constant outputs into the biases of the next layers.

        b_j <- 0,       b'_k <- b'_k + sum over weights of W'_kj (a_j - a_j at 0),      a_j the constant output of j

    If a BatchNorm follows the layer, its scale and shift of channel j become 0, too. The masked network still computes
    the same function, and its dead channels can be removed. Exact for linear layers, and for convolutions without zero
    padding.

    Args:
        given: the network and masks before this pruning; only the first batch is read.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.

    Returns:
        name of a parameter -> its new value, for the parameters that change.

    Raises:
        ValueError: a layer that reads a dead channel has no bias, or the channel's output is not constant.
    """
    names = dict.fromkeys([*weights_of(given.model), *kept])
    with network(given.model, {**(given.masks or {}), **kept}, names) as net:
        batch, _ = next(weighted_batches("absorb_bias", given.batches, given.size))
        call = partial(run, "absorb_bias", net.model, given.loss, batch)
        layers = [each for each in _in_order(net, call) if is_layer(net.module_of(each[0]))]
        before = {name: p.detach().clone() for name, p in net.model.named_parameters()}
        for index, (name, follower) in enumerate(layers[:-1]):  # the channels of the last layer are the outputs
            if name not in kept:
                continue
            dead = ~required_layout(net.module_of(name)).rows(kept[name].to(before[name].device) != 0).any(2).flatten()
            if dead.any():
                _absorb(net, dead, (name, follower), [reader for reader, _ in layers[index + 1 :]], call)
        after = dict(net.model.named_parameters())
        return {n: after[n].detach().clone() for n in before if n not in kept and not torch.equal(before[n], after[n])}


def _in_order(net: Network, call: Callable[[], None]) -> list[tuple[str, nn.Module | None]]:
    """Return each weight in the order in which layers run, with the BatchNorm whose input is the layer's output."""
    ran: list[str] = []
    written: dict[int, str] = {}
    outputs: list[Tensor] = []  # keeps the tensors alive, so that no other gets the same id
    followers: dict[str, nn.Module] = {}

    def note(name: str, _module: nn.Module, _inputs: Tensor, answer: Tensor) -> None:
        ran.append(name)
        written[id(answer)] = name
        outputs.append(answer)

    def follow(_key: None, module: nn.Module, inputs: Tensor, _answer: Tensor) -> None:
        if id(inputs) in written:
            followers[written[id(inputs)]] = module

    norms = [(None, module) for module in net.model.modules() if isinstance(module, _BatchNorm)]
    with layer_calls(norms, follow), layer_calls(_layers(net, net.parameters), note):
        call()
    return [(name, followers.get(name)) for name in dict.fromkeys(ran)]


def _absorb(
    net: Network, dead: Tensor, layer: tuple[str, nn.Module | None], readers: Sequence[str], call: Callable[[], None]
) -> None:
    """Set the outputs of a layer's dead channels to 0, and add the missing input to the bias of each later layer."""
    name, follower = layer
    before = _inputs(net, readers, call)
    for module in (net.module_of(name), follower):
        for leaf in ("bias",) if module is not follower else ("weight", "bias"):
            parameter = None if module is None else module._parameters.get(leaf)
            if parameter is not None:
                parameter.data = parameter.detach().masked_fill(dead, 0)  # new storage: the copy shares the model's
    for reader in readers:
        module = net.module_of(reader)
        missed = before[reader] - _inputs(net, [reader], call)[reader]
        if not missed.any():
            continue
        mean = missed.mean(1, keepdim=True)
        if float((missed - mean).abs().max()) > CONSTANT * float(before[reader].abs().max()) and not _is_padded(module):
            raise RefusedValue("repair.kind", "absorb_bias").because(
                f"needs constant outputs of dead channels, but {reader!r} reads varying ones of {name!r}; choose "
                "another repair."
            )
        bias = module._parameters.get("bias")
        if bias is None:
            raise RefusedValue("repair.kind", "absorb_bias").because(
                f"needs a bias in {reader!r}, which reads dead channels of {name!r}; give the layer a bias, or choose "
                "another repair."
            )
        high, low = missed.amax(1), missed.amin(1)
        constant = torch.where(high.abs() > low.abs(), high, low)  # at padded borders 0 is missing
        rows = required_layout(module).rows(net.parameters[reader].detach().to(torch.float64))
        bias.data = bias.detach() + (rows @ constant[:, :, None]).flatten().to(bias.dtype)


def _is_padded(module: nn.Module) -> bool:
    return any(getattr(module, "_reversed_padding_repeated_twice", ()))


def _inputs(net: Network, names: Sequence[str], call: Callable[[], None]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, inputs: Tensor, _answer: Tensor) -> None:
        found[name] = rows_of(module, inputs)

    with layer_calls(_layers(net, names), note):
        call()
    return found


def _layers(net: Network, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, net.module_of(name)) for name in names)


def least_squares(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 0.01,
) -> dict[str, Tensor]:
    """Refit the weights of linear and convolutional layers, each on its inputs before this pruning.

        for each row w of a weight:     v = argmin (v - w)^T H (v - w)  with v_j = 0 where j is pruned,
        H = 2 / N X^T X + damping mean(diag) I,      X the layer's N inputs (for a convolution, patches)

    so v_S = w_S + [H_SS]^-1 H_SZ w_Z for survivors S and pruned Z. Biases do not change.

    Args:
        given: the network and masks before this pruning; its parameters are those of `kept`.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.
        damping: above 0, a fraction of the mean of the diagonal.

    Returns:
        name -> tensor of the parameter's shape and dtype, 0 at pruned entries.

    Raises:
        ValueError: a parameter is not the weight of a linear or convolutional layer.
    """
    with given.network() as net:
        products = _products(net, given)
        return {name: _refit(net.weights[name], mask, products[name], damping) for name, mask in kept.items()}


def _products(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    """Return name -> 2 / N X^T X of the weight's layer, shape (groups, weights of a row, weights of a row)."""
    of_batch: dict[str, Tensor] = {}
    for name, module in _layers(net, net.parameters):
        if not is_layer(module) or not name.endswith("weight"):
            raise RefusedValue("repair.kind", "least_squares").because(
                f"refits linear and convolutional layers, but {name!r} belongs to a {type(module).__name__}; leave the "
                "tensor out, or choose another repair."
            )

    def note(name: str, module: nn.Module, inputs: Tensor, _answer: Tensor) -> None:
        if not multiplies(module, inputs):
            return
        rows = rows_of(module, inputs)
        of_batch[name] = of_batch.get(name, 0) + rows.mT @ rows * (2 / rows.shape[1])

    totals: dict[str, Tensor] = {}
    weights = 0.0
    with layer_calls(_layers(net, net.parameters), note):
        for weight in passes("least_squares", net, given):
            if missing := net.parameters.keys() - of_batch.keys():
                raise RefusedValue("repair.kind", "least_squares").because(
                    f"needs the inputs of {min(missing)!r}, but no call of its layer multiplies them; leave the tensor "
                    "out, or choose another repair."
                )
            totals = {name: totals.get(name, 0) + product * weight for name, product in of_batch.items()}
            weights += weight
            of_batch.clear()
    return {name: total / weights for name, total in totals.items()}


def _refit(weight: Weight, kept: Tensor, products: Tensor, damping: float) -> Tensor:
    layout, value = required_layout(weight.module, weight.leaf), weight.value
    rows, keeps = layout.rows(value.to(torch.float64)), layout.rows(kept.to(value.device) != 0)
    fitted = torch.zeros_like(rows)
    for group, product in enumerate(products):
        product.diagonal().add_(damping * product.diagonal().mean())
        for index, (row, keep) in enumerate(zip(rows[group], keeps[group], strict=True)):
            if keep.any():
                removed = product[keep][:, ~keep] @ row[~keep]
                update = torch.linalg.solve(product[keep][:, keep], removed)
                fitted[group, index, keep] = row[keep] + update
    return layout.parameter(fitted, value.shape).to(value.dtype)


def obs(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 1e-5,
    block: int | None = None,
    matrix: FisherMatrix | None = None,
) -> dict[str, Tensor]:
    """Update survivors by the sum of the updates for single removals, then mask (Singh & Alistarh 2020).

        dw = - sum over pruned q of w_q F^-1 e_q / [F^-1]_qq,        F = damping I + mean over examples of g_n g_n^T

    The published code does the same. The sum is exact for one pruned entry; `obs_joint` is exact for any number.

    Args:
        given: the network and masks before this pruning; F covers its parameters, which are those of `kept`.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.
        damping: above 0.
        block: None takes the whole matrix; an int takes blocks of `block` consecutive entries of a row.
        matrix: F, if computed before; None computes it.

    Returns:
        name -> tensor of the parameter's shape and dtype, 0 at pruned entries.
    """
    before = given.weights()
    if matrix is None:
        matrix = fisher_matrix(given, damping=damping, block=block)
    diagonal = matrix.inverse_diagonal()
    removed = {n: torch.where(kept[n].to(w.value.device) != 0, 0.0, w.value / diagonal[n]) for n, w in before.items()}
    updates = matrix.solve({name: vector.to(torch.float64) for name, vector in removed.items()})
    return {n: _masked_sum(w.value, -updates[n], kept[n]) for n, w in before.items()}


def obs_joint(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 1e-5,
    block: int | None = None,
    matrix: FisherMatrix | None = None,
) -> dict[str, Tensor]:
    """Update survivors by the change of least cost dw^T F dw / 2 that sets all pruned entries Q to 0.

        dw = - F^-1 E_Q ([F^-1]_QQ)^-1 w_Q

    See `obs` for the args and the result.
    """
    before = given.weights()
    if matrix is None:
        matrix = fisher_matrix(given, damping=damping, block=block)
    keeps = {name: (mask != 0).to(before[name].value.device) for name, mask in kept.items()}
    updates = matrix.joint_update({name: weight.value for name, weight in before.items()}, keeps)
    return {n: _masked_sum(w.value, updates[n], kept[n]) for n, w in before.items()}


def _masked_sum(value: Tensor, update: Tensor, kept: Tensor) -> Tensor:
    repaired = value.to(torch.float64) + update
    return torch.where(kept.to(value.device) != 0, repaired, 0.0).to(value.dtype)
