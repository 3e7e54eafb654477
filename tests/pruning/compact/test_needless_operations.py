"""Operations that change nothing are taken out, and all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pruning.compact.needless_operations import skip_needless
from pruning.graph.operations import name_of
from pruning.graph.tracing import traced


def operations(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[list[str], Callable[[Tensor], Tensor]]:
    """Return the operations that are left of a function, and the function of them."""

    class Network(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    graph = traced(Network().eval(), x, sizes="any").graph
    skip_needless(graph.graph, set())
    graph.recompile()
    return [name_of(node) for node in graph.graph.nodes if name_of(node)], graph


def attention(x: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


def positions(x: Tensor, start: int = 0, step: int = 1) -> Tensor:
    return torch.arange(start, x.shape[1] * step + start, step)


HIDE_NOTHING: list[Callable[[Tensor], Tensor]] = [
    lambda x: attention(x, (positions(x)[None, :, None] >= 0).expand(len(x), -1, x.shape[1])),
    lambda x: attention(x, ((positions(x, 2) + 0)[:, None] > -1).expand(-1, x.shape[1])),
    lambda x: attention(x, ((positions(x) >= 0) & (positions(x, 1) >= 0))[None].expand(x.shape[1], -1)),
]
HIDE: list[Callable[[Tensor], Tensor]] = [
    lambda x: attention(x, (positions(x) >= 1)[None].expand(x.shape[1], -1)),
    lambda x: attention(x, (positions(x) > 0)[None].expand(x.shape[1], -1)),
    lambda x: attention(x, (positions(x, -1) >= 0)[None].expand(x.shape[1], -1)),
    lambda x: attention(x, (positions(x, 3, -1) >= 0)[None].expand(x.shape[1], -1)),
    lambda x: attention(x, (positions(x) + -1 >= 0)[None].expand(x.shape[1], -1)),
    lambda x: attention(x, positions(x)[None] <= positions(x)[:, None]),
    lambda x: attention(x, (x[0, :, :1] >= 0).expand(-1, x.shape[1]) | (positions(x) == 0)),
    lambda x: attention(x, ((positions(x) >= 0) & (positions(x) >= 1))[None].expand(x.shape[1], -1)),
]


@pytest.mark.parametrize("call", HIDE_NOTHING)
def test_a_mask_that_hides_nothing_is_taken_out(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 5, 8)
    left, found = operations(call, x)

    assert left == ["scaled_dot_product_attention"]
    for given in (x, torch.randn(3, 7, 8)):
        assert torch.equal(found(given), call(given))


def test_positions_of_few_bits_may_wrap_around() -> None:
    def call(x: Tensor) -> Tensor:
        return attention(x, (torch.arange(x.shape[1], dtype=torch.int8) >= 0)[None].expand(x.shape[1], -1))

    long = torch.randn(2, 150, 8)
    assert torch.equal(operations(call, torch.randn(2, 5, 8))[1](long), call(long))


@pytest.mark.parametrize("call", HIDE)
def test_a_mask_that_may_hide_something_stays(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 5, 8)
    left, found = operations(call, x)

    assert len(left) > 1
    for given in (x, torch.randn(3, 7, 8)):
        assert torch.equal(found(given), call(given))
        assert not torch.equal(found(given), attention(given, None)), "it hides something"


def test_slices_of_everything_padding_by_nothing_and_dropouts_go() -> None:
    def call(x: Tensor) -> Tensor:
        return F.dropout(F.pad(x[:, 0:], (0, 0, 0, 0))[::1], 0.5, training=False).sin()

    assert operations(call, torch.randn(2, 5, 8))[0] == ["sin"]


def test_what_cuts_pads_or_drops_stays() -> None:
    def call(x: Tensor) -> Tensor:
        return F.dropout(F.pad(x[:, 1:], (0, 1))[::2], 0.5, training=True).sin()

    left = operations(call, torch.randn(4, 5, 8))[0]
    assert [name for name in left if name in ("slice", "pad", "constant_pad_nd", "dropout")] == [
        "slice",
        "pad",
        "slice",
        "dropout",
    ]


def test_nothing_goes_where_an_operation_writes() -> None:
    def call(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, 0:].add_(1)
        return y

    left, found = operations(call, torch.randn(2, 5, 8))
    assert "sin" in left
    assert torch.equal(found(torch.zeros(2, 5, 8)), torch.ones(2, 5, 8))
