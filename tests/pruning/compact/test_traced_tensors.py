"""Tensors that give only a shape or a dtype, constants that a forward makes, biases of heads, and caches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from odd_networks import empty as empty_at_random
from odd_networks import network
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.graph.tracing import output_difference, outputs_of


def agree(smaller: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    assert output_difference(outputs_of(smaller, (inputs, {})), outputs_of(model, (inputs, {}))) < 1e-5


def empty(model: nn.Module, x: Tensor, name: str, which: Callable[[Tensor], Tensor]) -> None:
    """Set channels of the group of a weight's outputs to 0."""
    groups = pruning.dependency_groups(model, x)
    (group,) = [g for g in groups for each in g.members if each.tensor == name and each.channels.shape[0] > 1]
    for member in group.members:
        tensor = model.state_dict()[member.tensor]
        tensor[which(member.channels).expand(tensor.shape)] = 0.0


class Between(nn.Module):
    """Two convolutions, and a function between them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Linear(4, 3)
        self.scale, self.between = nn.Parameter(torch.randn(8)), between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.between(F.silu(self.first(x)), self.scale)).mean((2, 3)))
        return found


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "type of another shape": lambda y, _: y * torch.arange(1, 9).type_as(y).view(1, 8, 1, 1),
    "to another": lambda y, _: y + torch.linspace(0, 1, 5).to(y),
    "like": lambda y, _: y * torch.full_like(y, 0.5) + torch.empty_like(y).fill_(0.1),
    "new": lambda y, _: torch.cat([y, y.new_zeros(y.shape[0], 8, 5, 5)], 1)[:, :8] * y.new_ones(1),
    "expanded as": lambda y, scale: y * scale.view(-1, 1, 1).expand_as(y),
    "viewed as": lambda y, scale: (y.flatten(2) * scale[:, None]).view_as(y),
    "of the input's dtype": lambda y, _: y * torch.linspace(0.5, 1, 8, dtype=y.dtype).view(8, 1, 1),
    "dtype of a parameter": lambda y, scale: y.double().type_as(scale),
    "chosen": lambda y, _: torch.where(y > 0, y, 0.1) - torch.where(y > 0, torch.zeros_like(y), y),
    "one matrix": lambda y, _: y @ torch.eye(5, dtype=y.dtype),
}


@sampled(12)
@pytest.mark.parametrize("name", BETWEEN)
def test_channels_are_followed_through_tensors_without_values_of_the_inputs(name: str) -> None:
    torch.manual_seed(0)
    model, x = Between(BETWEEN[name]).eval(), torch.randn(2, 3, 5, 5)
    empty(model, x, "first.weight", lambda channels: channels % 2 == 1)
    smaller = pruning.shrink(model, x)
    assert smaller.get_parameter("first.weight").shape[0] == 4, smaller.shrunk
    agree(smaller, model, torch.randn(3, 3, 5, 5))


def test_a_graph_that_fails_in_float64_alone_is_compared_in_float32_and_says_so() -> None:
    class Baked(nn.Module):
        """Casts positions to its input's dtype, which a graph casts to the dtype of its example."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            one, other = F.relu(self.first(x)).chunk(2, 1)
            place = x @ torch.arange(4).to(x.dtype)[:, None]
            found: Tensor = self.second(torch.cat([other * 2, one], 1)[:, :4]) + place
            return found

    torch.manual_seed(0)
    model, x = Baked().eval(), torch.randn(2, 4)
    with torch.no_grad():
        model.first.weight[[0, 4, 5]], model.first.bias[[0, 4, 5]] = 0.0, 0.0
    smaller = pruning.shrink(model, x)
    report: Any = smaller.shrunk
    assert (report.form, list(report.error)) == ("graph", ["float32"]), report
    assert "compared in float32 alone, because it fails in float64" in report.tried[-1]
    agree(smaller, model, torch.randn(3, 4))


HEADS, SIZE, TOKENS = 4, 3, 5


def distances() -> Tensor:
    return torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None] + TOKENS - 1


class Attention(nn.Module):
    """Attention with a bias for each head."""

    def __init__(self, kind: str, written: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, HEADS * SIZE) for _ in range(3))
        self.o, self.f, self.kind, self.written = nn.Linear(HEADS * SIZE, 12), nn.Linear(12, 3), kind, written
        self.distances, self.heads = nn.Buffer(distances()), HEADS
        shape = {"table": (HEADS, 2 * TOKENS), "rows": (2 * TOKENS, HEADS), "positions": (TOKENS, TOKENS)}
        table = torch.randn(*shape.get(kind, (HEADS, TOKENS, TOKENS)))
        self.bias: Any = nn.Buffer(table) if kind == "buffer" else nn.Parameter(table)
        self.embedding = nn.Embedding(2 * TOKENS, HEADS)

    def mask(self) -> Any:
        made: dict[str, Callable[[], Tensor]] = {
            "table": lambda: self.bias[:, self.distances],
            "rows": lambda: self.bias[self.distances.view(-1)].view(TOKENS, TOKENS, -1).permute(2, 0, 1),
            "embedding": lambda: torch.where(distances() < 6, self.embedding(self.distances).permute(2, 0, 1), -1e9),
            "made": lambda: (2.0 ** -torch.arange(1, HEADS + 1)).view(HEADS, 1, 1) * self.distances,
            "zeros": lambda: torch.zeros(1, self.heads, TOKENS, TOKENS),
        }
        return made[self.kind]() if self.kind in made else self.bias

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.written:
            y = (q @ k.transpose(-2, -1) + self.mask()).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask())
        found: Tensor = self.f(x + self.o(y.transpose(1, 2).flatten(2)))
        return found


KINDS = ("parameter", "buffer", "table", "rows", "embedding", "made", "zeros", "positions")
QUICK = {("parameter", False), ("rows", True), ("made", False), ("positions", True)}


@sampled(quick=lambda *case: case in QUICK)
@pytest.mark.parametrize(("kind", "written"), product(KINDS, (False, True)))
def test_a_bias_for_each_head_goes_with_its_head(kind: str, written: bool) -> None:
    torch.manual_seed(0)
    model, x = Attention(kind, written).eval(), torch.randn(2, TOKENS, 12)
    empty(model, x, "q.weight", lambda channels: channels == 1)
    smaller: Any = pruning.shrink(model, x)
    assert smaller.get_parameter("q.weight").shape == ((HEADS - 1) * SIZE, 12), smaller.shrunk
    assert smaller.shrunk.form == ("graph" if kind == "made" else "module")
    agree(smaller, model, torch.randn(3, TOKENS, 12))


class Blocks(nn.Module):
    """Attention within blocks of an image, with a position for each token of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.qkv = nn.Parameter(torch.randn(1, 3, TOKENS, 8)), nn.Linear(8, 3 * HEADS * SIZE)
        self.o, self.f = nn.Linear(HEADS * SIZE, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x + self.place).view(len(x), 3, TOKENS, 3, -1, SIZE).permute(3, 0, 4, 1, 2, 5)
        y = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 1, 4).flatten(3)
        found: Tensor = self.f(self.o(y))
        return found


def test_positions_of_blocks_are_no_heads() -> None:
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.randn(2, 3, TOKENS, 8)
    empty(model, x, "qkv.weight", lambda channels: channels == 1)
    smaller = pruning.shrink(model, x)
    assert smaller.get_parameter("o.weight").shape == (8, (HEADS - 1) * SIZE), smaller.shrunk
    agree(smaller, model, torch.randn(2, 3, TOKENS, 8))


class Cache:
    """Keys of earlier tokens, in a class that torch does not know."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Caching(nn.Module):
    """Returns a cache if its configuration says so, as stock transformers do."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.config, self.known = SimpleNamespace(use_cache=True), known
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        keys = F.relu(self.first(x))
        cache = Cache(keys) if not self.known else (keys,) if self.config.use_cache else None
        return {"logits": self.second(keys), "past_key_values": cache}


@pytest.mark.parametrize("known", [False, True])
def test_a_cache_in_the_output_is_not_traced(known: bool) -> None:
    torch.manual_seed(0)
    model, x = Caching(known).eval(), torch.randn(2, 4)
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)
    smaller: Any = pruning.shrink(model, x)
    assert (smaller.first.out_features, smaller.config.use_cache, model.config.use_cache) == (4, True, True)
    assert smaller(x)["past_key_values"] is not None
    torch.testing.assert_close(smaller(x)["logits"], model(x)["logits"])


def check(seed: int) -> None:
    """Compare a random network without the channels that were emptied with itself, on another batch."""
    model, x = network(seed), torch.randn(2, 4, 6)
    empty_at_random(model, x, seed)
    smaller = pruning.shrink(model, x)
    report: Any = smaller.shrunk
    # torch takes an LSTM whose projection is as wide as its units for one without a projection
    assert report.form != "unchanged" or "not divisible by stride" in str(report.tried), (seed, report.tried)
    agree(smaller, model, torch.randn(3, 4, 6))


@pytest.mark.slow
def test_a_network_with_odd_operations_computes_what_it_did() -> None:
    check(0)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 101, 20))
def test_many_networks_with_odd_operations_compute_what_they_did(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


class Counts(nn.Module):
    """Scales by a histogram of what it computes, which torch refuses to make of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beside = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) * self.beside(x).detach().histc(3, 0, 1)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_an_operation_that_refuses_nan_is_followed() -> None:
    torch.manual_seed(0)
    model, x = Counts().eval(), torch.randn(2, 4)
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)

    smaller: Any = pruning.shrink(model, x)

    assert smaller.shrunk.form == "module"
    agree(smaller, model, torch.randn(3, 4))


class Mapped(nn.Module):
    """Maps a function over positions, as masks of attention may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        each = torch.vmap(torch.vmap(lambda row, column: row >= column, (None, 0)), (0, None))
        return self.inner(x) * each(rows, columns)  # type: ignore[no-any-return]


def test_a_network_that_maps_a_function_is_pruned_part_by_part_and_its_whole_refused_in_a_sentence() -> None:
    model, x = Mapped().eval(), torch.randn(4, 4)
    with pytest.warns(UserWarning, match=r"within the modules inner, .* it calls torch\.vmap in its forward; compute"):
        pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)

    smaller: Any = pruning.shrink(model, x)

    assert smaller.inner[0].weight.shape == (4, 4)
    agree(smaller, model, torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"Mapped cannot be traced .* it calls torch\.vmap in its forward"):
        pruning.to_sparse(model, x)


class Compressing(nn.Module):
    """Puts means over whole windows of 4 positions beside the positions; short sequences have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 6)
        self.each, self.window, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        count = y.shape[1] // 4
        windows = self.window(y[:, : 4 * count].reshape(len(y), count, 4, 6).mean(2))
        found: Tensor = self.last(torch.cat([self.each(y), windows], 1))
        return found


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_channels_that_meet_a_tensor_without_entries_in_the_example_stay() -> None:
    torch.manual_seed(0)
    model, x = Compressing().eval(), torch.randn(2, 3, 5)
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)
    smaller = pruning.shrink(model, x)

    assert [layer.weight.shape[0] for layer in smaller.children()] == [4, 6, 4, 4, 3]
    agree(smaller, model, torch.randn(3, 9, 5))


class Spectral(nn.Module):
    """Products with complex parameters in the frequencies of a hidden layer's outputs; it takes and returns them."""

    def __init__(self, *, fixed_width: bool) -> None:
        super().__init__()
        self.first, self.second, self.fixed_width = nn.Linear(12, 16), nn.Linear(16, 8), fixed_width
        self.filter = nn.Parameter(torch.randn(5, 4, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(torch.view_as_real(x).flatten(-2)))
        y = self.second(y.view(-1, 16) if self.fixed_width else y)
        spectrum = torch.zeros(len(x), 5, dtype=self.filter.dtype) + torch.fft.rfft(y) * self.turn
        return torch.einsum("bi,io->bo", spectrum, self.filter)


@sampled(2)
@pytest.mark.parametrize("fixed_width", [True, False])
def test_complex_tensors_are_compared_in_the_precision_of_the_others(fixed_width: bool) -> None:
    torch.manual_seed(0)
    model, x = Spectral(fixed_width=fixed_width).eval(), torch.randn(2, 6, dtype=torch.cfloat)
    with torch.no_grad():
        empty(model, x, "first.weight", lambda channels: channels < 4)

    smaller = pruning.shrink(model, x)

    assert smaller.shrunk.form == ("graph" if fixed_width else "module")
    assert len(smaller.shrunk.tried) == fixed_width
    assert smaller.shrunk.removed["second.weight"] == ((8, 16), (8, 12))
    assert smaller.shrunk.error["float64"] < 1e-10
    agree(smaller, model, x)
