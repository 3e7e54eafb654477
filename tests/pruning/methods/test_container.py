"""Successive prunings: the scores that each method gets, and the methods that the container keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

import pruning


def only_hook(module: nn.Module) -> Any:
    (hook,) = module._forward_pre_hooks.values()
    return hook


@pytest.mark.parametrize("method", ["random_unstructured", "l1_unstructured"])
def test_amounts_are_relative_to_what_survives(method: str) -> None:
    layer = nn.Linear(10, 10)
    zeros = []
    for _ in range(4):
        getattr(pruning, method)(layer, "weight", 0.2)
        zeros.append(int((layer.weight_mask == 0).sum()))
    assert zeros == [20, 36, 49, 59]


def test_masks_are_nested_whatever_comes_next() -> None:
    layer = nn.Conv3d(2, 4, 2)
    pruning.l1_unstructured(layer, "weight", 0.1)
    masks = [layer.weight_mask.clone()]
    for prune in (
        lambda: pruning.ln_structured(layer, "weight", 0.3, n=2, dim=0),
        lambda: pruning.random_unstructured(layer, "weight", 5),
        lambda: pruning.ln_structured(layer, "weight", 0.5, n=float("inf"), dim=1),
        lambda: pruning.custom_from_mask(layer, "weight", torch.rand(4, 2, 2, 2, 2) > 0.5),
        lambda: pruning.random_structured(layer, "weight", 1, dim=-1),
        lambda: pruning.identity(layer, "weight"),
    ):
        prune()
        masks.append(layer.weight_mask.clone())
        assert torch.all(masks[-1] <= masks[-2])
    hook = only_hook(layer)
    assert len(hook) == 7
    pruning.identity(layer, "weight")
    assert only_hook(layer) is hook, "later methods join the container that there is"
    assert isinstance(hook, pruning.PruningContainer)
    assert isinstance(hook, torch_prune.PruningContainer)
    assert hook._tensor_name == "weight"
    assert [type(method) for method in hook] == [
        pruning.L1Unstructured,
        pruning.LnStructured,
        pruning.RandomUnstructured,
        pruning.LnStructured,
        pruning.CustomFromMask,
        pruning.RandomStructured,
        pruning.Identity,
        pruning.Identity,
    ]
    assert isinstance(hook[0], torch_prune.L1Unstructured)
    assert all(method._reparam is None for method in hook)  # only the container's hook has a `Reparam`


def test_a_fully_pruned_tensor_takes_fractions_but_no_counts() -> None:
    layer = nn.Linear(2, 2)
    pruning.l1_unstructured(layer, "weight", 1.0)
    for method in ("l1_unstructured", "random_unstructured"):
        getattr(pruning, method)(layer, "weight", 0.5)
        with pytest.raises(ValueError, match=r"`amount` \(=1\) must not exceed the 0 units"):
            getattr(pruning, method)(layer, "weight", 1)
    pruning.ln_structured(layer, "weight", 0.5, 2, 0)
    with pytest.raises(ValueError, match="0 units"):
        pruning.random_structured(layer, "weight", 1, 0)
    assert not layer.weight_mask.any()


def test_structured_amounts_count_the_channels_still_alive() -> None:
    layer = nn.Linear(3, 10)
    for kept in (8, 6, 5, 4):  # round(0.2 * 10), round(0.2 * 8), round(0.2 * 6), round(0.2 * 5)
        pruning.ln_structured(layer, "weight", 0.2, n=2, dim=0)
        assert int(layer.weight_mask.any(1).sum()) == kept


class Recorder(pruning.BasePruningMethod):
    """A method that prunes the first entry it gets, and records the shapes of its arguments."""

    PRUNING_TYPE = "unstructured"
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]]

    def __init__(self, dim: int | None = None) -> None:
        self.seen = []
        if dim is not None:
            self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        self.seen.append((tuple(t.shape), tuple(default_mask.shape)))
        mask = default_mask.clone()
        mask.view(-1)[0] = 0
        return mask


class Channels(Recorder):
    PRUNING_TYPE = "structured"


class Whole(Recorder):
    PRUNING_TYPE = "global"


class Unknown(Recorder):
    PRUNING_TYPE = "sideways"


def test_custom_methods_see_the_full_shape_first_and_the_survivors_later() -> None:
    layer = nn.Linear(3, 4)
    first = Recorder.apply(layer, "weight")
    assert isinstance(first, Recorder)
    assert first.seen == [((4, 3), (4, 3))]
    container = Recorder.apply(layer, "weight")
    assert container[1].seen == [((11,), (11,))]  # type: ignore[index]
    assert layer.weight_mask.view(-1).tolist() == [0, 0, *[1] * 10]
    pruning.custom_from_mask(layer, "weight", torch.tensor([[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]))
    Channels.apply(layer, "weight", dim=0)
    assert only_hook(layer)[-1].seen == [((3, 3), (3, 3))]
    Whole.apply(layer, "weight")
    assert only_hook(layer)[-1].seen == [((4, 3), (4, 3))]
    assert layer.weight_mask.view(-1).tolist() == [0, 0, 0, 0, *[1] * 8]


def test_a_custom_method_sees_what_torch_would_show_it() -> None:
    shown: dict[str, list[list[list[float]]]] = {"ours": [], "torch": []}

    def make(base: Any, label: str) -> Any:
        class Spy(base):  # type: ignore[misc]
            PRUNING_TYPE = "unstructured"

            def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
                shown[label].append([t.detach().tolist(), default_mask.tolist()])
                return (t.detach().abs() > t.detach().abs().median()).to(default_mask.dtype)

        return Spy

    for base, label in ((pruning.BasePruningMethod, "ours"), (torch_prune.BasePruningMethod, "torch")):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        spy = make(base, label)
        for _ in range(3):
            spy.apply(layer, "weight")
    assert shown["ours"] == shown["torch"]


def test_a_subclass_of_a_builtin_that_computes_its_own_mask_is_asked() -> None:
    class FromTheRight(pruning.L1Unstructured):
        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            mask = default_mask.clone()
            mask.view(-1)[-int(float(self.amount)) :] = 0
            return mask

    layer = nn.Linear(4, 1)
    FromTheRight.apply(layer, "weight", 1)
    FromTheRight.apply(layer, "weight", 2)
    assert layer.weight_mask.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("library", [pruning, torch_prune])
def test_a_subclass_of_a_builtin_that_is_global_counts_what_is_pruned(library: Any) -> None:
    class Whole(library.L1Unstructured):  # type: ignore[misc]
        PRUNING_TYPE = "global"

    layer = nn.Linear(4, 5)
    for left in (10, 10, 10):  # half of all entries: the smallest, which were pruned before
        Whole.apply(layer, "weight", 0.5)
        assert int(layer.weight_mask.sum()) == left
    Whole.apply(layer, "weight", 15)
    assert int(layer.weight_mask.sum()) == 5


@pytest.mark.parametrize("computed", [torch.tensor([True, False]), torch.tensor([[1.0, 0.0]], dtype=torch.float64)])
def test_custom_masks_of_other_dtypes_and_smaller_shapes_are_taken(computed: Tensor) -> None:
    class Fixed(pruning.BasePruningMethod):
        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            return computed

    layer = nn.Linear(2, 3)
    Fixed.apply(layer, "weight")  # a PRUNING_TYPE is not needed for the first round
    assert layer.weight_mask.tolist() == [[1, 0]] * 3
    assert layer.weight_mask.dtype == layer.weight_orig.dtype
    with pytest.raises(ValueError, match="PRUNING_TYPE"):
        Fixed.apply(layer, "weight")


def test_masks_hold_zeros_and_ones() -> None:
    class Soft(pruning.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            return default_mask * 0.5

    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="zeros and ones"):
        Soft.apply(layer, "weight")
    assert not pruning.is_pruned(layer)


def test_a_pruning_type_is_checked_in_a_container() -> None:
    layer = nn.Linear(3, 4)
    Unknown.apply(layer, "weight")
    with pytest.raises(ValueError, match=r"`PRUNING_TYPE` \(='sideways'\)"):
        Unknown.apply(layer, "weight")
    with pytest.raises(AttributeError, match="needs an attribute `dim`"):
        Channels.apply(layer, "weight")
    with pytest.raises(IndexError, match="`dim`"):
        Channels.apply(layer, "weight", dim=-3)


def test_container_by_hand() -> None:
    container = pruning.PruningContainer()
    container._tensor_name = "test"
    assert len(container) == 0
    t = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    default = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    for method, expected in (
        (pruning.L1Unstructured(2), [[0, 0, 1, 0], [1, 1, 0, 1]]),
        (pruning.LnStructured(1, n=2, dim=0), [[0, 0, 0, 0], [1, 1, 0, 1]]),
        (pruning.LnStructured(1, n=2, dim=1), [[0, 1, 1, 0], [0, 1, 0, 1]]),
    ):
        method._tensor_name = "test"
        container.add_pruning_method(method)
        computed = container.compute_mask(t, default)
        assert computed.tolist() == expected
        assert computed.dtype == t.dtype
    assert default.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]


def test_what_a_container_refuses() -> None:
    container = pruning.PruningContainer()
    with pytest.raises(ValueError, match="empty PruningContainer"):
        container.compute_mask(torch.ones(2), torch.ones(2))
    method, other = pruning.L1Unstructured(1), pruning.L1Unstructured(1)
    method._tensor_name, other._tensor_name = "weight", "bias"
    container.add_pruning_method(method)
    with pytest.raises(ValueError, match=r"'bias'.*'weight'"):
        container.add_pruning_method(other)
    with pytest.raises(ValueError, match=r"'weight'.*None"):
        pruning.PruningContainer(pruning.L1Unstructured(1)).add_pruning_method(method)
    for bad in (10, "ugh", None):
        with pytest.raises(TypeError, match="must be a BasePruningMethod"):
            container.add_pruning_method(bad)  # type: ignore[arg-type]
    assert tuple(container) == (method,)


def test_container_nests_no_containers() -> None:
    methods = [pruning.L1Unstructured(1), pruning.Identity()]
    assert list(pruning.PruningContainer(pruning.PruningContainer(methods), pruning.Identity()))[:2] == methods


def test_hooks_of_torch_are_recognised_and_continued() -> None:
    layer = nn.Linear(10, 10)
    torch_prune.l1_unstructured(layer, "weight", 0.2)  # type: ignore[no-untyped-call]
    assert pruning.is_pruned(layer)
    torch_prune.l1_unstructured(layer, "weight", 0.2)  # type: ignore[no-untyped-call]
    pruning.l1_unstructured(layer, "weight", 0.2)
    assert int((layer.weight_mask == 0).sum()) == 49
    assert len(only_hook(layer)) == 3
    layer(torch.ones(1, 10)).sum().backward()
    pruning.remove(layer, "weight")
    assert int((layer.weight == 0).sum()) == 49
    torch_prune.identity(layer, "bias")  # type: ignore[no-untyped-call]
    pruning.remove(layer, "bias")
    assert not pruning.is_pruned(layer)
    assert list(dict(layer.named_parameters())) == ["weight", "bias"]


def test_torch_accepts_our_hooks() -> None:
    layer = nn.Linear(10, 10)
    pruning.l1_unstructured(layer, "weight", 0.2)
    assert torch_prune.is_pruned(layer)
    torch_prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
    assert not pruning.is_pruned(layer)
    assert int((layer.weight == 0).sum()) == 20
    layer(torch.ones(1, 10)).sum().backward()
    for _ in range(2):
        pruning.l1_unstructured(layer, "weight", 0.1)
    torch_prune.random_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    layer(torch.ones(1, 10)).sum().backward()
    assert int((layer.weight_mask == 0).sum()) == 59
    assert not layer.weight[layer.weight_mask == 0].any()
