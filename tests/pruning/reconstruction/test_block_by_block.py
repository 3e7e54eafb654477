"""Pruning block by block: equal to a naive loop, for all kinds of networks, from checkpoints, and refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning.layouts import required_layout
from pruning.reconstruction.block_order import parts_of
from pruning.reconstruction.layer_problem import (
    LayerProblem,
    Solution,
    Target,
    rows_of_inputs,
)
from pruning.reconstruction.sparsegpt import sparsegpt


class Block(nn.Module):
    """Block with two layers that share an input, a keyword argument, and a tuple as output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        x = x + scale * torch.tanh(self.one(x)) * self.two(x)
        return (x + self.dropout(self.down(torch.relu(self.up(x)))),)


class Standardised(nn.Linear):
    """Layer that multiplies by weights of mean 0."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)


class Model(nn.Module):
    """Embedding, blocks with an argument of their own, and a head that is tied to the embedding."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.layers):
            x = block(x, scale=torch.tensor(1.0 + index).to(x), mask=attention_mask)[0]
        out: Tensor = self.head(self.norm(x))
        return out


class Images(nn.Module):
    """Convolutions, grouped and depthwise, without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.depthwise(torch.relu(self.grouped(x)))
        out: Tensor = self.last(x.mean((2, 3)))
        return out


class TwoLists(nn.Module):
    """Blocks of an encoder and of a decoder, with code in between."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.decoder = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x, scale=torch.ones(()).to(x))[0]
        x = torch.sin(x)
        for block in self.decoder:
            x = block(x, scale=x.mean())[0]
        return x


def tokens(count: int = 3, padded: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(11, (4, 6), generator=generator)} for _ in range(count)]
    for batch in batches if padded else ():
        batch["attention_mask"] = (torch.arange(6) < torch.tensor([[6], [4], [2], [5]])).long()
    return batches


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, 9, 9, dtype=torch.float64, generator=generator) for _ in range(2)]


def vectors() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 8, dtype=torch.float64, generator=generator),) for _ in range(2)]


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def inputs_of(model: nn.Module, name: str, batches: list[Any]) -> Tensor:
    """Return the input vectors of a layer in whole passes of the network, without padding."""
    found: list[Tensor] = []
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None

        def note(module: nn.Module, inputs: Any, counts: Tensor | None = None if mask is None else mask != 0) -> None:
            found.append(rows_of_inputs(module, inputs[0].detach(), counts))

        handle = model.get_submodule(name).register_forward_pre_hook(note)
        call(model, copy.deepcopy(batch))
        handle.remove()
    return torch.cat(found, 1)


def naively(model: nn.Module, blocks: list[list[str]], batches: list[Any], target: Target) -> nn.Module:
    """Prune the layers of each block in turn, with inputs from whole passes of the network as it is by then."""
    model = copy.deepcopy(model).eval()
    for names in blocks:
        rows = {name: inputs_of(model, name, batches) for name in names}
        for name in names:
            layer: Any = model.get_submodule(name)
            inputs, weight = rows[name], required_layout(layer).rows(layer.weight.detach())
            pruned, done = [], 0
            for index, part in enumerate(weight):
                product = 2 / inputs.shape[1] * inputs[index].mT @ inputs[index]
                count = target.count((index + 1) * part.numel()) - done
                done += count
                own = target if target.m else Target(count / part.numel())
                pruned.append(sparsegpt(LayerProblem(part, product, torch.ones_like(part) != 0, own)).weight)
            with torch.no_grad():
                layer.weight.copy_(required_layout(layer).parameter(torch.stack(pruned), layer.weight.shape))
    return model


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


INSIDE = ("one", "two", "up", "down")


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("target", [Target(0.5), Target(0.5, 2, 4)], ids=["half", "2:4"])
def test_blocks_get_the_inputs_that_the_pruned_blocks_before_give(target: Target, padded: bool) -> None:
    torch.manual_seed(0)
    model, batches = Model().double(), tokens(padded=padded)
    expected = naively(model, [[f"layers.{i}.{name}" for name in INSIDE] for i in range(3)], batches, target)
    asked = {"sparsity": 0.5} if target.m is None else {"n": 2, "m": 4}
    embedding = model.embedding.weight.detach().clone()

    found = pruning.layerwise(model, "sparsegpt", batches, dtype=torch.float64, **asked)  # type: ignore[arg-type]

    same(model, expected)
    assert [*found.masks] == [f"layers.{i}.{name}.weight" for i in range(3) for name in INSIDE]
    assert torch.equal(model.embedding.weight, embedding), "tied weights stay"
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in found.masks.items())
    counted = sum(int(batch["attention_mask"].sum()) for batch in batches) if padded else 3 * 24
    assert {report.rows for report in found.layers.values()} == {counted}


def test_convolutions_go_layer_by_layer_in_the_order_of_execution() -> None:
    torch.manual_seed(0)
    model = Images().double()
    expected = naively(model, [["first"], ["grouped"], ["depthwise"], ["last"]], images(), Target(0.4))

    found = pruning.layerwise(model, "sparsegpt", images(), sparsity=0.4, dtype=torch.float64)

    same(model, expected)
    assert [found.masks[name].numel() - int(found.masks[name].sum()) for name in found.masks] == [
        round(0.4 * mask.numel()) for mask in found.masks.values()
    ]


def test_several_lists_of_blocks_are_found() -> None:
    torch.manual_seed(0)
    model = TwoLists().double()
    blocks = [[f"{part}.{i}.{name}" for name in INSIDE] for part in ("encoder", "decoder") for i in range(2)]
    expected = naively(model, blocks, vectors(), Target(0.5))

    pruning.layerwise(model, "sparsegpt", vectors(), sparsity=0.5, dtype=torch.float64)

    same(model, expected)


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupted_pruning_goes_on_to_the_same_bits(after: int) -> None:
    class Interrupted(Exception):
        pass

    torch.manual_seed(0)
    model = Model()
    whole, part = copy.deepcopy(model), copy.deepcopy(model)
    expected = pruning.layerwise(whole, "sparsegpt", tokens(), sparsity=0.5)
    seen: list[pruning.Layerwise] = []

    def interrupt(result: pruning.Layerwise) -> None:
        seen.append(result)
        if len(seen) == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        pruning.layerwise(part, "sparsegpt", tokens(), sparsity=0.5, on_block=interrupt)
    found = pruning.layerwise(part, "sparsegpt", tokens(), sparsity=0.5, done=seen[-1])

    assert len(seen[-1].layers) == 4 * after
    assert found.masks == expected.masks
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), part.parameters(), strict=True))


@pytest.mark.parametrize("method", ["sparsegpt", "alps", "wanda", "magnitude"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_modes_stay(method: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model().to(dtype)
    model.layers[0].eval()

    found = pruning.layerwise(model, method, tokens(), sparsity=0.5)

    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert [module.training for module in model.layers] == [False, True, True]
    assert found.masks.sparsity() == pytest.approx(0.5, abs=1e-3)
    assert all(0 < report.error < 1 for report in found.layers.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_wanda_sees_the_layers_of_its_own_block_dense() -> None:
    """`down` gets the outputs of the dense `up` of its block."""
    torch.manual_seed(0)
    model = Model(1).double()
    dense = copy.deepcopy(model).eval()
    rows: list[Tensor] = []
    dense.layers[0].down.register_forward_pre_hook(lambda _m, given: rows.append(given[0].flatten(0, -2)))  # type: ignore[union-attr]
    for batch in tokens():
        dense(**batch)
    weight: Any = dense.layers[0].down.weight  # type: ignore[union-attr]
    scores = weight.abs() * torch.cat(rows).square().sum(0).sqrt()

    found = pruning.layerwise(model, "wanda", tokens(), sparsity=0.5, dtype=torch.float64)

    kept = found.masks["layers.0.down.weight"]
    assert not kept.gather(1, scores.argsort(1)[:, :8]).any()


def test_sparsities_by_pattern_and_earlier_masks() -> None:
    torch.manual_seed(0)
    model = Model()
    first = pruning.layerwise(model, "magnitude", tokens(), sparsity=0.25)
    rates = {"*.down.weight": 0.75, "*": 0.5}

    found = pruning.layerwise(model, "sparsegpt", tokens(), sparsity=rates, masks=first.masks)

    assert found.masks.nested_in(first.masks)
    sparsities = found.masks.sparsities()
    assert {sparsities[f"layers.{i}.down.weight"] for i in range(3)} == {0.75}
    assert {sparsities[f"layers.{i}.up.weight"] for i in range(3)} == {0.5}


def test_a_layer_without_examples_is_told() -> None:
    class Unused(Block):
        def forward(self, x: Tensor, **named: Any) -> tuple[Tensor]:
            return (x + self.one(x),)

    model = Model(1)
    model.layers[0] = Unused()
    with pytest.warns(UserWarning, match=r"no example reaches layers\.0\.two\.weight, layers\.0\.up\.weight, layers"):
        found = pruning.layerwise(model, "sparsegpt", tokens(), sparsity=0.5)

    assert found.layers["layers.0.up.weight"].rows == 0
    assert found.masks.sparsity() == 0.5


def test_transposed_layers_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    other = nn.Sequential(Conv1D(16, 8), nn.ReLU(), Conv1D(4, 16)).double()
    with torch.no_grad():
        for index in (0, 2):
            linear, transposed = one[index], other[index]
            transposed.weight.copy_(linear.weight.mT)  # type: ignore[union-attr, operator]
            transposed.bias.copy_(linear.bias)  # type: ignore[union-attr, operator, arg-type]
    for model in (one, other):
        pruning.layerwise(model, "sparsegpt", vectors(), sparsity=0.5, dtype=torch.float64)

    torch.testing.assert_close(one[2].weight, other[2].weight.mT)  # type: ignore[union-attr, operator]


def test_least_squares_refits_given_masks_block_by_block() -> None:
    """The second block gets what the refitted first one gives, and its own layers are dense."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))).double()
    masks = pruning.layerwise(copy.deepcopy(model), "magnitude", vectors(), sparsity=0.5).masks
    expected, inputs = copy.deepcopy(model), torch.cat([batch[0] for batch in vectors()])
    for index in range(2):
        layer: Any = expected[index][0]  # type: ignore[index]
        product = 2 / len(inputs) * inputs.mT @ inputs
        product += 0.01 * product.diagonal().mean() * torch.eye(8)
        with torch.no_grad():
            for row, kept in zip(layer.weight, masks[f"{index}.0.weight"], strict=True):
                wanted = product[kept] @ row
                row[~kept] = 0
                row[kept] = torch.linalg.solve(product[kept][:, kept], wanted)
            inputs = expected[index](inputs)  # type: ignore[index, operator]

    found = pruning.layerwise(model, "least_squares", vectors(), masks=masks, dtype=torch.float64)

    same(model, expected)
    assert found.masks == masks


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sparsity": None}, "`sparsity` .=None., or `n` .=None. and `m` .=None., must be given"),
        ({"sparsity": 1.5}, r"`sparsity` .=1.5 for .*must lie in \[0, 1\)"),
        ({"sparsity": None, "n": 2, "m": 3}, "`m` .=3. must divide the 8 inputs of 'layers.0.one.weight'"),
        ({"sparsity": {"nothing": 0.5}}, "must have a pattern for 'layers.0.one.weight'"),
        (
            {"method": "sparsegbt"},
            "`method` .='sparsegbt'. must be one of sparsegpt, alps, wanda, least_squares, magnitude",
        ),
        (
            {"method": "least_squares", "masks": {}},
            "method='least_squares' only updates the survivors of masks; pass `masks`, and",
        ),
        ({"dampening": 0.1}, "`dampening` .=0.1. is not taken by the reconstruction sparsegpt, which takes damping"),
        ({"damping": -1}, "`damping` .=-1. must be above 0"),
        ({"batches": []}, "`batches` .=... must hold calibration data"),
        ({"blocks": "layer"}, "`blocks` .='layer'. must name modules of the network, such as layers"),
        ({"dtype": torch.float16}, "`dtype` .=torch.float16. must be torch.float32 or torch.float64"),
        ({"batches": {"tokens": torch.ones(1)}}, "`batches` .a dict. must be a list of batches"),
        ({"batches": torch.ones(4, 8)}, "`batches` .a Tensor. must be a list of batches"),
        (
            {"batches": [torch.ones(2, 9)]},
            r"`batches` \(\(2, 9\) torch.float32\) must be an input of Model, which failed",
        ),
        ({"sparsity": None, "n": 2}, "`n` .=2. and `m` .=None. must be given together"),
        ({"parameters": ["head.weight"]}, "`parameters` .='head.weight'. must name weights .*one module alone holds"),
        ({"parameters": [("module", "weight")]}, "`parameters` .with a tuple. must hold names"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"method": "sparsegpt", "batches": tokens(), "sparsity": 0.5, **changes}
    model = Model()
    before = copy.deepcopy(model.state_dict())

    with pytest.raises((ValueError, TypeError), match=said):
        pruning.layerwise(model, given.pop("method"), given.pop("batches"), **given)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_several_places_and_statistics_that_are_no_numbers_are_refused() -> None:
    shared = Model()
    shared.layers[1] = shared.layers[0]
    with pytest.raises(
        ValueError, match=r"'layers.0.one.weight' and 'layers.1.one.weight', one weight. must not share"
    ):
        pruning.layerwise(shared, "sparsegpt", tokens(), sparsity=0.5)
    found = pruning.layerwise(shared, "sparsegpt", tokens(), sparsity=0.5, parameters="layers.2.*")
    assert len(found.masks) == 4
    with pytest.raises(ValueError, match=r"`parameters` .*that one module alone holds"):
        pruning.layerwise(shared, "sparsegpt", tokens(), sparsity=0.5, parameters=["layers.0.*"])

    broken = Model()
    seen: list[pruning.Layerwise] = []
    with torch.no_grad():
        broken.layers[0].down.bias[0] = torch.inf  # type: ignore[union-attr, index]
    with pytest.raises(
        ValueError, match=r"Pruning layers\.1\.one\.weight of layers\.1: the statistics .* infinite or NaN"
    ):
        pruning.layerwise(broken, "sparsegpt", tokens(), sparsity=0.5, on_block=seen.append)
    assert [*seen[-1].layers] == [f"layers.0.{name}.weight" for name in INSIDE], "the block before is done"


class Odd(nn.Module):
    """Blocks that change their input in place, write to a list of the caller, and read what others wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Skipping() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.layers:
            x = block(x, skips, float(x.detach().mean()))
        return x


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, skips: list[Tensor], level: float) -> Tensor:
        x += level
        skips.append(self.one(x))
        out: Tensor = torch.relu_(self.two(x)) + sum(skips) + self.one(torch.tanh(skips[-1]))
        return out


def test_blocks_may_share_state_and_work_in_place() -> None:
    torch.manual_seed(0)
    model = Odd().double()
    expected = naively(
        model, [[f"layers.{i}.{name}" for name in ("one", "two")] for i in range(3)], vectors(), Target(0.5)
    )

    batches = vectors()
    pruning.layerwise(model, "sparsegpt", batches, sparsity=0.5, dtype=torch.float64)

    same(model, expected)
    assert torch.equal(batches[0][0], vectors()[0][0]), "the caller's batches stay"


def test_a_sequential_of_layers_in_place_is_pruned_layer_by_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3)).double()
    expected = naively(model, [["0"], ["2"]], images(), Target(0.5))

    pruning.layerwise(model, "sparsegpt", images(), sparsity=0.5, dtype=torch.float64)

    same(model, expected)


def test_blocks_in_a_plain_sequential_with_lists_inside_are_pruned_once() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.heads[0](x) + self.heads[1](x))
            return out

    solved: list[LayerProblem] = []

    def counting(asked: LayerProblem) -> Any:
        solved.append(asked)
        return sparsegpt(asked)

    found = pruning.layerwise(nn.Sequential(Several(), Several()).double(), counting, vectors(), sparsity=0.5)

    assert len(solved) == len(found.masks) == 6
    assert {report.block for report in found.layers.values()} == {"0", "1"}


class Experts(nn.Module):
    """Block whose experts are a list of like modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.experts[0](self.gate(x)) + self.experts[1](self.gate(x))
        return out


class OtherExperts(Experts):
    pass


class Alternating(nn.Module):
    """Blocks of two classes in one list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), OtherExperts(), Experts(), OtherExperts()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Attending(nn.Module):
    """Block that mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.out(self.into(x).softmax(-1).roll(1, 0))
        return mixed


class Scanning(Attending):
    """Block of another class, with the same layers."""

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.out(self.into(x).cumsum(0).tanh())
        return mixed


class Crossing(Attending):
    """Block that also reads what lies outside of the blocks."""

    def forward(self, x: Tensor, states: Tensor) -> Tensor:  # type: ignore[override]
        mixed: Tensor = x + self.out(self.into(states).relu() * x)
        return mixed


class Interleaved(nn.Module):
    """Blocks of three classes in one list, none of which has a list inside; and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scanning(), Scanning(), Crossing(), Attending(), Crossing()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        states = x.flip(0)
        for layer in self.layers:
            x = layer(x, states) if isinstance(layer, Crossing) else layer(x)
        out: Tensor = self.head(x)
        return out


def test_blocks_of_several_classes_are_found_without_lists_inside() -> None:
    torch.manual_seed(0)
    model, blocks = Interleaved().double(), [f"layers.{index}" for index in range(5)]
    named = copy.deepcopy(model)
    given: dict[str, Any] = {"sparsity": 0.5, "dtype": torch.float64}
    expected = naively(model, [[f"{block}.into", f"{block}.out"] for block in blocks], vectors(), Target(0.5))

    found = pruning.layerwise(model, "sparsegpt", vectors(), **given)
    pruning.layerwise(named, "sparsegpt", vectors(), blocks="layers", **given)

    same(model, expected)
    assert list(dict.fromkeys(report.block for report in found.layers.values())) == blocks
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), named.parameters(), strict=True))


@pytest.mark.parametrize(
    "children",
    [
        [Attending(), Scanning()],
        [Attending(), nn.Linear(8, 8), Attending()],
        [Attending(), nn.Sequential(nn.Linear(8, 8)), Attending()],
    ],
    ids=["no class repeated", "a layer", "a child with one layer"],
)
def test_a_list_with_other_modules_than_blocks_goes_layer_by_layer(children: list[nn.Module]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(children)

    assert all(part.module is layer for part in parts_of(model, None, None) for layer in part.layers.values())


class Stages(nn.Module):
    """Stages of blocks: lists in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Experts(), Experts()]) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return x


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (Alternating, [f"layers.{index}" for index in range(4)]),
        (Stages, [f"stages.{stage}.{index}" for stage in range(2) for index in range(2)]),
    ],
)
def test_a_list_of_several_classes_and_lists_in_lists_leave_no_layer_out(
    make: type[nn.Module], blocks: list[str]
) -> None:
    torch.manual_seed(0)
    model = make().double()
    inside = ("gate", "experts.0.0", "experts.1.0")
    expected = naively(model, [[f"{block}.{name}" for name in inside] for block in blocks], vectors(), Target(0.5))

    found = pruning.layerwise(model, "sparsegpt", vectors(), sparsity=0.5, dtype=torch.float64)

    same(model, expected)
    assert list(dict.fromkeys(report.block for report in found.layers.values())) == blocks


def test_a_list_of_whole_networks_is_no_list_of_blocks() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([Alternating(), Block()])

    with pytest.warns(
        UserWarning, match=r"^37% of the network's matrix weights stay dense: towers.1.up.weight \(128 entries\), "
    ):
        names = [part.name for part in parts_of(Towers(), None, None)]

    assert names == [f"towers.0.layers.{index}" for index in range(4)]


def test_layers_outside_of_the_blocks_that_were_found_are_told() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 4)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.two(torch.relu(self.one(x)))
            return torch.cat([head(x) for head in self.heads])

    given: dict[str, Any] = {"sparsity": 0.5}
    with pytest.warns(
        UserWarning,
        match=r"^67% .* stay dense: one.weight \(64 entries\), two.weight .* name them in `parameters`, or name",
    ):
        pruning.layerwise(Heads().double(), "wanda", vectors(), **given)
    pruning.layerwise(Heads().double(), "wanda", vectors(), blocks="heads", **given)
    raw = Heads().double()
    raw.matrix = nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
    said = r"to prune one.weight, two.weight, name them in `parameters`, .*; to prune the others, call pruning.prune"
    with pytest.warns(UserWarning, match=said):
        pruning.layerwise(raw, "wanda", vectors(), **given)
    pruning.layerwise(Heads().double(), "wanda", vectors(), parameters="heads.*", **given)


class Permuted(nn.Module):
    """Block whose gate gets all positions in their order, and whose experts get them in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.flatten(0, 1)
        out = self.gate(vectors)
        for expert in self.experts:
            out = out + expert(vectors.flip(0)).flip(0)
        return out.view_as(x)


@pytest.mark.parametrize("blocks", [None, []], ids=["blocks", "layer by layer"])
def test_padding_counts_for_experts_that_get_vectors_in_another_order(blocks: Any) -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Permuted(), Permuted()])

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    seen: list[Tensor] = []

    def note(problem: LayerProblem) -> Solution:
        seen.append(problem.hessian)
        return Solution(problem.weight, problem.kept)

    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]])
    saved: list[Any] = []
    asked: Any = {"batches": [{"x": x, "attention_mask": mask}], "sparsity": 0.0, "blocks": blocks}
    net = Mixture()
    with pytest.warns(UserWarning, match="such as layers.0.experts.0.weight") as told:
        found = pruning.layerwise(net, note, **asked, on_block=saved.append)

    assert len(told) == 1, "once in a call"
    with pytest.warns(UserWarning, match="such as layers.0.experts.0.weight"):  # also where a pruning goes on
        pruning.layerwise(net, lambda one: Solution(one.weight, one.kept), **asked, done=saved[-1])
    assert [found.layers[f"layers.0.{name}.weight"].rows for name in ("gate", "experts.0", "experts.1")] == [8, 12, 12]
    tokens, everything = x[mask == 1], x.flatten(0, 1)
    torch.testing.assert_close(seen[0], 2 / 8 * tokens.T @ tokens)
    torch.testing.assert_close(seen[1], 2 / 12 * everything.T @ everything)


def test_a_repeated_batch_counts_twice() -> None:
    torch.manual_seed(0)
    one, other = nn.Sequential(nn.Linear(8, 8)).double(), vectors()
    two = copy.deepcopy(one)
    found = pruning.layerwise(one, "sparsegpt", [other[0], other[0], other[1]], sparsity=0.5, dtype=torch.float64)
    pruning.layerwise(two, "sparsegpt", [other[0], (other[0][0].clone(),), other[1]], sparsity=0.5, dtype=torch.float64)

    assert found.layers["0.weight"].rows == 15
    assert torch.equal(one[0].weight, two[0].weight)  # type: ignore[arg-type]


def test_autocast_reads_the_pruned_weights_and_solves_in_full_precision() -> None:
    """Autocast keeps copies of weights; the second block must get zeros from the first, which is pruned whole."""

    def nothing(asked: LayerProblem) -> Any:
        squares.append(float(asked.hessian.diagonal().sum()))
        dtypes.append((asked.weight @ asked.weight.mT).dtype)
        return type(sparsegpt(asked))(torch.zeros_like(asked.weight), torch.zeros_like(asked.kept))

    squares: list[float] = []
    dtypes: list[torch.dtype] = []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(2)))
    with torch.autocast("cpu", torch.bfloat16):
        pruning.layerwise(model, nothing, [torch.randn(5, 8)], sparsity=0.5)

    assert squares[0] > 0
    assert squares[1] == 8  # the identity, in place of inputs that are all 0
    assert set(dtypes) == {torch.float32}


def test_weights_that_are_computed_are_left() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8)).double()

    with pytest.warns(UserWarning, match=r"stay dense: 0\.parametrizations\.weight\.original1"):
        found = pruning.layerwise(model, "wanda", vectors(), sparsity=0.5)

    assert [*found.masks] == ["2.weight"]


def test_a_result_or_masks_of_something_else_are_refused() -> None:
    model = Model()
    half = pruning.layerwise(copy.deepcopy(model), "magnitude", tokens(), sparsity=0.5)
    with pytest.raises(
        ValueError, match=r"`done` .with 'layers.0.one.weight'. must belong to this network, with its pruned"
    ):
        pruning.layerwise(model, "magnitude", tokens(), sparsity=0.5, done=half)
    half = pruning.layerwise(model, "magnitude", tokens(), sparsity=0.5)
    with pytest.raises(ValueError, match=r"`done` .*at 0\.5000. must be of the same `sparsity` .=0\.9"):
        pruning.layerwise(model, "magnitude", tokens(), sparsity=0.9, done=half)
    for masks in ({"layers.0.on.weight": torch.ones(8, 8)}, {"layers.0.one.weight": torch.ones(8)}):
        with pytest.raises(ValueError, match=r"`masks` .with 'layers.0.on"):
            pruning.layerwise(model, "magnitude", tokens(), sparsity=0.5, masks=masks)
    with pytest.raises(ValueError, match=r"`sparsity` .with 'typo'. must hold patterns for weights"):
        pruning.layerwise(model, "magnitude", tokens(), sparsity={"*": 0.5, "typo": 0.9})


def test_a_method_of_ones_own_cannot_revive_pruned_entries() -> None:
    def everything(asked: LayerProblem) -> Any:
        return type(sparsegpt(asked))(asked.weight + 1, torch.ones_like(asked.kept))

    model = nn.Sequential(nn.Linear(8, 8)).double()
    before = torch.rand(8, 8) > 0.5

    found = pruning.layerwise(model, everything, vectors(), sparsity=0.5, masks={"0.weight": before})

    assert torch.equal(found.masks["0.weight"], before)
    assert not model[0].weight[~before].any()  # type: ignore[index, operator, union-attr]


def test_magnitude_does_not_read_its_calibration_data() -> None:
    model = nn.Sequential(nn.Linear(8, 6))
    expected = pruning.prune(copy.deepcopy(model), "magnitude", sparsity=0.5).masks
    result = pruning.layerwise(model, "magnitude", [(torch.full((4, 8), torch.nan),)], sparsity=0.5)
    assert result.masks == expected
    assert math.isnan(result.layers["0.weight"].error)
    with pytest.raises(ValueError, match="the statistics of its inputs are infinite or NaN"):
        pruning.layerwise(nn.Sequential(nn.Linear(8, 6)), "wanda", [(torch.full((4, 8), torch.nan),)], sparsity=0.5)


@pytest.mark.parametrize("batch", [torch.randn(4, 8), [torch.randn(4, 8)], {"input": torch.randn(4, 8)}])
def test_zeros_that_do_not_reach_the_product_are_said(batch: Any) -> None:
    network = nn.Sequential(Standardised(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match=r"^zeros of 0 do not reach the product: .* leave it out of `parameters`\.$"):
        pruning.layerwise(network, "magnitude", [batch], sparsity=0.5, blocks=[])
    pruning.layerwise(network, "magnitude", [batch], sparsity=0.5, blocks=[], parameters=["2.weight"])
