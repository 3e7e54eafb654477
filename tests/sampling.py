"""Cases of parametrised tests that the default run takes, where each case takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])
PARAM = type(pytest.param())


def sampled(every: int = 3, *, quick: Callable[..., bool] | None = None) -> Callable[[Test], Test]:
    """Mark cases of the parametrisation below as slow, so that the default run takes the others alone.

    Args:
        every: the default run takes the first case, and each so-many-th after it.
        quick: whether the default run takes a case, in place of `every`.
    """

    def of_test(test: Test) -> Test:
        marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
        place = max(place for place, mark in enumerate(marks) if mark.name == "parametrize")
        names, cases = marks[place].args
        one = isinstance(names, str) and "," not in names
        found: list[Any] = []
        for number, case in enumerate(cases):
            each = case if isinstance(case, PARAM) else pytest.param(*((case,) if one else case))
            taken = quick(*each.values) if quick else number % every == 0
            slow = pytest.param(*each.values, marks=(*each.marks, pytest.mark.slow), id=each.id)
            found.append(case if taken else slow)
        marks[place] = pytest.mark.parametrize(names, found, **marks[place].kwargs).mark
        return test

    return of_test
