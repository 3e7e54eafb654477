"""2:4 storage of weights: two values for each four consecutive inputs, and their positions."""

from __future__ import annotations

import torch
from torch import Tensor

LOADING = '''\
def _expanded(values, indices, shape):
    """Return the tensor from two values for each four inputs; two bits give the position of each value."""
    places = torch.stack([indices >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten()[: values.numel()]
    groups = torch.zeros(values.numel() // 2, 4, dtype=values.dtype)
    groups.scatter_(1, places.view(-1, 2).long(), values.view(-1, 2))
    return groups.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


'''
"""Code of the generated module that expands `compressed` tensors."""


def compressed(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the values and indices of a weight; None if four consecutive inputs have more than two non-zeros.

    Inputs are the second dimension. Groups of four are counted along it, for each output and each kernel position.
    Values are stored in the order of their positions in the group. Each uint8 of the indices holds four positions, 0 to
    3, the first in the lowest bits. In float32 a group takes 8.5 bytes instead of 16.
    """
    if tensor.ndim < 2 or not tensor.numel() or tensor.shape[1] % 4 or not tensor.is_floating_point():
        return None
    groups = tensor.detach().movedim(1, -1).reshape(-1, 4)
    used = groups != 0
    if int(used.sum(1).max()) > 2:
        return None
    places = used.int().argsort(dim=1, descending=True, stable=True)[:, :2].sort(dim=1).values
    flat = places.flatten().to(torch.uint8)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % 4)]).view(-1, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return groups.gather(1, places).flatten(), (padded << shifts).sum(1, dtype=torch.uint8)
