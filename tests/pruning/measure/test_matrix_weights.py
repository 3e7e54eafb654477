"""Share of a network's matrix weights that a pruning considers, and what it says of the others."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pruning
from pruning.measure.matrix_weights import Considered, considered


class Raw(nn.Module):
    """Network with a weight of no layer, a bias for each position, and a norm over two dimensions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w, self.bias_table = nn.Parameter(torch.randn(width, 4)), nn.Parameter(torch.randn(4, 4))
        self.norm, self.out = nn.LayerNorm((4, width)), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(F.linear(x + self.bias_table, self.w)))
        return out


def test_a_weight_without_a_layer_is_a_matrix_and_biases_and_norms_are_none() -> None:
    found = considered(Raw(), ["out.weight"])

    assert (found.entries, dict(found.dense), found.share) == (72, {"w": 32}, pytest.approx(40 / 72))


@pytest.mark.parametrize(
    ("name", "values", "way"),
    [
        ("w", torch.randn(1, 8, 4), "name them in `parameters`"),
        ("debias_w", torch.randn(8, 4), "name them in `parameters`"),
        ("w", torch.randn(8, 4, dtype=torch.cfloat), "name them in `parameters`"),
        ("w", torch.ones(8, 4, dtype=torch.int8), "do it before the network is quantised"),
    ],
)
def test_matrices_of_any_shape_name_and_numbers_are_told(name: str, values: Tensor, way: str) -> None:
    network = nn.Sequential(nn.Linear(4, 5))
    network.register_parameter(name, nn.Parameter(values, requires_grad=values.dtype != torch.int8))

    with pytest.warns(UserWarning, match=rf"stay dense: {name} \(32 entries\); to prune them, {way}\.$"):
        assert pruning.prune(network, "magnitude", sparsity=0.5).details["considered"] == pytest.approx(20 / 52)


def test_the_largest_come_first_and_three_are_named() -> None:
    network = nn.Sequential(*(nn.Linear(size, 2) for size in (3, 5, 4, 6)))
    found = considered(network, [])

    assert list(found.dense.items()) == [("3.weight", 12), ("1.weight", 10), ("2.weight", 8), ("0.weight", 6)]
    said = (
        "100% of the network's matrix weights stay dense: 3.weight (12 entries), 1.weight (10 entries), 2.weight "
        "(8 entries) and 1 more; to prune "
    )
    assert found.sentence(found.dense, "name them") == f"{said}them, name them"
    assert found.sentence([], "name them", "wait") == f"{said}them, wait"
    assert found.sentence(["1.weight"], "name it", "wait") == f"{said}1.weight, name it; to prune the others, wait"
    mixed = Considered(9, {"a": 4, "b": 3, "c": 2}, packed=["b"]).sentence(["c"], "name it", "wait")
    assert mixed.endswith(
        "; to prune c, name it; to prune a, wait; to prune the others, do it before the network is quantised"
    )
    assert found.plain() == {
        "entries": 36,
        "considered": 0,
        "dense": {"3.weight": 12, "1.weight": 10, "2.weight": 8},
    }


def test_an_embedding_and_what_is_tied_to_it_are_no_matrices_and_a_tied_weight_counts_once() -> None:
    network = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    network["one"], network["two"] = nn.Linear(4, 4), nn.Linear(4, 4)
    network["head"].weight, network["two"].weight = network["embedding"].weight, network["one"].weight

    assert considered(network, []).entries == 16
    assert considered(network, ["two.weight"]).dense == {}


def test_pruned_weights_keep_their_names() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pruning.l1_unstructured(network[0], "weight", amount=0.5)

    assert considered(network, ["0.weight"]).dense == {"1.weight": 8}


class Chain(nn.Module):
    """Two matrices of no layer, of which the second writes what a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 12))
        self.fc, self.out = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.fc((F.linear(x, self.w1).relu() @ self.w2).relu()).relu())
        return out


def test_groups_say_which_matrices_of_no_layer_they_leave_dense() -> None:
    asked = {"sparsity": 0.25, "unit": "group", "example": torch.randn(4, 8)}
    with pytest.warns(UserWarning, match=r"^22% of .* stay dense: w1 .128 entries.; .* name them in `parameters`\.$"):
        plan = pruning.prune(Chain(), "magnitude", **asked)  # type: ignore[arg-type]
    assert plan.details["considered"] == pytest.approx(1 - 128 / 576)
    names = ["w1", "w2", "fc.weight", "out.weight"]
    assert pruning.prune(Chain(), "magnitude", parameters=names, **asked).details["considered"] == 1  # type: ignore[arg-type]


def test_prune_says_what_stays_dense_below_nine_tenths_and_a_plan_has_the_share() -> None:
    with pytest.warns(UserWarning, match=r"^44% of .* stay dense: w .32 entries.; .* name them in `parameters`\.$"):
        plan = pruning.prune(Raw(), "magnitude", sparsity=0.5)
    assert plan.details["considered"] == pytest.approx(40 / 72)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pruning.prune(Raw(), "magnitude", sparsity=0.5, parameters=["w"]).details["considered"] < 0.5
        assert (
            pruning.prune(Raw(1), "magnitude", sparsity=0.5, parameters=["w", "out.weight"]).details["considered"] == 1
        )


WAYS: dict[str, dict[str, Any]] = {
    "entries": {"method": "magnitude", "sparsity": 0.5},
    "rows": {"method": "magnitude", "sparsity": 0.5, "scope": "row"},
    "windows": {"method": "n_m"},
    "channels": {"method": "magnitude", "sparsity": 0.25, "unit": "channel"},
    "ln_structured": {"method": "ln_structured", "sparsity": 0.25},
    "wanda": {"method": "wanda", "sparsity": 0.5, "order": "at_once", "scope": "layer"},
    "groups": {"method": "magnitude", "sparsity": 0.25, "unit": "group"},
    "layerwise": {"method": "sparsegpt", "sparsity": 0.5},
}


class Mixed(nn.Module):
    """A matrix of no layer that mixes positions, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mixing, self.out = nn.Linear(8, 16), nn.Parameter(torch.randn(8, 8)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mixing @ self.fc(x).relu())
        return out


@pytest.mark.parametrize("build", [Chain, Mixed])
@pytest.mark.parametrize("way", WAYS)
def test_advice_to_prune_what_stays_dense_prunes_it(build: type[nn.Module], way: str) -> None:
    model, asked, example = build(), {**WAYS[way]}, torch.randn(4, 8, 8)
    method: Any = asked.pop("method")

    def prune(**more: Any) -> None:
        if way == "layerwise":
            pruning.layerwise(model, method, [(example,)], **asked, **more)
        else:
            reads: dict[str, Any] = {"batches": [example]} if way == "wanda" else {}
            pruning.prune(model, method, example=example, **reads, **asked, **more)

    with pytest.warns(UserWarning, match="stay dense") as caught:
        prune()
    (said,) = (str(each.message) for each in caught if "stay dense" in str(each.message))
    dense = re.findall(r"(\w+) \(", said.partition("; to prune")[0])
    if "name them" in said:
        prune(parameters=dense)
    else:
        assert "call pruning.prune(model, sparsity=..., parameters=[...])" in said
        pruning.prune(model, sparsity=0.5, parameters=dense)
    pruning.remove_all(model)
    assert [*dense] == [name for name in dense if (model.get_parameter(name) == 0).float().mean() >= 0.2]
    assert ("name them" in said) == (way == "entries" or (way, build) == ("groups", Chain))
