"""Scores of second order: the diagonal Fisher, OBD, and OBS with the whole Fisher matrix or blocks of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.scores.readings.fisher_matrix import Blocks, FisherMatrix, fisher_matrix
from pruning.scores.readings.network import Network, Weight, in_single_precision
from pruning.scores.readings.per_example import Passed, passed
from pruning.scores.readings.scoring_data import ScoringInput, loss_of, outputs_through, refuse_nan, uses, weighed


def fisher(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by the diagonal of the empirical Fisher matrix (Theis et al. 2018, arXiv 1801.05787).

        score_i = v_i^2 F_ii / 2,       F_ii = mean over examples n of g_ni^2,      g_n the gradient of example n

    BatchNorm is in evaluation mode; examples are the first dimension of a batch. They weigh what `size` gives for each
    alone (its tokens, say, where `loss` is a mean over these, and g_n that of its own mean), if that adds up to its
    batch's; else all of a batch weigh the same.
    """
    with given.network() as net:
        in_single_precision(net.model)

        def forward(batch: Any) -> Tensor:
            return loss_of("fisher", given.loss, net.model, batch)

        means = _Means(net)
        for batch, weight in weighed("fisher", given.batches, given.size):
            for done, share in passed(net, batch, weight, forward, given.size):
                signs = None if done.factors is None else done.factors.square()
                means.add(done.square_sums(None, signs), share, share * done.count)  # of a mean: 1/count of their own
        return means.scores()


def obd(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by the Gauss-Newton diagonal of the Hessian: Optimal Brain Damage (LeCun, Denker & Solla 1989).

        score_i = v_i^2 H_ii / 2,       H_ii = mean over examples of (J^T A J)_ii

    with J the Jacobian of an example's outputs and A the Hessian of its loss in these: this is the diagonal of the
    generalised Gauss-Newton matrix, without the terms in the network's own second derivatives. It is the diagonal of
    the Hessian itself, exactly, where the outputs are piecewise linear in each single weight: networks of linear and
    convolutional layers, ReLU, pooling and BatchNorm in evaluation mode, in which a weight acts once, under any loss of
    the outputs that is twice differentiable (cross-entropy, squares). With smooth activations (tanh, GELU), attention,
    LayerNorm or tied weights the two differ. It takes a backward pass per output.

    `loss` calls the model once, and reads nothing else of
    it but its outputs; these are logits, of which the loss is no linear function.

    Raises:
        ValueError: `loss` or the last layer is another.
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
        for batch, weight in weighed("obd", given.batches, given.size):
            for done, share in passed(net, batch, weight, forward, given.size):
                means.weight += share
                for cotangent, signs in _roots(done, losses[0], leaves[1]):
                    curved = curved or bool(signs.any())
                    means.add(done.square_sums(cotangent, signs), 0.0, share)
        if not curved:
            raise ValueError(
                "`loss` is linear in what the model returns (or flat), where `obd` sees no curvature; let the network "
                "return logits, and the loss take them through `log_softmax`, as `cross_entropy` does."
            )
        return means.scores()


def _roots(done: Passed, loss: Tensor, leaf: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield (cotangents, signs) whose signed squares make the Hessian of each example's loss in its outputs.

    The mean over a batch of J^T A J is the sum of signed squares over examples and over what is yielded.
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
    """Refuse losses whose curvature in one call's outputs is not all that they have."""
    if len(leaves) > 2:
        raise ValueError(
            f"`loss` (which calls the model {len(leaves) // 2} times) must call it once for `obd`, which takes the "
            "curvature in one call's outputs; join the inputs in one batch."
        )
    read = uses(loss)
    if others := [name for name, parameter in net.parameters.items() if id(parameter) in read]:
        raise ValueError(
            f"`loss` (which reads {others[0]!r} itself) must read the model's outputs alone for `obd`; leave penalties "
            "of weights out."
        )
    if type(leaves[0].grad_fn).__name__ in ("SoftmaxBackward0", "SigmoidBackward0"):
        raise ValueError(
            "`model` must return logits for `obd`, which takes outputs to be linear where no kink is, and it ends in a "
            "softmax or sigmoid; let the network return logits, and the loss apply that."
        )


class _Means:
    """Means of squares over examples, float64, and scores from them."""

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
    """Score each entry by what removing it costs when all others make up for it: Optimal Brain Surgeon.

        score_q = v_q^2 / (2 [F^-1]_qq),        F = damping I + mean over examples n of g_n g_n^T

    as WoodFisher (Singh & Alistarh 2020, arXiv 2004.14340) approximates Hassibi & Stork 1993; the inverse is exact, in
    float64. BatchNorm is in evaluation mode.

    Args:
        damping: above 0.
        block: None takes the whole matrix, which holds the gradients of all examples; a number takes blocks of so many
            consecutive entries, which begin anew at each row (a filter, a unit), as oBERT's (arXiv 2203.07259).
        form: "block" scores each block by what removing all of it costs, w_Q^T ([F^-1]_QQ)^-1 w_Q / 2, in one dimension
            for each weight's name; `pruning.prune` asks it of blocks that go at once.
        matrix: what `fisher_matrix` has made of these arguments before; None makes it.

    Raises:
        ValueError: `form` is another word, or "block" is asked of no blocks, or of such as do not divide rows or whose
            rows are not outputs.
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
                f"has shape {tuple(shape)}; choose a divisor, or leave it out, as any tensor whose rows are inputs."
            )
