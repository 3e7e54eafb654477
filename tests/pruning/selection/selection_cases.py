"""Masks and scores as test cases of selection, and a reference that sorts."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


LAYOUTS = ["contiguous", "transposed", "channels_last", "strided"]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return an equal tensor in another memory layout."""
    match layout:
        case "transposed" if tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        case "channels_last" if tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case "strided" if tensor.dim() > 0:
            return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor.contiguous()


def reference(mask: Tensor, scores: Tensor, count: int, magnitude: bool) -> Tensor:
    """Prune by a stable sort of the survivors: of equal scores the lowest index is pruned first."""
    keys = scores.double().abs() if magnitude else scores.double()
    alive = [i for i, kept in enumerate(mask.flatten().tolist()) if kept]
    values = keys.flatten().tolist()
    expected = mask.flatten().clone()
    for i in sorted(alive, key=lambda i: values[i])[:count]:
        expected[i] = 0
    return expected.view(mask.shape)


@st.composite
def cases(draw):
    """Draw a mask, scores with ties and infinities, and a count; shapes fill from zero to many chunks."""
    shape = draw(st.sampled_from([(0,), (1,), (), (7,), (5, 3), (1000,), (40, 30), (6, 5, 3, 3), (1, 600), (700, 1)]))
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator).to(draw(st.sampled_from(FLOATS)))
    if draw(st.booleans()):
        scores = (scores * draw(st.sampled_from([0.5, 2]))).round()
    if draw(st.booleans()):
        scores[torch.rand(shape, generator=generator) < 0.1] = draw(st.sampled_from([math.inf, -math.inf, -0.0]))
    kept = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.01, 0.05, 0.5, 1.1]))
    mask = kept.to(draw(st.sampled_from([*FLOATS, torch.bool])))
    survivors = int(mask.count_nonzero())
    count = draw(st.integers(0, survivors)) if draw(st.booleans()) else round(0.9 * survivors)
    return laid_out(mask, draw(st.sampled_from(LAYOUTS))), laid_out(scores, draw(st.sampled_from(LAYOUTS))), count
