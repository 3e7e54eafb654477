"""Products in forwards, such as attention, against counts by hand and torch's counter, also with empty heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pruning
from pruning import MaskSet
from pruning.graph.tracing import traced
from pruning.measure.macs import LayerMacs, macs

BATCH, HEADS, TOKENS, FEATURES = 2, 3, 5, 4
WIDTH = HEADS * FEATURES
PRODUCTS = 2 * BATCH * HEADS * TOKENS * TOKENS * FEATURES
LINEAR = BATCH * TOKENS * 4 * WIDTH * WIDTH
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of queries, keys and values, each (batch, heads, tokens, features), to a tensor of the same shape."""


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape, (q, k, v) = q.shape, (each.flatten(0, 1) for each in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(shape)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape, (q, k, v) = q.shape, (each.flatten(0, 1) for each in (q, k, v))
    bias = torch.zeros(TOKENS, TOKENS)
    return torch.bmm(torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1), v).view(shape)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def by_a_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


MIXES: dict[str, Mix] = {
    "sdpa": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "kernel": by_a_kernel,
    "grouped": grouped,
    "matmul": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "bmm": by_bmm,
    "baddbmm": by_baddbmm,
    "einsum": by_einsum,
}


class Attention(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, FEATURES)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(self.mix(*parts).transpose(1, 2).flatten(2))


def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_both_products_of_attention_are_counted_however_they_are_written(mix: Mix) -> None:
    found = macs(Attention(mix), tokens())

    assert found.layers[""] == LayerMacs(PRODUCTS, PRODUCTS)
    assert (found.total, found.remaining) == (LINEAR + PRODUCTS, LINEAR + PRODUCTS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow  # imports torch's compiler
def test_attention_that_compiles_itself_is_counted() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    found = macs(Attention(flex_attention), tokens())

    assert found.layers[""] == LayerMacs(PRODUCTS, PRODUCTS)
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    assert macs(nn.Sequential(compiled), torch.randn(1, 2)).total == 4


@sampled(2)
@pytest.mark.parametrize("mix", [MIXES[name] for name in ("sdpa", "kernel", "matmul", "bmm")])
def test_what_is_left_of_attention_is_that_of_its_heads_that_are_not_empty(mix: Mix) -> None:
    torch.manual_seed(0)
    model, head = Attention(mix), slice(FEATURES, 2 * FEATURES)
    gone = {name: torch.ones_like(each) for name, each in model.named_parameters()}
    for name in ("query", "key", "value"):
        gone[f"{name}.weight"][head] = gone[f"{name}.bias"][head] = 0
    gone["out.weight"][:, head] = 0
    MaskSet(gone).apply(model)

    masked, smaller = macs(model, tokens()), pruning.shrink(model, tokens())

    assert masked.layers[""] == LayerMacs(PRODUCTS, PRODUCTS * 2 // 3)
    assert (masked.total, masked.remaining) == (LINEAR + PRODUCTS, LINEAR * 2 // 3 + PRODUCTS * 2 // 3)
    assert macs(smaller, tokens()).total == masked.remaining


def test_products_of_heads_that_are_masked_in_part_stay() -> None:
    model = Attention(F.scaled_dot_product_attention)
    rows = torch.ones(WIDTH, WIDTH)
    rows[:FEATURES:2] = 0
    pruning.custom_from_mask(model.query, "weight", rows)

    assert macs(model, tokens()).layers[""] == LayerMacs(PRODUCTS, PRODUCTS)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_of_torch_s_own_attention_an_empty_head_s_products_go(weights: bool, first: bool, bias: bool) -> None:
    model = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=first)  # torch initialises its biases to 0
    example = {**dict.fromkeys(("query", "key", "value"), tokens()), "need_weights": weights}
    examples, attended = (BATCH, TOKENS) if first else (TOKENS, BATCH)
    products = 2 * examples * attended**2 * WIDTH
    dense = macs(model, example)
    mask = torch.ones(3 * WIDTH, WIDTH)
    mask[:FEATURES] = 0
    pruning.custom_from_mask(model, "in_proj_weight", mask)
    masked = macs(model, example)

    assert dense.layers == {"": LayerMacs(LINEAR + products, LINEAR + products)}
    assert masked.total == dense.total
    assert dense.remaining - masked.remaining == BATCH * TOKENS * FEATURES * WIDTH + products // 2 // HEADS


class Own(nn.Module):
    """A forward with weights outside layers: as either factor, as a slice, and in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.kernel = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d((self.weight[:2] @ (x @ self.weight).mT)[None], self.kernel)


def test_weights_of_own_forwards_are_counted_by_their_masks() -> None:
    model, x = Own(), torch.randn(5, 4)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert macs(model, x).total == 5 * 24 + 5 * 12 + 3 * 36 == counter.get_total_flops() // 2
    rows = torch.zeros(4, 6)
    rows[0] = 1

    MaskSet({"weight": rows, "kernel": torch.zeros(6, 2, 3)}).apply(model)

    assert macs(model, x).layers == {"": LayerMacs(288, 5 * 6 + 5 * 6)}


def test_the_program_of_a_network_takes_as_many() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(0, 1), Attention(F.scaled_dot_product_attention))
    x = torch.randn(BATCH, 1, TOKENS + 2, WIDTH + 2)

    assert macs(traced(model, x).graph, x).total == macs(model, x).total > PRODUCTS
