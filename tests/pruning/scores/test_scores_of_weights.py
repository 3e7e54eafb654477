"""Magnitude, random, LAMP and SynFlow scores: golden values, laws, and a second network against a slow reference."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from scored_networks import assert_close, conv_batch, conv_network, flat, golden, golden_network
from torch import Tensor, nn

import pruning
from pruning.scores import lamp, magnitude, random, synflow
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.scores.weight_scores import Flow


def test_magnitude_is_the_absolute_value() -> None:
    model = golden_network()

    scores = magnitude(model)

    assert list(scores) == ["fc1.weight", "fc2.weight"]
    assert torch.equal(scores["fc1.weight"], model.fc1.weight.detach().abs())


def test_random_scores_follow_their_generator() -> None:
    drawn = [flat(random(golden_network(), generator=torch.Generator().manual_seed(s))) for s in (0, 0, 1)]

    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert len(set(drawn[0].tolist())) == 28


# --- LAMP -------------------------------------------------------------------------------------------------------------


def test_lamp_on_the_golden_network() -> None:
    assert_close(flat(lamp(golden_network())), golden("lamp"))


def lamp_by_loops(weight: Tensor) -> Tensor:
    entries = [(abs(value), index) for index, value in enumerate(weight.flatten().tolist())]
    return torch.tensor([v * v / sum(u * u for u, j in entries if (u, j) >= (v, i)) for v, i in entries]).double()


def test_lamp_on_another_network_against_loops() -> None:
    model = conv_network()
    expected = torch.cat([lamp_by_loops(model.get_parameter(name)) for name in lamp(model)])

    assert torch.allclose(flat(lamp(model)), expected, rtol=1e-6)


def test_lamp_gives_the_largest_exactly_1_and_ignores_the_scale_of_a_layer() -> None:
    model = conv_network().float()
    scores = lamp(model)
    with torch.no_grad():
        model.fc.weight *= 4

    assert all(score.max() == 1 for score in scores.values())
    assert torch.equal(lamp(model)["fc.weight"], scores["fc.weight"])


def test_lamp_counts_survivors_alone_and_has_0_for_nothing() -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[3.0, 4.0, 12.0, 5.0]])
    masks = {"weight": torch.tensor([[1, 1, 0, 0]])}

    assert lamp(layer, masks=masks)["weight"].tolist() == [[9 / 25, 1, 0, 0]]
    layer.weight.data.zero_()
    assert lamp(layer)["weight"].tolist() == [[0, 0, 0, 0]]


# --- SynFlow ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "name"), [(False, "synflow"), (True, "synflow_bias")])
def test_synflow_on_the_golden_network(bias: bool, name: str) -> None:
    assert_close(flat(synflow(golden_network(), None, None, bias=bias)), golden(name))


def test_synflow_conserves_the_flow_through_units_and_layers() -> None:
    scores = synflow(golden_network())
    into, out = scores["fc1.weight"].sum(1), scores["fc2.weight"].sum(0)

    assert_close(into, out)
    assert_close(into, torch.tensor([1.19, 1.071, 1.0325, 1.498], dtype=torch.float64))
    assert scores["fc1.weight"].sum().item() == pytest.approx(4.7915, abs=1e-12)


def test_synflow_of_a_convolutional_network_conserves_too() -> None:
    scores = synflow(conv_network(), [conv_batch()])

    totals = torch.stack([score.sum() for score in scores.values()])
    assert_close(totals, totals[:1].expand_as(totals))


def test_synflow_on_another_network_against_finite_differences() -> None:
    model = conv_network()
    scores = synflow(model, [conv_batch()])
    bn = model.bn1
    scale = (bn.weight.abs() / (bn.running_var + bn.eps).sqrt())[:, None, None]

    def flow(weights: dict[str, Tensor]) -> Tensor:
        x = nn.functional.conv2d(torch.ones(1, 2, 6, 6).double(), weights["conv1.weight"], padding=1) * scale
        x = nn.functional.conv2d(x, weights["conv2.weight"], stride=2, groups=2).flatten(1)
        return (x @ weights["fc.weight"].T).sum()

    weights = {name: model.get_parameter(name).detach().abs().requires_grad_() for name in scores}
    gradients = torch.autograd.grad(flow(weights), list(weights.values()))
    assert_close(flat(scores), torch.cat([(w * g).flatten() for w, g in zip(weights.values(), gradients, strict=True)]))


def test_synflow_of_a_pruned_network_flows_through_what_is_kept() -> None:
    model = golden_network()
    masks = {"fc1.weight": torch.ones(4, 4)}
    masks["fc1.weight"][2] = 0

    scores = synflow(model, masks=masks)

    assert not scores["fc1.weight"][2].any()
    assert not scores["fc2.weight"][:, 2].any()
    assert_close(scores["fc1.weight"][:2].sum(1), torch.tensor([1.19, 1.071], dtype=torch.float64))


def test_synflow_does_not_overflow_in_a_deep_network_of_float32() -> None:
    layers = [module for _ in range(60) for module in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)

    assert flat(synflow(model)).isfinite().all()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.fc(x).sigmoid()


@pytest.mark.parametrize(
    ("model", "function"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.GELU()), "gelu"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "layer_norm"),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU6()), "hardtanh"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "tanh"),
        (nn.Sequential(nn.Linear(3, 3), nn.SiLU(inplace=True)), "silu"),
        (nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(-1)), "log_softmax"),
        (Gated(), "sigmoid"),
    ],
)
def test_synflow_refuses_functions_that_break_its_laws(model: nn.Module, function: str) -> None:
    with pytest.raises(ValueError, match=rf"applies {function}\).* must .*ReLU"):
        synflow(model)


def test_synflow_needs_the_shape_of_an_input() -> None:
    with pytest.raises(ValueError, match=r"`batches` \(=None\) must hold a batch"):
        synflow(conv_network())
    with pytest.raises(ValueError, match=r"`batches` \(of torch.int64\) must begin with real-valued"):
        synflow(golden_network(), [torch.arange(4)[None]])


def test_names_follow_a_wrapped_and_a_tied_network() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Embedding(3, 3)))
    model.b.weight = model.a.weight

    assert list(magnitude(nn.DataParallel(model))) == ["a.weight"]
    assert list(magnitude(model, parameters=["b.weight", "c.weight"])) == ["b.weight", "c.weight"]


def test_what_cannot_be_scored_is_told() -> None:
    with pytest.raises(ValueError, match=r"`parameters` \(='fc3.weight'\) must name parameters"):
        magnitude(golden_network(), parameters=["fc3.weight"])
    with pytest.raises(ValueError, match=r"`fc1.weight` has the shape \(4, 4\) in the model but \(2, 2\)"):
        magnitude(golden_network(), masks={"fc1.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"`model` \(ReLU\) must have a linear or convolutional layer"):
        magnitude(nn.ReLU())


def test_scores_are_attributes_of_the_package() -> None:
    assert pruning.scores.lamp is lamp
    assert {"SCORES", "fisher_matrix", *pruning.scores.SCORES} <= set(dir(pruning.scores)) & set(pruning.scores.__all__)
    with pytest.raises(AttributeError, match="no attribute 'l2'"):
        pruning.scores.l2  # noqa: B018


@pytest.mark.parametrize("name", ["fisher_matrix", *pruning.scores.SCORES])
def test_a_score_can_be_pickled(name: str) -> None:
    score = getattr(pruning.scores, name)

    assert pickle.loads(pickle.dumps(score)) is score
    assert str(score).startswith(f"<function {name} at ")


def test_rounds_of_synflow_are_synflow_under_each_rounds_masks() -> None:
    model, draw = conv_network(), torch.Generator().manual_seed(0)
    flow = Flow(ScoringInput(model, [conv_batch()]))
    masks = {name: torch.ones_like(score) for name, score in synflow(model, [conv_batch()]).items()}

    for dtype in (torch.bool, torch.float32, torch.bool):
        masks = {n: (mask != 0) & (torch.rand(mask.shape, generator=draw) > 0.2) for n, mask in masks.items()}
        masks = {name: mask.to(dtype) for name, mask in masks.items()}
        expected = synflow(model, [conv_batch()], masks=masks)
        found = flow.scores(masks)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"`fc.weight` has the shape"):
        flow.scores({"fc.weight": torch.ones(2, 2)})


def test_the_network_of_magnitudes_is_made_ready_once_for_many_rounds() -> None:
    def pruned(inner: int, score: str | Callable[..., object] = "synflow") -> tuple[int, pruning.MaskSet]:
        calls: list[int] = []
        model = conv_network()
        model.register_forward_hook(lambda *_: calls.append(1))
        batches = [conv_batch()]
        decided = pruning.prune(model, "synflow", sparsity=0.8, inner=inner, score=score, batches=batches)
        return len(calls), decided.masks

    (few, _), (many, masks) = pruned(4), pruned(24)
    by_itself, expected = pruned(24, synflow)  # a function is called again in each round
    assert many - few == 20
    assert by_itself > many
    assert all(torch.equal(masks[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "computed",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm],
)
def test_a_weight_that_is_computed_from_others_stays_dense(computed: Callable[[nn.Module], nn.Module]) -> None:
    model = golden_network()
    computed(model.fc2)
    assert "fc2.weight" not in magnitude(model)
    said = r"fc2.weight stays dense, because it is computed from other parameters"
    with pytest.warns(UserWarning, match=said), pytest.warns(UserWarning, match="of the network's matrix weights"):
        masks = pruning.prune(model, "magnitude", sparsity=0.5).masks
    assert list(masks) == list(magnitude(model))
    with pytest.raises(ValueError, match=r"`parameters` \(='fc2.weight'\) must name parameters of `model`"):
        pruning.prune(model, "magnitude", sparsity=0.5, parameters=["fc2.weight"])
    alone = nn.Sequential(nn.Linear(3, 4))
    computed(alone[0])
    with pytest.raises(ValueError, match=r"whose weight is computed from no other parameters"):
        pruning.prune(alone, "magnitude", sparsity=0.5)


def test_lamp_tells_which_tensor_holds_nan() -> None:
    model = conv_network()
    model.fc.weight.data[0, 3] = float("nan")
    with pytest.raises(ValueError, match=r"`fc.weight` holds NaN"):
        lamp(model)


class Ends(nn.Module):
    """A linear layer followed by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "log_sigmoid": nn.LogSigmoid(),
    "softmin": nn.Softmin(1),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x),
    "glu": nn.GLU(),
    "threshold": nn.Threshold(0.1, 20.0),
    "softshrink": nn.Softshrink(),
    "clamp": lambda x: x.clamp(max=10),
    "square": lambda x: x * x,
    "shift": lambda x: x + 1,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("bias", [False, True])
def test_synflow_refuses_what_does_not_scale_whatever_it_is_called(name: str, bias: bool) -> None:
    model = Ends(BROKEN[name])
    drawn = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"`model` \(Ends, .* for the laws of `synflow`"):
        synflow(model, bias=bias)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("bias", [False, True])
def test_synflow_takes_what_scales(bias: bool) -> None:
    for function in (nn.LeakyReLU(), nn.PReLU(), lambda x: x.clamp(min=0) + x.abs()):
        assert synflow(Ends(function), bias=bias)["fc.weight"].all()
