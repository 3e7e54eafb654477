"""2:4 storage: values and positions computed by hand, and lossless storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pruning
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import difference
from orchestrator.deploy.formats.generated_module import LOADING, compressed


def expanded(values: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    namespace: dict[str, Any] = {"torch": torch}
    exec(LOADING, namespace)
    found: Tensor = namespace["_expanded"](values, indices, shape)
    return found


def test_values_and_places_by_hand() -> None:
    weight = torch.tensor([[0.0, 5, 0, 7, 0, 0, 0, 9], [1, 2, 0, 0, 0, 0, 0, 0]])

    parts = compressed(weight)

    assert parts is not None
    values, indices = parts
    assert values.tolist() == [5, 7, 0, 9, 1, 2, 0, 0]
    places = [(1, 3, 0, 3), (0, 1, 0, 1)]  # four zeros keep the first two
    assert indices.tolist() == [a | b << 2 | c << 4 | d << 6 for a, b, c, d in places]
    assert torch.equal(expanded(values, indices, (2, 8)), weight)


@pytest.mark.parametrize("shape", [(3, 4), (5, 12), (2, 8, 3, 3), (3, 4, 5)])
def test_nothing_is_lost(shape: tuple[int, ...]) -> None:
    outputs, inputs, *kernel = shape
    layer: nn.Module = nn.Linear(inputs, outputs)
    if kernel:
        layer = (nn.Conv1d if len(kernel) == 1 else nn.Conv2d)(inputs, outputs, kernel)  # type: ignore[arg-type]
    layer.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    pruning.prune(layer, "n_m", n=2, m=4)
    weight = layer.weight.detach()
    assert float((weight == 0).float().mean()) == 0.5

    parts = compressed(weight)

    assert parts is not None, "fours are counted as the method counts them"
    assert parts[0].numel() == weight.numel() // 2
    assert torch.equal(expanded(*parts, shape), weight)


def test_what_does_not_fit_is_left_as_it_is() -> None:
    assert compressed(torch.ones(3, 4)) is None
    assert compressed(torch.zeros(3, 6)) is None
    assert compressed(torch.zeros(4)) is None
    assert compressed(torch.zeros(0, 4)) is None


def test_a_network_with_such_weights_is_stored_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    pruning.prune(model[0], "n_m", n=2, m=4)
    images = torch.randn(4, 16)

    CODECS["safetensors"].write(model, (images,), tmp_path)

    stored = {name: each.shape for name, each in load_file(tmp_path / "network.safetensors").items()}
    assert stored == {
        "0.weight.values": (64,),
        "0.weight.indices": (16,),
        "0.bias": (8,),
        "2.weight": (3, 8),
        "2.bias": (3,),
    }
    with torch.no_grad():
        assert difference(CODECS["safetensors"].load(tmp_path)((images,)), model(images)) <= 1e-6
