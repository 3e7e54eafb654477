"""Gradient, SNIP, GraSP and Taylor scores: golden values, laws, and a second network against finite differences."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from scored_networks import (
    GOLDEN_BATCH,
    assert_close,
    conv_batch,
    conv_network,
    cross_entropy,
    finite_differences,
    flat,
    golden,
    golden_network,
    loss_as_function,
    split,
    values_of,
)
from torch import Tensor, nn

from pruning.scores import gradient, grasp, snip, taylor

# --- gradient, SNIP ---------------------------------------------------------------------------------------------------


def test_gradient_and_snip_on_the_golden_network() -> None:
    assert_close(flat(gradient(golden_network(), [GOLDEN_BATCH], cross_entropy)), golden("gradient").abs())
    assert_close(flat(snip(golden_network(), [GOLDEN_BATCH], cross_entropy)), golden("signed_snip").abs())


def test_snip_on_another_network_against_finite_differences() -> None:
    model = conv_network()
    scores = snip(model, [conv_batch()], cross_entropy, batch_norm="eval")
    weights = values_of(model, list(scores))
    slopes = finite_differences(loss_as_function(model, conv_batch()), weights)

    assert_close(flat(scores), (flat(weights) * slopes).abs(), rtol=1e-6, atol=1e-9)


def test_snip_does_not_depend_on_how_the_examples_are_cut_into_batches() -> None:
    whole = flat(snip(golden_network(), [GOLDEN_BATCH], cross_entropy))
    parts = flat(snip(golden_network(), iter(split(GOLDEN_BATCH, 1, 3, 2)), cross_entropy))

    assert_close(parts, whole)
    assert_close(
        flat(snip(golden_network(), split(GOLDEN_BATCH, 1, 5), cross_entropy, size=lambda batch: 1)),
        parts * 0 + flat(mean_of_means()),
    )


def mean_of_means() -> dict[str, Tensor]:
    model = golden_network()
    gradients = [
        torch.autograd.grad(cross_entropy(model, b), (model.fc1.weight, model.fc2.weight))
        for b in split(GOLDEN_BATCH, 1, 5)
    ]
    weights = (model.fc1.weight.detach(), model.fc2.weight.detach())
    return {str(i): (w * (a + b) / 2).abs() for i, (w, a, b) in enumerate(zip(weights, *gradients, strict=True))}


def test_force_scores_what_is_pruned_by_its_own_value() -> None:
    mask = golden("snip_mask")
    masks = {"fc1.weight": mask[:16].view(4, 4), "fc2.weight": mask[16:].view(3, 4)}

    assert_close(flat(snip(golden_network(), [GOLDEN_BATCH], cross_entropy, masks=masks)), golden("force"))


def test_snip_ignores_a_rescaling_that_leaves_the_function() -> None:
    model = golden_network()
    before = flat(snip(model, [GOLDEN_BATCH], cross_entropy))
    with torch.no_grad():
        for parameter, factor in zip(model.parameters(), (3, 3, 1 / 3, 1), strict=True):
            parameter *= factor

    assert_close(flat(snip(model, [GOLDEN_BATCH], cross_entropy)), before)


def test_a_filter_before_batch_norm_is_scored_whatever_its_scale() -> None:
    model = conv_network()
    model.bn1.eps = 1e-30
    before = flat(snip(model, [conv_batch()], cross_entropy))
    with torch.no_grad():
        model.conv1.weight[1] *= 3

    assert_close(flat(snip(model, [conv_batch()], cross_entropy)), before)


def test_batch_norm_reads_what_it_is_told_to() -> None:
    model = conv_network()
    by_mode = {}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        model.dropout.eval()
        (by_mode[mode],) = torch.autograd.grad(cross_entropy(model, conv_batch()), (model.fc.weight,))

    for mode, expected in by_mode.items():
        assert_close(gradient(model, [conv_batch()], cross_entropy, batch_norm=mode)["fc.weight"], expected.abs())
    with pytest.raises(ValueError, match=r"`batch_norm` \(='running'\) must be"):
        gradient(model, [conv_batch()], cross_entropy, batch_norm="running")


def test_a_tied_weight_has_the_gradient_of_all_its_uses() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    (expected,) = torch.autograd.grad(cross_entropy(model, GOLDEN_BATCH), (model[0].weight,))

    scores = gradient(model, [GOLDEN_BATCH], cross_entropy)

    assert list(scores) == ["0.weight"]
    assert_close(scores["0.weight"], expected.abs())


def test_attention_is_scored_by_its_projections() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.5)

    scores = snip(model, [torch.ones(2, 3, 4)], lambda net, x: net(x).square().sum(-1).mean() + net(x)[0, 0, 0])

    assert list(scores) == ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert all(score.any() for score in scores.values())


# --- GraSP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1, 200])
def test_grasp_on_the_golden_network(temperature: int) -> None:
    scores = grasp(golden_network(), [GOLDEN_BATCH], cross_entropy, temperature=temperature)

    assert_close(flat(scores), -golden(f"grasp_{temperature}"), atol=1e-18)


def test_grasp_on_another_network_is_half_the_slope_of_the_squared_gradient() -> None:
    model = conv_network()
    scores = grasp(model, split(conv_batch(), 2, 4), cross_entropy, batch_norm="eval", temperature=1)
    weights = values_of(model, list(scores))
    loss = loss_as_function(model, conv_batch())

    def half_square(values: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
            slopes = torch.autograd.grad(loss(leaves), list(leaves.values()))
        return sum((g.square().sum() for g in slopes), torch.zeros(())) / 2

    assert_close(flat(scores), flat(weights) * finite_differences(half_square, weights), rtol=1e-5, atol=1e-8)


def test_grasp_takes_logits_by_name_and_refuses_what_it_cannot_scale() -> None:
    class Named(nn.Module):
        def __init__(self, loss: Tensor | None = None) -> None:
            super().__init__()
            self.net, self.loss = golden_network(), loss

        def forward(self, x: Tensor) -> dict[str, Tensor | None]:
            return {"logits": self.net(x), "loss": self.loss}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0])["logits"], batch[1])

    assert_close(flat(grasp(Named(), [GOLDEN_BATCH], loss)), -golden("grasp_200"), atol=1e-18)
    with pytest.raises(ValueError, match=r"`model` \(which returned dict\) must return a tensor"):
        grasp(Named(torch.zeros(())), [GOLDEN_BATCH], loss)
    with pytest.raises(ValueError, match=r"`temperature` \(=0\) must be above 0"):
        grasp(golden_network(), [GOLDEN_BATCH], cross_entropy, temperature=0)


# --- Taylor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "name"), [("filter", "taylor_filter"), ("gate", "taylor_gate")])
def test_taylor_of_units_on_the_golden_network(form: str, name: str) -> None:
    scores = taylor(golden_network(), [GOLDEN_BATCH], cross_entropy, form=form)

    assert_close(scores["fc1.weight"], golden(name))


def test_taylor_of_entries_is_the_square_of_snip() -> None:
    scores = flat(taylor(golden_network(), [GOLDEN_BATCH], cross_entropy))

    assert_close(scores, golden("signed_snip").square())


def test_taylor_of_gates_of_each_example_on_the_golden_network() -> None:
    scores = taylor(golden_network(), split(GOLDEN_BATCH, 2, 4), cross_entropy, form="gate", per_example=True)

    assert_close(scores["fc1.weight"], golden("taylor_gate_per_example"))


def test_taylor_of_batch_norm_on_the_golden_network() -> None:
    first, relu, last = golden_network()
    norm = nn.BatchNorm1d(4).double()
    norm.weight.data = torch.tensor([1.2, 0.7, -0.4, 0.9], dtype=torch.float64)
    norm.bias.data = torch.tensor([0.1, -0.2, 0.3, 0.05], dtype=torch.float64)
    first.bias.data.zero_()

    scores = taylor(nn.Sequential(first, norm, relu, last), [GOLDEN_BATCH], cross_entropy, form="bn")

    assert list(scores) == ["1.weight"]
    assert_close(scores["1.weight"], golden("taylor_bn"))


class Gate(nn.Module):
    """Multiply each channel by a trainable factor, 1 at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(channels, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors.view(1, -1, *[1] * (x.dim() - 2))


def test_taylor_of_gates_on_another_network_against_gates() -> None:
    model, batch = conv_network(), conv_batch()
    gated = [conv_network() for _ in range(3)]
    for net, name, channels in zip(gated, ("conv1", "conv2", "fc"), (4, 4, 3), strict=True):
        setattr(net, name, nn.Sequential(getattr(net, name), Gate(channels)))
    gates = [getattr(net, name)[1].factors for net, name in zip(gated, ("conv1", "conv2", "fc"), strict=True)]

    def slopes(batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(
            [torch.autograd.grad(cross_entropy(n, batch), g)[0] for n, g in zip(gated, gates, strict=True)]
        )

    whole = taylor(model, [batch], cross_entropy, form="gate", batch_norm="eval")
    each = taylor(model, [batch], cross_entropy, form="gate", batch_norm="eval", per_example=True)

    assert list(whole) == ["conv1.weight", "conv2.weight", "fc.weight"]
    assert_close(flat(whole), slopes(batch).square())
    assert_close(flat(each), torch.stack([slopes(one).square() for one in split(batch, *[1] * 6)]).mean(0))


def test_taylor_squares_each_batch_before_it_averages() -> None:
    parts = split(GOLDEN_BATCH, 2, 4)
    first, second = (flat(taylor(golden_network(), [part], cross_entropy)) for part in parts)

    assert_close(flat(taylor(golden_network(), parts, cross_entropy)), (2 * first + 4 * second) / 6)


def test_taylor_of_filters_counts_outputs_of_transposed_convolutions() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(30, 3)).double()
    batch = (torch.randn(4, 4, 3).double(), torch.tensor([0, 1, 2, 0]))
    entries = taylor(model, [batch], cross_entropy)["0.weight"]

    assert torch.allclose(taylor(model, [batch], cross_entropy, form="filter")["0.weight"], grouped(entries))


def grouped(entries: Tensor) -> Tensor:
    """Sum the entries of a weight (in, out / groups, kernel) with two groups for each output."""
    return torch.cat([part.sum((0, 2)) for part in entries.split(2)])


def test_taylor_tells_what_does_not_go_together() -> None:
    model = golden_network()
    with pytest.raises(ValueError, match=r"`form` \(='unit'\) must be one of"):
        taylor(model, [GOLDEN_BATCH], cross_entropy, form="unit")
    with pytest.raises(ValueError, match=r"`per_example` \(=True\) must go with form='gate'"):
        taylor(model, [GOLDEN_BATCH], cross_entropy, per_example=True)
    with pytest.raises(ValueError, match=r"`model` \(Sequential\) must have BatchNorm layers with a scale"):
        taylor(model, [GOLDEN_BATCH], cross_entropy, form="bn")
