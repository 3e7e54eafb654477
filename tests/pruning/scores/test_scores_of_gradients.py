"""Scores of the mean gradient: golden values, laws, and another network against finite differences."""

from __future__ import annotations

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

from pruning.scores import gradient, snip

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
