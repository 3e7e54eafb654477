"""LSTMs on their nonzero weights compute what PyTorch's compute, also from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.compact import sparse_graph, sparse_network
from pruning.compact.fused_layers import SparseLstm, is_worthwhile
from pruning.compact.sparse_files import LAYERS, layers_of, load_layers, save_layers, tensors_of

VARIANTS: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True, "dropout": 0.5},
]


class Reader(nn.Module):
    """An LSTM that starts from zeros, or from given states, and its readers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 20, **options)
        self.head = nn.Linear(20 * (2 if self.lstm.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the head's outputs and the last states."""
        found, (hidden, state) = self.lstm(x)
        return self.head(found), hidden, state


def pruned(sparsity: float = 0.8, **options: Any) -> Reader:
    torch.manual_seed(0)
    reader = Reader(**options).eval()
    for name, parameter in list(reader.lstm.named_parameters()):
        if parameter.ndim == 2:
            pruning.l1_unstructured(reader.lstm, name, amount=sparsity)
            pruning.remove(reader.lstm, name)
    return reader


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run LSTMs on their nonzeros, however fast that is."""
    monkeypatch.setattr(sparse_graph, "is_worthwhile", lambda speedups: True)
    monkeypatch.setattr(sparse_network, "NOISE", 0.0)


@pytest.mark.usefixtures("_always")
@sampled(2)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_outputs_and_last_states_are_those_of_pytorch(options: dict[str, Any], tmp_path: Path) -> None:
    reader = pruned(**options)
    network = pruning.to_sparse(reader, torch.randn(4, 3, 12))
    (place,) = [name for name, module in network.named_modules() if isinstance(module, SparseLstm)]
    cells = (options.get("num_layers", 1)) * (2 if options.get("bidirectional") else 1)
    names = [f"lstm.{kind}_{cell}" for cell in range(cells) for kind in ("input", "hidden")]
    assert [layer.name for layer in network.sparse.layers] == [*names, "head"]

    for first, second in ((4, 3), (1, 7), (9, 2)):
        x = torch.randn(first, second, 12)
        with torch.no_grad():
            expected, found = reader.double()(x.double()), network(x)
            reader.float()
        for one, other in zip(expected, found, strict=True):
            assert float((one - other).abs().max() / one.abs().max()) < 1e-5

    save_layers(network, tmp_path)  # type: ignore[arg-type]
    loaded = load_layers(tmp_path, nn.Module(), [*layers_of(network), *tensors_of(network)])  # type: ignore[arg-type]
    states, size = torch.zeros(cells, 3, 20), (4, 3, 12)
    x = torch.randn(size).transpose(0, 1) if options.get("batch_first") else torch.randn(size)
    with torch.no_grad():
        again, given = loaded.get_submodule(place)(x, states, states), network.get_submodule(place)(x, states, states)
    assert all(torch.equal(one, other) for one, other in zip(again, given, strict=True))


@pytest.mark.usefixtures("_always")
@sampled(3)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"products": 4}, "must have two linear layers for each cell"),
        ({"products": 1}, "`products` of LSTM"),
        ({"directions": 2}, "must have two linear layers for each cell"),
        ({"batch_first": 1}, "must have two linear layers for each cell"),
        ({"more": 1}, "and no others"),
    ],
)
def test_an_altered_lstm_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    network: Any = pruning.to_sparse(pruned(), torch.randn(4, 3, 12))
    save_layers(network, tmp_path)
    content = json.loads((tmp_path / LAYERS).read_text())
    content["lstms"]["sparse_lstm"] |= change
    (tmp_path / LAYERS).write_text(json.dumps(content))

    with pytest.raises(ValueError, match=said):
        load_layers(tmp_path, nn.Module(), [*layers_of(network), *tensors_of(network)])


def test_an_lstm_that_is_not_faster_or_not_sparse_stays_pytorchs() -> None:
    assert not is_worthwhile([])
    assert not is_worthwhile([2.0, 0.9])
    assert is_worthwhile([1.1, 2.0])
    dense = pruning.to_sparse(pruned(sparsity=0.1), torch.randn(4, 3, 12))
    assert not any(isinstance(module, SparseLstm) for module in dense.modules())
