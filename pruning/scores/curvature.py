"""Second-order scores: the diagonal Fisher, OBD, and OBS with the whole Fisher matrix or blocks of it; float64.

F = damping I + mean over examples n of g_n g_n^T,       g_n the gradient of example n, 0 where v is 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from pruning.scores.readings.network import Network, Weight, in_single_precision
from pruning.scores.readings.per_example import BatchPass, example_passes
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    leaf_uses,
    loss_of,
    outputs_through,
    refuse_nan,
)

COLUMNS = 8192
"""Columns solved at a time."""


class FisherMatrix(Protocol):
    """Operations of the Fisher matrix that OBS uses; a vector is name -> float64 tensor of the parameter's shape."""

    def inverse_diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal of F^-1."""

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return F^-1 u."""

    def joint_update(self, values: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the change dw with the least dw^T F dw / 2 that sets every pruned entry to 0.

        dw_Q = -w_Q,    dw_K = [F_KK]^-1 F_KQ w_Q        K the kept entries, Q the pruned ones
        """


def fisher_matrix(
    given: ScoringInput,
    *,
    damping: float = 1e-5,
    block: int | None = None,
) -> FisherMatrix:
    """Compute the Fisher matrix of `model` over the examples of all batches; see `pruning.scores.obs`.

    Raises:
        ValueError: there is no data or no loss, `damping` is not above 0, or `block` below 1.
    """
    if not (isinstance(cast(object, damping), Real) and damping > 0):
        raise ValueError(f"`damping` (={damping!r}) must be above 0, or the matrix has no inverse; pass 1e-5.")
    if block is not None and block < 1:
        raise ValueError(f"`block` (={block!r}) must be at least 1, or None for the whole matrix.")
    with given.network() as net:
        refuse_nan("obs", net.parameters, "weights")
        in_single_precision(net.model)
        examples = _examples(net, given)
        if block is None:
            return _WholeMatrix(examples, list(net.parameters), damping)
        return FisherBlocks(examples, list(net.parameters), damping, block)


def _examples(net: Network, given: ScoringInput) -> Iterator[tuple[list[Tensor], float]]:
    """Yield (gradients of some examples for each weight, each (count, *shape), weight of each example)."""
    for done, share in example_passes("obs", net, given):
        rows = [row.mul_(done.count) for row in done.rows()]
        for row, parameter in zip(rows, net.parameters.values(), strict=True):
            row.mul_(parameter.detach() != 0)  # pruned entries are 0 in the copy
        refuse_nan("obs", dict(zip(net.parameters, rows, strict=True)), "gradients")
        yield rows, share / done.count


class _WholeMatrix:
    """The whole matrix in dual form: with G the weighted gradients, K = damping I + G G^T has one row per example.

    F^-1 u = (u - G^T K^-1 G u) / damping,       diag F^-1 = (1 - sum over rows of (C^-1 G)^2) / damping,     K = C C^T
    """

    def __init__(self, examples: Iterable[tuple[list[Tensor], float]], names: list[str], damping: float) -> None:
        parts, weights = [], []
        for rows, weight in examples:
            parts.append(rows)
            weights += [weight] * len(rows[0])
        shares = (torch.tensor(weights, dtype=torch.float64) / sum(weights)).sqrt()
        self.damping = damping
        self.shapes = {name: rows.shape[1:] for name, rows in zip(names, parts[0], strict=True)}
        self.rows: dict[str, Tensor] = {}
        for index, name in enumerate(names):
            joined = torch.cat([rows[index].flatten(1) for rows in parts])
            for rows in parts:
                rows[index] = rows[index][:0]  # frees the parts, so that gradients are in memory once
            self.rows[name] = joined.mul_(shares.to(joined)[:, None])
        self.factor = torch.linalg.cholesky(self._dual(self.rows))

    def _dual(self, rows: Mapping[str, Tensor]) -> Tensor:
        dual: Tensor | None = None
        for part in rows.values():
            for columns in torch.split(part, COLUMNS, 1):
                columns = columns.to(torch.float64)
                dual = columns @ columns.T if dual is None else dual.addmm_(columns, columns.T)
        assert dual is not None
        dual.diagonal().add_(self.damping)
        return dual

    def _times(self, vector: Mapping[str, Tensor]) -> Tensor:
        """Return G u."""
        products = [g.to(torch.float64) @ vector[name].flatten().to(torch.float64) for name, g in self.rows.items()]
        return torch.stack(products).sum(0)

    def _back(self, dual: Tensor) -> dict[str, Tensor]:
        """Return G^T a."""
        return {name: (g.to(torch.float64).T @ dual).view(self.shapes[name]) for name, g in self.rows.items()}

    def inverse_diagonal(self) -> dict[str, Tensor]:
        found = {}
        for name, rows in self.rows.items():
            parts = [
                torch.linalg.solve_triangular(self.factor, columns.to(torch.float64), upper=False).square_().sum(0)
                for columns in torch.split(rows, COLUMNS, 1)
            ]
            found[name] = torch.cat(parts).neg_().add_(1).div_(self.damping).view(self.shapes[name])
        return found

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inner = torch.cholesky_solve(self._times(vector)[:, None], self.factor)[:, 0]
        back = self._back(inner)
        return {name: (vector[name].to(torch.float64) - back[name]) / self.damping for name in self.rows}

    def joint_update(self, values: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # [F_KK]^-1 G_K^T a = G_K^T (damping I + G_K G_K^T)^-1 a, with a = G_Q w_Q
        pruned = {name: values[name].to(torch.float64) * (kept[name] == 0) for name in self.rows}
        survivors = {name: g * (kept[name].flatten() != 0) for name, g in self.rows.items()}
        inner = torch.cholesky_solve(self._times(pruned)[:, None], torch.linalg.cholesky(self._dual(survivors)))[:, 0]
        return {name: torch.where(kept[name] != 0, b, -pruned[name]) for name, b in self._back(inner).items()}


class FisherBlocks:
    """Blocks along the rows of each weight: (rows, blocks, width, width), plus narrower ones for the rest of a row."""

    def __init__(
        self, examples: Iterable[tuple[list[Tensor], float]], names: list[str], damping: float, block: int
    ) -> None:
        self.block = block
        self.shapes: dict[str, torch.Size] = {}
        self.blocks: dict[str, list[Tensor]] = {name: [] for name in names}
        total = 0.0
        for rows, weight in examples:
            total += weight * len(rows[0])
            for name, row in zip(names, rows, strict=True):
                self.shapes[name] = row.shape[1:]
                parts = [part.movedim(0, -1) for part in self._cut(row.to(torch.float64))]
                products = [(part @ part.mT).mul_(weight) for part in parts]
                known = self.blocks[name]
                self.blocks[name] = [a.add_(b) for a, b in zip(known, products, strict=True)] if known else products
        for known in self.blocks.values():
            for product in known:
                product.div_(total).diagonal(dim1=-2, dim2=-1).add_(damping)

    def _cut(self, values: Tensor) -> list[Tensor]:
        """Cut (examples, *shape) into (examples, rows, blocks, width), and the rest of each row likewise."""
        flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(1)
        whole = flat.shape[2] // self.block * self.block
        parts = (flat[..., :whole].reshape(*flat.shape[:2], -1, self.block), flat[..., whole:].unsqueeze(2))
        return [part for part in parts if part.numel()]

    def _vector(self, vector: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        return {name: [part[0] for part in self._cut(vector[name].to(torch.float64)[None])] for name in self.blocks}

    def _join(self, name: str, parts: list[Tensor]) -> Tensor:
        rows = 1 if len(self.shapes[name]) < 2 else self.shapes[name][0]
        return torch.cat([part.reshape(rows, -1) for part in parts], 1).view(self.shapes[name])

    def inverse_diagonal(self) -> dict[str, Tensor]:
        return {
            name: self._join(name, [torch.linalg.inv(part).diagonal(dim1=-2, dim2=-1) for part in parts])
            for name, parts in self.blocks.items()
        }

    def block_costs(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return w_Q^T ([F^-1]_QQ)^-1 w_Q / 2 = w_Q^T F_QQ w_Q / 2 for every block Q, shape (blocks,)."""
        return {
            name: torch.cat(
                [(u * (f @ u[..., None])[..., 0]).sum(-1).flatten() / 2 for f, u in zip(fs, us, strict=True)]
            )
            for (name, fs), us in zip(self.blocks.items(), self._vector(values).values(), strict=True)
        }

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._join(name, [torch.linalg.solve(f, u) for f, u in zip(self.blocks[name], parts, strict=True)])
            for name, parts in self._vector(vector).items()
        }

    def joint_update(self, values: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, keeps = self._vector(values), self._vector({name: mask != 0 for name, mask in kept.items()})
        return {
            name: self._join(
                name, [_joint(f, w, k) for f, w, k in zip(blocks, weights[name], keeps[name], strict=True)]
            )
            for name, blocks in self.blocks.items()
        }


def _joint(matrix: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """Return the joint update of blocks (..., width, width) for values (..., width); `kept` holds 1 or 0 for each."""
    pruned = values * (1 - kept)
    among_kept = matrix * kept[..., :, None] * kept[..., None, :] + torch.diag_embed(1 - kept)
    update: Tensor = torch.linalg.solve(among_kept, (matrix @ pruned[..., None])[..., 0] * kept)
    return update - pruned


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
        means = _Means(net)
        for done, share in example_passes("fisher", net, given):
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
        for done, share in example_passes("obd", net, given, forward):
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
    if isinstance(matrix, FisherBlocks) and form == "block":
        return matrix.block_costs({name: weight.value for name, weight in weights.items()})
    diagonal = matrix.inverse_diagonal()
    return {name: w.value.to(torch.float64).square().div_(2 * diagonal[name]) for name, w in weights.items()}


def _refuse_ragged(weights: Mapping[str, Weight], block: int | None) -> None:
    for name, weight in weights.items():
        shape, layout = weight.parameter.shape, weight.layout
        in_order = layout is not None and layout.by_output == tuple(range(len(layout.by_output)))
        if layout is None or not in_order or block is None or block < 1 or layout.row_entries(shape) % block:
            kind = type(weight.module).__name__
            raise ValueError(
                f"`block` (={block!r}) must divide the weights of an output for form='block', but {name!r} of {kind} "
                f"has shape {tuple(shape)}; choose a divisor. Leave this tensor out if its rows are inputs."
            )
