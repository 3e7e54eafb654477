"""Fisher, OBD and OBS: golden values, laws, and a second network against full matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scored_networks import (
    GOLDEN,
    GOLDEN_BATCH,
    Batch,
    assert_close,
    conv_batch,
    conv_network,
    cross_entropy,
    flat,
    golden,
    golden_network,
    split,
    values_of,
)
from torch import Tensor, nn
from torch.func import functional_call

from pruning.scores import fisher, fisher_matrix, obd, obs, taylor


def example_gradients(model: nn.Module, names: list[str], batch: Batch, loss: Any = cross_entropy) -> Tensor:
    """Return the gradients of all examples, computed one by one: (examples, entries)."""
    parameters = [model.get_parameter(name) for name in names]
    rows = [
        torch.autograd.grad(loss(model, one), parameters, allow_unused=True, materialize_grads=True)
        for one in split(batch, *[1] * len(batch[0]))
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def slow_fisher(model: nn.Module, names: list[str], batch: Batch) -> Tensor:
    weights = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
    return weights**2 * (example_gradients(model, names, batch) ** 2).mean(0) / 2


# --- the diagonal -----------------------------------------------------------------------------------------------------


def test_fisher_and_obd_on_the_golden_network() -> None:
    assert_close(flat(fisher(golden_network(), [GOLDEN_BATCH], cross_entropy)), golden("fisher"))
    assert_close(flat(obd(golden_network(), [GOLDEN_BATCH], cross_entropy)), golden("obd"))


def test_fisher_on_another_network_against_a_loop_over_examples() -> None:
    model = conv_network()
    scores = fisher(model, [conv_batch()], cross_entropy)

    assert_close(flat(scores), slow_fisher(model, list(scores), conv_batch()))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "circular": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", dilation=2, stride=2), (2, 7, 6)),
    "same": (nn.Conv2d(2, 4, 3, padding="same", dilation=2, groups=2), (2, 5, 5)),
    "conv1d": (nn.Conv1d(3, 2, 2, stride=2), (3, 7)),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 3, 3)),
    "sequence": (nn.Linear(3, 4), (5, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_fisher_of_every_kind_of_layer(kind: str) -> None:
    layer, shape = LAYERS[kind]
    model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).double()
    batch = (torch.randn(5, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))
    model(batch[0])
    scores = fisher(model, split(batch, 3, 2), cross_entropy)

    assert_close(flat(scores), slow_fisher(model, list(scores), batch))


class Tied(nn.Module):
    """A network of tokens whose output layer shares its embedding's weight, and whose hidden layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.hidden(torch.relu(self.hidden(self.embedding(tokens))))
        return self.head(x.mean(1))


class SequenceFirst(nn.Module):
    """Attention over a sequence along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.fc(self.attention(x, x, x)[0]).mean(0)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(Tied(), torch.tensor([[0, 1], [2, 2], [1, 0]])), (SequenceFirst(), torch.randn(3, 2, 4).double())],
)
def test_fisher_and_obd_are_right_where_layers_do_not_show_their_examples(model: nn.Module, inputs: Tensor) -> None:
    model, batch = model.double(), (inputs, torch.tensor([0, 2, 1]))
    scores = fisher(model, [batch], cross_entropy)

    assert_close(flat(scores), slow_fisher(model, list(scores), batch))
    parts = [obd(model, [one], cross_entropy) for one in split(batch, 1, 1, 1)]
    assert_close(flat(obd(model, [batch], cross_entropy)), sum(map(flat, parts), torch.zeros(())) / 3)


def test_fisher_is_no_less_than_the_square_of_the_batch_gradient() -> None:
    model = conv_network()
    scores = fisher(model, [conv_batch()], cross_entropy)
    g = example_gradients(model, list(scores), conv_batch()).mean(0)

    assert (2 * flat(scores) >= (flat(values_of(model, list(scores))) * g) ** 2).all()


def slow_hessian_diagonal(model: nn.Module, names: list[str], batch: Batch, loss: Any) -> Tensor:
    values = values_of(model, names)
    shapes = [value.shape for value in values.values()]

    def by_vector(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return loss(functional_call(model, weights, (batch[0],)), batch[1])

    return torch.autograd.functional.hessian(by_vector, flat(values)).diagonal()


def wave(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute a loss that is not convex, so that its Hessian has diagonal entries of both signs."""
    return (4 * outputs.gather(1, labels[:, None])).sin().mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, wave])
def test_obd_on_another_network_against_the_hessian(loss: Any) -> None:
    model = conv_network()
    scores = obd(model, [conv_batch()], lambda net, batch: loss(net(batch[0]), batch[1]))
    expected = slow_hessian_diagonal(model, list(scores), conv_batch(), loss)

    assert (expected < 0).any() == (loss is wave)
    assert_close(flat(scores), flat(values_of(model, list(scores))) ** 2 * expected / 2)


def test_obd_needs_to_see_outputs() -> None:
    model = golden_network()
    with pytest.raises(ValueError, match="`loss` must call the model"):
        obd(model, [GOLDEN_BATCH], lambda net, batch: net.fc1(batch[0]).mean())


@pytest.mark.parametrize(
    ("last", "loss", "told"),
    [
        (
            nn.LogSoftmax(1),
            lambda net, batch: F.nll_loss(net(batch[0]), batch[1]),
            "linear .* let the model return logits",
        ),
        (nn.Softmax(1), lambda net, batch: F.nll_loss(net(batch[0]).log(), batch[1]), "must return logits"),
        (
            nn.Identity(),
            lambda net, batch: cross_entropy(net, batch) + cross_entropy(net, batch),
            "calls the model 2 times",
        ),
        (
            nn.Identity(),
            lambda net, batch: cross_entropy(net, batch) + net[0].fc1.weight.square().sum(),
            "'0.fc1.weight' it",
        ),
    ],
)
def test_obd_refuses_losses_whose_curvature_is_not_in_one_call_s_outputs(last: nn.Module, loss: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        obd(nn.Sequential(golden_network(), last), [GOLDEN_BATCH], loss)


def test_obd_is_right_of_log_probabilities_where_the_loss_takes_them_for_logits() -> None:
    scores = obd(nn.Sequential(golden_network(), nn.LogSoftmax(1)), [GOLDEN_BATCH], cross_entropy)
    assert_close(flat(scores), golden("obd"))


class Tokens(nn.Module):
    """A network of tokens, with or without attention between the tokens."""

    def __init__(self, *, attention: bool) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True) if attention else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).tanh()
        return self.fc(x if self.mix is None else self.mix(x, x, x)[0])


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("score", [fisher, obd, obs])
def test_the_cut_into_batches_does_not_matter_where_examples_have_unlike_many_tokens(
    score: Any, attention: bool
) -> None:
    torch.manual_seed(3)
    model = Tokens(attention=attention).double()
    labels = torch.randint(5, (6, 4)).where(torch.arange(4) < torch.tensor([4, 1, 3, 0, 2, 4])[:, None], -100)
    batch = (torch.randint(5, (6, 4)), labels)

    def token_loss(net: nn.Module, given: Batch) -> Tensor:
        return F.cross_entropy(net(given[0]).flatten(0, 1), given[1].flatten())

    def tokens(given: Batch) -> int:
        return int((given[1] != -100).sum())

    whole, *others = (
        flat(score(model, split(batch, *sizes), token_loss, size=tokens, parameters=["fc.weight"]))
        for sizes in ([6], [1, 1, 4], [1] * 6)
    )
    for other in others:
        assert_close(other, whole)


def by_example(score: Any) -> Any:
    """Return Taylor's gates with the square of each example's gradient; another score as it is."""
    return partial(score, form="gate", per_example=True) if score is taylor else score


@pytest.mark.parametrize("score", [fisher, obd, obs, taylor])
def test_examples_weigh_what_they_are_given_where_the_first_weighs_the_mean(score: Any) -> None:
    model, sizes = nn.Linear(4, 3).double(), torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    torch.manual_seed(0)
    batch = (torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 2, 1]), sizes)

    def loss(net: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        inputs, labels, weights = given
        return (F.cross_entropy(net(inputs), labels, reduction="none") * weights).sum() / weights.sum()

    def size(given: tuple[Tensor, ...]) -> float:
        return float(given[2].sum())

    found = [
        flat(by_example(score)(model, batches, loss, size=size, parameters=["weight"]))
        for batches in ([batch], [tuple(each[n : n + 1] for each in batch) for n in range(3)])
    ]

    assert_close(found[0], found[1])
    if score is fisher:
        rows = example_gradients(model, ["weight"], batch[:2])
        assert_close(found[0], model.weight.detach().flatten() ** 2 * (sizes @ rows**2) / sizes.sum() / 2)


# --- OBS --------------------------------------------------------------------------------------------------------------


def test_obs_on_the_golden_network() -> None:
    for block, name in ((None, "obs"), (4, "obs_blocks")):
        scores = obs(golden_network(), [GOLDEN_BATCH], cross_entropy, damping=0.01, block=block)
        assert_close(flat(scores), golden(name))
    matrix = fisher_matrix(golden_network(), [GOLDEN_BATCH], cross_entropy, damping=0.01)
    assert_close(flat(matrix.inverse_diagonal()), golden("obs_inverse"))


def slow_inverse(gradients: Tensor, damping: float) -> Tensor:
    """Compute the inverse by WoodFisher's recursion."""
    inverse, count = torch.eye(gradients.shape[1], dtype=torch.float64) / damping, len(gradients)
    for g in gradients:
        u = inverse @ g
        inverse = inverse - torch.outer(u, u) / (count + g @ u)
    return inverse


@pytest.mark.parametrize("examples", [6, 40])
def test_obs_on_another_network_against_the_recursion(examples: int) -> None:
    model, batch = conv_network(), conv_batch(examples)
    scores = obs(model, split(batch, 2, examples - 2), cross_entropy, damping=0.1)
    inverse = slow_inverse(example_gradients(model, list(scores), batch), 0.1)

    assert_close(flat(scores), flat(values_of(model, list(scores))) ** 2 / (2 * inverse.diagonal()))


def test_blocks_begin_anew_at_each_row() -> None:
    model = conv_network()
    scores = obs(model, [conv_batch()], cross_entropy, damping=0.1, block=5)
    expected = []
    for name in scores:
        weight = model.get_parameter(name).detach().flatten(1)
        gradients = example_gradients(model, [name], conv_batch()).view(6, *weight.shape)
        for row in range(len(weight)):
            for columns in range(0, weight.shape[1], 5):
                inverse = slow_inverse(gradients[:, row, columns : columns + 5], 0.1)
                expected.append(weight[row, columns : columns + 5] ** 2 / (2 * inverse.diagonal()))

    assert_close(flat(scores), torch.cat(expected))


def test_a_block_of_one_is_the_diagonal_and_the_damping() -> None:
    model = golden_network()
    scores = flat(obs(model, [GOLDEN_BATCH], cross_entropy, damping=0.01, block=1))
    weights = flat(values_of(model, ["fc1.weight", "fc2.weight"]))

    assert_close(scores, golden("fisher") + 0.01 * weights**2 / 2)


def test_what_is_pruned_takes_no_part() -> None:
    model = golden_network()
    mask = (torch.arange(16) % 3 > 0).view(4, 4)
    scores = obs(model, [GOLDEN_BATCH], cross_entropy, damping=0.01, masks={"fc1.weight": mask})
    with torch.no_grad():
        model.fc1.weight *= mask
    alive = torch.cat([mask.flatten(), torch.ones(12)]) != 0
    gradients = example_gradients(model, list(scores), GOLDEN_BATCH)[:, alive]
    weights = flat(values_of(model, list(scores)))

    assert_close(flat(scores)[alive], weights[alive] ** 2 / (2 * slow_inverse(gradients, 0.01).diagonal()))
    assert not flat(scores)[~alive].any()


def test_a_block_scores_what_removing_all_of_it_costs() -> None:
    scores = obs(golden_network(), [GOLDEN_BATCH], cross_entropy, damping=0.01, block=4, form="block")
    want = [0.019621284, 0.0085088292, 0.0378403, 0.044355391, 0.01217552, 0.0044262699, 0.039083445]  # of golden F^-1
    assert_close(flat(scores), torch.tensor(want, dtype=torch.float64), rtol=1e-7)

    with pytest.raises(ValueError, match=r"`block` \(=3\) must divide the weights of an output .* 'fc1.weight'"):
        obs(golden_network(), [GOLDEN_BATCH], cross_entropy, block=3, form="block")
    with pytest.raises(ValueError, match=r"`block` \(=None\) must divide"):
        obs(golden_network(), [GOLDEN_BATCH], cross_entropy, form="block")
    for model in (Conv1D(), nn.Sequential(nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 4, 1), nn.Flatten())):
        with pytest.raises(ValueError, match=r"'.*weight' of Conv.* Leave this tensor out if its rows are inputs"):
            obs(model.double(), [GOLDEN_BATCH], cross_entropy, block=1, form="block")


class Conv1D(nn.Module):
    """Stands for transformers' layer of that name: W has the shape (inputs, outputs)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def unflat(vector: Tensor) -> dict[str, Tensor]:
    return {"fc1.weight": vector[:16].view(4, 4), "fc2.weight": vector[16:].view(3, 4)}


def test_updates_of_the_golden_network() -> None:
    model = golden_network()
    matrix = fisher_matrix(model, [GOLDEN_BATCH], cross_entropy, damping=0.01)
    weights = values_of(model, ["fc1.weight", "fc2.weight"])
    first = torch.zeros(28, dtype=torch.float64)
    first[22] = 1
    factor = flat(weights)[22] / flat(matrix.inverse_diagonal())[22]
    kept = torch.ones(28, dtype=torch.float64)
    kept[22] = 0

    assert_close(-factor * flat(matrix.solve(unflat(first))), golden("obs_update"))
    assert_close(flat(matrix.joint_update(weights, unflat(kept))), golden("obs_update"))


@pytest.mark.parametrize("block", [None, 3])
def test_the_joint_update_is_the_cheapest_that_prunes(block: int | None) -> None:
    model = golden_network()
    matrix = fisher_matrix(model, [GOLDEN_BATCH], cross_entropy, damping=0.01, block=block)
    gradients = example_gradients(model, ["fc1.weight", "fc2.weight"], GOLDEN_BATCH)
    full = gradients.T @ gradients / 6 + 0.01 * torch.eye(28, dtype=torch.float64)
    if block:
        place = torch.arange(28) // 4 * 2 + (torch.arange(28) % 4 == 3)
        full = full * (place[:, None] == place)
    weights = values_of(model, ["fc1.weight", "fc2.weight"])
    kept = torch.ones(28, dtype=torch.float64)
    pruned = [19, 22] if block is None else [1, 2, 7, 19, 22]
    kept[pruned] = 0

    update = flat(matrix.joint_update(weights, unflat(kept)))

    inverse, w = torch.linalg.inv(full), flat(weights)
    assert_close(update, -inverse[:, pruned] @ torch.linalg.solve(inverse[pruned][:, pruned], w[pruned]))
    assert_close(flat(matrix.solve(unflat(w))), inverse @ w)
    if block is None:
        assert (update @ full @ update / 2).item() == pytest.approx(GOLDEN["obs_pair_cost"], rel=1e-9)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ValueError, match=r"`damping` \(=0\) must be above 0"):
        obs(golden_network(), [GOLDEN_BATCH], cross_entropy, damping=0)
    with pytest.raises(ValueError, match=r"`block` \(=0\) must be an integer of at least 1"):
        obs(golden_network(), [GOLDEN_BATCH], cross_entropy, block=0)
