"""Selection of prunable parameters: by type and pattern, tied ones once, under the names of the plain network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pruning
from orchestrator.core.specs import PruneFields
from orchestrator.workloads import model_building
from pruning.engine.one_call import chosen
from pruning.measure.matrix_weights import considered

DEFAULT = PruneFields(("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"))


def names(model: nn.Module, **changes: Any) -> list[str]:
    return [each.name for each in model_building.prunable(model, replace(DEFAULT, **changes))]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.Embedding(3, 4), nn.Linear(4, 2)
    )


def test_the_default_takes_weights_of_linear_and_convolution() -> None:
    model = network()
    chosen = model_building.prunable(model, DEFAULT)

    assert [each.name for each in chosen] == ["0.weight", "3.weight", "5.weight"]
    assert [(each.module, each.parameter) for each in chosen] == [
        (model.get_submodule(index), "weight") for index in ("0", "3", "5")
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"exclude": ["5.*"]}, ["0.weight", "3.weight"]),
        ({"exclude": ["5.weight"]}, ["0.weight", "3.weight"]),
        ({"include": ["[35].*"]}, ["3.weight", "5.weight"]),
        ({"types": ["Conv?d"]}, ["0.weight"]),
        ({"types": ["Embedding", "BatchNorm2d"]}, ["1.weight", "4.weight"]),
        ({"types": ["_ConvNd"]}, ["0.weight"]),  # matches by a base class
        ({"parameters": ["weight", "bias"], "types": ["Linear"]}, ["3.weight", "3.bias", "5.weight", "5.bias"]),
    ],
)
def test_patterns_select(changes: dict[str, Any], expected: list[str]) -> None:
    assert names(network(), **changes) == expected


def test_a_root_module_that_is_itself_prunable() -> None:
    assert names(nn.Linear(2, 3)) == ["weight"]


def test_tied_parameters_count_once_and_are_excluded_by_any_of_their_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight

    assert names(model) == ["0.weight", "1.weight"]
    assert names(model, exclude=["2.weight"]) == ["1.weight"]
    assert names(model, include=["2.weight"]) == ["2.weight"]


def test_conv1d_of_transformers_counts_as_linear() -> None:
    theirs = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
    users = type("Conv1D", (nn.Module,), {"__module__": "mine"})
    model = nn.ModuleDict({"theirs": theirs(), "users": users()})
    for module in model.values():
        module.weight = nn.Parameter(torch.zeros(2, 3))

    assert names(model) == ["theirs.weight"]


def test_recurrent_weights_and_attention_are_among_them_or_selected_by_type() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(2, 3), "attention": nn.MultiheadAttention(4, 2)})

    assert names(model, types=["LSTM"], parameters=["weight_*"]) == ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    assert names(model, types=["MultiheadAttention"], parameters=["in_proj_weight"]) == ["attention.in_proj_weight"]
    rnn = ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    assert names(model) == [*rnn, "attention.in_proj_weight", "attention.out_proj.weight"]


def test_a_head_that_is_the_embedding_stays_and_a_name_without_wildcards_is_taken() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    model[3].weight = model[0].weight

    assert names(model) == ["1.weight"] == [*pruning.plan(model, sparsity=0.5).masks]
    assert names(model, include=["*", "3.weight"]) == ["1.weight", "3.weight"]
    assert names(model, include=["2.weight"]) == ["2.weight"]


def test_a_pruned_network_has_the_names_of_the_plain_one() -> None:
    model = network()
    expected = names(model)
    pruning.identity(model.get_submodule("3"), "weight")

    assert sorted(names(model)) == sorted(expected)
    assert names(model, include=["3.weight"]) == ["3.weight"]


def test_only_a_masked_parameter_loses_the_suffix_orig() -> None:
    model = nn.Module()
    model.weight_orig = nn.Parameter(torch.ones(2))

    assert names(model, types=["Module"], parameters=["weight_orig"]) == ["weight_orig"]


def test_nothing_left_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        model_building.ModelError, match=r"`prune` .*exclude=\['\*'\].* leaves nothing.*0\.weight, 0\.bias"
    ):
        names(network(), exclude=["*"])


@pytest.mark.parametrize("key", ["include", "exclude"])
def test_a_name_that_is_not_there_is_refused(key: str) -> None:
    with pytest.raises(
        model_building.ModelError, match=rf"`prune\.{key}` \(='fc'\) names no parameter.*'fc\.\*'.*0\.weight"
    ):
        names(network(), **{key: ["fc"]})

    assert names(network(), exclude=["fc.*"]) == ["0.weight", "3.weight", "5.weight"]


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.ones(8, 4)), nn.Linear(8, 5)


def test_a_sweep_warns_of_what_its_patterns_select_but_not_of_what_they_leave_out() -> None:
    model, usual = Raw(), chosen("magnitude")
    found = considered(model, names(model))

    (said,) = model_building.untold(model, found, PruneFields(include=("*",)), usual)
    assert said.endswith("; to prune them, add their names to prune.include, as in prune.include=['*','w']")
    assert names(model, include=["*", "w"]) == ["w", "out.weight"]
    assert model_building.untold(model, found, PruneFields(include=("out.*",)), usual) == ()
    assert model_building.untold(model, found, PruneFields(include=("*",), exclude=("w",)), usual) == ()


@pytest.mark.parametrize("method", ["n_m", "wanda"])
def test_a_sweep_names_a_method_that_takes_weights_of_no_layer(method: str) -> None:
    model = Raw()
    found = considered(model, names(model))

    (said,) = model_building.untold(model, found, PruneFields(include=("*",)), chosen(method))
    assert "; to prune them, choose a method that prunes single entries, such as method=magnitude, and add" in said
