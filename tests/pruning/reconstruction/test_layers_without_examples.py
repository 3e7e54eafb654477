"""Layers that no example reaches, inputs that are always 0, and uneven earlier masks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import pruning

METHODS = ("sparsegpt", "alps", "wanda", "magnitude")


class Experts(nn.Module):
    """Block whose second expert gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(Experts())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Halves(nn.Linear):
    """Multiplies the halves of its input, one after the other, with a weight of half its width."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.view(*x.shape[:-1], 2, -1), self.weight).flatten(-2)


class Across(nn.Conv2d):
    """Multiplies outputs of its weight, as a transposed convolution does."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(x, self.weight)


OWN = [(Halves(8, 4), normal(3, 16)), (Across(4, 6, 1), normal(3, 6, 5, 5))]


@pytest.mark.parametrize(("layer", "inputs"), OWN, ids=["linear", "convolution"])
def test_a_forward_that_multiplies_something_else_than_its_input_is_told(layer: nn.Module, inputs: Tensor) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Identity(), copy.deepcopy(layer))

    for method in METHODS:
        with pytest.warns(UserWarning, match=r"1\.weight, or their weights multiply no input .*pruned by magnitude"):
            pruning.layerwise(network(), method, [inputs], sparsity=0.5)
    given = {"batches": [inputs], "loss": lambda model, x: model(x).square().mean()}
    for asked in ({"method": "wanda", "order": "at_once"}, {"method": "magnitude", "repair": "least_squares"}):
        with pytest.raises(ValueError, match=r"'1\.weight'.* multipl"):
            pruning.prune(network(), sparsity=0.5, **asked, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [{"sparsity": 0.5}, {"n": 2, "m": 4}], ids=["half", "windows"])
def test_an_expert_without_tokens_is_pruned_by_magnitude(method: str, target: dict[str, float]) -> None:
    net = network()
    before: Tensor = net[0].experts[1].weight.detach().clone()  # type: ignore[index, union-attr, assignment]

    with pytest.warns(UserWarning, match=r"no example reaches 0\.experts\.1\.weight.*pruned by magnitude"):
        result = pruning.layerwise(net, method, [normal(4, 8, 16)], blocks="0", **target)  # type: ignore[arg-type]

    groups = before.abs().reshape(-1, 4) if "n" in target else before.abs() if method == "wanda" else before.abs()[None]
    groups = groups.reshape(len(groups), -1)
    largest = groups.argsort(dim=1)[:, groups.shape[1] // 2 :]
    expected = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, largest, True).view_as(before)
    torch.testing.assert_close(net.get_parameter("0.experts.1.weight").detach(), before * expected)
    report = result.layers["0.experts.1.weight"]
    assert (report.rows, report.error != report.error, report.sparsity) == (0, True, 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_masks_and_weights_have_the_same_zeros_if_inputs_are_always_zero(method: str) -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))
    inputs = normal(64, 16)
    inputs[:, 4:] = 0

    result = pruning.layerwise(net, method, [inputs], sparsity=0.5)

    assert result.layers["0.weight"].sparsity == 0.5
    assert torch.equal(net.get_parameter("0.weight") != 0, result.masks["0.weight"].bool())


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "magnitude"])
def test_the_total_is_exact_below_masks_that_are_uneven_over_columns(method: str) -> None:
    net = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8))
    mask = torch.ones(32, 256)
    mask[:, 128:] = normal(32, 128) > 0.25  # 60% of the second block of columns is pruned

    result = pruning.layerwise(net, method, [normal(512, 256)], sparsity=0.5, masks={"0.weight": mask})

    assert result.layers["0.weight"].sparsity == 0.5
    assert not (result.masks["0.weight"].bool() & ~mask.bool()).any()


def test_the_projections_of_multihead_attention_stay_dense() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's advice on nested tensors
        net = nn.TransformerEncoder(layer, 2)

    with pytest.warns(
        UserWarning, match=r"^50% .* layers.0.self_attn.in_proj_weight .* to prune them, call pruning.prune"
    ):
        result = pruning.layerwise(net, "sparsegpt", [normal(4, 8, 16)], sparsity=0.5)

    assert [name for name in result.masks if name.startswith("layers.0")] == [
        "layers.0.linear1.weight",
        "layers.0.linear2.weight",
    ]
    assert bool(net.get_parameter("layers.0.self_attn.out_proj.weight").all())


def test_what_continues_must_have_the_same_target() -> None:
    saved: list[pruning.reconstruction.block_by_block.Layerwise] = []
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    batches = [normal(64, 8)]
    pruning.layerwise(net, "wanda", batches, sparsity=0.5, on_block=saved.append)

    with pytest.raises(ValueError, match=r"`done` .* must be of the same"):
        pruning.layerwise(net, "wanda", batches, n=2, m=4, done=saved[0])
    with pytest.raises(ValueError, match=r"`done` .* must be of the same"):
        pruning.layerwise(net, "wanda", batches, sparsity=0.1, done=saved[0])


def test_a_call_that_continues_names_the_layers_without_examples_of_earlier_blocks() -> None:
    saved: list[pruning.reconstruction.block_by_block.Layerwise] = []
    net, said = (
        nn.Sequential(Experts(), nn.Sequential(nn.Linear(16, 8))),
        r"no example reaches 0\.experts\.1\.weight, or",
    )
    asked = {"sparsity": 0.5, "blocks": ["0", "1"]}
    with pytest.warns(UserWarning, match=said) as whole:
        pruning.layerwise(net, "wanda", [normal(4, 8, 16)], on_block=saved.append, **asked)  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match=said) as continued:
        pruning.layerwise(net, "wanda", [normal(4, 8, 16)], done=saved[0], **asked)  # type: ignore[arg-type]
    assert [str(each.message) for each in continued] == [str(each.message) for each in whole]


def test_what_a_method_of_ones_own_returns_is_checked() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"Pruning 0.weight of 0: `method` \(which returned a NoneType\) must return"):
        pruning.layerwise(net, lambda problem: None, [normal(16, 8)], sparsity=0.5)  # type: ignore[arg-type, return-value]


def test_the_error_is_that_of_the_masked_weights() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    inputs = normal(64, 8)
    outputs = net[0](inputs).detach() - net.get_parameter("0.bias").detach()

    def half(
        problem: pruning.reconstruction.layer_problem.LayerProblem,
    ) -> pruning.reconstruction.layer_problem.Solution:
        kept = torch.ones_like(problem.kept)
        kept[:, ::2] = False
        return pruning.reconstruction.layer_problem.Solution(problem.weight, kept)

    result = pruning.layerwise(net, half, [inputs], sparsity=0.5)

    change = outputs - (net[0](inputs).detach() - net.get_parameter("0.bias").detach())
    expected = float(change.square().sum() / outputs.square().sum())
    assert result.layers["0.weight"].error == pytest.approx(expected, rel=1e-5)


def test_a_mask_of_padding_must_hold_zeros_and_ones() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(x) * attention_mask[..., None].exp()

    batch = {"x": normal(2, 3, 8), "attention_mask": torch.tensor([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]])}
    with pytest.raises(ValueError, match="must hold 1 for tokens and 0 for padding"):
        pruning.layerwise(Net(), "wanda", [batch], sparsity=0.5)


def test_a_pattern_behind_one_that_takes_its_weights_is_named() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(
        ValueError, match=r"`sparsity` \(with '1.weight'\) .* an earlier pattern names its weights; put it first"
    ):
        pruning.layerwise(net, "wanda", [normal(16, 8)], sparsity={"*": 0.5, "1.weight": 0.6})


class Towers(nn.Module):
    """Two towers of blocks, of which a call without images runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(4)])
        self.text = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])

    def forward(self, text: Tensor) -> Tensor:
        return self.text[1](self.text[0](text).relu())  # type: ignore[no-any-return]


def test_blocks_that_no_batch_calls_stay_dense_and_the_share_is_said() -> None:
    net, blocks = Towers(), ["image", "text"]

    with pytest.warns(UserWarning, match=r"no batch calls image\.0, image\.1, image\.2 and 1 more: not pruned; 67% of"):
        result = pruning.layerwise(net, "wanda", [normal(4, 16)], sparsity=0.5, blocks=blocks)

    assert set(result.masks) == {"text.0.weight", "text.1.weight"}
