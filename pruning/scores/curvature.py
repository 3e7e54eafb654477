"""Second-order scores: the diagonal Fisher, OBD, and OBS with the whole Fisher matrix or blocks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.scores.readings.fisher_matrix import Blocks, FisherMatrix, fisher_matrix
from pruning.scores.readings.network import Network, Weight, in_single_precision
from pruning.scores.readings.per_example import BatchPass, batch_passes
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    leaf_uses,
    loss_of,
    outputs_through,
    refuse_nan,
    weighted_batches,
)


def fisher(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by the diagonal of the empirical Fisher matrix (Theis et al. 2018, arXiv 1801.05787).

        score_i = v_i^2 F_ii / 2,       F_ii = mean over examples n of g_ni^2,      g_n the gradient of example n

    BatchNorm is in evaluation mode; examples lie along the first dimension of a batch. An example weighs
    `size(example)` if these weights add up to the weight of its batch; otherwise all examples of a batch weigh the
    same. For a loss that is a mean over tokens, let `size` count tokens; g_n is then the gradient of the example's own
    mean loss.
    """
    with given.network() as net:
        in_single_precision(net.model)

        def forward(batch: Any) -> Tensor:
            return loss_of("fisher", given.loss, net.model, batch)

        means = _Means(net)
        for batch, weight in weighted_batches("fisher", given.batches, given.size):
            for done, share in batch_passes(net, batch, weight, forward, given.size):
                signs = None if done.factors is None else done.factors.square()
                # A mean loss has g_n / count as its gradients: count times the sum of squares is their mean.
                means.add(done.square_sums(None, signs), share, share * done.count)
        return means.scores()


def obd(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by the Gauss-Newton diagonal of the Hessian: Optimal Brain Damage (LeCun, Denker & Solla 1989).

        score_i = v_i^2 H_ii / 2,       H_ii = mean over examples of (J^T A J)_ii

    with J the Jacobian of an example's outputs and A the Hessian of its loss with respect to the outputs: the diagonal
    of the generalised Gauss-Newton matrix, without the terms in the network's own second derivatives. It equals the
    diagonal of the Hessian exactly where the outputs are piecewise linear in each single weight: in networks of linear
    and convolutional layers, ReLU, pooling and BatchNorm in evaluation mode that use each weight once, under any loss
    of the outputs that is twice differentiable (cross-entropy, squares). With smooth activations (tanh, GELU),
    attention, LayerNorm or tied weights the two differ. The score costs one backward pass per output.

    `loss` must call the model once and read only its outputs. The outputs must be logits, and the loss must not be
    linear in them.

    Raises:
        ValueError: `loss` or the last layer breaks these rules.
    """
    with given.network() as net:
        in_single_precision(net.model)
        refuse_nan("obd", net.parameters, "weights")
        leaves: list[Tensor] = []
        losses: list[Tensor] = []

        def cut(outputs: Tensor) -> Tensor:
            leaves[:] = [*leaves, outputs, outputs.detach().requires_grad_()]
            return leaves[-1]

        def forward(batch: Any) -> Tensor:
            leaves.clear()
            with outputs_through("obd", net.model, cut):
                losses[:] = [loss_of("obd", given.loss, net.model, batch, leaves)]
            _refuse_other_losses(net, losses[0], leaves)
            return leaves[0]

        means, curved = _Means(net), False
        for batch, weight in weighted_batches("obd", given.batches, given.size):
            for done, share in batch_passes(net, batch, weight, forward, given.size):
                means.weight += share
                for cotangent, signs in _hessian_roots(done, losses[0], leaves[1]):
                    curved = curved or bool(signs.any())
                    means.add(done.square_sums(cotangent, signs), 0.0, share)
        if not curved:
            raise ValueError(
                "`loss` is linear or constant in the model's outputs, so that `obd` finds no curvature; let the model "
                "return logits, and apply `log_softmax` in the loss, as `cross_entropy` does."
            )
        return means.scores()


def _hessian_roots(done: BatchPass, loss: Tensor, leaf: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield (cotangents, signs) whose signed squares add up to the Hessian of each example's loss in its outputs.

    The sum of the signed squares over all examples and all yielded pairs is the batch mean of J^T A J.
    """
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    if not slope.requires_grad:
        return
    slopes = slope.reshape(done.count, -1)
    columns = [
        torch.autograd.grad(slopes[:, index].sum(), leaf, retain_graph=True)[0].reshape(done.count, -1)
        for index in range(slopes.shape[1])
    ]
    hessians = torch.stack(columns, 2).to(torch.float64)
    refuse_nan("obd", {"loss": hessians}, "second derivatives")
    values, vectors = torch.linalg.eigh(hessians)
    for index in range(slopes.shape[1]):
        cotangent = vectors[:, :, index] * values[:, index, None].abs().sqrt()
        yield cotangent.to(leaf.dtype).view_as(leaf), values[:, index].sign().to(leaf.dtype)


def _refuse_other_losses(net: Network, loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """Refuse losses with curvature beyond that in the outputs of one call of the model."""
    if len(leaves) > 2:
        raise ValueError(
            f"`loss` (which calls the model {len(leaves) // 2} times) must call it once for `obd`, which computes the "
            "curvature in the outputs of one call; join the inputs in one batch."
        )
    read = leaf_uses(loss)
    if others := [name for name, parameter in net.parameters.items() if id(parameter) in read]:
        raise ValueError(
            f"`loss` (which reads {others[0]!r} itself) must read only the model's outputs for `obd`; remove penalties "
            "on weights from it."
        )
    if type(leaves[0].grad_fn).__name__ in ("SoftmaxBackward0", "SigmoidBackward0"):
        raise ValueError(
            "`model` (which ends in a softmax or sigmoid) must return logits for `obd`, which assumes piecewise linear "
            "outputs; let the model return logits, and apply the softmax or sigmoid in the loss."
        )


class _Means:
    """Weighted means of squares over examples, in float64, and the scores computed from them."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.weight = 0.0
        self.totals = [torch.zeros_like(p, dtype=torch.float64, requires_grad=False) for p in net.parameters.values()]

    def add(self, squares: list[Tensor], weight: float, factor: float) -> None:
        self.weight += weight
        for total, value in zip(self.totals, squares, strict=True):
            total.add_(value, alpha=factor)

    def scores(self) -> dict[str, Tensor]:
        return {
            name: total.div_(2 * self.weight).mul_(self.net.weights[name].value.to(torch.float64).square())
            for name, total in zip(self.net.parameters, self.totals, strict=True)
        }


def obs(
    given: ScoringInput,
    *,
    damping: float = 1e-5,
    block: int | None = None,
    form: Literal["entry", "block"] = "entry",
    matrix: FisherMatrix | None = None,
) -> dict[str, Tensor]:
    """Score each entry by the loss increase when it is removed and all others adapt: Optimal Brain Surgeon.

        score_q = v_q^2 / (2 [F^-1]_qq),        F = damping I + mean over examples n of g_n g_n^T

    the approximation of Hassibi & Stork 1993 by WoodFisher (Singh & Alistarh 2020, arXiv 2004.14340); the inverse is
    exact, in float64. BatchNorm is in evaluation mode.

    Args:
        damping: above 0.
        block: None takes the whole matrix and holds the gradients of all examples in memory. An int takes blocks of
            `block` consecutive entries; the first block of each row (a filter, a unit) starts at the row's first entry,
            as in oBERT (arXiv 2203.07259).
        form: "entry", or "block" for the cost of removing each whole block Q, w_Q^T ([F^-1]_QQ)^-1 w_Q / 2, as a tensor
            of shape (blocks,) for each weight's name; `pruning.prune` uses it where whole blocks are pruned.
        matrix: the result of `fisher_matrix` for the same arguments; None computes it.

    Raises:
        ValueError: `form` is neither word; or it is "block" and `block` is None or does not divide the rows, or the
            rows of a weight are not its outputs.
    """
    if form not in ("entry", "block"):
        raise ValueError(f"`form` (={form!r}) must be 'entry' or 'block'.")
    weights = given.weights()
    if form == "block":
        _refuse_ragged(weights, block)
    if matrix is None:
        matrix = fisher_matrix(given, damping=damping, block=block)
    if isinstance(matrix, Blocks) and form == "block":
        return matrix.block_costs({name: weight.value for name, weight in weights.items()})
    diagonal = matrix.inverse_diagonal()
    return {name: w.value.to(torch.float64).square().div_(2 * diagonal[name]) for name, w in weights.items()}


def _refuse_ragged(weights: Mapping[str, Weight], block: int | None) -> None:
    for name, weight in weights.items():
        shape, kind = weight.parameter.shape, type(weight.module).__name__
        row = shape.numel() // max(shape[0], 1) if len(shape) > 1 else shape.numel()
        if block is None or block < 1 or row % block or kind == "Conv1D" or isinstance(weight.module, _ConvTransposeNd):
            raise ValueError(
                f"`block` (={block!r}) must divide the weights of an output for form='block', but {name!r} of {kind} "
                f"has shape {tuple(shape)}; choose a divisor. Leave this tensor out if its rows are inputs."
            )
