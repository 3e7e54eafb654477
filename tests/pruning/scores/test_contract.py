"""Laws that every score in the catalogue keeps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from scored_networks import Batch, assert_close, conv_batch, conv_network, cross_entropy, flat, split
from torch import Tensor, nn

import pruning
from pruning.catalogue.scores import SCORES, ScoreRow

SHARED = ["model", "batches", "loss", "size", "generator", "masks", "parameters"]
OF_WEIGHTS = {name: score for name, score in SCORES.items() if not score.of_units}
"""Scores of any network; those of whole layers and experts are in test_layer_scores.py and test_expert_scores.py."""
DATA_SCORES = [name for name, score in OF_WEIGHTS.items() if score.reads_data]


def scored(name: str, model: nn.Module, batches: list[Batch] | None = None, **own: Any) -> dict[str, Tensor]:
    batches = [conv_batch()] if batches is None else batches
    generator = torch.Generator().manual_seed(0)
    return getattr(pruning.scores, name)(model, batches, cross_entropy, generator=generator, **own)


def state(model: nn.Module) -> list[Any]:
    """Return all state that a score must not change: tensors, gradients, flags, hooks and the global generator."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    flags = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    needs = [(p.requires_grad, id(p), p._version) for p in model.parameters()]
    return [*(t.detach().clone() for t in tensors), *gradients, flags, needs, torch.get_rng_state()]


def equal(before: Any, after: Any) -> bool:
    return torch.equal(before, after) if isinstance(before, Tensor) else bool(before == after)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_score_changes_nothing(name: str) -> None:
    model = conv_network().train()
    model.bn1.eval()
    cross_entropy(model, conv_batch()).backward()
    model.conv2.weight.requires_grad_(False)
    before = state(model)

    scored(name, model)

    assert all(equal(*pair) for pair in zip(before, state(model), strict=True))


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_data_that_draws_does_not_move_the_global_generator(name: str) -> None:
    def drawing() -> Iterator[Batch]:
        torch.rand(3)
        yield conv_batch()

    model = conv_network()
    before = torch.get_rng_state()

    getattr(pruning.scores, name)(model, drawing(), cross_entropy)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "score"), OF_WEIGHTS.items())
def test_all_take_the_same_arguments_and_return_a_score_for_each_entry_or_unit(name: str, score: ScoreRow) -> None:
    model = conv_network()

    scores = scored(name, model)

    call = getattr(pruning.scores, name)
    assert list(inspect.signature(call).parameters)[: len(SHARED)] == SHARED
    assert ("batch_norm" in inspect.signature(call).parameters) == score.reads_batch_norm
    assert call is getattr(pruning.scores, name)
    assert inspect.getdoc(call).startswith(inspect.getdoc(score.load()))
    if not score.units:
        assert list(scores) == ["conv1.weight", "conv2.weight", "fc.weight"]
    for parameter, values in scores.items():
        shape = model.get_parameter(parameter).shape
        assert values.shape == (shape[:1] if score.units else shape)
        assert values.isfinite().all()
        assert values.dtype == torch.float64
        assert not values.requires_grad
        assert score.signed or (values >= 0).all()


HOLDS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "ours": lambda layer, mask: pruning.custom_from_mask(layer, "weight", mask),
    "torch": lambda layer, mask: torch_prune.custom_from_mask(layer, "weight", mask),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
@pytest.mark.parametrize("holder", HOLDS)
def test_a_pruned_network_is_scored_as_it_computes(name: str, holder: str) -> None:
    mask = (torch.arange(48) % 3 != 0).view(3, 16)
    plain, held, zeroed = conv_network(), conv_network(), conv_network()
    HOLDS[holder](held.fc, mask)
    held(conv_batch()[0])  # leaves a tensor with a history in `fc.weight`
    zeroed.fc.weight.data.mul_(mask)

    by_masks = scored(name, plain, masks={"fc.weight": mask})
    by_hooks = scored(name, held)
    by_zeros = scored(name, zeroed)

    assert list(by_hooks) == list(by_masks) == list(by_zeros)
    for key, values in by_masks.items():
        assert torch.equal(values, by_hooks[key])
        kept = mask if values.shape == mask.shape else torch.ones_like(values, dtype=torch.bool)
        assert torch.equal(values[kept], by_zeros[key][kept])


@pytest.mark.parametrize(
    "name", [name for name in DATA_SCORES if not SCORES[name].reads_batch_norm or name != "taylor"]
)
def test_the_cut_into_batches_does_not_matter_where_batch_norm_is_not_reading_them(name: str) -> None:
    own = {"batch_norm": "eval"} if SCORES[name].reads_batch_norm else {}

    whole = flat(scored(name, conv_network(), **own))

    assert_close(flat(scored(name, conv_network(), split(conv_batch(), 1, 3, 2), **own)), whole, rtol=1e-8)


@pytest.mark.parametrize("name", DATA_SCORES)
def test_missing_data_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`batches` \(=None\) must hold scoring data, which `{name}` reads; pass"):
        getattr(pruning.scores, name)(conv_network(), None, cross_entropy)
    with pytest.raises(ValueError, match=r"`batches` \(=empty\) must hold scoring data"):
        getattr(pruning.scores, name)(conv_network(), [], cross_entropy)


@pytest.mark.parametrize("name", [name for name in DATA_SCORES if "inputs" not in SCORES[name].needs])
def test_a_missing_or_useless_loss_is_told(name: str) -> None:
    score = getattr(pruning.scores, name)
    with pytest.raises(ValueError, match=rf"`loss` \(=None\) must be a function .*`{name}`"):
        score(conv_network(), [conv_batch()], None)
    with pytest.raises(
        ValueError, match=r"`loss` \(which returned a tensor of shape \(6, 3\)\) must return the batch's mean"
    ):
        score(conv_network(), [conv_batch()], lambda model, batch: model(batch[0]))
    with pytest.raises(
        ValueError, match=r"`loss` \(which returned a tensor of shape \(\)\) must return the batch's mean"
    ):
        score(conv_network(), [conv_batch()], lambda model, batch: model(batch[0]).detach().mean())
    model = conv_network()
    with pytest.raises(ValueError, match=r"`loss` .*the model passed to it"):
        score(model, [conv_batch()], lambda _, batch: cross_entropy(model, batch))
    with torch.inference_mode(), pytest.raises(ValueError, match=r"`torch.inference_mode` rules out"):
        score(conv_network(), [conv_batch()], cross_entropy)


@pytest.mark.parametrize("name", [name for name in DATA_SCORES if SCORES[name].reads_batch_norm])
def test_batch_norm_in_training_mode_takes_its_statistics_from_all_examples(name: str) -> None:
    if name != "taylor":  # which averages squares of mini-batch gradients
        with pytest.raises(ValueError, match=rf"one batch of all examples for `{name}` with batch_norm='train'"):
            scored(name, conv_network(), split(conv_batch(), 3, 3))
    with pytest.raises(ValueError, match=r"batch of 1 example"):
        scored(name, conv_network(), [conv_batch(1)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["snip", "taylor", "grasp", "fisher", "obd", "obs"])
def test_scores_of_16_bits_do_not_vanish_where_their_factors_are_small(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(0.01)
    batch = (torch.randn(64, 16).to(dtype), torch.randint(4, (64,)))
    found = flat(scored(name, model, [batch]))
    exact = flat(scored(name, copy.deepcopy(model).double(), [(batch[0].double(), batch[1])]))

    assert ((found == 0) == (exact == 0)).all()
    assert torch.corrcoef(torch.stack([found, exact]))[0, 1] > 0.999


@pytest.mark.parametrize("name", ["obd", "obs"])
def test_nan_is_told_where_matrices_are_decomposed(name: str) -> None:
    model = conv_network()
    model.fc.weight.data[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"`fc.weight` has weights of NaN"):
        scored(name, model)


def test_arguments_of_another_type_are_told() -> None:
    with pytest.raises(ValueError, match=r"`damping` \(='x'\) must be above 0"):
        scored("obs", conv_network(), damping="x")
    with pytest.raises(ValueError, match=r"`temperature` \(='x'\) must be above 0"):
        scored("grasp", conv_network(), temperature="x")
    with pytest.raises(ValueError, match=r"`parameters` \(='fc.weight'\) must be names in a list"):
        scored("magnitude", conv_network(), parameters="fc.weight")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"`synflow` takes gradients"):
        scored("synflow", conv_network())
