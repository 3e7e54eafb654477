"""Wrong arguments: the error names them, and nothing is changed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pruning


def test_structured_methods_want_two_dimensions_and_one_of_them() -> None:
    layer = nn.Conv2d(2, 2, 2)
    for prune in (
        lambda name, dim: pruning.random_structured(layer, name, 1, dim),
        lambda name, dim: pruning.ln_structured(layer, name, 1, 2, dim),
    ):
        with pytest.raises(ValueError, match="2 dimensions or more"):
            prune("bias", 0)
        for dim in (4, -5):
            with pytest.raises(IndexError, match=rf"`dim` \(={dim}\)"):
                prune("weight", dim)
    assert not pruning.is_pruned(layer)


def test_ln_apply_has_no_default_dim_but_the_constructor_has() -> None:
    assert pruning.LnStructured(1, 2).dim == -1
    assert pruning.RandomStructured(1).dim == -1
    with pytest.raises(TypeError, match="dim"):
        pruning.LnStructured.apply(nn.Linear(2, 2), "weight", 1, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("bad", [torch.ones(3, 2), torch.full((2, 3), 0.5)])
def test_custom_masks_must_fit(bad: Tensor) -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"Linear\.weight: `mask`"):
        pruning.custom_from_mask(layer, "weight", bad)
    assert not pruning.is_pruned(layer)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_compute_mask_that_raises_leaves_the_module_alone(name: str) -> None:
    layer = nn.Linear(5, 2)
    broken = mock.patch("pruning.L1Unstructured.compute_mask", side_effect=ArithmeticError("no"))
    with broken, pytest.raises(ArithmeticError):
        pruning.l1_unstructured(layer, name, 0.9)
    assert [key for key, _ in layer.named_parameters()] == ["weight", "bias"]
    assert not dict(layer.named_buffers())


@pytest.mark.parametrize("kind", ["unstructured", "global"])
def test_a_mask_of_another_shape_is_refused_in_every_round(kind: str) -> None:
    class Odd(pruning.BasePruningMethod):
        PRUNING_TYPE = kind

        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            return torch.ones(7)

    layer = nn.Linear(5, 2)
    for first in (True, False):
        if not first:
            pruning.random_unstructured(layer, "weight", 1)
        with pytest.raises(ValueError, match=r"`compute_mask` of Odd returned a mask of shape \(7,\); it must have"):
            Odd.apply(layer, "weight")


def test_errors_about_the_parameter() -> None:
    layer = nn.Linear(2, 2, bias=False)
    for name in ("nope", "bias", "training"):
        with pytest.raises(AttributeError, match=rf"`name` \(='{name}'\).*its parameters are: 'weight'"):
            pruning.identity(layer, name)
    with pytest.raises(ValueError, match="is not pruned"):
        pruning.remove(layer, "weight")
    with pytest.raises(ValueError, match="must be a parameter"):
        pruning.remove(layer, "nope")
    with pytest.raises(RuntimeError, match="call `apply` first"):
        pruning.Identity().remove(layer)
    with pytest.raises(RuntimeError, match="before it was applied"):
        pruning.Identity()(layer, None)


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "mask": (TypeError, "`mask` must be a tensor, not None", lambda m: pruning.custom_from_mask(m, "weight", None)),
    "scores": (
        *(TypeError, "`importance_scores` must be a tensor, not list"),
        lambda m: pruning.l1_unstructured(m, "weight", 0.5, importance_scores=[1]),
    ),
    "scores elsewhere": (
        *(ValueError, r"`importance_scores` \(on meta\) must be on the device of `Linear.weight`, cpu"),
        lambda m: pruning.l1_unstructured(m, "weight", 0.5, torch.ones(3, 4, device="meta")),
    ),
    "sparse scores": (
        *(ValueError, r"`importance_scores` \(torch.sparse_coo\) must be a dense tensor"),
        lambda m: pruning.ln_structured(m, "weight", 0.5, 2, 0, torch.ones(3, 4).to_sparse()),
    ),
    "scores of one elsewhere": (
        *(ValueError, "must be on the device of `Linear.weight`, cpu"),
        lambda m: pruning.global_unstructured(
            [(m, "weight")], pruning.L1Unstructured, {(m, "weight"): torch.ones(3, 4, device="meta")}, amount=1
        ),
    ),
    "channels' scores elsewhere": (
        *(ValueError, "must be on the device of `Linear.weight`, cpu"),
        lambda m: pruning.global_structured(
            [(m, "weight")], importance_scores={(m, "weight"): torch.ones(3, 4, device="meta")}, amount=1
        ),
    ),
    "dim": (TypeError, r"`dim` \(='0'\) must be an int", lambda m: pruning.ln_structured(m, "weight", 0.5, 2, "0")),
    "n": (ValueError, r"`n` \(=None\) must be", lambda m: pruning.ln_structured(m, "weight", 0.5, None, 0)),
    "n is NaN": (ValueError, r"`n` \(=nan\)", lambda m: pruning.ln_structured(m, "weight", 0.5, float("nan"), 0)),
    "n of all": (ValueError, r"`n` \(=None\)", lambda m: pruning.global_structured([(m, "weight")], amount=1, n=None)),
    "generator": (
        *(TypeError, r"`generator` \(=42\) must be a torch.Generator"),
        lambda m: pruning.random_unstructured(m, "weight", 0.5, generator=42),
    ),
    "module": (TypeError, "`module`", lambda _: pruning.l1_unstructured(None, "weight", 0.5)),
    "modules": (
        *(TypeError, "`parameters` must contain pairs"),
        lambda m: pruning.global_unstructured([m], pruning.L1Unstructured, amount=1),
    ),
    "names": (
        *(TypeError, "`parameters` must contain pairs"),
        lambda _: pruning.global_unstructured(["ab"], pruning.L1Unstructured, amount=1),
    ),
    "method": (
        *(TypeError, r"`pruning_method` \(='l1'\) must be"),
        lambda m: pruning.global_unstructured([(m, "weight")], "l1", amount=1),
    ),
    "structured method": (
        *(TypeError, r"`pruning_method` \(='l1'\) must be"),
        lambda m: pruning.global_structured([(m, "weight")], "l1", amount=1),
    ),
}


@pytest.mark.parametrize(("error", "words", "call"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(error: type[Exception], words: str, call: Any) -> None:
    layer = nn.Linear(4, 3)
    with pytest.raises(error, match=words):
        call(layer)
    assert not pruning.is_pruned(layer)
