"""Hidden units of LSTM, GRU and RNN: their groups, and the smaller layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.graph.tracing import output_difference, outputs_of

HIDDEN = 6


class Reader(nn.Module):
    """A recurrent layer between two linear ones; its first states are zeros, or parameters."""

    def __init__(self, kind: Any, begins: str = "", **options: Any) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 5), kind(5, HIDDEN, batch_first=True, **options)
        outputs = options.get("proj_size", HIDDEN)
        states = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
        self.head, self.begins = nn.Linear(outputs * (states + 1 + options.get("bidirectional", False)), 3), begins
        self.hidden, self.outputs, self.states = HIDDEN, outputs, states
        self.start = nn.Parameter(torch.randn(states, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x, size = F.relu(self.first(x)), x.shape[0]
        given: Any = ()
        if self.begins:
            made = torch.zeros(self.states, size, self.hidden, dtype=x.dtype)
            first = self.start.expand(-1, size, -1).contiguous() if self.begins == "parameter" else made
            given = ((first, made),) if isinstance(self.layer, nn.LSTM) else (first,)
        found, last = self.layer(x, *given)
        states = last[0] if isinstance(last, tuple) else last
        answer: Tensor = self.head(torch.cat([found[:, -1], states.transpose(0, 1).flatten(1)], 1))
        return answer


class Steps(nn.Module):
    """A recurrent cell, called step by step."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(4, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(x.shape[1]):
            state = self.layer(x[:, step], state)
        answer: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return answer


def emptied(model: nn.Module, x: Tensor) -> nn.Module:
    """Set each third channel of all groups to 0."""
    for group in pruning.dependency_groups(model, x):
        for member in group.members:
            tensor = model.state_dict()[member.tensor]
            tensor[(member.channels % 3 == 1).expand(tensor.shape)] = 0.0
    return model


NETWORKS: dict[str, Any] = {
    "lstm": lambda: Reader(nn.LSTM),
    "deep": lambda: Reader(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.5),
    "projected": lambda: Reader(nn.LSTM, num_layers=2, proj_size=4, bidirectional=True),
    "gru": lambda: Reader(nn.GRU, num_layers=2, bias=False),
    "rnn": lambda: Reader(nn.RNN, nonlinearity="relu", bidirectional=True),
    "from zeros": lambda: Reader(nn.LSTM, "zeros"),
    "from a parameter": lambda: Reader(nn.GRU, "parameter", num_layers=2),
    "lstm cell": lambda: Steps(nn.LSTMCell),
    "gru cell": lambda: Steps(nn.GRUCell),
    "rnn cell": lambda: Steps(nn.RNNCell),
}


@pytest.mark.filterwarnings("ignore:shrink. the example's call does not run start")  # some begin with zeros
@sampled(16)
@pytest.mark.parametrize("name", NETWORKS)
def test_hidden_units_go_and_the_layer_is_told(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    model = emptied(NETWORKS[name]().eval(), x)
    smaller: Any = pruning.shrink(model, x)
    assert (smaller.shrunk.form, smaller.layer.hidden_size) == ("module", 4), smaller.shrunk
    assert smaller.layer.input_size == (4 if isinstance(model, Steps) else 3)
    if name == "projected":
        assert smaller.layer.proj_size == 3
    other = (torch.randn(4, 3, 4),)
    assert output_difference(outputs_of(smaller, (other, {})), outputs_of(model, (other, {}))) < 1e-5
    smaller.train()
    smaller(other[0]).sum().backward()
    assert smaller.layer.state_dict()  # the layer's own list of weights has the smaller ones
    assert all(each.grad is not None for each in smaller.layer.parameters())


def test_a_unit_has_a_row_in_each_gate_a_recurrent_column_and_its_readers() -> None:
    model = nn.Sequential(nn.GRU(2, 3, batch_first=True))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = model[0], nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.head(self.gru(x)[0][:, -1])
            return answer

    (group,) = pruning.dependency_groups(Last(), torch.randn(2, 4, 2))
    found = {(member.tensor, *member.channels.shape): member.channels.flatten().tolist() for member in group.members}
    assert found == {
        ("gru.weight_ih_l0", 9, 1): [0, 1, 2] * 3,
        ("gru.weight_hh_l0", 9, 1): [0, 1, 2] * 3,
        ("gru.weight_hh_l0", 1, 3): [0, 1, 2],
        ("gru.bias_ih_l0", 9): [0, 1, 2] * 3,
        ("gru.bias_hh_l0", 9): [0, 1, 2] * 3,
        ("head.weight", 1, 3): [0, 1, 2],
    }


def test_a_unit_whose_candidate_is_empty_stays_zero_whatever_its_other_gates_compute() -> None:
    torch.manual_seed(0)
    model, x = Reader(nn.LSTM).eval(), torch.randn(2, 3, 4)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter[2 * HIDDEN + 1] = 0.0  # the candidate of unit 1: gates are i, f, g, o
    assert pruning.shrink(model, x).get_submodule("layer").hidden_size == HIDDEN - 1
    with torch.no_grad():
        model.layer.bias_hh_l0[2 * HIDDEN + 1] = 0.1  # grows from step to step
    assert pruning.shrink(model, x).get_submodule("layer").hidden_size == HIDDEN


def test_costs_of_recurrent_weights_count_each_step() -> None:
    model, x = Reader(nn.LSTM).eval(), torch.randn(2, 3, 4)
    groups = pruning.dependency_groups(model, x)
    assert groups.tensors["layer.weight_ih_l0"].applied == groups.tensors["layer.weight_hh_l0"].applied == 6
    assert groups.whole("macs") == pruning.report(model, x).macs.total


class BothWays(nn.Module):
    """Sum of the outputs of both directions, cut at a number, which needs a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, HIDDEN, batch_first=True, bidirectional=True), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)[0] + x.new_zeros(1)
        answer: Tensor = self.head(found[..., :HIDDEN] + found[..., HIDDEN:])
        return answer


def test_the_first_states_of_a_graph_are_converted_with_it() -> None:
    x = torch.randn(2, 5, 4)
    model = emptied(BothWays().eval(), x)
    smaller = pruning.shrink(model, x)
    report: Any = smaller.shrunk
    assert (report.form, [*report.error]) == ("graph", ["float32", "float64"])

    for dtype, within in ((torch.float64, 1e-6), (torch.bfloat16, 0.05)):
        found, expected = (outputs_of(copy.deepcopy(each).to(dtype), ((x.to(dtype),), {})) for each in (smaller, model))
        assert found[0].dtype is dtype
        assert output_difference(found, expected) < within
    assert copy.deepcopy(smaller).to("meta")(x.to("meta")).is_meta
    assert output_difference(outputs_of(smaller, ((x,), {})), outputs_of(model, ((x,), {}))) < 1e-5
