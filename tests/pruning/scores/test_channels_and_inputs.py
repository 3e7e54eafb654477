"""Channel scores and Wanda: golden values, laws, and a second network against loops."""

from __future__ import annotations

import pytest
import torch
from scored_networks import (
    GOLDEN_BATCH,
    assert_close,
    conv_batch,
    conv_network,
    cross_entropy,
    golden,
    golden_network,
    split,
)
from torch import Tensor, nn

from pruning.choices.axes import Schedule, Score, Unit
from pruning.choices.combining import Choices
from pruning.engine.one_call import plan
from pruning.scores import activation, bn_scale, fpgm, wanda


def test_bn_scale_is_the_magnitude_of_scales() -> None:
    model = conv_network()
    model.bn1.weight.data = torch.tensor([0.5, -2.0, 0.0, 1.0], dtype=torch.float64)

    assert {name: score.tolist() for name, score in bn_scale(model).items()} == {"bn1.weight": [0.5, 2.0, 0.0, 1.0]}


def test_bn_scale_needs_batch_norm() -> None:
    with pytest.raises(
        ValueError, match=r"`model` \(Sequential\) must have BatchNorm layers with a scale for `bn_scale`"
    ):
        bn_scale(golden_network())
    with pytest.raises(ValueError, match=r"`model` \(BatchNorm1d\) must have BatchNorm layers with a scale"):
        bn_scale(nn.BatchNorm1d(3, affine=False))
    with pytest.raises(ValueError, match=r"`parameters` \(='fc.weight'\) must name scales .* choose from bn1.weight"):
        bn_scale(conv_network(), parameters=["fc.weight"])


# --- FPGM -------------------------------------------------------------------------------------------------------------


def test_fpgm_on_the_golden_network() -> None:
    assert_close(fpgm(golden_network())["fc1.weight"], golden("fpgm"))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_fpgm_on_another_network_against_loops(dim: int) -> None:
    model = conv_network()
    weight = model.conv1.weight.detach().transpose(0, dim)
    expected = [sum((a - b).norm() for b in weight) for a in weight]

    assert_close(fpgm(model, parameters=["conv1.weight"], dim=dim)["conv1.weight"], torch.stack(expected))


def test_fpgm_measures_survivors_alone() -> None:
    model = golden_network()
    masks = {"fc1.weight": torch.tensor([[1.0], [0.0], [1.0], [1.0]]).expand(4, 4)}
    rows = model.fc1.weight.detach()[[0, 2, 3]]

    scores = fpgm(model, masks=masks)["fc1.weight"]

    assert scores[1] == 0
    assert_close(scores[[0, 2, 3]], torch.stack([sum((a - b).norm() for b in rows) for a in rows]))


def test_fpgm_ignores_translations_and_rotations() -> None:
    model = golden_network()
    before = fpgm(model)["fc1.weight"]
    turn, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    with torch.no_grad():
        model.fc1.weight.copy_((model.fc1.weight + torch.arange(4)) @ turn)

    assert_close(fpgm(model)["fc1.weight"], before)


# --- Wanda ------------------------------------------------------------------------------------------------------------


def test_wanda_on_the_golden_network() -> None:
    scores = wanda(golden_network(), split(GOLDEN_BATCH, 4, 2), None)

    assert_close(scores["fc1.weight"].flatten(), golden("wanda_w1"))
    assert_close(scores["fc2.weight"].flatten(), golden("wanda_w2"))


def slow_wanda(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return |w| times the norm of the outputs when one entry of the weight is 1 and all others are 0."""
    scores = torch.zeros_like(layer.weight)
    for index in range(layer.weight.numel()):
        one = torch.zeros_like(layer.weight)
        one.view(-1)[index] = 1
        outputs = torch.func.functional_call(layer, {"weight": one, "bias": None}, (inputs,))
        scores.view(-1)[index] = layer.weight.detach().view(-1)[index].abs() * outputs.norm()
    return scores.detach()


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(3, 2), (4, 3)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5)),
    "conv2d": (nn.Conv2d(2, 3, 3, padding=2, dilation=2, padding_mode="circular"), (2, 5, 6)),
    "transposed": (nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 3, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_wanda_of_every_kind_of_layer_against_single_weights(kind: str) -> None:
    layer, shape = LAYERS[kind]
    layer, inputs = layer.double(), torch.randn(5, *shape, dtype=torch.float64)

    assert_close(wanda(layer, inputs.split(3))["weight"], slow_wanda(layer, inputs))


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "transposed"])
def test_wanda_of_inputs_of_several_sizes_adds_up_their_squares(kind: str) -> None:
    layer, (channels, *size) = LAYERS[kind]
    layer, sizes = layer.double(), (size, [n + 1 for n in size], size)
    batches = [torch.randn(2, channels, *each, dtype=torch.float64) for each in sizes]
    squares = torch.stack([slow_wanda(layer, batch) ** 2 for batch in batches]).sum(0)

    assert_close(wanda(layer, batches)["weight"], squares.sqrt())


def test_wanda_on_another_network_against_single_weights() -> None:
    model, (inputs, _) = conv_network(), conv_batch()
    scores = wanda(model, [conv_batch()], cross_entropy)

    assert_close(scores["conv1.weight"], slow_wanda(model.conv1, inputs))
    assert_close(scores["conv2.weight"], slow_wanda(model.conv2, model[:4](inputs)))
    assert_close(scores["fc.weight"], slow_wanda(model.fc, model[:7](inputs)))


def test_wanda_ignores_the_scale_of_all_inputs_in_its_ranking() -> None:
    inputs, labels = GOLDEN_BATCH
    once, thrice = (wanda(golden_network(), [(inputs * c, labels)])["fc1.weight"] for c in (1, 3))

    assert_close(thrice, 3 * once)


def test_wanda_sends_an_input_first_that_is_always_0() -> None:
    inputs = GOLDEN_BATCH[0].clone()
    inputs[:, 2] = 0

    scores = wanda(golden_network(), [inputs])["fc1.weight"]

    assert not scores[:, 2].any()
    assert scores[:, [0, 1, 3]].all()


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class OfTokens(nn.Module):
    """Linear layer over the features of four tokens, and a convolution whose channels are the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixed = nn.Linear(3, 2), nn.Conv1d(4, 4, 1)

    def forward(self, values: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.mixed(self.linear(values))
        return found


def test_padding_does_not_count_in_norms_of_inputs() -> None:
    generator, model = torch.Generator().manual_seed(0), OfTokens().double()
    values = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    batch = {"values": values, "attention_mask": mask}
    norms = values[mask != 0].square().sum(0).sqrt()

    assert_close(activation(model, [batch])["linear.weight"], norms.expand(2, 3))
    assert_close(wanda(model, [batch])["linear.weight"], model.linear.weight.abs() * norms)
    assert_close(wanda(model, [batch])["mixed.weight"], slow_wanda(model.mixed, model.linear(values)))


def test_activation_is_the_norm_of_the_input_alone() -> None:
    model, batches = golden_network(), split(GOLDEN_BATCH, 4, 2)
    with torch.no_grad():
        model.fc2.weight[0, 1] = 0
    scores = activation(model, batches, None)
    expected = wanda(model, batches, None)["fc2.weight"] / model.fc2.weight.detach().abs()

    assert scores["fc2.weight"][0, 1] == 0, "an entry that is 0 loses nothing"
    kept = model.fc2.weight != 0
    assert_close(scores["fc2.weight"][kept], expected[kept])
    assert_close(scores["fc1.weight"], slow_wanda(ones_like(model.fc1), torch.cat([x for x, _ in batches])))


def test_activation_ranks_hidden_units_by_the_norm_of_what_they_compute() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 3))
    inputs = torch.randn(20, 5)
    choices = Choices(Score("activation"), Unit("group"), schedule=Schedule(3 / 7))
    planned = plan(model, choices, batches=[inputs], example=inputs)
    norms = model[1](model[0](inputs)).norm(dim=0)

    kept = planned.masks["0.weight"].any(1)
    assert kept.sum() == 4
    assert norms[kept].min() > norms[~kept].max()


def ones_like(layer: nn.Linear) -> nn.Linear:
    """Return a layer of the same shape whose weights are 1."""
    found = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    nn.init.ones_(found.weight)
    return found


def test_wanda_refuses_weights_without_inputs_of_their_own() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"`model` \(whose '0.weight' is tied\) must"):
        wanda(tied, [torch.ones(2, 4)])
    with pytest.raises(ValueError, match=r"`model` \(whose '0.weight' acts more than once in a pass\) must"):
        wanda(Twice(nn.Linear(4, 4)), [torch.ones(2, 4)])
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with pytest.raises(ValueError, match=r"`parameters` \(='self_attn.in_proj_weight'\) must name weights of linear"):
        wanda(attention, [torch.ones(2, 3, 4)])
    names = ["linear1.weight", "linear2.weight"]
    assert list(wanda(attention, [torch.ones(2, 3, 4)], parameters=names)) == names
