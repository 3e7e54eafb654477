"""Channels: norms against values by hand, and the channels that survive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pruning
from pruning.selection import channel_masks


@pytest.mark.parametrize("n", [0, 1, 2, 3.0, float("inf"), -float("inf"), "fro"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_channel_norms(n: channel_masks.Norm, dim: int) -> None:
    t = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    rows = t.movedim(dim, 0).flatten(1).abs()
    order = 2.0 if n == "fro" else float(n)
    by_hand = {0.0: (rows != 0).sum(1).float(), float("inf"): rows.amax(1), -float("inf"): rows.amin(1)}
    expected = by_hand.get(order, (rows**order).sum(1) ** (1 / order if order else 1))
    assert torch.allclose(channel_masks.channel_norms(t, n, dim), expected)


def test_nuclear_norms_where_channels_are_matrices() -> None:
    t = torch.diag_embed(torch.tensor([[3.0, -4.0], [1.0, 1.0]]))  # singular values 3, 4 and 1, 1
    assert channel_masks.channel_norms(t, "nuc", 0).tolist() == pytest.approx([7.0, 2.0])
    layer = nn.Conv1d(2, 3, 2)
    pruning.ln_structured(layer, "weight", 1, n="nuc", dim=0)
    assert int(layer.weight_mask.sum()) == 8
    with pytest.raises(ValueError, match="'nuc'"):
        pruning.ln_structured(nn.Linear(2, 2), "weight", 1, n="nuc", dim=0)
    with pytest.raises(ValueError, match=r"`n` \(='max'\)"):
        pruning.ln_structured(nn.Linear(2, 2), "weight", 1, n="max", dim=0)  # type: ignore[arg-type]


def test_norms_of_half_precision_do_not_overflow() -> None:
    layer = nn.Linear(2, 2, dtype=torch.float16)
    # The norms are 84,853 and 70,711. Both overflow in half precision, and of equal norms the first would be pruned.
    layer.weight = nn.Parameter(torch.tensor([[6e4, 6e4], [5e4, 5e4]], dtype=torch.float16))
    pruning.ln_structured(layer, "weight", 1, n=2, dim=0)
    assert layer.weight_mask.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("n", [1, 2, "fro"])
@pytest.mark.parametrize(("shape", "dim"), [((100, 7, 3, 3), 1), ((64, 5, 4), 2), ((300, 2), -1), ((100, 7, 3), 0)])
def test_norms_of_channels_that_lie_across_memory(
    shape: tuple[int, ...], dim: int, n: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_masks, "AT_ONCE", 50)
    t = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = t.double().movedim(dim, 0).flatten(1)
    expected = rows.abs().sum(1) if n == 1 else rows.square().sum(1).sqrt()
    found = channel_masks.channel_norms(t, n, dim)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=0)
    equal = torch.ones(shape)
    assert len(channel_masks.channel_norms(equal, n, dim).unique()) == 1
    t.select(dim, 1)[(0,) * (len(shape) - 1)] = float("nan")
    assert channel_masks.channel_norms(t, n, dim).isnan().nonzero().tolist() == [[1]]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)
def test_channels_are_dropped_alike_on_every_device(device: str, dim: int) -> None:
    t = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    first, second = (pruning.LnStructured(amount, n=2, dim=dim) for amount in (2, 1))
    on_host, on_device = (first.first_mask(where, where) for where in (t, t.to(device)))
    for mask, where in ((on_host, t), (on_device, t.to(device))):
        second.prune_(mask, where * mask)
    assert torch.equal(on_device.cpu(), on_host)
    channels_left = channel_masks.alive_channels(on_host, dim)
    assert int(channels_left.sum()) == t.shape[dim] - 3
    masked = torch.ones(6, 5, 4, device="meta")
    channel_masks.drop_channels(
        masked, torch.ones(t.shape[dim], dtype=torch.bool, device="meta"), dim
    )  # a meta tensor would fail if this waited for the device


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (2, 0, 3)])
def test_channels_without_entries(shape: tuple[int, ...]) -> None:
    module = nn.ParameterDict({"weight": torch.empty(shape)})
    for _ in range(2):
        pruning.ln_structured(module, "weight", 0.5, n=2, dim=0)
        pruning.global_structured([(module, "weight")], amount=0.5)
    assert module.weight_mask.shape == shape
    with pytest.raises(ValueError, match="0 units"):
        pruning.random_structured(module, "weight", 1, dim=0)
