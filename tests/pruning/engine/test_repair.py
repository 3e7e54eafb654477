"""Repairs against golden values, slow references, and the network functions that they must preserve."""

from __future__ import annotations

import copy

import pytest
import torch
from golden_network import BATCHES, W1, Golden, X, loss
from torch import nn

import pruning
from pruning.catalogue.repairs import REPAIRS
from pruning.choices.axes import Repair, Schedule, Scope, Score, Unit
from pruning.choices.combining import Choices
from pruning.scores.readings.scoring_data import ScoringInput

DATA = {"batches": BATCHES, "loss": loss}


def repaired(kind, model, kept, *, batches, loss, **options):
    return REPAIRS[kind].load()(ScoringInput(model, batches, loss, parameters=list(kept)), kept, **options)


SPARSEGPT = {
    "1010100101100110": 0.4672908781611652,
    "1011100001100110": 0.32897317972898316,
}
"""Mask of W1, row by row -> tr(dW H dW^T) of the least-squares repair, H damped by 0.01."""


def vector(model):
    return torch.cat([model.fc1.weight.detach().flatten(), model.fc2.weight.detach().flatten()])


def fisher(model, damping):
    """Compute damping I + mean over examples of g g^T, one example at a time."""
    rows = []
    for i in range(len(X)):
        one = loss(model, (BATCHES[0][0][i : i + 1], BATCHES[0][1][i : i + 1]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(one, [model.fc1.weight, model.fc2.weight])]))
    stacked = torch.stack(rows)
    return stacked.T @ stacked / len(X) + damping * torch.eye(28).double()


def test_the_first_update_of_obs_is_golden():
    model, before = Golden(), vector(Golden())

    pruning.prune(model, "obs", sparsity=1 / 28, damping=0.01, **DATA)

    update = vector(model) - before
    assert pruning.MaskSet.collect(model)["fc2.weight"].flatten().tolist() == [True] * 6 + [False] + [True] * 5
    golden = {0: 0.0005062529146844701, 8: -0.004272351979687067, 22: -0.02, 27: -0.0007269090043776823}
    for index, value in golden.items():
        assert float(update[index]) == pytest.approx(value, abs=1e-12)
    cost = update @ fisher(Golden(), 0.01) @ update / 2
    assert float(cost) == pytest.approx(3.7065175102052575e-06, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "cost"),
    [("obs_joint", 0.0046386394977072235), ("obs", 0.006310264091603554), ("none", 0.011646699351683536)],
)
def test_costs_of_removing_half_are_golden(kind, cost):
    model = Golden()

    pruning.prune(model, "obs", sparsity=0.5, damping=0.01, repair=kind, **DATA)

    update = vector(model) - vector(Golden())
    assert float(update @ fisher(Golden(), 0.01) @ update / 2) == pytest.approx(cost, rel=1e-9)


def test_the_joint_update_is_that_of_the_inverse_written_out():
    model, inverse = Golden(), torch.linalg.inv(fisher(Golden(), 0.05))
    repair = Repair("obs_joint", {"damping": 0.05})

    masks = pruning.prune(model, "magnitude", sparsity=0.5, scope="global", repair=repair, **DATA).masks

    gone = torch.cat([~masks["fc1.weight"].flatten(), ~masks["fc2.weight"].flatten()]).nonzero().flatten()
    weights = vector(Golden())
    want = weights - inverse[:, gone] @ torch.linalg.solve(inverse[gone][:, gone], weights[gone])
    assert torch.allclose(vector(model), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mask", "cost"), SPARSEGPT.items())
def test_least_squares_reaches_the_golden_cost(mask, cost):
    kept = torch.tensor([int(bit) for bit in mask]).view(4, 4)

    value = repaired("least_squares", Golden(), {"fc1.weight": kept}, **DATA)["fc1.weight"]

    hessian = 2 / len(X) * X.T @ X
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(4, dtype=torch.float64)
    change = value - torch.tensor(W1, dtype=torch.float64)
    assert float(torch.einsum("ij,jk,ik->", change, hessian, change)) == pytest.approx(cost, rel=1e-9)
    assert not value[kept == 0].any()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(4, 6, (2, 3), stride=2, dilation=(1, 2), padding_mode="circular", padding=2),
        nn.Conv1d(4, 6, 3, padding="same"),
    ],
)
def test_least_squares_of_convolutions_brings_outputs_nearest(layer):
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    x = torch.randn(5, 4, *[9] * (layer.weight.dim() - 2), dtype=torch.float64)
    kept = torch.rand_like(layer.weight) < 0.5
    dense = layer(x).detach()

    def squared(model, batch):
        return model(batch).square().mean()

    value = repaired(
        "least_squares", nn.Sequential(layer), {"0.weight": kept}, batches=[x], loss=squared, damping=1e-9
    )["0.weight"]

    def distance(weight):
        with torch.no_grad():
            return float((torch.func.functional_call(layer, {"weight": weight}, x) - dense).square().sum())

    best = distance(value)
    assert not value[~kept].any()
    assert best < distance(layer.weight * kept)
    for index in kept.nonzero()[::7]:  # moving any survivor increases the distance
        for step in (1e-3, -1e-3):
            moved = value.clone()
            moved[tuple(index)] += step
            assert distance(moved) > best


class WithBatchNorm(nn.Module):
    """A convolution without a bias before a BatchNorm, a convolution with a bias, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.fc = nn.Conv2d(4, 5, 2), nn.Linear(20, 3)
        generator = torch.Generator().manual_seed(0)
        self.double()
        for tensor in (*self.norm.parameters(), self.norm.running_mean, self.norm.running_var, self.conv2.bias):
            tensor.data.uniform_(0.2, 1, generator=generator)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        return self.fc(torch.nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1))


IMAGES = torch.randn(6, 1, 7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def outputs(model, batch):
    return model(batch).square().mean()


def test_absorbing_biases_keeps_the_function_and_silences_channels():
    torch.manual_seed(0)
    model = WithBatchNorm().eval()
    masked = copy.deepcopy(model)
    unit = Unit("channel", spare_last=True)

    pruning.prune(masked, "magnitude", sparsity=0.5, unit=unit)
    found = pruning.prune(
        model, "magnitude", sparsity=0.5, unit=unit, repair="absorb_bias", batches=[IMAGES], loss=outputs
    )

    other = torch.randn(4, 1, 7, 7, dtype=torch.float64)
    assert set(found.values) == {"norm.weight", "norm.bias", "conv2.bias", "fc.bias"}
    assert torch.allclose(model(other), masked(other), rtol=0, atol=1e-12)
    dead = ~found.masks["conv2.weight"].flatten(1).any(1)
    assert dead.any()
    assert not model.conv2.bias[dead].any()
    small = copy.deepcopy(model)
    pruning.remove_all(small)
    keep1, keep2 = (found.masks[f"conv{i}.weight"].flatten(1).any(1) for i in (1, 2))
    with torch.no_grad():  # the survivors as a smaller network
        x = torch.nn.functional.conv2d(other, small.conv1.weight[keep1])
        norm = small.norm
        x = torch.nn.functional.batch_norm(
            x, norm.running_mean[keep1], norm.running_var[keep1], norm.weight[keep1], norm.bias[keep1]
        )
        x = torch.nn.functional.conv2d(torch.relu(x), small.conv2.weight[keep2][:, keep1], small.conv2.bias[keep2])
        x = torch.nn.functional.max_pool2d(torch.relu(x), 2).flatten(1)
        columns = small.fc.weight.view(3, 5, 4)[:, keep2].flatten(1)
        assert torch.allclose(x @ columns.T + small.fc.bias, masked(other), rtol=0, atol=1e-12)


def test_a_dead_hidden_unit_of_the_golden_network():
    """Masking row 2 of W1 leaves relu(b1[2]) = 0.05: the logits move by (0.008, 0.001, -0.0205) if it is removed."""
    kept = {"fc1.weight": torch.ones(4, 4), "fc2.weight": torch.ones(3, 4)}
    kept["fc1.weight"][2] = 0

    values = repaired("absorb_bias", Golden(), kept, **DATA)
    kept["fc2.weight"][0] = 0  # no layer reads an output, so it keeps its bias
    assert repaired("absorb_bias", Golden(), kept, **DATA)["fc2.bias"][0] == Golden().fc2.bias[0]

    assert values["fc1.bias"].tolist() == [0.10, -0.20, 0.0, 0.15]
    assert (values["fc2.bias"] - Golden().fc2.bias).tolist() == pytest.approx([0.008, 0.001, -0.0205], abs=1e-12)


@pytest.mark.parametrize("unit", [{}, {"unit": "group", "example": IMAGES}], ids=["entries", "groups"])
def test_statistics_are_those_of_the_pruned_network(unit):
    model = WithBatchNorm()
    found = pruning.prune(
        model, "magnitude", sparsity=0.5, repair="bn_stats", batches=[IMAGES[:3], IMAGES[3:]], loss=outputs, **unit
    )

    assert set(found.values) == {"norm.running_mean", "norm.running_var"}
    halves = [model.conv1(part).detach() for part in (IMAGES[:3], IMAGES[3:])]
    means = torch.stack([half.mean((0, 2, 3)) for half in halves]).mean(0)
    variances = torch.stack([half.var((0, 2, 3)) for half in halves]).mean(0)
    assert torch.allclose(model.norm.running_mean, means)
    assert torch.allclose(model.norm.running_var, variances)


@pytest.mark.parametrize("kind", sorted({*REPAIRS} - {"none"}))
def test_a_repair_changes_nothing_it_reads(kind):
    torch.manual_seed(0)
    model = WithBatchNorm()
    pruning.prune(model, "magnitude", sparsity=0.2)
    state = copy.deepcopy(model.state_dict())
    choices = Choices(unit=Unit("channel", spare_last=True), schedule=Schedule(sparsity=0.5), repair=Repair(kind))

    decided = pruning.plan(model, choices, batches=[IMAGES], loss=outputs)

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    pruning.commit(model, decided)
    assert torch.isfinite(model.eval()(IMAGES)).all()


def without_a_bias_to_absorb_into():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    nn.init.ones_(model[0].bias)
    return model


@pytest.mark.parametrize(
    ("model", "repair", "said"),
    [
        (Golden(), "bn_stats", "needs a BatchNorm layer"),
        (
            without_a_bias_to_absorb_into(),
            "absorb_bias",
            "needs a bias",
        ),
        (nn.MultiheadAttention(4, 1).double(), "least_squares", "belongs to a MultiheadAttention"),
        (Golden(), Repair("obs"), "`batches`"),
    ],
)
@pytest.mark.filterwarnings("ignore:without `example`")
def test_what_cannot_be_repaired_is_refused(model, repair, said):
    given = {} if said == "`batches`" else DATA
    with pytest.raises(ValueError, match=said):
        pruning.prune(model, "magnitude", sparsity=0.5, unit="channel", repair=repair, **given)
    assert not pruning.is_pruned(model)


def test_the_score_and_the_repair_share_their_matrix():
    by_score, by_repair = Golden(), Golden()
    score = Score("obs", {"damping": 0.03, "block": 4})
    pruning.prune(by_score, Choices(score, scope=Scope("global"), repair=Repair("obs")), sparsity=0.5, **DATA)
    pruning.prune(
        by_repair, Choices(score, scope=Scope("global"), repair=Repair("obs", {"damping": 0.03})), sparsity=0.5, **DATA
    )

    assert torch.equal(vector(by_score), vector(by_repair))
    read = []

    def counted(model, batch):
        read.append(batch)
        return loss(model, batch)

    pruning.prune(Golden(), "obs", sparsity=0.5, damping=0.03, block=4, batches=BATCHES, loss=counted)
    assert len(read) == len(BATCHES)
    with pytest.raises(ValueError, match=r"`repair.damping` \(=0.1\) is not taken by the repair bn_stats, which"):
        Repair("bn_stats", {"damping": 0.1})
