"""Networks that torch.export cannot trace whole: groups within their parts, and smaller parts put back in place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pruning
from pruning.compact import smaller_network
from pruning.measure.macs import macs


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fine, self.coarse = block(3, 8, 2), block(8, 16, 2), block(16, 16, 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        fine = self.fine(self.stem(images))
        return {"fine": fine, "coarse": self.coarse(fine)}


class Detector(nn.Module):
    """Images of different sizes in a list, a head that all levels share, and a second stage for the best places."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Sequential(block(16, 12), nn.Conv2d(12, 5, 1))
        self.stages = nn.ModuleList([layers(16, 20, 6)])
        self.last = nn.Linear(6, 2)

    def forward(self, images: list[Tensor], targets: list[Tensor] | None = None) -> Any:
        found = []
        for image in images:
            places = []
            for level in self.backbone(image[None]).values():
                scores = self.head(level).amax(1).flatten()
                best = (scores > scores.mean()).nonzero().flatten()
                places.append(level.flatten(2)[0].T[best])
            found.append(self.last(self.stages[0](torch.cat(places))))
        if targets is None:
            return found
        return {"loss": sum((one - other).square().mean() for one, other in zip(found, targets, strict=True))}


class Branch(nn.Module):
    """A part between branches on values; `more` reads a weight of the part."""

    def __init__(self, part: nn.Module, reads: str = "") -> None:
        super().__init__()
        self.part, self._reads = part, reads

    def forward(self, x: Tensor) -> Any:
        found = self.part(x)
        if found.sum().item() > 1e9:
            return x
        return (found, F.linear(x, self.part.get_parameter(self._reads))) if self._reads else found


class Halves(nn.Module):
    """Halves whose sizes are numbers in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 24), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        found: Tensor = self.other(x[:, :12] * x[:, 12:].sigmoid())
        return found


@pytest.fixture(scope="module")
def detector() -> tuple[nn.Module, nn.Module, Any]:
    """A pruned detector, its smaller one, and the example."""
    torch.manual_seed(0)
    model, example = Detector().eval(), ([torch.rand(3, 16, 16), torch.rand(3, 24, 20)],)
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias)
    options: dict[str, Any] = {"unit": "group", "scope": "layer", "budget": "channels", "example": example}
    with pytest.warns(UserWarning) as warned:  # noqa: PT030
        plan = pruning.prune(model, "magnitude", sparsity=0.5, **options)
    dense, limits = (str(each.message) for each in warned)
    assert dense.startswith("39% of the network's matrix weights stay dense: backbone.coarse.0.weight")
    assert re.search(r"modules backbone, head, stages.0, .*; last.weight outside of these", limits)
    assert plan.details["units"] == {"backbone.stem.0.weight": 8, "head.0.0.weight": 12, "stages.0.0.weight": 20}
    return model, pruning.shrink(model, example), example


def test_the_parts_of_a_detector_are_shrunk_and_its_class_is_kept(detector: Any) -> None:
    model, smaller, _ = detector
    report = smaller.shrunk
    assert (type(smaller), report.form) == (Detector, "module")
    assert report.parts == {"backbone": "module", "head": "module", "stages.0": "module"}
    assert (report.outside, report.kept) == ({"last.weight": 12}, {})
    assert report.tried[0].startswith("the whole network: Detector makes a tensor in `nonzero` whose size depends")
    shapes = {name: tuple(each.shape) for name, each in smaller.named_parameters() if each.ndim > 1}
    assert shapes == {
        "backbone.stem.0.weight": (4, 3, 3, 3),
        "backbone.fine.0.weight": (16, 4, 3, 3),
        "backbone.coarse.0.weight": (16, 16, 3, 3),
        "head.0.0.weight": (6, 16, 3, 3),
        "head.1.weight": (5, 6, 1, 1),
        "stages.0.0.weight": (10, 16),
        "stages.0.2.weight": (6, 10),
        "last.weight": (2, 6),
    }
    for size in (16, 27):
        images = torch.rand(2, 3, size, size + 9)
        for one, other in zip(model(list(images)), smaller(list(images)), strict=True):
            torch.testing.assert_close(one, other)
        for key, level in model.backbone(images).items():
            torch.testing.assert_close(smaller.backbone(images)[key], level)


def test_a_smaller_detector_trains(detector: Any) -> None:
    _, smaller, (images,) = detector
    smaller.train()(images, [torch.zeros(2), torch.ones(2)])["loss"].backward()
    smaller.eval()
    assert smaller.backbone.stem[0].weight.grad.abs().sum() > 0


@pytest.mark.slow
def test_multiplications_of_all_calls_and_of_the_rest_are_counted(detector: Any) -> None:
    model, _, example = detector
    groups = pruning.dependency_groups(model, example)
    assert groups.whole("macs") == macs(model, example).total


@pytest.mark.parametrize(("reads", "units"), [("", {"part.0.weight": 16}), ("0.weight", {})])
def test_a_weight_that_is_also_read_outside_keeps_its_channels(reads: str, units: dict[str, int]) -> None:
    model, example = Branch(layers(8, 16, 8), reads), torch.randn(4, 8)
    if units:
        assert pruning.dependency_groups(model, example).sizes == units
    else:
        with pytest.raises(ValueError, match="no channels that can be removed"):
            pruning.dependency_groups(model, example)


@pytest.mark.slow
def test_a_part_that_needs_graph_form_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model, example = Branch(Halves()), torch.randn(4, 8)
    with torch.no_grad():
        for row in (0, 12, 3, 15):  # units 0 and 3 of both halves
            model.part.get_parameter("one.weight")[row] = 0
            model.part.get_parameter("one.bias")[row] = 0
    smaller: Any = pruning.shrink(model, example)
    assert (smaller.shrunk.form, smaller.shrunk.parts) == ("graph", {"part": "graph"})
    assert smaller.shrunk.tried[1].startswith("`part`, module: ")
    assert smaller.get_parameter("part.one.weight").shape[0] == 20
    x = torch.randn(7, 8)
    torch.testing.assert_close(smaller(x), model(x))
    with pytest.raises(ValueError, match="must stay in evaluation mode"):
        smaller.train()


class Fixed(nn.Module):
    """Layers that take another way for large batches, with the hidden units as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu()
        found: Tensor = self.other(x.reshape(-1, 16) if len(x) > 6 else x)
        return found


class Pair(nn.Module):
    """Two parts with a branch on values between them."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return x if x.sum().item() > 1e9 else self.other(x)


def halved(model: nn.Module, *names: str) -> None:
    """Empty the first half of the units of some layers."""
    with torch.no_grad():
        for name in names:
            for tensor in model.get_submodule(name).parameters():
                tensor[: len(tensor) // 2] = 0


@pytest.mark.slow
def test_only_the_part_that_fails_on_other_sizes_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model, example = Pair(layers(8, 16, 8), Fixed()), torch.randn(4, 8)
    halved(model, "one.0", "other.one")
    smaller: Any = pruning.shrink(model, example)
    assert smaller.shrunk.parts == {"one": "module", "other": "graph"}
    assert [each.partition(":")[0] for each in smaller.shrunk.tried] == ["the whole network", "`other`, module"]
    assert len(smaller.one[0].weight) == len(smaller.get_parameter("other.one.weight")) == 8


@pytest.mark.slow
def test_only_the_part_that_cannot_be_made_smaller_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(flow: Any, decision: Any) -> Any:
        if any(str(node.target).startswith("other.") for node in flow.fields):
            raise RuntimeError("no rule")
        return folds(flow, decision)

    torch.manual_seed(0)
    model, example = Pair(layers(8, 16, 8), layers(8, 12, 4)), torch.randn(4, 8)
    halved(model, "one.0", "other.0")
    folds = smaller_network.folds
    monkeypatch.setattr(smaller_network, "folds", failing)
    smaller: Any = pruning.shrink(model, example)
    assert smaller.shrunk.parts == {"one": "module"}
    assert [each for each in smaller.shrunk.tried if "no rule" in each] == [
        f"`other`, {form}: no rule" for form in ("module", "graph", "graph")
    ]
    assert (len(smaller.one[0].weight), len(smaller.other[0].weight)) == (8, 12)
    assert smaller.shrunk.outside == {"other.0.weight": 96, "other.2.weight": 48}


class Unsteady(Branch):
    """Rounding decides the output of a batch of 1, as it orders the equal scores of an image of one pixel."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return (found / 49 * 49 - found).sign() if len(x) == 1 else found


def test_inputs_at_which_rounding_decides_do_not_keep_a_network_whole() -> None:
    torch.manual_seed(0)
    part, example = layers(8, 64, 32), torch.randn(4, 8)
    with torch.no_grad():
        part.get_parameter("0.weight")[:32] = 0  # their constants are added to the bias, with other rounding
    smaller: Any = pruning.shrink(Unsteady(part), example)
    assert smaller.shrunk.parts == {"part": "module"}
    assert len(smaller.part[0].weight) == 32
    assert smaller.shrunk.tried[1:] == tuple(
        f"not compared for inputs of {shape} torch.float64, where rounding or chance changes the outputs"
        for shape in ((1, 8), (1, 4, 8))
    )


class Noted(Branch):
    """Notes the batch and dtype of each call; `fine` puts out a digit that rounding decides in float32 alone."""

    calls: set[tuple[int, torch.dtype]] = set()  # noqa: RUF012  # of the class, since copies of a network share it
    fine = False

    def forward(self, x: Tensor) -> Any:
        self.calls.add((len(x), x.dtype))
        found = super().forward(x)
        return (found * 1e6).round() % 2 if self.fine else found


@pytest.mark.parametrize("fine", [False, True])
def test_inputs_of_other_sizes_run_in_float64_only_where_they_differ_in_float32(fine: bool) -> None:
    torch.manual_seed(0)
    part, example = layers(8, 64, 32), torch.randn(4, 8)
    with torch.no_grad():
        part.get_parameter("0.weight")[:32] = 0
    network = Noted(part)
    network.fine = fine
    Noted.calls.clear()
    smaller: Any = pruning.shrink(network, example)
    assert len(smaller.part[0].weight) == 32
    assert len(smaller.shrunk.tried) == 1
    assert {dtype for batch, dtype in Noted.calls if batch == 5} == {torch.float32, *[torch.float64] * fine}


def test_a_network_without_parts_is_refused_as_before() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.one(x)
            return self.two(x) if x.sum().item() > 0 else x

    for call in (pruning.dependency_groups, pruning.shrink):
        with pytest.raises(ValueError, match=r"Alone cannot be traced by torch\.export"):
            call(Alone(), torch.randn(4, 8))


@pytest.mark.parametrize("call", [pruning.shrink, pruning.to_sparse, pruning.dependency_groups, pruning.report])
def test_tensors_without_values_are_refused_in_a_sentence(call: Any) -> None:
    model, example = layers(8, 16, 6), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"`example` \(with a tensor on the meta device\) must have values; pass"):
        call(model, example.to("meta"))
    with pytest.raises(ValueError, match=r"`0\.weight` is on the meta device and has no values; load values first"):
        call(model.to("meta"), example)


def test_a_size_that_depends_on_values_is_left_to_the_network() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = layers(8, 16, 6), layers(6, 10, 3)

        def forward(self, x: Tensor) -> Any:
            x = self.one(x)
            return self.two(x[x[:, 0] > 0])

    torch.manual_seed(0)
    groups = pruning.dependency_groups(Picks(), torch.randn(40, 8))
    assert groups.sizes == {"one.0.weight": 16, "two.0.weight": 10}
    assert "whose size depends on values" in groups.limits
