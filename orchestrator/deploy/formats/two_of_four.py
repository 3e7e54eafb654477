"""2:4 storage: of each four consecutive inputs the two values that may not be zero, and where they stand."""

from __future__ import annotations

import torch
from torch import Tensor

LOADING = '''\
def _expanded(values, indices, shape):
    """Return the tensor of which of each four inputs two values are kept, two bits saying where each of them stands."""
    places = torch.stack([indices >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten()[: values.numel()]
    groups = torch.zeros(values.numel() // 2, 4, dtype=values.dtype)
    groups.scatter_(1, places.view(-1, 2).long(), values.view(-1, 2))
    return groups.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


'''
"""What the generated module does with `compressed` tensors."""


def compressed(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the values and indices of a weight, None where some four consecutive inputs have more than two non-zeros.

    Inputs are the second dimension; fours are counted along it, for each output and each place of a kernel. Values are
    those of the places, in ascending order; indices hold four of these places, 0 to 3, in each uint8, the first in the
    lowest bits: 8.5 bytes of 16 in float32.
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
