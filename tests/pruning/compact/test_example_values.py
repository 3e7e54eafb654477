"""Values that only the example has, by its numbers, masks or sizes: no channel is constant because of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.compact.tried_inputs import other_inputs

DRAWS = torch.Generator().manual_seed(0)
WHOLE = torch.randint(1, 20, (2, 6), generator=DRAWS)
OTHER = WHOLE.flip(1) * torch.tensor([[1], [0]])
"""Tokens, of which a row is padding alone."""


class Net(nn.Module):
    """Layers whose hidden channels a function changes between them."""

    def __init__(self, between: Callable[..., Tensor], *, tokens: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 16) if tokens else nn.Linear(6, 16)
        self.hidden, self.last = nn.Linear(16, 16), nn.Linear(16, 5)
        self.between = between

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(F.relu(self.hidden(self.first(x))), x, *more))
        return found


def _of_mask(y: Tensor, _x: Tensor, mask: Tensor) -> Tensor:
    return (y * mask[..., None]).sum(1)


def _written(y: Tensor, x: Tensor) -> Tensor:
    counts = torch.zeros_like(x)
    counts += x != 0
    return y * counts[..., None]


def _attention(y: Tensor, x: Tensor) -> Tensor:
    heads = y.unflatten(-1, (4, -1)).transpose(1, 2)
    found = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=(x != 0)[:, None, None])
    return found.transpose(1, 2).flatten(2)


def _pairs(y: Tensor, x: Tensor) -> Tensor:
    real = x != 0
    both = real[:, None, :] * real[:, :, None]
    return y + (y @ y.mT).masked_fill(~both, -1e4).softmax(-1) @ y


X, ROWS = torch.randn(2, 4, 6, generator=DRAWS), torch.randn(3, 6, generator=DRAWS)
ALL, SOME = torch.ones(2, 4, dtype=torch.bool), torch.rand(2, 4, generator=DRAWS) > 0.5
NETWORKS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "a mask": (_of_mask, (X, ALL), (X.flip(1), SOME)),
    "padding": (lambda y, x: y * (x != 0)[..., None], (WHOLE,), (OTHER,)),
    "whole numbers": (lambda y, x: y * (x * (x > 0)).sum(1).clamp(max=1)[:, None, None], (WHOLE,), (OTHER,)),
    "a tensor that is written": (_written, (WHOLE,), (OTHER,)),
    "a query that sees no key": (_attention, (WHOLE,), (OTHER,)),
    "a product of masks": (_pairs, (WHOLE,), (OTHER,)),
    "a threshold": (lambda y, _: y * (y > 8), (ROWS,), (ROWS.flip(1) * 100,)),
    "a guard": (lambda y, _: y * y.isfinite(), (ROWS,), (ROWS.flip(1) * 100,)),
    "numbers in place of an image": (lambda y, n: y * (n * (1 / 255.0)).mean(), (WHOLE * 0,), (OTHER,)),
}


def constant_channels(model: Net) -> None:
    """Let four hidden channels be 1 for every input, and two 0."""
    with torch.no_grad():
        model.hidden.weight[:6] = 0.0
        model.hidden.bias[:6] = torch.tensor([1.0, 1, 1, 1, 0, 0])


@sampled(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_values_of_the_example_are_no_constants(name: str) -> None:
    torch.manual_seed(0)
    between, given, others = NETWORKS[name]
    model = Net(between, tokens=given[0].dtype is torch.long).eval()
    constant_channels(model)
    smaller: Any = pruning.shrink(model, given)
    with torch.no_grad():
        assert smaller(*others).isfinite().all()
        torch.testing.assert_close(smaller(*others), model(*others), rtol=1e-4, atol=1e-5)
    assert smaller.shrunk.form == "module"
    assert smaller.hidden.out_features == (16 if name == "a query that sees no key" else 14)


class Timestep(nn.Module):
    """Layers on an embedding of a whole number, as of a step of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(torch.arange(4) * -0.5)[None, :]
        step = self.second(torch.cat((angles.sin(), angles.cos()), -1))
        found: Tensor = self.last(F.silu(self.first(x)) * step)
        return found


def test_a_network_without_zeros_stays_whole_at_the_step_of_the_example() -> None:
    model, x = Timestep().eval(), torch.randn(1, 6)
    smaller: Any = pruning.shrink(model, (x, torch.tensor([7])))
    assert (smaller.shrunk.form, smaller.shrunk.removed) == ("module", {})
    later = (x, torch.tensor([900]))
    torch.testing.assert_close(smaller(*later), model(*later))
    pruning.prune(model, "l1_unstructured", sparsity=0.5)
    torch.testing.assert_close(pruning.to_sparse(model, (x, torch.tensor([7])))(*later), model(*later))


def small_image(middle: nn.Module) -> nn.Sequential:
    """Return a network whose second convolution has the kernel that a test sets."""
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


def test_filters_that_meet_padding_alone_are_no_constants() -> None:
    torch.manual_seed(0)
    middle = nn.Conv2d(8, 8, 3, dilation=8, padding=8)
    with torch.no_grad():
        middle.weight[:3, :, 1, 1] = 0.0
        middle.weight[3] = 0.0
        middle.bias[:4] = 1.0  # type: ignore[index]
    model, larger = small_image(middle), torch.randn(1, 3, 40, 40)
    smaller: Any = pruning.shrink(model, torch.randn(2, 3, 6, 6))
    torch.testing.assert_close(smaller(larger), model(larger), rtol=1e-4, atol=1e-5)
    assert (smaller.shrunk.form, smaller[2].out_channels) == ("module", 7)


def test_filters_that_add_up_in_larger_images_are_no_constants() -> None:
    """Over one pixel, each output of a transposed convolution has one weight, and these are equal here."""
    torch.manual_seed(0)
    model, larger = small_image(middle := nn.ConvTranspose2d(8, 8, 3)), torch.randn(1, 3, 5, 5)
    with torch.no_grad():
        model[0].weight[:3] = 0.0
        model[0].bias[:3] = 1.0
        middle.weight[3:, :3] = 0.0
        middle.weight[:3, :3] = 0.5
        middle.weight[:, 3] = 0.0
    smaller: Any = pruning.shrink(model, torch.randn(2, 3, 1, 1))
    torch.testing.assert_close(smaller(larger), model(larger), rtol=1e-4, atol=1e-5)
    assert (smaller.shrunk.form, smaller[2].out_channels) == ("module", 7)


POSITIONS: dict[str, Callable[[nn.Embedding, int], Tensor]] = {
    "a layer": lambda table, length: table(torch.arange(length)),
    "an index": lambda table, length: table.weight[torch.arange(length)],
    "a selection": lambda table, length: table.weight.index_select(0, torch.arange(length)),
}


class Positions(nn.Module):
    """A table of positions that is added to tokens of zeros."""

    def __init__(self, read: Callable[[nn.Embedding, int], Tensor]) -> None:
        super().__init__()
        self.tokens, self.table, self.last = nn.Linear(6, 12), nn.Embedding(300, 12), nn.Linear(12, 5)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.relu(self.tokens(x) + self.read(self.table, x.shape[1])))
        return found


@pytest.mark.parametrize("name", POSITIONS)
def test_rows_of_a_table_beyond_the_example_count(name: str) -> None:
    torch.manual_seed(0)
    model = Positions(POSITIONS[name]).eval()
    with torch.no_grad():
        model.tokens.weight[:4] = 0.0
        model.tokens.bias[:4] = 1.0
        model.table.weight[:200, :4] = 0.0
        model.table.weight[:, 3] = 0.0
    smaller: Any = pruning.shrink(model, torch.randn(2, 8, 6))
    longer = torch.randn(2, 300, 6)
    torch.testing.assert_close(smaller(longer), model(longer), rtol=1e-4, atol=1e-5)
    assert smaller.shrunk.removed["last.weight"] == ((5, 12), (5, 11))


class Hidden(nn.Module):
    """A forward whose sizes are hidden from `shrink`, and change what it computes for larger inputs."""

    def __init__(self, *, delayed: bool) -> None:
        super().__init__()
        self.first, self.last, self.delayed = nn.Linear(6, 12), nn.Linear(12, 5), delayed

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        length = int(x.shape[1])
        if self.delayed:
            y = y + F.pad(y, (0, 0, 16, 0))[:, : x.shape[1]]
        elif length > 40:
            y = F.pad(y, (0, 0, 0, math.ceil(length / 64) * 64 - length))
        return self.last(y).mean(1)


@pytest.mark.parametrize("delayed", [False, True])
def test_sizes_that_are_many_times_the_example_s_are_tried(delayed: bool) -> None:
    torch.manual_seed(0)
    model = Hidden(delayed=delayed).eval()
    with torch.no_grad():
        model.first.weight[:4] = 0.0
        model.first.bias[:4] = 1.0
    smaller: Any = pruning.shrink(model, torch.randn(2, 6, 6))
    assert smaller.shrunk.form == "graph"
    with pytest.raises(ValueError, match="as in the example of its trace"):
        smaller(torch.randn(2, 50, 6))


def test_numbers_and_truth_values_are_drawn_anew() -> None:
    given = ((torch.full((2, 3), 9), torch.ones(2, 3, dtype=torch.bool)), {})
    drawn = [each[0] for each in other_inputs(given)]
    assert any(ids.shape == (2, 3) and len(ids.unique()) > 1 and not mask.all() for ids, mask in drawn)


class Optional(nn.Module):
    """Hidden channels that an argument may scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor, scale: Tensor | None = None, power: int = 1) -> Tensor:
        y = F.relu(self.first(x)) * power
        found: Tensor = self.last(y if scale is None else y * scale)
        return found


@pytest.mark.parametrize("given", [(), (None, 3), (None, 0.5)])
def test_arguments_that_decide_constants_are_named(given: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model, x, scale = Optional().eval(), torch.randn(3, 6), torch.rand(3, 1)
    with torch.no_grad():
        model.first.weight[:4] = 0.0
        model.first.bias[:4] = 1.0
    with pytest.warns(UserWarning, match="outputs") as told:
        smaller: Any = pruning.shrink(model, (x, *given))
    said = "\n".join(str(each.message) for each in told)
    assert "may differ in calls that give `scale`: make another" in said
    assert f"with `power={(given or (None, 1))[1] + 1}`, which the example's call does not have, outputs differ" in said
    assert smaller.shrunk.removed["first.weight"] == ((12, 6), (8, 6))
    of_scale: Any = pruning.shrink(model, (x, scale))
    assert of_scale.shrunk.removed == {}


def _quantised(y: Tensor, _x: Tensor) -> Tensor:
    scale, zero = torch.full((16,), 0.1), torch.zeros(16, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(y, scale, zero, y.ndim - 1, -128, 127)


def _of_numbers(y: Tensor, x: Tensor) -> Tensor:
    real = (x != 0).long()
    return y * (real[:, :, None] @ real[:, None, :]).sum(-1, keepdim=True).float()


def _hashed(y: Tensor, x: Tensor) -> Tensor:
    return y + F.embedding((x * 31) % 20, torch.ones(20, 1))


def _turned(y: Tensor, _x: Tensor) -> Tensor:
    angles = torch.arange(y.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.03, 0.01, 1, 0.3, 0.1, 0.7])
    return torch.cat((y[..., :8] * angles.cos(), y[..., 8:] * angles.sin()), -1)


@pytest.mark.filterwarnings("ignore:.*stay dense")
@pytest.mark.parametrize("between", [_quantised, _of_numbers, _hashed, _turned])
def test_operations_on_numbers_are_followed(between: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(between, tokens=True).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=WHOLE)
    smaller: Any = pruning.shrink(model, WHOLE)
    torch.testing.assert_close(smaller(OTHER), model(OTHER), rtol=1e-4, atol=1e-5)
    assert smaller.shrunk.after < 0.7 * smaller.shrunk.before


class Unbatched(nn.Module):
    """Convolutions over one sequence without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(6, 16, 3, padding=1), nn.Conv1d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.relu(self.first(x)))
        return found


def test_a_sequence_without_a_batch_is_no_error() -> None:
    model, x = Unbatched().eval(), torch.randn(6, 9)
    with pytest.raises(ValueError, match="no channels that can be removed"):
        pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)
    smaller: Any = pruning.shrink(model, x)
    assert smaller.shrunk.tried == ()


class Spectrum(nn.Module):
    """A product of complex numbers over a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)
        self.filter = nn.Parameter(torch.randn(12, 12, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.einsum("btc,cd->btd", torch.fft.rfft(self.first(x), dim=1), self.filter)
        found: Tensor = self.last(torch.fft.irfft(turned, n=x.shape[1], dim=1))
        return found


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_a_transform_of_several_sequences_is_made_sparse() -> None:
    torch.manual_seed(0)
    model, x = Spectrum().eval(), torch.randn(3, 5, 6)
    pruning.prune(model, "l1_unstructured", sparsity=0.8)
    sparse = pruning.to_sparse(model, x)
    torch.testing.assert_close(sparse(x), model(x), rtol=1e-4, atol=1e-5)
