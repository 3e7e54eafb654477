"""Sizes at which conditions of a forward change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruning.compact.branching_sizes import branching_sizes
from pruning.compact.tried_inputs import Axis
from pruning.graph.tracing import outputs_of

BATCH, ROWS, COLUMNS = Axis(False, 4), Axis(True, 8), Axis(True, 6)
"""Axes of an input of shape (4, 8, 6)."""


class Asking(nn.Module):
    """Returns whether a condition on its input holds."""

    def __init__(self, condition: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.condition(x) else x


CONDITIONS: dict[str, tuple[Callable[[Tensor], Any], dict[Axis, list[int]]]] = {
    "above": (lambda x: x.shape[1] > 100, {ROWS: [101]}),
    "below": (lambda x: x.shape[1] > 5, {ROWS: [5]}),
    "batch": (lambda x: x.shape[0] < 100, {BATCH: [100]}),
    "beyond the scan": (lambda x: x.shape[1] >= 10_000, {ROWS: [10_184]}),
    "multiple": (lambda x: x.size(-1) % 4 == 0, {COLUMNS: [4, 8]}),
    "padding": (lambda x: -x.shape[1] % 5, {ROWS: [5, 10]}),
    "difference": (lambda x: not x.shape[0] - 90, {BATCH: [90]}),
    "entries": (lambda x: x.numel() > 2000, {BATCH: [42], ROWS: [84], COLUMNS: [63]}),
    "ratio": (lambda x: math.ceil(x.shape[1] / 2) == 10, {ROWS: [19]}),
    "reflected": (lambda x: 50 - x.shape[1] < x.shape[1] * 0.5, {ROWS: [34]}),
    "larger": (lambda x: max(x.shape[1], 50) == 50, {ROWS: [50]}),
    "feature map": (lambda x: x[..., ::2].shape[2] == 7, {BATCH: [10], ROWS: [19], COLUMNS: [14]}),
    "two sizes": (lambda x: x.shape[1] > x.shape[2], {ROWS: [6], COLUMNS: [8]}),
    "a sum of both": (lambda x: sum(x.shape[1:]) == 20, {ROWS: [14], COLUMNS: [12]}),
    "a tensor": (lambda x: torch.tensor(1) < x.shape[0], {}),
    "no number": (lambda x: x.shape[1] in (None, "8"), {}),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_sizes_are_those_at_which_a_condition_changes_first(name: str) -> None:
    condition, expected = CONDITIONS[name]
    found = branching_sizes(Asking(condition), ((torch.zeros(4, 8, 6),), {}))
    assert {axis: sizes for axis, sizes in found.items() if sizes} == expected


class Reshaping(nn.Module):
    """Uses sizes in all places where a forward does, with numbers, lists, names and as arguments of operations."""

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns = x.shape
        wide = x.view(batch * rows, columns)[: rows // 2].expand(2, rows // 2, columns)
        made = torch.arange(columns) + torch.zeros(rows // 2, columns) + sum([1] * rows) + {rows: 3}[8]
        return torch.nn.functional.pad(wide, (0, rows)).split([rows, columns], -1)[1] * made * float(f"{rows}.5")


def test_a_forward_computes_the_same_with_sizes_that_note(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = torch.randn(4, 8, 6), list[list[Tensor]]()
    monkeypatch.setattr("pruning.compact.branching_sizes.outputs_of", lambda *given: found.append(outputs_of(*given)))

    branching_sizes(Reshaping(), ((x,), {}))

    assert torch.equal(found[0][0], Reshaping()(x))


def test_what_a_call_compares_before_it_fails_is_found() -> None:
    def failing(x: Tensor) -> bool:
        assert x.shape[1] > 3
        raise ValueError

    assert branching_sizes(Asking(failing), ((torch.zeros(4, 8, 6),), {}))[ROWS] == [3]
