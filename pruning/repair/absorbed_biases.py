"""Bias absorption: the constant output of a dead channel moves into the biases of the layers that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pruning.repair.batch_norm_statistics import is_layer, rows_of, run
from pruning.scores.readings.network import Network, network, weights_of
from pruning.scores.readings.scoring_data import Loss, ScoringInput, weighted_batches

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
        layers = [each for each in _in_order(net, given.loss, batch) if is_layer(net.module_of(each[0]))]
        before = {name: p.detach().clone() for name, p in net.model.named_parameters()}
        for index, (name, follower) in enumerate(layers[:-1]):  # the channels of the last layer are the outputs
            if name not in kept:
                continue
            dead = ~(kept[name].to(before[name].device) != 0).flatten(1).any(1)
            if dead.any():
                _absorb(net, dead, (name, follower), [reader for reader, _ in layers[index + 1 :]], given.loss, batch)
        after = dict(net.model.named_parameters())
        return {n: after[n].detach().clone() for n in before if n not in kept and not torch.equal(before[n], after[n])}


def _in_order(net: Network, loss: Loss, batch: Any) -> list[tuple[str, nn.Module | None]]:
    """Return each weight in the order in which layers run, with the BatchNorm whose input is the layer's output."""
    ran: list[str] = []
    written: dict[int, str] = {}
    outputs: list[Tensor] = []  # keeps the tensors alive, so that no other gets the same id
    followers: dict[str, nn.Module] = {}
    handles = []
    for name in net.parameters:

        def note(_module: nn.Module, _given: object, answer: Tensor, name: str = name) -> None:
            ran.append(name)
            written[id(answer)] = name
            outputs.append(answer)

        handles.append(net.module_of(name).register_forward_hook(note))
    for module in net.model.modules():
        if isinstance(module, _BatchNorm):

            def follow(module: nn.Module, given: tuple[Tensor, ...]) -> None:
                if id(given[0]) in written:
                    followers[written[id(given[0])]] = module

            handles.append(module.register_forward_pre_hook(follow))
    run("absorb_bias", net.model, loss, batch)
    for handle in handles:
        handle.remove()
    return [(name, followers.get(name)) for name in dict.fromkeys(ran)]


def _absorb(
    net: Network,
    dead: Tensor,
    layer: tuple[str, nn.Module | None],
    readers: Sequence[str],
    loss: Loss,
    batch: Any,
) -> None:
    """Set the outputs of a layer's dead channels to 0, and add the missing input to the bias of each later layer."""
    name, follower = layer
    before = _inputs(net, readers, loss, batch)
    for module in (net.module_of(name), follower):
        for leaf in ("bias",) if module is not follower else ("weight", "bias"):
            parameter = None if module is None else module._parameters.get(leaf)
            if parameter is not None:
                parameter.data = parameter.detach().masked_fill(dead, 0)  # new storage: the copy shares the model's
    for reader in readers:
        module = net.module_of(reader)
        missed = before[reader] - _inputs(net, [reader], loss, batch)[reader]
        if not missed.any():
            continue
        mean = missed.mean(1, keepdim=True)
        if float((missed - mean).abs().max()) > CONSTANT * float(before[reader].abs().max()) and not _is_padded(module):
            raise ValueError(
                f"`repair.kind` (='absorb_bias') needs constant outputs of dead channels, but {reader!r} reads varying "
                f"ones of {name!r}; choose another repair."
            )
        bias = module._parameters.get("bias")
        if bias is None:
            raise ValueError(
                f"`repair.kind` (='absorb_bias') needs a bias in {reader!r}, which reads dead channels of {name!r}; "
                "give the layer a bias, or choose another repair."
            )
        high, low = missed.amax(1), missed.amin(1)
        constant = torch.where(high.abs() > low.abs(), high, low)  # at padded borders 0 is missing
        rows = net.parameters[reader].detach().to(torch.float64).view(len(constant), -1, constant.shape[1])
        bias.data = bias.detach() + (rows @ constant[:, :, None]).flatten().to(bias.dtype)


def _is_padded(module: nn.Module) -> bool:
    return any(getattr(module, "_reversed_padding_repeated_twice", ()))


def _inputs(net: Network, names: Sequence[str], loss: Loss, batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = []
    for name in names:

        def note(module: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
            found[name] = rows_of(module, given[0])

        handles.append(net.module_of(name).register_forward_pre_hook(note))
    run("absorb_bias", net.model, loss, batch)
    for handle in handles:
        handle.remove()
    return found
