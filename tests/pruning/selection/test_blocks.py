"""Blocks of four inputs of one output or several: index in each layout, masks against NumPy, masks that change."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import pruning
from pruning.choices.axes import Scope, Unit
from pruning.kernels.byte_kernels import in_blocks
from pruning.kernels.group_kernels import _grouped
from pruning.kernels.sparse_weight import ByteScale, LayerShape, SparseWeight
from pruning.layouts import WeightLayout, layout_of, required_layout
from pruning.reconstruction.layer_problem import LayerProblem, Solution, Target
from pruning.reconstruction.solving import _columns, _reordered
from pruning.selection.selection_groups import block_index, groups_of

Array = NDArray[Any]
Places = tuple[Array, Array, Array, int, int]
"""Output, kernel position and input of each entry, all counted from 0; numbers of positions and of inputs."""


class Conv1D(nn.Module):
    """Stands for transformers' layer of that name: y = x W with W of shape (inputs, outputs)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))


class Experts(nn.Module):
    """Experts in stacks, (experts, outputs, inputs) or, if they are transposed, (experts, inputs, outputs)."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        up, down = torch.randn(3, 14, 10), torch.randn(3, 10, 7)
        self.weight = nn.Parameter(up.mT.contiguous() if is_transposed else up)
        self.down = nn.Parameter(down.mT.contiguous() if is_transposed else down)


def linear(at: Array, shape: tuple[int, ...]) -> Places:
    return at[0], at[0] * 0, at[1], 1, shape[1]


def convolution(at: Array, shape: tuple[int, ...]) -> Places:
    position = at[2] if len(shape) == 3 else at[2] * shape[3] + at[3]
    return at[0], position, at[1], int(np.prod(shape[2:])), shape[1]


def transposed(at: Array, shape: tuple[int, ...], groups: int = 2) -> Places:
    inputs = shape[0] // groups
    output = at[0] // inputs * shape[1] + at[1]
    return output, at[2] * shape[3] + at[3], at[0] % inputs, shape[2] * shape[3], inputs


def conv1d(at: Array, shape: tuple[int, ...]) -> Places:
    return at[1], at[0] * 0, at[0], 1, shape[0]


def experts(at: Array, shape: tuple[int, ...]) -> Places:
    return at[0] * shape[1] + at[1], at[0] * 0, at[2], 1, shape[2]


def turned_experts(at: Array, shape: tuple[int, ...]) -> Places:
    return at[0] * shape[2] + at[2], at[0] * 0, at[1], 1, shape[1]


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Places]]] = {
    "linear": (lambda: nn.Linear(10, 6), linear),
    "whole": (lambda: nn.Linear(12, 6), linear),
    "conv2d": (lambda: nn.Conv2d(6, 5, (3, 2)), convolution),
    "conv1d": (lambda: nn.Conv1d(9, 5, 3), convolution),
    "few channels": (lambda: nn.Conv2d(3, 5, 3), convolution),
    "grouped": (lambda: nn.Conv2d(12, 6, 3, groups=2), convolution),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), convolution),
    "transposed": (lambda: nn.ConvTranspose2d(12, 10, (2, 3), groups=2), transposed),
    "transformers": (lambda: Conv1D(6, 10), conv1d),
    "experts": (lambda: Experts(is_transposed=False), experts),
    "turned experts": (lambda: Experts(is_transposed=True), turned_experts),
}


MATRICES = {"grouped": 2, "depthwise": 6, "transposed": 2, "experts": 3, "turned experts": 3}
"""Layer -> number of its groups or experts, whose outputs share no blocks."""


def indices(case: str, module: nn.Module, outputs: int = 1) -> Array:
    """Return the index of each entry's block, (output // outputs * positions + position) * blocks + input // 4."""
    shape = tuple(module.get_parameter("weight").shape)
    output, position, read, positions, inputs = LAYERS[case][1](np.indices(shape), shape)
    each = (output.max() + 1) // MATRICES.get(case, 1)
    row = output // each * -(-each // outputs) + output % each // outputs
    found: Array = (row * positions + position) * -(-inputs // 4) + read // 4
    return found


def kept_in_numpy(scores: list[Array], index: list[Array], sparsity: float) -> list[Array]:
    """Return masks without the blocks with the smallest sums, ranked together; ties: lowest index first."""
    sums = [np.bincount(each.ravel(), score.ravel()) for score, each in zip(scores, index, strict=True)]
    together = np.concatenate(sums)
    kept = np.ones(len(together), bool)
    kept[np.argsort(together, kind="stable")[: round(sparsity * len(together))]] = False
    cuts = np.split(kept, np.cumsum([len(each) for each in sums])[:-1])
    return [cut[each] for cut, each in zip(cuts, index, strict=True)]


def network() -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({case: make() for case, (make, _) in LAYERS.items()}).double()


@pytest.mark.parametrize("outputs", [1, 2, 4, 16])
@pytest.mark.parametrize("case", LAYERS)
def test_the_index_of_a_block_follows_from_output_position_and_input(case: str, outputs: int) -> None:
    module = LAYERS[case][0]()
    shape = module.get_parameter("weight").shape

    found = block_index(required_layout(module), shape, outputs=outputs)
    assert found.shape == shape
    assert found.numpy().tolist() == indices(case, module, outputs).tolist()
    cut = groups_of({"w": shape}, Unit("block", outputs=outputs), None, {"w": layout_of(module, "weight")})
    assert cut.sizes["w"] == int(found.max()) + 1
    values = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(cut.sizes["w"], dtype=torch.float64).index_add_(0, found.flatten(), values.flatten())
    assert torch.allclose(cut.reduce({"w": values})["w"], sums, rtol=1e-14)
    rows = groups_of({"w": shape}, Unit("block", outputs=outputs), Scope("row"), {"w": layout_of(module, "weight")})
    pools = torch.arange(cut.sizes["w"]) // rows.parts[0].pool
    of_outputs = rows.expand({"w": pools})["w"]
    assert len(of_outputs.unique()) == int(found.max() + 1) // rows.parts[0].pool
    assert torch.equal(cut.expand({"w": torch.arange(cut.sizes["w"])})["w"], found)


@pytest.mark.filterwarnings("ignore:each output of .* reads one input", "ignore:every entry of")
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(("sparsity", "outputs"), [(0.0, 1), (0.37, 1), (0.9, 1), (0.37, 3), (0.37, 16)])
def test_masks_are_those_of_numpy(scope: str, sparsity: float, outputs: int) -> None:
    model, unit = network(), {"kind": "block", "outputs": outputs}
    names = [f"{case}.weight" for case in LAYERS]
    plan = pruning.prune(model, "magnitude", sparsity=sparsity, unit=unit, scope=scope, parameters=names)

    scores = [np.abs(model[case].get_parameter("weight_orig").detach().numpy()) for case in LAYERS]
    index = [indices(case, layer, outputs) for case, layer in network().items()]
    if scope == "global":
        want = kept_in_numpy(scores, index, sparsity)
    else:
        want = [kept_in_numpy([s], [i], sparsity)[0] for s, i in zip(scores, index, strict=True)]
    for name, mask in zip(names, want, strict=True):
        assert plan.masks[name].numpy().tolist() == mask.tolist(), name
    total = sum(plan.details["units"].values())
    if scope == "global":
        assert total - sum(plan.details["kept"].values()) == round(sparsity * total)


@pytest.mark.parametrize("case", ["linear", "conv2d", "grouped", "few channels"])
def test_kernels_in_8_bits_skip_the_pruned_blocks(case: str) -> None:
    layer = copy.deepcopy(network()[case]).float()
    mask = pruning.plan(layer, "magnitude", sparsity=0.7, unit="block").masks["weight"]
    weight = layer.get_parameter("weight").detach().masked_fill(~mask, 0)

    shape = LayerShape("linear", weight.shape[1], len(weight), rounding=ByteScale(1.0, 0))
    packed, _, _ = in_blocks(SparseWeight.of(weight), shape)
    index = block_index(required_layout(layer), weight.shape)
    assert len(packed.values) == len(index[mask].unique()) == int(index.max()) + 1 - round(0.7 * (int(index.max()) + 1))


def test_kernels_of_16_outputs_skip_the_pruned_blocks() -> None:
    layer = nn.Linear(70, 37)
    unit = {"kind": "block", "outputs": 16}
    mask = pruning.plan(layer, "magnitude", sparsity=0.7, unit=unit).masks["weight"]
    weight = layer.weight.detach().masked_fill(~mask, 0)
    shape = LayerShape("linear", 70, 37, rounding=ByteScale(1.0, 0))

    packed, _, _ = in_blocks(SparseWeight.of(weight), shape)
    blocks, _ = _grouped(packed)
    kept = 3 * 18 - round(0.7 * 3 * 18)
    assert len(block_index(required_layout(layer), weight.shape, outputs=16)[mask].unique()) == kept
    assert len((packed.rows() // 16 * 18 + packed.columns).unique()) == kept
    assert kept <= len(blocks.columns) < kept + 3 * 16


def test_presets_of_sweeps_are_names_in_python() -> None:
    model = nn.Linear(8, 32)
    named, spelled = (
        pruning.plan(model, "magnitude", sparsity=0.5, unit=unit, scope=scope)
        for unit, scope in (
            ("block_16x4", "erk"),
            ({"kind": "block", "outputs": 16}, {"kind": "layer", "allocation": "erk"}),
        )
    )

    assert named.details["units"] == {"weight": 4}
    assert torch.equal(named.masks["weight"], spelled.masks["weight"])


def test_layers_with_one_input_say_that_their_blocks_are_single_entries() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6))
    with pytest.warns(UserWarning, match=r"each output of 1.weight reads one input: its blocks are single entries"):
        plan = pruning.prune(model, "magnitude", sparsity=0.5, unit="block")
    assert plan.details["units"] == {"0.weight": 54, "1.weight": 54}


def test_ties_go_by_the_lowest_index_and_means_compare_short_blocks() -> None:
    weights = {"w": torch.tensor([[1.0, 1, 1, 1, 1, 1]])}
    cut = groups_of({"w": (1, 6)}, Unit("block"), Scope(normalise="size"))

    assert cut.reduce(weights)["w"].tolist() == [1, 1]
    few = groups_of({"w": (3, 6)}, Unit("block", outputs=2), Scope(normalise="size"))
    assert few.reduce({"w": torch.ones(3, 6)})["w"].tolist() == [1, 1, 1, 1]
    assert groups_of({"w": (1, 6)}, Unit("block")).reduce(weights)["w"].tolist() == [4, 2]
    even = pruning.plan(nn.Linear(12, 1), lambda *_, **__: {"weight": torch.ones(1, 12)}, sparsity=1 / 3, unit="block")
    assert even.masks["weight"].tolist() == [[False] * 4 + [True] * 8]


def test_random_blocks_are_drawn_alike_whatever_their_length() -> None:
    plan = pruning.plan(
        nn.Linear(6, 1000), "random", sparsity=0.5, unit="block", generator=torch.Generator().manual_seed(0)
    )
    long, short = plan.masks["weight"][:, 0], plan.masks["weight"][:, 5]
    assert 0.45 < float(short.double().mean()) < 0.55
    assert 0.45 < float(long.double().mean()) < 0.55


def test_obs_scores_blocks_of_a_convolution_by_their_entries() -> None:
    """The Fisher matrix has blocks along rows, which are other entries where the kernel is larger than 1."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten()).double(), torch.randn(6, 4, 3, 3).double()
    data: dict[str, Any] = {"batches": [(x, x)], "loss": lambda net, batch: net(batch[0]).square().mean()}
    plan = pruning.plan(model, "obs", sparsity=0.5, unit="block", block=4, repair="none", **data)

    scores = pruning.scores.obs(model, **data, block=4)["0.weight"]
    kept = scores.sum(1).flatten() >= scores.sum(1).flatten().sort().values[6]
    assert plan.masks["0.weight"].all(1).flatten().tolist() == kept.tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scope": "window"}, r"`scope.kind` \(='window'\) ranks single entries .* unit.kind='entry'"),
        ({"dynamics": "set"}, r"`unit.kind` \(='block'\) cannot be combined with dynamics.kind='set'"),
        ({"dynamics": "sr_ste", "scope": "window"}, r"ranks single entries along the input dimension"),
        ({"unit": {"size": 0}}, r"`unit.size` \(=0\) must be an int of at least 1"),
        ({"unit": {"outputs": 0}}, r"`unit.outputs` \(=0\) must be an int of at least 1"),
        ({"unit": {"kind": "entry", "outputs": 16}}, r"`unit.outputs` \(=16\) is for unit.kind 'block', and unit.kind"),
        ({"dim": 1}, r"`unit.dim` \(=1\) is for unit.kind 'channel', and unit.kind is 'block'; leave"),
    ],
)
def test_what_has_no_blocks_is_refused(options: dict[str, Any], said: str) -> None:
    unit = {"kind": "block", **options.get("unit", {})}
    with pytest.raises(ValueError, match=said):
        pruning.plan(nn.Linear(8, 8), "magnitude", sparsity=0.5, **{**options, "unit": unit})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("l1_unstructured", "unit.kind` .='block'. is for methods that rank by a score, but L1Unstructured selects by"),
        ("global_random_unstructured", "but RandomUnstructured selects by itself; .* or unit.kind='entry'"),
        ("ln_structured", "but LnStructured selects by itself; .* or unit.kind='channel'"),
        ("fpgm", "`score.kind` .='fpgm'. scores whole channels, not units of kind 'block'; use unit.kind='channel'"),
        ("slimming", "`score.kind` .='bn_scale'. scores whole channels"),
    ],
)
def test_methods_that_count_other_units_refuse_blocks(method: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pruning.plan(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), method, sparsity=0.5, unit="block")


@pytest.mark.parametrize("call", [pruning.plan, pruning.prune])
def test_a_size_that_is_no_function_of_a_batch_is_not_taken_for_that_of_a_block(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"`size` .=8. must be a function.* unit={'kind': 'block', 'size': 8}"):
        call(nn.Linear(8, 8), "magnitude", sparsity=0.5, unit="block", size=8)


# --- layer by layer ---------------------------------------------------------------------------------------------------


def convolutional() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    layers = (nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 2, groups=2), nn.ReLU(), nn.Conv2d(12, 12, 2, groups=12))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 10)).double()
    return model, torch.randn(32, 6, 6, 6).double() @ torch.randn(6, 6).double()


@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "alps"])
def test_layerwise_prunes_whole_blocks_to_exact_counts(method: str, outputs: int) -> None:
    model, x = convolutional()
    found = pruning.layerwise(model, method, [(x,)], sparsity=0.6, size=4, outputs=outputs)

    for name, mask in found.masks.items():
        module = model.get_submodule(name.rpartition(".")[0])
        index = block_index(required_layout(module), mask.shape, outputs=outputs)
        sums, sizes = (
            torch.bincount(index.flatten(), each.flatten().double()) for each in (mask, torch.ones(mask.shape))
        )
        assert ((sums == 0) | (sums == sizes)).all(), name
        lost, blocks = int((sums == 0).sum()), len(sums)
        assert lost == round(0.6 * blocks) if method != "wanda" else abs(lost - 0.6 * blocks) <= 12
        assert not module.get_parameter("weight")[~mask].any()


def test_updates_of_survivors_lower_the_error_of_blocks() -> None:
    errors = {}
    for method in ("magnitude", "sparsegpt", "alps"):
        model, x = convolutional()
        layers = pruning.layerwise(model, method, [(x,)], sparsity=0.6, size=4).layers
        errors[method] = [layers[name].error for name in ("0.weight", "2.weight")]
        with torch.no_grad():
            errors[method].append(float((model(x) - convolutional()[0](x)).square().mean()))
    assert all(one <= other for one, other in zip(errors["sparsegpt"], errors["magnitude"], strict=True))
    assert all(one <= other for one, other in zip(errors["alps"], errors["magnitude"], strict=True))


@pytest.mark.parametrize(
    "given", [{"unit": "block"}, {"unit": {"kind": "block", "outputs": 4}}, {"scope": "window", "n": 1, "m": 2}]
)
@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_layers_one_by_one_have_the_masks_of_all_at_once(method: str, given: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(20, 6, 3, groups=2 if method == "wanda" else 1)).double()
    batch = (torch.randn(20, 20, 5, 5).double(),)
    target: dict[str, Any] = {} if "scope" in given else {"sparsity": 0.5}
    own: dict[str, Any] = (
        {"order": "at_once", "batches": [batch], "loss": lambda net, b: net(*b).mean()} if method == "wanda" else {}
    )
    plan = pruning.plan(model, method, **target, **given, **own)

    options: dict[str, Any] = {"size": 4, **target} if "unit" in given else {"n": 1, "m": 2}
    options |= {"outputs": 4} if isinstance(given.get("unit"), dict) else {}
    assert pruning.layerwise(model, method, [batch], **options).masks == plan.masks


def test_a_result_of_blocks_goes_on_and_another_size_is_told() -> None:
    model, x = convolutional()
    done = pruning.layerwise(model, "sparsegpt", [(x,)], sparsity=0.6, size=4)
    assert pruning.layerwise(model, "sparsegpt", [(x,)], sparsity=0.6, size=4, done=done).masks == done.masks
    with pytest.raises(ValueError, match="must be of the same `sparsity`"):
        pruning.layerwise(model, "sparsegpt", [(x,)], sparsity=0.3, size=4, done=done)
    with pytest.raises(ValueError, match=r"`size` \(=4\) must be an integer of at least 1.*and 1 where `n` and `m`"):
        pruning.layerwise(model, "sparsegpt", [(x,)], n=2, m=4, size=4)
    with pytest.raises(ValueError, match=r"`outputs` \(=0\) must be an integer of at least 1"):
        pruning.layerwise(model, "sparsegpt", [(x,)], sparsity=0.6, size=4, outputs=0)


def test_inputs_that_fill_up_a_block_change_neither_statistics_nor_errors() -> None:
    torch.manual_seed(4)
    inputs, weight = torch.randn(30, 12).double(), torch.randn(5, 12).double()  # 6 channels at 2 positions
    plain = LayerProblem(weight, inputs.mT @ inputs, torch.ones(5, 12, dtype=torch.bool), Target(0.5, size=4))
    columns = _columns(WeightLayout(("output", "input", "position")), (5, 6, 2), plain.target)
    filled, own = _reordered(plain, columns), columns >= 0

    assert columns.tolist() == [0, 2, 4, 6, 8, 10, -1, -1, 1, 3, 5, 7, 9, 11, -1, -1]
    torch.testing.assert_close(filled.damped(0.1)[own][:, own], plain.damped(0.1)[columns[own]][:, columns[own]])
    assert not filled.damped(0.1)[own][:, ~own].any()
    assert not filled.weight[:, ~own].any()
    assert not filled.kept[:, ~own].any()
    assert filled.size == pytest.approx(plain.size)


def test_a_method_of_the_users_own_must_keep_blocks_whole() -> None:
    def odd(problem: Any) -> Any:
        kept = problem.kept.clone()
        kept[:, ::2] = False
        return Solution(problem.weight, kept)

    model, x = convolutional()
    with pytest.raises(ValueError, match="must keep or prune blocks of 4 inputs and 1 outputs"):
        pruning.layerwise(model, odd, [(x,)], sparsity=0.5, size=4)


# --- masks that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("name", ["rigl", "movement", "gradual"])
def test_masks_that_change_keep_blocks_whole(name: str, outputs: int) -> None:
    (model, x), sides, unit = convolutional(), {"size": 4, "outputs": outputs}, Unit("block", outputs=outputs)
    names = ["0.weight", "2.weight", "6.weight"]
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = pruning.plan(model, "random", sparsity=0.7, unit=unit, parameters=names).masks
    own: dict[str, Any] = {"rigl": sides, "movement": {"sparsity": 0.7, **sides}}.get(
        name, {"sparsity": 0.7, "unit": unit}
    )
    dynamics = getattr(pruning.dynamics, name)(every=3, until=20, **own)
    start = first if name == "rigl" else {n: torch.ones_like(mask) for n, mask in first.items()}
    dynamics.attach(model, start, steps, length=25)
    shapes = {n: first[n].shape for n in names}
    layouts = {n: required_layout(model.get_submodule(n.rpartition(".")[0])) for n in names}
    cut, seen = groups_of(shapes, unit, None, layouts), [copy.deepcopy(dynamics.masks)]
    for _ in range(25):
        steps.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(32) % 10).backward()
        steps.step()
        seen.append(copy.deepcopy(dynamics.masks))

    for masks in seen:
        assert all(torch.equal(mask, masks[n]) for n, mask in cut.expand(cut.alive(masks)).items())
        counts = {n: int(each.sum()) for n, each in cut.alive(masks).items()}
        if name == "rigl":
            assert counts == {n: int(each.sum()) for n, each in cut.alive(first).items()}
    assert any(one != other for one, other in itertools.pairwise(seen))
    assert counts == {n: size - round(0.7 * size) for n, size in cut.sizes.items()}


def test_gradual_pruning_goes_on_from_masks_of_blocks() -> None:
    """The first masks prune half of the blocks, the short ones, but fewer of the entries."""
    model = nn.Sequential(nn.Linear(6, 20)).double()
    steps = torch.optim.SGD(model.parameters(), lr=0.05)
    first = torch.ones(20, 6, dtype=torch.bool)
    first[:, 4:] = False
    dynamics = pruning.dynamics.gradual(0.75, every=1, until=10, unit="block")
    dynamics.attach(model, {"0.weight": first}, steps, length=12)
    for _ in range(12):
        steps.zero_grad()
        model(torch.ones(2, 6).double()).square().sum().backward()
        steps.step()
    assert int(dynamics.masks["0.weight"][:, 0].sum()) == 10


def test_rigl_refuses_masks_that_cut_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    steps = torch.optim.SGD(model.parameters(), lr=0.05)
    first = pruning.plan(model, "random", sparsity=0.5).masks
    with pytest.raises(ValueError, match=r"`masks` .with '0.weight'. must keep or prune each block of `size` \(=4\)"):
        pruning.dynamics.rigl(size=4).attach(model, first, steps, length=200)
