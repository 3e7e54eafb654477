"""A class of the user's own gets the arguments that were typed for it, and what it cannot take is named as typed."""

from __future__ import annotations

from typing import Any

import pytest
from test_scoring import pruned
from torch import Tensor
from training_cases import network

import pruning
from orchestrator.core.errors import OrchestratorError

seen: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


class Noting(pruning.L1Unstructured):
    """Notes which arguments named as those of a score it is called with."""

    def __init__(self, amount: int, batch_size: int = 3, examples: int = 5, per_class: int | None = None) -> None:
        super().__init__(amount)
        seen.update(batch_size=batch_size, examples=examples, per_class=per_class)


def test_arguments_named_as_those_of_a_score_reach_a_class() -> None:
    pruned(network(), method={"_target_": f"{__name__}.Noting", "batch_size": 7, "per_class": 2})

    assert seen == {"batch_size": 7, "examples": 5, "per_class": 2}


class Dimmed(pruning.L1Unstructured):
    """Notes its dimension, which means something of its own."""

    def __init__(self, amount: int, dim: Any = None) -> None:
        super().__init__(amount)
        seen.update(dim=dim)


@pytest.mark.parametrize(("typed", "given"), [({}, None), ({"dim": None}, None), ({"dim": "rows"}, "rows")])
def test_a_class_gets_the_dim_that_was_typed_alone(typed: dict[str, Any], given: Any) -> None:
    pruned(network(), method={"_target_": f"{__name__}.Dimmed", **typed})

    assert seen == {"dim": given}


class Channels(pruning.RandomStructured):
    """Notes the dimension of its channels."""

    def __init__(self, amount: int, dim: Any = 0) -> None:
        super().__init__(amount, dim)
        seen.update(dim=dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_channels_are_counted_along_the_dim_of_a_structured_class(dim: int) -> None:
    masks, _ = pruned(network(), method={"_target_": f"{__name__}.Channels", "dim": dim})

    assert seen == {"dim": dim}
    left = [float(mask.any(1 - dim).float().mean()) for mask in masks.values()]
    assert left == pytest.approx([0.5, 0.5][dim - 1 :], abs=0.17), "outputs of the last layer are the network's"


@pytest.mark.parametrize("dim", [None, "rows"])
def test_a_structured_class_needs_a_number_for_its_dim(dim: Any) -> None:
    with pytest.raises(OrchestratorError, match=rf"^`method\.dim` \(={dim!r}\) must be an int"):
        pruned(network(), method={"_target_": f"{__name__}.Channels", "dim": dim})


class Threshold(pruning.L1Unstructured):
    """Lacks an argument."""

    def __init__(self, amount: int, threshold: float) -> None:
        super().__init__(amount)


def test_a_class_that_lacks_an_argument_is_named_as_typed() -> None:
    with pytest.raises(
        OrchestratorError,
        match=r"^`method\._target_` \(=test_own_classes\.Threshold\) cannot be built: .*'threshold'; set its arguments "
        r"under `method`\.$",
    ):
        pruned(network(), method={"_target_": f"{__name__}.Threshold"})


class Fraction(pruning.L1Unstructured):
    """Reads its amount as a fraction."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        mask = default_mask.clone()
        mask.view(-1)[t.abs().flatten().topk(int(self.amount * t.numel()), largest=False).indices] = 0
        return mask


def test_a_class_that_reads_a_fraction_is_told_of_the_count_that_it_gets() -> None:
    with pytest.raises(
        OrchestratorError,
        match=r"Fraction\) cannot prune \S+ with amount=(\d+), a number of entries and not a fraction: RuntimeError: "
        "selected index k out of range",
    ):
        pruned(network(), method={"_target_": f"{__name__}.Fraction"})


class Applied(pruning.L1Unstructured):
    """Prunes by an `apply` of its own."""

    @classmethod
    def apply(cls, module: Any, name: str, amount: Any, importance_scores: Any = None) -> Any:
        return super().apply(module, name, amount, importance_scores)


class Inherited(Applied):
    """Inherits it."""


@pytest.mark.parametrize("name", ["Applied", "Inherited"])
def test_a_class_with_an_apply_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(
        OrchestratorError,
        match=rf"^`method\._target_` \(=test_own_classes\.{name}\) replaces `apply`, .*`compute_mask`",
    ):
        pruned(network(), method={"_target_": f"{__name__}.{name}"})
