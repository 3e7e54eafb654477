"""Scores read from the inputs of layers: norms of inputs (Wanda), and how much a transformer's layers matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pruning.dependencies.families.family_groups import require_unit
from pruning.dependencies.families.stock_transformer import StockTransformer
from pruning.layouts import kind_of, multiplies, required_layout
from pruning.scores.readings.network import Network, layer_calls
from pruning.scores.readings.per_example import patches, windows
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    call_network,
    mean_loss,
    weighted_batches,
    without_padding,
)


def wanda(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by its magnitude times the norm of its input: Wanda (Sun et al. 2023, arXiv 2306.11695).

        score_ij = |v_ij| ||X_j||_2         X_j input j of the layer, over all examples and positions

    Scores compare within a row, the weights of one output. The inputs of all layers come from the same forward passes
    of the network as it is now, with BatchNorm in evaluation mode. The inputs of a convolution are its patches: each
    entry of a patch is multiplied by one weight of a filter.

    `loss` calls the network; if None, the network is called with a batch's first tensor, or with the items of a dict as
    keyword arguments. Tokens where the `attention_mask` of a dict is 0 do not count.

    Raises:
        ValueError: a weight is tied; or its layer runs more than once in a pass; or hooks cannot see the layer's inputs
            (the projections of `nn.MultiheadAttention`).
    """
    with given.network() as net, torch.no_grad():
        norms = _remembered(net, given, "wanda")
        return {n: p.detach().to(torch.float64, copy=True).abs_().mul_(norms[n]) for n, p in net.parameters.items()}


def activation(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by the norm of its input alone, as Minitron does (Muralidharan et al. 2024, arXiv 2407.14679).

        score_ij = ||X_j||_2                0 where v_ij is 0

    The sum over the entries of a hidden unit ranks units by the norms of their activations, and that of a head ranks
    heads by the norms of what they pass on: the weights that write them add the same to each, as long as none of these
    weights is 0. Inputs are those of `wanda`, in evaluation mode.

    Raises:
        ValueError: as `wanda`.
    """
    return _norms_of_kept(given, "activation")


def minitron(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score entries as `activation` does; whole layers of a transformer are ranked by `block_influence` in its place.

    Layers and hidden units can so be removed in one pruning (Muralidharan et al. 2024, arXiv 2407.14679).

    Raises:
        ValueError: as `wanda`.
    """
    return _norms_of_kept(given, "minitron")


def _norms_of_kept(given: ScoringInput, name: str) -> dict[str, Tensor]:
    with given.network() as net, torch.no_grad():
        norms = _remembered(net, given, name)
        return {n: torch.where(p != 0, norms[n].expand_as(p), 0.0) for n, p in net.parameters.items()}


def _remembered(net: Network, given: ScoringInput, name: str) -> Mapping[str, Tensor]:
    _refuse_tied(net, name)
    return given.remembered(["input norms", *net.parameters], partial(_input_norms, net, given, name))


def _input_norms(net: Network, given: ScoringInput, score: str) -> dict[str, Tensor]:
    """Return name -> norms of a layer's inputs over all batches, float64 in a shape that broadcasts to the weight."""
    found: dict[str, _InputSquares] = {}
    seen: set[str] = set()
    batches: list[Any] = []

    def read(name: str, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
        if name in seen:
            raise ValueError(
                f"`model` (whose {name!r} acts more than once in a pass) must call each layer once for `{score}`, "
                f"which reads its inputs; leave the weight out of `parameters`, in a sweep by prune.exclude=[{name}]."
            )
        seen.add(name)
        if not multiplies(module, inputs):
            return
        if not isinstance(module, _ConvNd):  # whose inputs have channels where others have tokens
            inputs = without_padding(batches[-1], inputs)
        found.setdefault(name, _InputSquares(module)).add(inputs, output)

    layers = [each for each in net.layers() if (kind := kind_of(each[1])) is not None and kind.by_call]
    _require_inputs(net, dict(layers), score)
    with layer_calls(layers, read, prepend=True):
        for batch, _ in weighted_batches(score, given.batches, given.size):
            seen.clear()
            batches[:] = [batch]
            call_network(net.model, given.loss, batch)
    _require_inputs(net, found, score)
    return {name: own.squares().sqrt_() for name, own in found.items()}


def _require_inputs(net: Network, found: Collection[str], score: str) -> None:
    """Raise ValueError unless all scored weights are among those whose inputs can be, or were, read."""
    if unseen := [name for name in net.parameters if name not in found]:
        raise ValueError(
            f"`parameters` (={unseen[0]!r}) must name weights of linear and convolutional layers that multiply the "
            f"input of a call: `{score}` reads these inputs; leave the others out, in a sweep by "
            f"prune.exclude=[{unseen[0]}], or choose another score, such as taylor, which reads experts, too."
        )


def _refuse_tied(net: Network, score: str) -> None:
    names = {id(parameter): name for name, parameter in net.parameters.items()}
    owners = Counter(id(p) for module in net.model.modules() for p in module._parameters.values() if p is not None)
    for key, name in names.items():
        if owners[key] > 1:
            raise ValueError(
                f"`model` (whose {name!r} is tied) must have each weight in only one layer for `{score}`, which reads "
                f"that layer's inputs; leave the weight out of `parameters`, in a sweep by prune.exclude=[{name}]."
            )


class _InputSquares:
    """Sums of squares of a layer's inputs, kept for each input position while inputs and outputs keep one size.

    The sums of a convolution are reduced to one for each weight of a filter when the size changes, and at the end.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._spatial = len(module.kernel_size) if isinstance(module, _ConvNd) else 0
        self._size: tuple[torch.Size, torch.Size] | None = None
        self._places = self._weights = torch.zeros(())

    def add(self, inputs: Tensor, output: Tensor) -> None:
        """Add the squares of one call's inputs, in float64."""
        place = inputs.shape[-1 - self._spatial :]
        size = place, output.shape[output.dim() - self._spatial :]
        own = inputs.reshape(-1, *place).to(torch.float64, copy=True).square_().sum(0)
        if size == self._size:
            self._places.add_(own)
        else:
            self._weights, self._places, self._size = self.squares(), own, size

    def squares(self) -> Tensor:
        """Return the sum of squares of each weight's inputs, in a shape that broadcasts to the weight."""
        if self._size is None:
            return self._weights
        return self._weights.to(self._places) + _by_weight(self._module, self._places, self._size[1])


def _by_weight(module: nn.Module, sums: Tensor, output_size: torch.Size) -> Tensor:
    """Reduce sums at each input position to one for each weight; `output_size` is the spatial size of the outputs."""
    if not isinstance(module, _ConvNd):
        return sums[:, None] if required_layout(module).inputs == 0 else sums
    kernel, groups = module.kernel_size, module.groups
    if isinstance(module, _ConvTransposeNd):  # a weight acts at each position whose result is not cut off
        acts = patches(sums.new_ones(1, 1, *output_size), module)[0]
        return torch.matmul(sums.flatten(1), acts).view(module.in_channels, 1, *kernel)
    positions = tuple(range(1, 1 + len(kernel)))
    by_group = windows(sums[None], module)[0].sum(positions).view(groups, module.in_channels // groups, *kernel)
    return by_group if groups == 1 else torch.repeat_interleave(by_group, module.out_channels // groups, 0)


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
        streams: dict[int, tuple[Tensor, Tensor]] = {}

        def record(number: int, _layer: nn.Module, before: Tensor, output: Any) -> None:
            streams[number] = before, output if isinstance(output, Tensor) else output[0]

        layers = enumerate(map(net.model.get_submodule, found.layers))
        with layer_calls(layers, record, keyword="hidden_states"):
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
    loss = mean_loss("left_out", given)
    (group,) = found.groups("layer")
    emptied: list[list[str]] = [[] for _ in found.layers]
    for member in group.members:
        if member.masked:
            emptied[int(member.channels.flatten()[0])].append(member.tensor)
    with given.network() as net, torch.no_grad():
        whole, without = loss(net.model), []
        for names in emptied:
            with _zeros(net.model, names):
                without.append(loss(net.model) - whole)
        return _spread(net, found, without)


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
