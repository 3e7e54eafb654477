"""The empirical Fisher matrix, whole or in blocks, and the operations with its inverse that OBS needs; float64.

F = damping I + mean over examples n of g_n g_n^T,       g_n the gradient of example n, 0 where v is 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from pruning.scores.readings.network import Network, in_single_precision
from pruning.scores.readings.per_example import batch_passes
from pruning.scores.readings.scoring_data import ScoringInput, loss_of, refuse_nan, weighted_batches

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
        return Blocks(examples, list(net.parameters), damping, block)


def _examples(net: Network, given: ScoringInput) -> Iterator[tuple[list[Tensor], float]]:
    """Yield (gradients of some examples for each weight, each (count, *shape), weight of each example)."""

    def forward(batch: Any) -> Tensor:
        return loss_of("obs", given.loss, net.model, batch)

    for batch, weight in weighted_batches("obs", given.batches, given.size):
        for done, share in batch_passes(net, batch, weight, forward, given.size):
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


class Blocks:
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
