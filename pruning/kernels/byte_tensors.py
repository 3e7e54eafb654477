"""Tensors of bytes, four channels in an element, as floats and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pruning.kernels.sparse_weight import ByteScale, LayerShape, in_fours


def split_in_blocks(values: Tensor) -> Tensor:
    """Return values, (examples, channels, *sizes), as (examples, blocks, *sizes, 4); zeros fill up the last block."""
    padded = F.pad(values, (0, 0) * (values.ndim - 2) + (0, -values.shape[1] % 4))
    return padded.view(len(values), in_fours(values.shape[1]), 4, *values.shape[2:]).movedim(2, -1)


def of_blocks(blocks: Tensor) -> Tensor:
    """Return values whose channels `split_in_blocks` split, with those that fill up the last block."""
    return blocks.movedim(-1, 2).flatten(1, 2)


def joined(values: Tensor) -> Tensor:
    """Return bytes, (examples, channels, *sizes), as elements of four consecutive channels; zeros fill up the last."""
    fours = split_in_blocks(values)
    return fours.flatten().view(torch.int32).view(fours.shape[:-1])


def floats_of(x: Tensor, scale: ByteScale, channels: int, layer: LayerShape) -> Tensor:
    """Return the floats of a tensor of bytes, for the inputs or outputs of a layer."""
    each = x.contiguous().unsqueeze(-1).view(torch.uint8)
    found = each.flatten(-2)[..., :channels] if layer.kind == "linear" else of_blocks(each)[:, :channels]
    return (found.float() - scale.zero) * scale.scale


def bytes_of(y: Tensor, scale: ByteScale, layer: LayerShape) -> Tensor:
    """Return a layer's outputs as bytes; values beyond the range are taken to the nearest."""
    inverse = torch.tensor(1 / scale.scale, dtype=torch.float32)
    found = ((y * inverse).nan_to_num(-torch.inf).round() + scale.zero).clamp(0, 255).to(torch.uint8)
    if layer.kind == "linear":
        return joined(found.view(-1, found.shape[-1])).view(*found.shape[:-1], -1)
    return joined(found)
