"""Methods for one layer: golden values, and the laws that they share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.catalogue.reconstructions import RECONSTRUCTIONS
from pruning.reconstruction.layer_problem import LayerProblem, Solution, Target, alps, least_squares, wanda
from pruning.reconstruction.sparsegpt import inverse_factor, sparsegpt

WEIGHT = torch.tensor(
    [[0.5, -0.3, 0.8, 0.1], [-0.6, 0.4, 0.2, -0.9], [0.25, 0.7, -0.45, 0.35], [-0.15, 0.55, 0.65, 0.05]],
    dtype=torch.float64,
)
INPUTS = torch.tensor(
    [
        [1, 0.8, -0.5, 0.1],
        [-0.3, -1.5, 0.6, -0.4],
        [0.4, 1.8, 0.9, 0.2],
        [-1.2, 0.6, 0.2, 0.3],
        [0.6, -1.1, 1.1, -0.2],
        [0.2, 1.2, -0.8, 0.5],
    ],
    dtype=torch.float64,
)
METHODS: dict[str, Callable[[LayerProblem], Solution]] = {
    "block 4": partial(sparsegpt, block=4),
    **{name: row.load() for name, row in RECONSTRUCTIONS.items() if row.chooses},
}


def problem(
    weight: Tensor = WEIGHT, inputs: Tensor = INPUTS, kept: Tensor | None = None, **target: float
) -> LayerProblem:
    whole = torch.ones_like(weight, dtype=torch.bool)
    hessian = 2 / len(inputs) * inputs.mT @ inputs
    return LayerProblem(weight, hessian, whole if kept is None else kept, Target(**target))  # type: ignore[arg-type]


def drawn(rows: int = 6, columns: int = 12, count: int = 30, seed: int = 0, **target: float) -> LayerProblem:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, dtype=torch.float64, generator=generator)
    inputs = torch.randn(count, columns, dtype=torch.float64, generator=generator) @ mixed
    return problem(torch.randn(rows, columns, dtype=torch.float64, generator=generator), inputs, **target)


def refit(problem: LayerProblem, kept: Tensor, damping: float = 0.01) -> Tensor:
    """Return the weights of least error under H + damping mean(diag H) I that are 0 where `kept` is False.

        for each row w with survivors S:     v_S = w_S + [H_SS]^-1 H_SZ w_Z,      Z the pruned entries

    Args:
        problem: the layer.
        kept: bool of the weight's shape.
        damping: fraction of the mean of the diagonal.
    """
    hessian, weight = problem.damped(damping), problem.weight
    found = torch.zeros_like(weight)
    for row, mask in enumerate(kept):
        if bool(mask.any()):
            part = hessian[mask]
            change = part[:, ~mask] @ weight[row, ~mask]
            found[row, mask] = weight[row, mask] + torch.linalg.solve(part[:, mask], change)
    return found


def rounded(weight: Tensor) -> list[float]:
    return weight.flatten().tolist()


BLOCK_4 = [0.5, 0, 0.75014634, 0, -0.6, 0, 0, 0.18198152, 0, 0.8110722, -0.48220189, 0, 0, 0.48335668, 0.66932113, 0]
BLOCK_2 = [0.5, 0, 0.75014634, -0.92391933, -0.6, 0, 0, 0, *BLOCK_4[8:]]


@pytest.mark.parametrize(
    ("block", "target", "expected"),
    [
        (4, {"sparsity": 0.5}, BLOCK_4),
        (4, {"sparsity": 0.5, "n": 2, "m": 4}, BLOCK_4),
        (2, {"sparsity": 0.5}, BLOCK_2),
    ],
)
def test_sparsegpt_gives_the_golden_weights(block: int, target: dict[str, float], expected: list[float]) -> None:
    assert rounded(sparsegpt(problem(**target), block=block).weight) == pytest.approx(expected, abs=1e-8)


def test_wanda_gives_the_golden_mask() -> None:
    """At 50% by row and for 2:4."""
    expected = "0110110001100110"
    for target in ({"sparsity": 0.5}, {"sparsity": 0.5, "n": 2, "m": 4}):
        assert "".join(str(int(each)) for each in wanda(problem(**target)).kept.flatten()) == expected  # type: ignore[arg-type]


def test_the_sum_of_squared_errors_is_the_error_under_the_damped_statistics() -> None:
    """With one pruned column, the update is that of exact OBS: e^2 = w^2 / [Hc^-1]_00 summed over rows."""
    found = problem(sparsity=0.25)
    first = found.kept.clone()
    first[:, 0] = False
    weight = found.weight.masked_fill(~first, 0)
    asked = LayerProblem(found.weight, found.hessian, first, Target(0.25))
    solved = sparsegpt(asked, block=4)
    damped = found.damped(0.01)
    change = solved.weight - found.weight

    assert torch.equal(solved.kept, first)
    expected = (found.weight[:, 0] ** 2 / torch.linalg.inv(damped)[0, 0]).sum()
    assert float(((change @ damped) * change).sum()) == pytest.approx(float(expected), rel=1e-12)
    assert not torch.equal(solved.weight, weight)


def test_the_factor_gives_the_inverse() -> None:
    damped = drawn().damped(0.01)
    upper = inverse_factor(damped)

    torch.testing.assert_close(upper.mT @ upper @ damped, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-10)
    assert torch.equal(upper, upper.triu())


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.37, 0.5, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_counts_are_exact_and_pruned_weights_are_zero(method: str, sparsity: float) -> None:
    asked = drawn(sparsity=sparsity)
    solved = METHODS[method](asked)

    assert int((~solved.kept).sum()) == round(sparsity * 72)
    assert not solved.weight[~solved.kept].any()


@pytest.mark.parametrize("method", METHODS)
def test_windows_keep_n_of_m(method: str) -> None:
    solved = METHODS[method](drawn(sparsity=0.5, n=2, m=4))

    assert (solved.kept.view(6, 3, 4).sum(-1) == 2).all()


@pytest.mark.parametrize("method", METHODS)
def test_entries_that_were_pruned_stay_pruned(method: str) -> None:
    whole = drawn(sparsity=0.5)
    before = torch.rand(6, 12, generator=torch.Generator().manual_seed(3)) > 0.3
    asked = LayerProblem(whole.weight * before, whole.hessian, before, Target(0.5))

    solved = METHODS[method](asked)

    assert not (solved.kept & ~before).any()


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_is_best_and_sparsegpt_lies_between_it_and_masking(seed: int) -> None:
    asked = drawn(seed=seed, sparsity=0.5)
    solved = sparsegpt(asked)
    damped = LayerProblem(asked.weight, asked.damped(0.01), asked.kept, asked.target)
    best = refit(asked, solved.kept)

    assert damped.error(best) <= damped.error(solved.weight) + 1e-12
    assert damped.error(solved.weight) <= damped.error(asked.weight * solved.kept) + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_least_squares_is_joint_obs(seed: int) -> None:
    """dw = - Hc^-1 E_Q ([Hc^-1]_QQ)^-1 w_Q for the pruned entries Q of each row, by an inverse."""
    asked = drawn(seed=seed, sparsity=0.5)
    kept, inverse = sparsegpt(asked).kept, torch.linalg.inv(asked.damped(0.01))
    expected = asked.weight.clone()
    for row, mask in enumerate(kept):
        gone = ~mask
        expected[row] -= inverse[:, gone] @ torch.linalg.solve(inverse[gone][:, gone], asked.weight[row, gone])

    torch.testing.assert_close(refit(asked, kept), expected * kept, rtol=0, atol=1e-10)
    found = least_squares(LayerProblem(asked.weight, asked.hessian, kept, Target()))
    torch.testing.assert_close(found.weight, expected * kept, rtol=0, atol=1e-10)
    assert torch.equal(found.kept, kept)


@pytest.mark.parametrize("seed", range(5))
def test_alps_is_at_least_as_good_as_sparsegpt(seed: int) -> None:
    asked = drawn(rows=16, columns=32, count=200, seed=seed, sparsity=0.6)
    damped = LayerProblem(asked.weight, asked.damped(0.01), asked.kept, asked.target)

    assert damped.error(alps(asked).weight) <= damped.error(sparsegpt(asked).weight)


def test_alps_finds_the_best_mask_of_a_small_row() -> None:
    """All masks of one row of six inputs are tried."""
    asked = drawn(rows=1, columns=6, count=40, sparsity=0.5)
    damped = LayerProblem(asked.weight, asked.damped(0.01), asked.kept, asked.target)
    errors = []
    for left in combinations(range(6), 3):
        mask = torch.zeros(1, 6, dtype=torch.bool)
        mask[0, list(left)] = True
        errors.append(damped.error(refit(asked, mask)))

    assert damped.error(alps(asked).weight) <= sorted(errors)[2], "one of the best three of twenty"
    assert min(errors) <= damped.error(sparsegpt(asked).weight) + 1e-12


def test_an_input_that_is_always_zero_goes_first() -> None:
    inputs = INPUTS.clone()
    inputs[:, 1] = 0
    for method in (wanda, partial(sparsegpt, block=4), alps):
        kept = method(problem(inputs=inputs, sparsity=0.25)).kept
        assert not kept[:, 1].any()


SHORT = (
    (nn.Linear(3, 200), (3,)),
    (nn.Conv1d(4, 8, 3, groups=4), (4, 7)),
    (nn.Conv2d(6, 6, 3, groups=6), (6, 5, 5)),
    (nn.Linear(9, 5), (9,)),
)


@pytest.mark.parametrize(("layer", "shape"), SHORT, ids=str)
def test_short_rows_share_out_what_rounding_down_leaves(layer: nn.Module, shape: tuple[int, ...]) -> None:
    batches, model = [torch.randn(30, *shape, dtype=torch.float64)], nn.Sequential(layer).double()
    earlier = None
    for sparsity in (0.1, 0.3, 0.34, 0.5, 0.77):
        by_layer = pruning.layerwise(copy.deepcopy(model), "wanda", batches, sparsity=sparsity, dtype=torch.float64)
        masks = pruning.plan(model, "wanda", order="at_once", batches=batches, sparsity=sparsity).masks
        lost = (~masks["0.weight"]).flatten(1).sum(1)

        assert masks == by_layer.masks
        assert int(lost.sum()) == int(sparsity * masks["0.weight"].numel() + 0.5 + 1e-9)
        assert int(lost.max() - lost.min()) <= 1
        assert earlier is None or masks.nested_in(earlier)
        again = pruning.plan(model, "wanda", order="at_once", batches=batches, sparsity=sparsity, masks=masks).masks
        assert again == masks
        earlier = masks


def test_long_rows_lose_the_floor_as_in_the_code_of_the_paper() -> None:
    model = nn.Sequential(nn.Linear(101, 7))

    masks = pruning.layerwise(model, "wanda", [torch.randn(5, 101)], sparsity=0.5).masks

    assert (~masks["0.weight"]).sum(1).tolist() == [50] * 7


def test_a_dead_input_goes_first_in_a_window_however_large_its_weights_are() -> None:
    weight = torch.tensor([[100.0, 0.1, 0.2, 0.3]], dtype=torch.float64)
    inputs = INPUTS.clone()
    inputs[:, 0] = 0

    for method in (wanda, partial(sparsegpt, block=4), alps):
        assert not method(problem(weight, inputs, sparsity=0.5, n=2, m=4)).kept[0, 0]


def test_wanda_does_not_depend_on_the_scale_of_a_row_and_is_magnitude_at_equal_norms() -> None:
    asked = drawn(sparsity=0.5)
    scaled = LayerProblem(asked.weight * torch.arange(1, 7)[:, None], asked.hessian, asked.kept, asked.target)
    assert torch.equal(wanda(asked).kept, wanda(scaled).kept)

    equal = LayerProblem(asked.weight, torch.eye(12, dtype=torch.float64), asked.kept, asked.target)
    smallest = asked.weight.abs().argsort(1)[:, :6]
    assert not wanda(equal).kept.gather(1, smallest).any()


def test_statistics_that_are_no_numbers_are_told() -> None:
    broken = LayerProblem(WEIGHT, torch.full((4, 4), torch.nan, dtype=torch.float64), WEIGHT != 9, Target(0.5))
    with pytest.raises(ValueError, match="not positive definite; pass a larger `damping`"):
        sparsegpt(broken)
