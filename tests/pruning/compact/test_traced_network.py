"""A network made from a trace gives the masked network's outputs, or refuses the input in a sentence."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.compact.traced_network import TracedNetwork
from pruning.graph import tracing
from pruning.graph.tracing import output_difference, outputs_of, traced

Condition = Callable[..., bool]


class Branching(nn.Module):
    """Runs one of two layers; with `split`, a smaller network keeps no class."""

    def __init__(self, condition: Condition, *, split: bool, own: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.out, self.condition, self.split, self.own = nn.Conv2d(8 if split else 16, 5, 1), condition, split, own

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        y = F.relu(self.a(x if x.is_floating_point() else x.float() / 255))
        other = self.c if self.own else nn.Identity()
        y = F.relu(self.b(y) if self.condition(x, *more) else other(y))
        if self.split:
            one, two = torch.split(y, [8, 8], 1)
            y = one + two * 2
        found: Tensor = self.out(y)
        return found


IMAGES = [torch.randn(b, 3, h, w) for b, h, w in ((1, 8, 8), (2, 8, 8), (3, 9, 9), (6, 8, 10), (5, 12, 12), (4, 5, 7))]
OTHERS = [
    (torch.rand(2, 3, 8, 8) * 255).to(torch.uint8),
    torch.randn(2, 3, 8, 8).mT,
    torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
]
CONDITIONS: dict[str, Condition] = {
    "batch == 1": lambda x: x.shape[0] == 1,
    "batch != 2": lambda x: len(x) != 2,
    "batch % 2": lambda x: x.shape[0] % 2 == 0,
    "batch > 3": lambda x: x.shape[0] > 3,
    "width == 8": lambda x: x.shape[-1] == 8,
    "width % 4": lambda x: bool(x.shape[-1] % 4),
    "width > 8": lambda x: x.size(3) > 8,
    "height != width": lambda x: x.shape[2] != x.shape[3],
    "entries": lambda x: x.numel() > 400,
    "dtype": lambda x: x.dtype == torch.uint8,
    "contiguous": lambda x: x.is_contiguous(),
}


def pruned(condition: Condition, example: Any, *, split: bool, own: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Branching(condition, split=split, own=own).eval()
    pruning.prune(model, "magnitude", unit="group", sparsity=0.4, example=example)
    smaller = pruning.shrink(model, example)
    report: Any = smaller.shrunk
    assert report.after < report.before
    return model, smaller


def agrees(smaller: nn.Module, model: nn.Module, *given: Any) -> bool:
    """Return whether a network takes an input, and hold its outputs to the masked network's."""
    with torch.no_grad():
        try:
            found = smaller(*given)
        except ValueError as error:
            if not re.search("as in the example of its trace: .*; make it again from the masked network", str(error)):
                raise
            return False
        torch.testing.assert_close(found, model(*given), rtol=1e-4, atol=1e-5)
        return True


SLOW = pytest.mark.slow
QUICK = {"batch == 1", "dtype", "contiguous"}


@pytest.mark.parametrize("split", [True, pytest.param(False, marks=SLOW)])
@sampled(quick=lambda name: name in QUICK)
@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_a_branch_that_the_example_did_not_take_is_refused_or_right(name: str, split: bool) -> None:
    example = IMAGES[1]
    model, smaller = pruned(CONDITIONS[name], example, split=split, own=len(name) % 2 == 0)
    taken = CONDITIONS[name](example)
    for x in [*IMAGES, *OTHERS]:
        came = agrees(smaller, model, x)
        same = CONDITIONS[name](x) == taken and x.is_floating_point()
        assert came or not same or (name, x.is_contiguous()) == ("contiguous", False), x.shape


@pytest.mark.slow
def test_arguments_of_other_values_are_refused() -> None:
    model, smaller = pruned(lambda x, more=1: isinstance(more, int) and more == 1, (IMAGES[1], 1), split=True)
    assert agrees(smaller, model, IMAGES[1], 1)
    others: list[tuple[Any, ...]] = [(), (None,), (torch.ones(2),), (2,), ("b",)]
    for given in others:
        assert not agrees(smaller, model, IMAGES[1], *given), given


@pytest.mark.slow
def test_an_example_of_batch_one_makes_a_network_for_any_batch_and_size() -> None:
    model, smaller = pruned(lambda _: True, IMAGES[0], split=True)
    assert isinstance(smaller, TracedNetwork)
    assert all(agrees(smaller, model, x) for x in IMAGES)
    assert agrees(smaller, model, IMAGES[0][:0])
    with torch.no_grad():
        assert torch.equal(smaller(x=IMAGES[1]), smaller(IMAGES[1]))
    with pytest.raises(ValueError, match=r"the call \(\.\.\., \.\.\.\) must have the inputs x as in the example"):
        smaller(IMAGES[1], IMAGES[1])
    with pytest.raises(ValueError, match=r"`x` \(of shape \(3, 8, 8\), torch.float32\) must be of shape \(any, an"):
        smaller(IMAGES[1][0])


class OneApart(nn.Module):
    """One example takes another branch than several do: to the same result if the scale is 1."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.a, self.out, self.table = nn.Linear(6, 16), nn.Linear(8, 4), nn.Parameter(torch.randn(1, 16))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        table = self.table * 1 if x.shape[0] != 1 else self.scale * self.table
        one, two = torch.split(F.relu(self.a(x)) + table, [8, 8], 1)
        found: Tensor = self.out(one * 2 + two)
        return found


@sampled(2)
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_size_that_a_branch_excludes_is_taken_if_the_outputs_agree_at_it(scale: float) -> None:
    torch.manual_seed(0)
    model, x = OneApart(scale).eval(), torch.randn(3, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.5, example=x)
    smaller = pruning.shrink(model, x)

    assert isinstance(smaller, TracedNetwork)
    torch.testing.assert_close(smaller(x), model(x))
    if scale == 1.0:
        torch.testing.assert_close(smaller(x[:1]), model(x[:1]))
    else:
        with pytest.raises(ValueError, match=r"must fulfil x.shape\[0\] != 1"):
            smaller(x[:1])


@pytest.mark.slow
def test_a_traced_network_refuses_to_train_and_can_be_copied_saved_and_converted() -> None:
    model, smaller = pruned(lambda x: x.shape[0] < 4, IMAGES[1], split=True)
    with pytest.raises(
        ValueError, match=r"this TracedNetwork \(mode=True\) must stay in evaluation mode: .* fine-tune"
    ):
        nn.Sequential(smaller).train()
    file = io.BytesIO()
    torch.save(smaller, file)
    file.seek(0)
    for each in (copy.deepcopy(smaller), pickle.loads(pickle.dumps(smaller)), torch.load(file, weights_only=False)):
        assert each.shrunk.removed == smaller.shrunk.removed  # type: ignore[union-attr]
        assert list(each.state_dict()) == list(smaller.state_dict())
        each.load_state_dict(smaller.state_dict())
        assert agrees(each.eval(), model, IMAGES[2])
        assert not agrees(each, model, IMAGES[3])
        assert agrees(each.double(), model.double(), IMAGES[2].double())
        assert not agrees(each, model, IMAGES[3].double())
        model.float()


class Recurrent(nn.Module):
    def __init__(self, kind: Any, options: dict[str, Any], *, states: bool) -> None:
        super().__init__()
        self.r, self.states = kind(24, 32, **options), states
        width = (options.get("proj_size") or 32) * (1 + options.get("bidirectional", False))
        self.a, self.b = nn.Linear(width, 256), nn.Linear(256, 7)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        first = (states if len(states) > 1 else states[0]) if states else None
        found: Tensor = self.b(torch.relu(self.a(self.r(x, first)[0])))
        return found


RECURRENT: list[Any] = [
    (nn.GRU, {"batch_first": True}, 0),
    pytest.param(nn.RNN, {"batch_first": True, "num_layers": 2, "bias": False}, 1, marks=SLOW),
    pytest.param(nn.LSTM, {"batch_first": True, "bidirectional": True, "num_layers": 2}, 0, marks=SLOW),
    pytest.param(nn.LSTM, {"batch_first": True, "proj_size": 8}, 0, marks=SLOW),
    (nn.LSTM, {"bias": False}, 2),
]


@pytest.mark.filterwarnings("ignore")
@sampled(2)
@pytest.mark.parametrize(("kind", "options", "states"), RECURRENT)
def test_sparse_recurrent_networks_are_loaded(kind: Any, options: dict[str, Any], states: int) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, options, states=bool(states)).eval()
    pruning.prune(model, "magnitude", sparsity=0.95)

    def inputs(batch: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, 4, 24) if options.get("batch_first") else torch.randn(4, batch, 24)
        return x, *(torch.randn(options.get("num_layers", 1), batch, 32) for _ in range(states))

    faster = pruning.to_sparse(model, inputs(1))
    again = pickle.loads(pickle.dumps(faster))
    for batch in (1, 2, 5):
        given = inputs(batch)
        assert agrees(faster, model, *given)
        with torch.no_grad():
            assert torch.equal(again(*given), faster(*given))


class Positions(nn.Module):
    """Reads as many positions of a table as its input has."""

    def __init__(self, *, split: bool) -> None:
        super().__init__()
        self.a, self.b, self.split = nn.Linear(6, 16), nn.Linear(16 if not split else 8, 3), split
        self.table = nn.Parameter(torch.randn(20, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.a(x) + self.table[: x.shape[1]])
        if self.split:
            one, two = torch.split(y, [8, 8], -1)
            y = one * two
        found: Tensor = self.b(y)
        return found


@sampled(2)
@pytest.mark.parametrize("split", [True, False])
def test_a_table_of_positions_stays_for_longer_inputs(split: bool) -> None:
    torch.manual_seed(0)
    model, x = Positions(split=split).eval(), torch.randn(1, 5, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.4, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert smaller.shrunk.form == ("graph" if split else "module")
    assert smaller.table.shape[0] == 20
    assert smaller.table.shape[1] < 16
    assert all(
        agrees(smaller, model, torch.randn(batch, length, 6)) for batch, length in ((1, 5), (3, 9), (2, 1), (4, 20))
    )


class Masked(nn.Module):
    """Attention with a table of masks, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("bias", torch.tril(torch.ones(20, 20)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at each step."""
        length, bias = x.shape[1], self.get_buffer("bias")
        q, k, v = self.qkv(x).split(8, dim=-1)
        scores = (q @ k.mT).masked_fill(bias[:length, :length] == 0, float("-inf"))
        found: Tensor = self.out(scores.softmax(-1) @ v)
        return found


@pytest.mark.slow
def test_a_table_that_a_shared_layer_reads_twice_stays_for_longer_inputs() -> None:
    torch.manual_seed(0)
    layer = Masked()
    model, x = nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), layer, nn.Linear(8, 3)).eval(), torch.randn(1, 5, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.4, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert smaller.shrunk.after < smaller.shrunk.before
    assert smaller.get_buffer("1.bias").shape == (20, 20)
    assert all(agrees(smaller, model, torch.randn(2, length, 6)) for length in (5, 9, 20))


class Halves(nn.Module):
    """Recurrent layer whose outputs are cut in halves of a fixed size, with a query for each item of the batch."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn, self.query = kind(6, 8, **options), nn.Parameter(torch.randn(1, 8))
        self.both, self.out = nn.Linear(8 * (1 + self.rnn.bidirectional), 16), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs at each step, and the last states."""
        found, states = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
        one, two = self.both(found if self.rnn.batch_first else found.transpose(0, 1)).split([8, 8], -1)
        queries = self.query.expand(x.shape[0], -1)[:, None]
        return self.out(one * torch.sigmoid(two) + queries), states[0] if isinstance(states, tuple) else states


@sampled(16)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"batch_first": True}),
        (nn.GRU, {"batch_first": True, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_a_graph_of_a_recurrent_layer_takes_any_length(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Halves(kind, **options).eval(), torch.randn(1, 5, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.3, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert smaller.shrunk.form == "graph"
    assert smaller.shrunk.after < smaller.shrunk.before
    assert all(
        agrees(smaller, model, torch.randn(batch, length, 6)) for batch, length in ((1, 5), (3, 9), (2, 1), (4, 20))
    )


class EvenLengths(nn.Module):
    """Does more with sequences of even lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at each step."""
        one, two = self.a(x).split([8, 8], -1)
        y = one.clone(memory_format=torch.contiguous_format) * torch.sigmoid(two)
        found: Tensor = self.c(torch.relu(self.b(y)) if x.shape[1] % 2 == 0 else y)
        return found


def saved(network: Any) -> Any:
    """Return a network that went through a file."""
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
def test_a_graph_that_is_traced_again_keeps_the_conditions_of_its_first_trace() -> None:
    torch.manual_seed(0)
    model, x = EvenLengths().eval(), torch.randn(1, 6, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.4, example=x)
    smaller: Any = pruning.shrink(model, x)
    assert smaller.shrunk.form == "graph"

    for network in (smaller, pruning.shrink(smaller, x), pruning.to_sparse(smaller, x)):
        taken = [agrees(saved(network), model, torch.randn(2, length, 6)) for length in (6, 8, 3, 1)]
        assert taken == [True, True, False, False]


class LinearAttention(nn.Module):
    """Attention by products of einsum, which a trace decomposes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at each step."""
        one, two, three = (each.unflatten(-1, (2, -1)) for each in self.a(x).chunk(3, dim=-1))
        both = torch.einsum("bthd,bthe->bhde", two, three)
        found: Tensor = self.out(torch.einsum("bthd,bhde->bthe", one, both).flatten(-2))
        return found


@pytest.mark.slow
def test_sizes_that_a_decomposition_fixes_are_conditions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LinearAttention(), nn.GRU(3, 4, batch_first=True)).eval()
    x = torch.randn(2, 5, 6)
    (part,) = traced(model, x, sizes="any").parts

    for length in (3, 5, 9):
        given = torch.randn(2, length, 6)
        if not part.guard.refusal((given,), {}):
            torch.testing.assert_close(part.graph(given), model(given))
    assert not part.guard.refusal((x,), {})


@pytest.mark.slow
def test_labels_follow_einsum_over_inputs_in_any_layout() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Turned(), LinearAttention()).eval(), torch.randn(1, 6, 6)
    pruning.prune(model, "magnitude", unit="group", sparsity=0.3, example=x)

    smaller: Any = pruning.shrink(model, x)
    assert smaller.shrunk.after < smaller.shrunk.before


class Turned(nn.Module):
    """Convolution over time, whose outputs lie in memory by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs at each step."""
        return torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)


class OfOne(nn.Module):
    """Takes a container of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, given: Any) -> Tensor:
        (x,) = given.values() if isinstance(given, dict) else given
        found: Tensor = self.b(F.relu(self.a(x)))
        return found


@sampled(12)
@pytest.mark.parametrize("given", [{"x": torch.randn(2, 4)}, [torch.randn(2, 4)], (torch.randn(2, 4),)])
def test_an_input_may_be_a_container_of_one_tensor(given: Any) -> None:
    model = OfOne().eval()
    pruning.prune(model, "magnitude", sparsity=0.4, unit="group", example={"given": given})

    for other in (pruning.shrink(model, {"given": given}), pruning.to_sparse(model, {"given": given})):
        torch.testing.assert_close(other(given=given), model(given))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(8, 2)

    def forward(self, x: Tensor, more: Tensor | None = None, *, last: Tensor) -> Tensor:
        one, two = torch.split(F.relu(self.a(x)) + F.relu(self.b(last)), [8, 8], 1)
        found: Tensor = self.out(one - two if more is None else one - two * more)
        return found


@pytest.mark.slow
def test_inputs_by_position_are_those_of_the_forward_in_whatever_order_the_example_names_them() -> None:
    torch.manual_seed(0)
    model, x, last = Two().eval(), torch.randn(3, 4), torch.randn(3, 4)
    pruning.prune(model, "magnitude", sparsity=0.4, unit="group", example={"last": last, "x": x})

    copied = pickle.loads(pickle.dumps(pruning.shrink(model, {"last": last, "x": x})))

    torch.testing.assert_close(copied(x, last=last), model(x, last=last))
    torch.testing.assert_close(copied(last=last, x=x), model(x, last=last))
    with pytest.raises(ValueError, match=r"the call \(..., ...\) must have the inputs x, last"):
        copied(x, last)


class Windows(nn.Module):
    """Pads and cuts windows of 3 positions, twice, as window attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            padded = F.pad(x, (0, 0, 0, -x.shape[1] % 3))
            windows = layer(padded.view(-1, 3, 4))
            x = windows.view(-1, padded.shape[1], 4)[:, : x.shape[1]]
        return x


def test_a_trace_for_any_size_gives_up_where_sizes_become_long_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Windows().eval(), torch.randn(2, 7, 4)
    longer = ((torch.randn(3, 8, 4),), {})
    monkeypatch.setattr(tracing, "LONGEST_SIZE", 5)
    trace = traced(model, x, sizes="any")

    assert "must be of shape (any, 7, 4)" in trace.parts[0].guard.refusal(*longer)
    others = ((torch.randn(3, 7, 4),), {})
    assert output_difference(outputs_of(trace.graph, others), outputs_of(model, others)) < 1e-6
