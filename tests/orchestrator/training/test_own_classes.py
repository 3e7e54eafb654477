"""A class of the user's own gets the arguments that were typed for it, and what it cannot take is named as typed."""

from __future__ import annotations

from typing import Any

import pytest
from test_scoring import pruned
from training_cases import network

import pruning

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
