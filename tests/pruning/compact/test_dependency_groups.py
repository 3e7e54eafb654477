"""Dependency groups: complete members, budgets met to one channel, and `shrink` removes the chosen channels."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generated_networks import network
from sampling import sampled
from test_shrink import Block, Odd, Shared, Small
from torch import Tensor, nn

import pruning
from pruning import DependencyGroups
from pruning.choices.axes import Scope, Unit
from pruning.dependencies import group_finding
from pruning.dependencies.dependency_groups import Member, gone, kept_channels, largest_step, most_removable
from pruning.measure.macs import macs

BUDGETS = ("channels", "parameters", "macs", "bytes")


class Mixed(nn.Module):
    """A residual, a depthwise and a grouped convolution, a gate and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.reduce, self.expand = nn.Linear(8, 4), nn.Linear(4, 8)
        self.left, self.right = nn.Conv2d(8, 6, 1), nn.Conv2d(8, 4, 1)
        self.grouped, self.out = nn.Conv2d(6, 6, 3, groups=3), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.point(F.relu(self.depthwise(x)))
        x = x * torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3))))))[:, :, None, None]
        left, right = self.grouped(self.left(x)), self.right(x)
        return self.out(torch.cat([left.mean((2, 3)), right.amax((2, 3))], 1))


IMAGES, TOKENS = torch.randn(2, 3, 4, 4), torch.randn(2, 5, 12)


def members(groups: DependencyGroups) -> dict[str, list[tuple[str, int]]]:
    return {group.name: [(member.tensor, *member.dims) for member in group.members] for group in groups}


def magnitudes(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().abs() for name, each in model.named_parameters() if name.endswith("weight")}


def test_all_that_must_go_together_is_in_a_group() -> None:
    groups = pruning.dependency_groups(Mixed(), IMAGES)

    assert members(groups) == {  # equal to Torch-Pruning 1.6.1, except that groups of a convolution go as wholes
        "stem.weight": [
            ("stem.weight", 0), ("norm.weight", 0), ("norm.bias", 0), ("depthwise.weight", 0), ("depthwise.bias", 0),
            ("point.weight", 0), ("point.weight", 1), ("point.bias", 0), ("reduce.weight", 1), ("expand.weight", 0),
            ("expand.bias", 0), ("left.weight", 1), ("right.weight", 1), ("norm.running_mean", 0),
            ("norm.running_var", 0),
        ],
        "reduce.weight": [("reduce.weight", 0), ("reduce.bias", 0), ("expand.weight", 1)],
        "left.weight": [
            ("left.weight", 0), ("left.bias", 0), ("grouped.weight", 0), ("grouped.weight", 0, 1), ("grouped.bias", 0),
            ("out.weight", 1),
        ],
        "right.weight": [("right.weight", 0), ("right.bias", 0), ("out.weight", 1)],
    }  # fmt: skip
    assert groups.sizes == {"stem.weight": 8, "reduce.weight": 4, "left.weight": 3, "right.weight": 4}
    right = groups.groups[3].members
    assert right[2].indices(1) == [7]  # after the six channels of the grouped convolution


def test_a_head_is_one_unit_and_what_a_layer_norm_counts_is_in_no_group() -> None:
    groups = pruning.dependency_groups(Block(), TOKENS)

    assert members(groups) == {
        "qkv.weight": [("qkv.weight", 0), ("qkv.bias", 0), ("proj.weight", 1)],
        "up.weight": [("up.weight", 0), ("up.bias", 0), ("down.weight", 1)],
    }
    head = groups.groups[0]
    assert (head.units, head.width) == (3, 4)
    assert head.members[0].indices(1) == [*range(4, 8), *range(16, 20), *range(28, 32)]
    with pytest.raises(ValueError, match=r"has no channels .* \(\w+.weight: `\w+`.*; \w+.weight: it is an output"):
        pruning.dependency_groups(Odd(), torch.randn(2, 4))


class Standardised(nn.Conv2d):
    """Convolution that standardises its weights in each forward, as those of NFNets."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        return F.conv2d(x, F.batch_norm(rows, None, None, training=True).reshape_as(self.weight), self.bias)


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_inputs_of_a_weight_that_is_standardised_are_in_no_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 8, 1), nn.ReLU(), Standardised(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()

    assert members(pruning.dependency_groups(model, IMAGES)) == {
        "2.weight": [("2.weight", 0), ("2.bias", 0), ("4.weight", 1)]
    }
    pruning.prune(model, sparsity=0.5, unit="group", example=IMAGES)
    smaller = pruning.shrink(model, IMAGES)
    assert smaller.get_parameter("2.weight").shape == (3, 8, 1, 1)
    torch.testing.assert_close(smaller(IMAGES), model(IMAGES))


def test_scores_are_summed_over_all_members() -> None:
    model = Small()
    ones = {name: torch.ones_like(each) for name, each in model.named_parameters()}
    scored = pruning.dependency_groups(model, IMAGES).reduce(ones)

    assert scored["hidden.weight"].tolist() == [96 + 1 + 3] * 10  # inputs, bias, readers of a unit
    assert scored["first.weight"].tolist() == [27 + 1 + 1 + 72 + 72 + 1 + 6] * 8
    by_output = pruning.dependency_groups(model, IMAGES).reduce({**ones, "hidden.weight": torch.arange(10.0)})
    assert by_output["hidden.weight"].tolist() == [i + 4.0 for i in range(10)]
    assert by_output["third.weight"].tolist() == [8.0] * 6  # scores of outputs do not count for inputs


@pytest.mark.parametrize(("reduce", "expected"), [("l1", 4.0), ("l2", 10**0.5), ("square_of_sum", 4.0)])
def test_scores_reduce_and_compare_as_they_are_told(reduce: Any, expected: float) -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    scores = {"0.weight": torch.tensor([[3.0], [0.0]]), "1.weight": torch.tensor([[-1.0, 2.0]])}
    given = (model, torch.randn(2, 1), Unit("group", reduce=reduce))

    assert pruning.dependency_groups(*given).reduce(scores)["0.weight"][0].item() == pytest.approx(expected)
    relative = pruning.dependency_groups(*given, Scope(normalise="group")).reduce(scores)["0.weight"]
    assert relative.mean().item() == pytest.approx(1.0)
    sized = pruning.dependency_groups(*given, Scope(normalise="size")).reduce(scores)["0.weight"]
    assert sized[0].item() == pytest.approx({"l1": 2.0, "l2": 5**0.5, "square_of_sum": 1.0}[reduce])


def hold(
    model: nn.Module, example: Tensor, scope: Scope, sparsity: float
) -> tuple[DependencyGroups, dict[str, Tensor]]:
    """Prune and check: all members are masked, `shrink` removes exactly these, and one step less misses the target."""
    groups = pruning.dependency_groups(model, example, scope=scope)
    kept = kept_channels(groups, sparsity, groups.reduce(magnitudes(model)))
    before = sum(each.numel() for each in model.parameters())
    whole = macs(model, example).total
    pruning.MaskSet(groups.expand(kept)).apply(model)

    smaller = pruning.shrink(model, example)
    pruning.remove_all(model)
    parameters = dict(model.named_parameters())
    for group in groups:
        for member in group.members:
            if member.tensor in parameters:
                chosen = torch.isin(member.channels, (~kept[group.name]).nonzero())
                assert not (parameters[member.tensor] * chosen).any()
    assert smaller.shrunk.form != "unchanged"
    left = {name: each.numel() for name, each in smaller.state_dict().items()}
    assert all(left[name] == groups.entries(name, kept) for name in groups.tensors)
    assert groups.remaining(kept, "parameters") == sum(each.numel() for each in smaller.parameters())
    assert groups.remaining(kept, "macs") == macs(smaller, example).total
    total = {"parameters": before, "macs": whole, "channels": sum(groups.sizes.values())}
    if scope.budget in total:
        assert gone(groups, kept) == pytest.approx(1 - groups.remaining(kept, scope.budget) / total[scope.budget])
    assert sparsity - 1e-9 <= gone(groups, kept) < sparsity + largest_step(groups, kept)
    return groups, kept


def one_less_misses(
    groups: DependencyGroups, kept: Mapping[str, Tensor], scores: Mapping[str, Tensor], s: float
) -> bool:
    """Return whether the target is missed if the removed channel with the highest score is kept."""
    last = max(((float(scores[n][i]), n, int(i)) for n, k in kept.items() for i in (~k).nonzero()))
    more = {name: each.clone() for name, each in kept.items()}
    more[last[1]][last[2]] = True
    return gone(groups, more) < s


@sampled(8)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_is_met_to_one_channel(budget: Any) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    scores = pruning.dependency_groups(model, IMAGES).reduce(magnitudes(model))

    groups, kept = hold(model, IMAGES, Scope("global", budget=budget), 0.4)

    assert one_less_misses(groups, kept, scores, 0.4)


@sampled(8)
@pytest.mark.parametrize("sparsity", [0.2, 0.5])
def test_a_budget_in_multiply_accumulates_counts_those_of_attention(sparsity: float) -> None:
    torch.manual_seed(4)
    groups, kept = hold(Block().eval(), TOKENS, Scope("global", budget="macs", normalise="group"), sparsity)

    heads, units = (int(each.sum()) for each in kept.values())
    assert groups.remaining(kept, "macs") == 2 * 5 * (heads * 4 * (4 * 12 + 2 * 5) + units * 2 * 12)
    hold(Shared().eval(), torch.randn(2, 5, 6), Scope("global", budget="macs"), sparsity)


def test_each_group_loses_the_same_share_and_of_equal_scores_the_lowest_index() -> None:
    model = Small()
    groups = pruning.dependency_groups(model, IMAGES)
    equal = {name: torch.ones(size) for name, size in groups.sizes.items()}

    kept = kept_channels(groups, 0.5, equal)

    assert {name: each.nonzero().flatten().tolist() for name, each in kept.items()} == {
        "first.weight": [4, 5, 6, 7], "third.weight": [3, 4, 5], "hidden.weight": [5, 6, 7, 8, 9],
    }  # fmt: skip
    assert sum(int((~each).sum()) for each in kept_channels(groups, 0.51, equal).values()) == 13  # of 24: 12.24


@pytest.mark.parametrize(
    ("budget", "round_to", "step"),
    # 2 of 4 and 3 of 6 units are removed: 3 * 4 + 4 * 6 + 6 * 2 = 48 weights become 3 * 2 + 2 * 3 + 3 * 2 = 18. One
    # unit of the first layer adds 3 + 3 weights, two add 2 (3 + 3) = 12; one of the second layer adds 2 + 2, two 4 + 4.
    [("channels", 1, 1 / 10), ("parameters", 1, 6 / 48), ("bytes", 1, 6 / 48), ("parameters", 2, 12 / 48)],
)
def test_the_largest_step_is_what_the_costliest_channel_brings_back(budget: Any, round_to: int, step: float) -> None:
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((3, 4), (4, 6), (6, 2))))
    groups = pruning.dependency_groups(model, torch.randn(2, 3), scope=Scope(budget=budget, round_to=round_to))
    kept = {"0.weight": torch.arange(4) < 2, "1.weight": torch.arange(6) < 3}

    assert largest_step(groups, kept) == pytest.approx(step)
    assert largest_step(groups, groups.alive()) == 0


@sampled(8)
@pytest.mark.parametrize("budget", BUDGETS)
def test_groups_that_lose_channels_keep_a_multiple_and_a_minimum(budget: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 21), nn.ReLU(), nn.Linear(21, 12), nn.Linear(12, 3)
    )

    _, kept = hold(model.eval(), torch.randn(2, 7), Scope("global", min_kept=10, budget=budget, round_to=8), 0.3)

    counts = [int(each.sum()) for each in kept.values()]
    assert counts[2] == 12  # no multiple of 8 lies between the minimum, 10, and all 12 units
    assert all(count % 8 == 0 and count >= 16 for count in counts[:2] if count not in (40, 21))
    assert counts[:2] != [40, 21]


def test_a_multiple_holds_for_the_width_of_heads() -> None:
    groups = pruning.dependency_groups(Block(), TOKENS, scope=Scope(round_to=8))
    kept = kept_channels(groups, 0.3, {"qkv.weight": torch.arange(3.0), "up.weight": torch.arange(24.0)})

    assert {name: int(each.sum()) for name, each in kept.items()} == {"qkv.weight": 2, "up.weight": 16}


def test_what_cannot_be_reached_is_told_and_what_was_pruned_stays_so() -> None:
    groups = pruning.dependency_groups(Small(), IMAGES)
    scores = {name: torch.arange(float(size)) for name, size in groups.sizes.items()}
    with pytest.raises(ValueError, match=r"^`sparsity` \(=0.99\) cannot be reached: .* at most 0.875 of the channels"):
        kept_channels(groups, 0.99, scores)
    with pytest.raises(ValueError, match=r"^scores of 'hidden.weight' are NaN"):
        kept_channels(groups, 0.5, {**scores, "hidden.weight": torch.full((10,), float("nan"))})
    alive = groups.alive()
    alive["hidden.weight"][7:] = False

    kept = kept_channels(groups, 0.5, scores, alive)

    assert kept["hidden.weight"].nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    assert groups.alive(groups.expand(kept))["hidden.weight"].tolist() == kept["hidden.weight"].tolist()


@pytest.mark.slow
def test_one_call_prunes_groups_further_and_shrink_takes_them_out() -> None:
    torch.manual_seed(2)
    model = Mixed().eval()
    options: dict[str, Any] = {"unit": "group", "budget": "parameters", "example": IMAGES, "min_kept": 2}
    first = pruning.prune(model, "magnitude", sparsity=0.3, scope="global", **options)

    second = pruning.prune(model, "taylor", sparsity=0.6, inner=2, **options, **classes(5))

    assert second.masks.nested_in(first.masks)
    assert min(second.details["kept"].values()) >= 2
    smaller = pruning.shrink(model, IMAGES)
    assert 1 - smaller.shrunk.after / smaller.shrunk.before == pytest.approx(second.details["removed"])
    assert second.details["removed"] >= 0.6


def classes(count: int) -> dict[str, Any]:
    """Return batches of images with labels below `count`, and their loss."""
    labels = torch.arange(2) % count
    return {
        "batches": [(IMAGES, labels), (IMAGES + 1, labels)],
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    }


@pytest.mark.slow
def test_controls_free_entries_and_named_weights_hold_for_groups() -> None:
    torch.manual_seed(3)
    options: dict[str, Any] = {"sparsity": 0.5, "unit": "group", "example": IMAGES}
    plain = pruning.prune(Small(), "magnitude", **options, parameters=["hidden.weight", "third.weight"])
    assert list(plain.details["units"]) == ["third.weight", "hidden.weight"]
    model = Small()
    low = pruning.prune(copy.deepcopy(model), "magnitude", **options)
    high = pruning.prune(copy.deepcopy(model), "magnitude", **options, control="invert")
    assert all(not (low.masks[n] ^ ~high.masks[n]).any() for n in ("norm.weight", "hidden.bias"))
    drawn = pruning.prune(copy.deepcopy(model), "magnitude", **options, control="shuffle")
    assert drawn.details["kept"] == low.details["kept"]


class Raw(nn.Module):
    """Two matrices that belong to no layer, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8, 10))
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(F.relu(F.linear(x, self.first)) @ self.second))


def test_a_matrix_of_no_layer_loses_outputs_by_its_name() -> None:
    model, x = Raw().eval(), torch.randn(4, 6)
    options: dict[str, Any] = {"sparsity": 0.5, "unit": "group", "example": x}
    decided = pruning.prune(model, "magnitude", **options, parameters=["first", "second"])
    assert decided.details["kept"] == {"first": 4, "second": 5}
    smaller = pruning.shrink(model, x)
    assert (smaller.first.shape, smaller.second.shape) == ((4, 6), (4, 5))
    torch.testing.assert_close(smaller(x), model(x))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"example": None},
            r"^`example` \(=None\) must be an input of the network if `unit.kind` is 'group'",
        ),
        ({"sparsity": None}, r"^`sparsity` \(=None\) must be a fraction"),
        ({"scope": "row"}, r"^`scope.kind` \(='row'\) cannot be combined with dependency groups"),
        ({"repair": "least_squares"}, r"^`repair.kind` \(='least_squares'\) cannot be combined"),
        ({"unit": "channel", "budget": "macs"}, r"^`scope.budget` \(='macs'\) is for unit.kind 'group'"),
        ({"normalise": "mean"}, r"^`scope.normalise` \(='mean'\) must be 'size' or 'group'"),
        (
            {"parameters": ["first.weight"]},
            r"^`parameters` must name all weights of at least one of the network's 3 dep",
        ),
    ],
)
def test_what_groups_do_not_take_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pruning.prune(Small(), "magnitude", **{"sparsity": 0.5, "unit": "group", "example": IMAGES, **options})


def check(seed: int) -> None:
    scope = Scope(("layer", "global")[seed % 2], budget=BUDGETS[seed % 4])  # type: ignore[arg-type]
    model, x = network(seed, emptied=False).float(), torch.randn(2, 3, 8, 8)
    groups = pruning.dependency_groups(model, x, Unit("group"), scope)
    hold(model, x, scope, min(0.05, most_removable(groups, groups.alive({}))))


@sampled(8)
@pytest.mark.parametrize("seed", [0, 9])
def test_networks_drawn_at_random_lose_what_was_chosen(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.many
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_many_networks_drawn_at_random_lose_what_was_chosen(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@sampled(3)
@pytest.mark.parametrize("seed", [2, 4, 7, 11, 12])
def test_groups_are_those_of_torch_pruning(seed: int) -> None:
    model = network(seed, emptied=False).float()
    groups = pruning.dependency_groups(model, torch.randn(2, 3, 8, 8))
    found = {
        (member.tensor, channel): set(weights_of(group.members, channel))
        for group in groups
        for channel in range(group.units)
        for member in group.members[:1]
    }

    theirs = oracle(copy.deepcopy(model))

    assert len(found) >= 10
    for (name, channel), own in found.items():
        assert own == theirs(name, channel)


def weights_of(own: tuple[Member, ...], channel: int) -> list[tuple[str, int, int]]:
    return [(m.tensor, *m.dims, i) for m in own if m.tensor.endswith("weight") for i in m.indices(channel)]


def oracle(model: nn.Module) -> Callable[[str, int], set[tuple[str, int, int]]]:
    """Return a function (name of a weight, output) -> the (weight, dimension, index) that Torch-Pruning groups."""
    graph = importlib.import_module("torch_pruning").DependencyGraph()
    graph.build_dependency(model, torch.randn(2, 3, 8, 8))
    names = {module: name for name, module in model.named_modules()}

    def members_of(name: str, channel: int) -> set[tuple[str, int, int]]:
        layer = model.get_submodule(name.rpartition(".")[0])
        cut = graph.get_pruner_of_module(layer).prune_out_channels
        found = set()
        for dependency, indices in graph.get_pruning_group(layer, cut, idxs=[channel]):
            module = dependency.target.module
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.ConvTranspose2d):
                outputs = "out" in dependency.handler.__name__ or getattr(module, "groups", 1) > 1
                dim = 0 if outputs or isinstance(module, nn.BatchNorm2d) else 1
                dim = 1 - dim if isinstance(module, nn.ConvTranspose2d) else dim
                found |= {(f"{names[module]}.weight", dim, index) for index in indices}
        return found

    return members_of


class Halves(nn.Module):
    """Half of a layer's channels go through another layer, as in the blocks of YOLOv8; `kind` says how they are cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.n, self.m = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(8, 8, 3, padding=1)
        self.o, self.c, self.kind = nn.Conv2d(24, 5, 1), 8, kind

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.n(self.a(x)))
        cut: Callable[[], Any] = {
            "chunk": lambda: y.chunk(2, 1),
            "split": lambda: y.split(self.c, 1),
            "sizes": lambda: y.split((self.c, self.c), 1),
        }[self.kind]
        one, two = cut()
        found: Tensor = self.o(torch.cat([one, two, two + self.m(two)], 1))
        return found


@sampled(3)
@pytest.mark.parametrize("kind", ["chunk", "split", "sizes"])
def test_equal_pieces_lose_equally_many_channels_so_that_the_class_stays(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Halves(kind).eval(), torch.randn(2, 3, 5, 5)
    plan = pruning.prune(model, "magnitude", unit="group", sparsity=0.4, example=x)
    kept = (plan.masks["a.weight"] != 0).flatten(1).any(1).reshape(2, 8)
    smaller: Any = pruning.shrink(model, x)

    assert torch.equal(kept[0], kept[1])
    assert 0 < int(kept.sum()) < 16
    assert (type(smaller), smaller.c, smaller.a.out_channels) == (Halves, int(kept[0].sum()), int(kept.sum()))
    torch.testing.assert_close(smaller(x), model(x))
    smaller.train()(x).sum().backward()


class AttentionOfYolo(nn.Module):
    """Attention over positions, as in YOLO11: heads weighted from the right, merged to the width of the input."""

    def __init__(self, width: int = 32, heads: int = 4, keys: int = 3) -> None:
        super().__init__()
        self.heads, self.keys, self.each = heads, keys, width // heads
        self.qkv, self.out = nn.Conv2d(width, width + 2 * keys * heads, 1), nn.Conv2d(width, width, 1)
        self.places = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, height, _ = x.shape
        qkv = self.qkv(x).view(batch, self.heads, 2 * self.keys + self.each, -1)
        q, k, v = qkv.split([self.keys, self.keys, self.each], dim=2)
        weights = (q.transpose(-2, -1) @ k).softmax(-1)
        heads = (v @ weights.transpose(-2, -1)).view(batch, width, height, -1)
        found: Tensor = self.out(heads + self.places(v.reshape(batch, width, height, -1)))
        return found


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.attention = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), AttentionOfYolo()
        self.o = nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n(self.a(x)))
        found: Tensor = self.o(y + self.attention(y))
        return found


@pytest.mark.slow
def test_heads_go_with_as_many_channels_of_the_input_from_which_the_forward_takes_their_width() -> None:
    torch.manual_seed(0)
    model, x = WithAttention().eval(), torch.randn(2, 3, 5, 5)
    (group,) = pruning.dependency_groups(model, x).groups
    pruning.prune(model, "magnitude", unit="group", sparsity=0.5, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert (group.units, group.width) == (4, 8)
    assert (type(smaller), smaller.attention.heads, smaller.attention.each) == (WithAttention, 2, 8)
    assert (smaller.a.out_channels, smaller.attention.qkv.out_channels) == (16, 28)
    torch.testing.assert_close(smaller(x), model(x))


class AttentionToHalf(WithAttention):
    """Half of the channels go through the attention, as in the last block of YOLO11."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.o = nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.Conv2d(64, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = F.relu(self.n(self.a(x))).chunk(2, 1)
        found: Tensor = self.o(torch.cat([one, two + self.attention(two)], 1))
        return found


def test_the_input_of_a_module_is_found_where_a_trace_places_the_cut_in_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_module = group_finding.in_module

    def of_the_reader(node: Any) -> str:
        is_of_cut = node.op == "call_function" and group_finding.name_of(group_finding._whole(node)) == "relu"
        return "attention.qkv" if is_of_cut and group_finding._whole(node) is not node else in_module(node)

    (before,) = pruning.dependency_groups(AttentionToHalf().eval(), torch.randn(2, 3, 5, 5)).groups
    monkeypatch.setattr(group_finding, "in_module", of_the_reader)
    (group,) = pruning.dependency_groups(AttentionToHalf().eval(), torch.randn(2, 3, 5, 5)).groups

    assert (group.units, group.width) == (before.units, before.width) == (4, 8)


def _assigned(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, :8] = y[:, 8:]
    z[:, 8:] = y[:, :8]
    z[:, 0] = z[:, 0] * 2
    return z


COMPOSITE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda y, w: torch.einsum("bi,oi->bo", y, w),
    "baddbmm": lambda y, w: torch.baddbmm(y[None], y[None], w[None], beta=0.5)[0],
    "stack": lambda y, w: torch.stack([y, y @ w], 1).sum(1),
    "glu": lambda y, w: F.glu(torch.cat([y @ w, y], 1)),
    "assigned": lambda y, w: _assigned(y),
    "tensor_split": lambda y, w: torch.cat(y.tensor_split(2, 1)[::-1], 1),
    "every second": lambda y, w: torch.stack([-y[:, 1::2], y[:, ::2]], -1).flatten(1),
}


class Between(nn.Module):
    """Two layers, and an operation between them that may read a third weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.weight, self.last = nn.Linear(4, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.function(self.first(x), self.weight))
        return found


@pytest.mark.filterwarnings("ignore:.*stay dense. weight", "ignore:.*does not run weight")  # some do not read it
@sampled(12)
@pytest.mark.parametrize("function", COMPOSITE.values(), ids=COMPOSITE)
def test_operations_that_stand_for_several_lose_channels(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Between(function).eval(), torch.randn(2, 4)
    pruning.prune(model, "magnitude", unit="group", scope="layer", sparsity=0.3, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert smaller.first.weight.shape[0] < 16
    assert smaller.shrunk.kept == {}
    torch.testing.assert_close(smaller(x.repeat(2, 1)), model(x.repeat(2, 1)))


@torch.library.custom_op("test_dependency_groups::by_expert", mutates_args=())
def by_expert(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    parts = [rows[first:last] @ each for first, last, each in zip([0, *ends], ends, weight, strict=False)]
    return torch.cat(parts)


@by_expert.register_fake
def _(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(len(rows), weight.shape[2])


class Experts(nn.Module):
    """A mixture of three experts, each with the rows that a router gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(6, 3, bias=False), nn.Linear(6, 2)
        self.up, self.bias = nn.Parameter(torch.randn(3, 16, 6)), nn.Parameter(torch.randn(3, 16))
        self.down = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        expert, order = torch.sort(self.router(x).argmax(1))
        offs = (expert <= torch.arange(3)[:, None]).sum(1)
        y = by_expert(x[order], self.up.mT, offs) + self.bias[expert]
        y = by_expert(y[:, ::2] * y[:, 1::2].sigmoid(), self.down.mT, offs)
        found: Tensor = self.out(x + y[order.argsort()])
        return found


def test_hidden_units_of_fused_experts_are_a_group() -> None:
    torch.manual_seed(0)
    model, x = Experts().eval(), torch.randn(7, 6)
    groups = pruning.dependency_groups(model, x)
    assert members(groups)["up"] == [("up", 1), ("bias", 1), ("down", 2)]
    pruning.prune(model, "magnitude", unit="group", scope="layer", sparsity=0.5, example=x)
    smaller: Any = pruning.shrink(model, x)

    assert type(smaller) is Experts
    assert [tuple(each.shape) for each in (smaller.up, smaller.bias, smaller.down)] == [(3, 8, 6), (3, 8), (3, 6, 4)]
    for rows in (x, torch.randn(20, 6)):
        torch.testing.assert_close(smaller(rows), model(rows))
    counts = {each.applied * each.shape.numel() for each in groups.products}
    assert counts == {7 * 6 * 16, 7 * 8 * 6}, "each of 7 rows by one of three matrices"


class OwnLinear(nn.Module):
    """Layer of a kind that nobody knows, as layers with rounded weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Beside(nn.Module):
    """Two layers of an unknown kind, and beside them a known one between the network's input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.known = OwnLinear(4, 8), OwnLinear(8, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + self.known(x)  # type: ignore[no-any-return]


def test_groups_of_unknown_layers_alone_are_asked_for_by_name() -> None:
    model, x = Beside(), torch.randn(2, 4)

    with pytest.raises(ValueError, match=r"leaves none of 1 .* name a weight of each to prune: 'up\.weight'$"):
        pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x)
    plan = pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x, parameters=["up.weight"])

    assert plan.details["kept"] == {"up.weight": 4}


def test_named_weights_that_are_in_no_group_are_told() -> None:
    model, x = Beside(), torch.randn(2, 4)

    names = ["up.weight", "known.weight"]
    with pytest.warns(UserWarning, match=r"`parameters` names known\.weight, which stay whole: no dependency group"):
        plan = pruning.prune(model, "magnitude", sparsity=0.5, unit="group", example=x, parameters=iter(names))

    assert plan.details["kept"] == {"up.weight": 4}
