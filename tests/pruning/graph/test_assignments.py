"""Writes in a forward: the graph computes the same, and is traced once where all places in memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

from pruning.graph.tracing import output_difference, outputs_of, traced


class Writing(nn.Module):
    """Writes to the outputs of its first layer."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.write(self.norm(self.first(x)), x[:, :1, 1:-1, 1:-1]))
        return found


def _added(y: Tensor, x: Tensor) -> Tensor:
    before = y.mul(2.0)
    y += x
    y.relu_()
    return y + before


def _through_a_view(y: Tensor, x: Tensor) -> Tensor:
    seen = y.flatten(1)
    y += x
    return y + seen.view_as(y)


def _through_dropout(y: Tensor, x: Tensor) -> Tensor:
    """Dropout returns its input itself in evaluation mode."""
    seen = F.dropout(y, 0.5, training=False)
    seen += x
    return y + seen


def _to_slices(y: Tensor, x: Tensor) -> Tensor:
    """Slices that are read before and after writes to others; the last element by a negative index."""
    early, rows = y[:, 1:3], y[:, :, 2:, 1]
    for row in range(1, 4):
        y[:, :, row, :row] = y[:, :, row - 1, 1 : row + 1].clone() * x[:, :, row, :row]
    y[:, -1] += early[:, 0]
    rows.mul_(2.0)
    return y + early.sum() + rows.sum()


def _to_every_second(y: Tensor, x: Tensor) -> Tensor:
    y[:, ::2, 1::3], y[:, 1::2, :4:2] = x[:, :, 1::3], y[:, ::2, 4:6].clone()
    return y


def _to_no_entries(y: Tensor, x: Tensor) -> Tensor:
    y[:, 3:2] *= x[:, :0]
    y[:, :, -4:][:, :, 5:6][:, :, -3::4].tanh_()
    y[:, 0][:, 9:-1] *= 2.0
    return y


def _to_a_part(y: Tensor, x: Tensor) -> Tensor:
    """Each result of an operation that has several is new."""
    best, _ = y.topk(2, dim=1)
    best /= best.sum()
    return y + best[:, :1] * x


def _to_a_turned_slice(y: Tensor, x: Tensor) -> Tensor:
    y.transpose(2, 3)[:, :, 0] += x[:, :, 0]
    return y


def _to_a_slice_of_another_shape(y: Tensor, x: Tensor) -> Tensor:
    """An operation that changes the shape of a slice itself, and nothing in memory."""
    row = y[:, 1]
    row.unsqueeze_(1)
    row += x
    return y + row


def _of_another_dtype(y: Tensor, x: Tensor) -> Tensor:
    before = y.mul(2.0)
    y += x.double()
    return y + before


def _compared(y: Tensor, x: Tensor) -> Tensor:
    before = y.mul(2.0)
    y.gt_(x)
    return y * before


def _nothing(y: Tensor, _x: Tensor) -> Tensor:
    return F.dropout(y.flatten(2), 0.5, training=False, inplace=True).view_as(y)


@sampled(3)
@pytest.mark.parametrize(
    ("write", "again"),
    [
        (_added, 0),
        (_nothing, 0),
        (_through_a_view, 1),
        (_through_dropout, 0),
        (_to_slices, 0),
        (_to_every_second, 0),
        (_to_no_entries, 0),
        (_to_a_part, 0),
        (_to_a_turned_slice, 1),
        (_to_a_slice_of_another_shape, 1),
        (_of_another_dtype, 1),
        (_compared, 1),
    ],
)
def test_what_a_forward_writes_in_place_is_traced_once_where_all_its_places_are_known(
    write: Callable[[Tensor, Tensor], Tensor], again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    retraced, original = [], torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda program, table: retraced.append(table) or original(program, table),
    )
    torch.manual_seed(0)
    model, x = Writing(write).eval(), torch.randn(2, 3, 8, 8)

    trace = traced(model, x, sizes="batch")

    assert len(retraced) == again
    assert output_difference(outputs_of(trace.graph, ((x,), {})), outputs_of(model, ((x,), {}))) < 1e-6


class Drawn(nn.Module):
    """Cuts, writes and reads that a seed draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.layer = seed, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        draw, read = random.Random(self.seed), []
        places = [self.layer(x), 2 * x]
        for _ in range(12):
            place, step = draw.choice(places), draw.random()
            if step < 0.4 and place.ndim > 1:
                places.append(_cut(place, draw))
            elif step < 0.5:
                other = draw.choice([Tensor.clone, Tensor.contiguous, lambda each: each.unsqueeze(1), Tensor.detach])
                places.append(other(place))
            elif step < 0.8:
                _write(place, draw)
            else:
                read.append(place.sin().sum())
        return torch.stack([*read, *(each.sum() for each in places)]) + x.flatten(1).sum(1, keepdim=True)


def _cut(place: Tensor, draw: random.Random) -> Tensor:
    dim = draw.randrange(1, place.ndim)
    size = place.shape[dim]
    if draw.random() < 0.5:
        return place.select(dim, draw.randrange(-size, size))
    first = draw.randrange(size)
    last = -1 if first < size - 1 and draw.random() < 0.3 else draw.randint(first + 1, size)
    return place[(slice(None),) * dim + (slice(first, last, draw.choice([1, 1, 2, 3])),)]


def _write(place: Tensor, draw: random.Random) -> None:
    writes: list[Callable[[], Tensor]] = [
        lambda: place.add_(0.5),
        lambda: place.mul_(place.sigmoid()),
        lambda: place.copy_(place.flip(-1)),
        lambda: place.zero_(),
        lambda: place.relu_(),
        lambda: place.fill_(0.3),
    ]
    draw.choice(writes)()


@sampled(30)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_writes_are_traced_rightly(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Drawn(seed).eval(), torch.randn(3, 4, 5)
    trace = traced(model, x, sizes="batch")
    for given in (x, torch.randn(2, 4, 5)):
        found = outputs_of(trace.graph, ((given,), {}))
        assert output_difference(found, outputs_of(model, ((given,), {}))) < 1e-5


class Positions(nn.Module):
    """Makes a table of sines and cosines in every second column, as long as its input, for a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.last = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(x.shape[1], 8)
        angles = torch.arange(x.shape[1]).unsqueeze(1) * torch.exp(torch.arange(0, 8, 2) * -0.5)
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        found: Tensor = self.last(self.steps(x + table)[0])
        return found


def test_a_graph_that_is_traced_again_refuses_the_sizes_that_this_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruning.graph.tracing.write_to_new_tensors", lambda _: None)  # as for writes it cannot follow
    model, x = Positions().eval(), torch.randn(2, 6, 8)
    whole = traced(model, x, sizes="any").whole

    for other in (x, x[:, :4], torch.randn(2, 9, 8), torch.randn(3, 6, 8)):
        refused = whole.guard.refusal((other,), {})
        assert (
            refused
            or output_difference(outputs_of(whole.graph, ((other,), {})), outputs_of(model, ((other,), {}))) < 1e-6
        )
    assert not whole.guard.refusal((torch.randn(3, 6, 8),), {})


def test_a_table_that_is_written_in_every_second_column_is_traced_for_any_length() -> None:
    model = Positions().eval()
    whole = traced(model, torch.randn(2, 6, 8), sizes="any").whole

    for other in (torch.randn(2, 4, 8), torch.randn(3, 9, 8)):
        assert not whole.guard.refusal((other,), {})
        found = outputs_of(whole.graph, ((other,), {}))
        assert output_difference(found, outputs_of(model, ((other,), {}))) < 1e-6


class Scaled(nn.Module):
    """Writes to features of the first six steps, which are all of an example of six."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, 2:6] *= 3.0
        y[:, :6] += 1.0
        found: Tensor = self.last(y)
        return found


@sampled(2)
@pytest.mark.parametrize("again", [True, False])
def test_a_slice_that_ends_where_the_example_does_ends_there_for_longer_inputs(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if again:
        monkeypatch.setattr("pruning.graph.tracing.write_to_new_tensors", lambda _: None)
    model, lengths = Scaled().eval(), (3, 6, 7, 12)
    whole = traced(model, torch.randn(2, 6, 5), sizes="any").whole

    given = [torch.randn(3, length, 5) for length in lengths]
    taken = [each for each in given if not whole.guard.refusal((each,), {})]

    assert len(taken) == (1 if again else len(lengths))
    for each in taken:
        found = outputs_of(whole.graph, ((each,), {}))
        assert output_difference(found, outputs_of(model, ((each,), {}))) < 1e-6
