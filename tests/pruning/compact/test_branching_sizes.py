"""Sizes at which conditions of a forward change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruning.compact.branching_sizes import Change, NotedCall, changes_of_batch, noted_call
from pruning.compact.tried_inputs import Axis
from pruning.measure.macs import Inputs

GIVEN: Inputs = ((torch.zeros(4, 8, 6),), {})
BATCH, ROWS, COLUMNS = (Axis(size, frozenset([(0, dim)])) for dim, size in enumerate((4, 8, 6)))


class Asking(nn.Module):
    """Returns whether a condition on its input holds."""

    def __init__(self, condition: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.condition(x) else x


def changes(call: NotedCall) -> set[Change]:
    return {change for each in call.conditions.values() for change in each.changes}


CONDITIONS: dict[str, tuple[Callable[[Tensor], Any], set[Change]]] = {
    "above": (lambda x: x.shape[1] > 100, {(ROWS, 101)}),
    "below": (lambda x: x.shape[1] > 5, {(ROWS, 5)}),
    "batch": (lambda x: x.shape[0] < 100, {(BATCH, 100)}),
    "beyond the sizes that are scanned": (lambda x: x.shape[1] >= 10_000, {(ROWS, 10_185)}),
    "power of two": (lambda x: x.shape[1] == 2**16, {(ROWS, 2**16)}),
    "multiple": (lambda x: x.size(-1) % 4 == 0, {(COLUMNS, 4), (COLUMNS, 8)}),
    "padding": (lambda x: -x.shape[1] % 5, {(ROWS, 5), (ROWS, 10)}),
    "difference": (lambda x: not x.shape[0] - 90, {(BATCH, 90)}),
    "distance": (lambda x: abs(x.shape[1] - 8) > 40, {(ROWS, 49)}),
    "entries": (lambda x: x.numel() > 2000, {(BATCH, 42), (ROWS, 84), (COLUMNS, 63)}),
    "ratio": (lambda x: math.ceil(x.shape[1] / 2) == 10, {(ROWS, 19)}),
    "reflected": (lambda x: 50 - x.shape[1] < x.shape[1] * 0.5, {(ROWS, 34)}),
    "quotient and rest": (lambda x: divmod(x.shape[1], 10) == (3, 5), {(ROWS, 30)}),
    "shifted": (lambda x: x.shape[1] >> 4, {(ROWS, 16)}),
    "power": (lambda x: x.shape[1] ** 2 > 1000, {(ROWS, 32)}),
    "complex power": (lambda x: (x.shape[1] - 2) ** 0.5 > 3, {(ROWS, 12)}),
    "division by zero below": (lambda x: 100 // (x.shape[1] - 3) > 60, {(ROWS, 4)}),
    "feature map": (lambda x: x[..., ::2].shape[2] == 7, {(BATCH, 10), (ROWS, 19), (COLUMNS, 14)}),
    "two sizes": (lambda x: x.shape[1] > x.shape[2], {(ROWS, 6), (COLUMNS, 8)}),
    "a sum of both": (lambda x: sum(x.shape[1:]) == 20, {(ROWS, 14), (COLUMNS, 12)}),
    "a tensor": (lambda x: torch.tensor(1) < x.shape[0], set()),
    "no number": (lambda x: x.shape[1] in (None, "8"), set()),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_sizes_are_those_at_which_a_condition_changes_first(name: str) -> None:
    condition, expected = CONDITIONS[name]
    call = noted_call(Asking(condition), GIVEN)

    assert changes(call) == expected
    assert call.failure == ""


def test_sizes_of_tensors_that_modules_hold_stay() -> None:
    model: Any = Asking(lambda x: any(x.shape[1] > size for size in model.sizes()))
    model.sizes = lambda: (model.table.shape[0], model.counts.numel(), model.plain.size(0))
    model.plain = torch.zeros(40, 1)
    model.register_parameter("table", nn.Parameter(torch.zeros(64, 3)))
    model.register_buffer("counts", torch.zeros(30))

    assert changes(noted_call(model, GIVEN)) == {(ROWS, 65), (ROWS, 31), (ROWS, 41)}


def test_dimensions_of_one_size_change_together_and_alone() -> None:
    given: Inputs = ((torch.zeros(2, 8, 8),), {})
    height, width = (Axis(8, frozenset([(0, dim)])) for dim in (1, 2))
    both = Axis(8, height.places | width.places)

    assert changes(noted_call(Asking(lambda x: x.shape[1] > 20), given)) == {(both, 21), (height, 21)}
    assert changes(noted_call(Asking(lambda x: x.shape[2] > 2 * x.shape[1]), given)) == {(width, 17), (height, 3)}
    assert [leaf.shape for leaf in both.resized(given, 21)[0]] == [(2, 21, 21)]
    assert [leaf.shape for leaf in width.resized(given, 17)[0]] == [(2, 8, 17)]


@pytest.mark.parametrize(
    ("rule", "batches"),
    [
        ("x.shape[0] < 100", {100}),
        ("6 * x.shape[0] <= 600", {101}),
        ("x.shape[0] != 90", {90}),
        ("(49 * x.shape[0]) % 7 == 0", set()),
        ("math.ceil(x.shape[0] / 2) > 1", {2}),
        ("x.shape[0] != 90 * x.shape[1]", set()),
    ],
)
def test_conditions_of_a_trace_give_batches(rule: str, batches: set[int]) -> None:
    assert changes_of_batch([rule], GIVEN) == {(BATCH, each) for each in batches}


class Reshaping(nn.Module):
    """Uses sizes in all places where a forward does, with numbers, lists, names and as arguments of operations."""

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns = x.shape
        wide = x.view(batch * rows, columns)[: rows // 2].expand(2, rows // 2, columns)
        made = torch.arange(columns) + torch.zeros(rows // 2, columns) + sum([1] * rows) + {rows: 3}[8]
        made = made + pow(rows, 2, 7) + rows / columns + round(rows / columns, 1) + x.size(dim=-1)
        return torch.nn.functional.pad(wide, (0, rows)).split([rows, columns], -1)[1] * made * float(f"{rows}.5")


def test_a_forward_computes_the_same_with_sizes_that_note() -> None:
    x = torch.randn(4, 8, 6)
    call = noted_call(Reshaping(), ((x,), {}))

    assert call.failure == ""
    assert torch.equal(call.outputs[0], Reshaping()(x))


def test_a_call_that_fails_with_sizes_that_note_says_so() -> None:
    def exact(x: Tensor) -> bool:
        if x.shape[1] > 100 or type(x.shape[1]) is not int:
            raise TypeError("an int is needed")
        return True

    call = noted_call(Asking(exact), GIVEN)

    assert call.failure == "an int is needed"
    assert torch.equal(call.outputs[0], GIVEN[0][0] + 1)
    assert changes(call) == {(ROWS, 101)}


def test_many_comparisons_end_the_noting_and_many_operations_cost_little() -> None:
    assert noted_call(Asking(lambda x: x.shape[1] in range(100, 5000)), GIVEN).failure.startswith(
        "it compares sizes in"
    )

    def repeated(x: Tensor) -> bool:
        size = x.shape[1]
        for _ in range(2000):
            size = size // 2 + size % 2 + size - size
        return bool(size > 1)

    assert not noted_call(Asking(repeated), GIVEN).failure
