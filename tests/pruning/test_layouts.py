"""Layouts: the rows of a weight are the weights that one output reads, whatever the layer, and stacks are found."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pruning
from pruning.choices.axes import Unit
from pruning.layouts import EXPERTS, LINEAR, TRANSPOSED_LINEAR, WeightLayout, kind_of, layout_of, required_layout


class Conv1D(nn.Module):
    """Stands for transformers' layer of that name: y = x W with W of shape (inputs, outputs)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Renamed(Conv1D):
    __module__ = "mine"


LAYERS = (
    (nn.Linear(5, 4), (5,), -1),
    (Conv1D(4, 5), (5,), -1),
    (Renamed(4, 5), (5,), -1),
    (nn.Conv2d(6, 4, (3, 2), groups=2), (6, 5, 5), 1),
    (nn.Conv1d(4, 8, 3, groups=4), (4, 7), 1),
    (nn.ConvTranspose2d(6, 4, (2, 3)), (6, 5, 5), 1),
    (nn.ConvTranspose1d(6, 8, 3, groups=2), (6, 7), 1),
)


@pytest.mark.parametrize(("layer", "shape", "dim"), LAYERS, ids=lambda each: type(each).__name__)
def test_a_row_is_what_one_output_reads(layer: Any, shape: tuple[int, ...], dim: int) -> None:
    outputs = layer(torch.randn(2, *shape)).movedim(dim, 0).flatten(1).sum(1)
    layout = required_layout(layer)
    rows = layout.rows(torch.arange(layer.weight.numel()).view_as(layer.weight))

    torch.testing.assert_close(layout.parameter(rows, layer.weight.shape).flatten(), torch.arange(rows.numel()))
    torch.testing.assert_close(layout.sums(layer.weight), layout.rows(layer.weight).sum(2).flatten())
    for output, row in zip(outputs, rows.flatten(0, 1), strict=True):
        (read,) = torch.autograd.grad(output, layer.weight, retain_graph=True)
        assert set(row.tolist()) == set(read.flatten().nonzero()[:, 0].tolist())


def test_other_weights_have_rows_too() -> None:
    lstm, cell = nn.LSTM(3, 5, proj_size=2), nn.GRUCell(3, 5)
    attention, bilinear = nn.MultiheadAttention(4, 2), nn.Bilinear(2, 3, 4)

    assert layout_of(lstm, "weight_ih_l0") == WeightLayout(("output", "input"), 4)
    assert layout_of(lstm, "weight_hr_l0") == WeightLayout(("output", "input"), 1)
    assert layout_of(cell, "weight_hh") == WeightLayout(("output", "input"), 3)
    assert layout_of(attention, "in_proj_weight") == WeightLayout(("output", "input"), 3)
    assert required_layout(bilinear).rows(bilinear.weight).shape == (1, 4, 6)
    assert (
        layout_of(lstm, "bias_ih_l0") is layout_of(nn.LayerNorm(3), "weight") is layout_of(nn.Linear(1, 1), "x") is None
    )


class Experts(nn.Module):
    """Experts whose stacks have the given shapes."""

    def __init__(self, first: tuple[int, ...], second: tuple[int, ...], **own: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(first)), nn.Parameter(torch.randn(second))
        for name, value in own.items():
            setattr(self, name, value)


OUT, IN, UNKNOWN = ("stack", "output", "input"), ("stack", "input", "output"), ("stack", "unknown", "unknown")


@pytest.mark.parametrize(
    ("experts", "roles"),
    [
        (Experts((4, 12, 3), (4, 3, 6)), OUT),
        (Experts((4, 3, 12), (4, 6, 3)), IN),
        (Experts((4, 6, 3), (4, 3, 6)), UNKNOWN),
        (Experts((4, 6, 3), (4, 3, 6), is_transposed=False), OUT),
        (Experts((4, 6, 3), (4, 3, 6), first_bias=nn.Parameter(torch.randn(4, 6))), OUT),
        (Experts((4, 6, 3), (4, 3, 6), first_bias=nn.Parameter(torch.randn(4, 3))), IN),
        (Experts((4, 6, 3), (4, 3, 6), router=nn.Linear(3, 4)), OUT),
        (Experts((4, 3, 6), (4, 6, 3), router=nn.Linear(3, 4)), IN),
        (Experts((4, 6, 6), (4, 6, 6), is_transposed=True), IN),
        (Experts((4, 9, 3), (4, 9, 3), in_size=3, output_size=9), OUT),
        (Experts((24, 3), (24, 3), num_experts=4), ("unknown", "unknown")),
    ],
)
def test_stacks_of_experts_are_found_by_structure(experts: Experts, roles: tuple[str, ...]) -> None:
    layout = layout_of(experts, "first")

    assert kind_of(experts) is EXPERTS
    assert layout is not None
    assert layout.roles == roles


@pytest.mark.parametrize(
    "other",
    [
        Experts((4, 6, 6), (4, 6, 6)),  # two tables of biases, one value for each head and pair of positions
        Experts((1, 9, 3), (1, 1, 3)),  # positions, and a token
        Experts((4, 9, 3), (2, 3, 9)),
        Experts((4, 9, 3), (4, 5, 7)),
        Experts((9, 3), (3, 9)),
    ],
)
def test_other_tensors_are_no_experts(other: Experts) -> None:
    assert kind_of(other) is None


def test_a_class_is_known_by_what_it_is_not_by_its_name() -> None:
    own = type("Conv1D", (nn.Linear,), {})
    raw = type("Conv1D", (nn.Module,), {})

    assert kind_of(own(3, 2)) is LINEAR
    assert kind_of(Renamed(3, 2)) is TRANSPOSED_LINEAR
    assert kind_of(raw()) is None


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(8, 4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.linear(x, self.w))
        return out


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "row", "sparsity": 0.5},
        {"unit": Unit("block", size=4), "sparsity": 0.5},
        {"unit": "channel", "sparsity": 0.5},
    ],
)
def test_a_weight_of_no_known_layer_has_entries_only(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'w' of shape .8, 4. is no weight of a known layer, or of layers"):
        pruning.prune(Raw(), "magnitude", parameters=["w"], **options)
    with pytest.raises(ValueError, match="is no weight of a known layer"):
        pruning.prune(Raw(), "n_m", n=2, m=4, parameters=["w"])

    assert pruning.prune(Raw(), "magnitude", parameters=["w"], sparsity=0.5).masks["w"].sum() == 16


class StoresInputsFirst(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Swapped(nn.Conv2d):
    """A convolution whose forward multiplies by a weight of other sizes than those that it names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)
        self.weight = nn.Parameter(self.weight.detach().transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.weight)


class Paired(nn.Bilinear):
    def __init__(self) -> None:
        super().__init__(3, 4, 5)
        self.weight = nn.Parameter(torch.randn(5, 4, 3))


@pytest.mark.parametrize("layer", [StoresInputsFirst(4, 8), Swapped(4, 8), Paired()], ids=lambda each: str(each))
def test_a_weight_of_other_sizes_than_its_class_names_has_entries_only(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), layer)
    with pytest.warns(UserWarning, match=r"stay dense: 1.weight .* to prune them, name them in `parameters`\.$"):
        assert [*pruning.prune(model, "magnitude", sparsity=0.5).masks] == ["0.weight"]
    assert pruning.plan(model, "magnitude", sparsity=0.5, parameters=["1.weight"]).masks["1.weight"].any()
    for method, options in (("n_m", {"n": 2, "m": 4}), ("ln_structured", {"sparsity": 0.5})):
        with pytest.raises(ValueError, match=r"'1.weight' of shape .* is no weight of a known layer"):
            pruning.plan(model, method, parameters=["1.weight"], **options)  # type: ignore[arg-type]


def test_rows_of_a_grouped_transposed_convolution_end_with_its_group() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(6, 8, 3, groups=2, bias=False))

    mask = pruning.prune(model, "magnitude", sparsity=1 / 3, scope="row").masks["0.weight"]

    assert mask.view(2, 3, 4, 3).sum((1, 3)).tolist() == [[6] * 4] * 2


@pytest.mark.filterwarnings("ignore:channels of 0.weight are outputs")
@pytest.mark.parametrize(("layer", "shape", "dim"), LAYERS, ids=lambda each: type(each).__name__)
def test_channels_are_outputs_of_any_layer(layer: Any, shape: tuple[int, ...], dim: int) -> None:
    for method in ("ln_structured", "magnitude", "fpgm"):
        options: dict[str, Any] = {} if method == "ln_structured" else {"unit": Unit("channel")}
        model = nn.Sequential(copy.deepcopy(layer))
        mask = pruning.prune(model, method, sparsity=0.5, parameters=["0.weight"], **options).masks["0.weight"]
        kept = required_layout(layer).rows(mask).float().mean(2)

        assert set(kept.flatten().tolist()) == {0, 1}, "whole outputs"


def test_a_weight_that_layers_read_in_different_ways_has_entries_only() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ConvTranspose2d(8, 4, 3, bias=False))
    model[1].weight = model[0].weight

    for options in ({"scope": "row", "sparsity": 0.5}, {"method": "n_m"}):
        with pytest.raises(ValueError, match=r"'0.weight' of shape .* of layers that differ"):
            pruning.prune(model, **options)
    assert pruning.prune(model, sparsity=0.5).masks["0.weight"].sum() == 144


EMPTY = {
    "at the end": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 0)),
    "inside": lambda: nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op", "ignore:every entry of")
@pytest.mark.parametrize("build", EMPTY.values(), ids=EMPTY.keys())
def test_layers_without_entries_are_skipped(build: Callable[[], nn.Sequential]) -> None:
    example, weights = torch.randn(2, 8), [name for name, each in build().named_parameters() if each.ndim > 1]
    full = [name for name in weights if build().get_parameter(name).numel()]

    entries = pruning.prune(build(), "magnitude", sparsity=0.5).masks
    assert [name for name in weights if not entries[name].all()] == full
    assert [*pruning.layerwise(build(), "wanda", [example], sparsity=0.5).masks] == full
    grouped = pruning.prune(build(), "magnitude", sparsity=0.5, unit="group", example=example).masks
    assert any(not grouped[name].all() for name in full)


@pytest.mark.parametrize("options", [{"unit": "group"}, {"unit": "channel"}])
def test_an_example_without_rows_is_refused(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    for call in (pruning.report, partial(pruning.prune, method="magnitude", sparsity=0.5, **options)):
        with pytest.raises(
            ValueError, match=r"`example` \(of shape \(0, 8\)\) must hold numbers; pass one row or more"
        ):
            call(model, example=torch.randn(0, 8))


def test_lazy_layers_are_refused_before_their_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))

    calls = (partial(pruning.prune, sparsity=0.5), pruning.sparsity, partial(pruning.report, example=torch.randn(2, 3)))
    for call in calls:
        with pytest.raises(ValueError, match=r"weight` .of a lazy layer. has no shape before its first call"):
            call(model)
    model(torch.randn(2, 3))
    assert pruning.prune(model, sparsity=0.5).masks["0.weight"].shape == (4, 3)
