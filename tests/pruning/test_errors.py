"""Errors of the engine: their fields, and their way between processes."""

from __future__ import annotations

import pickle

import pytest

from pruning.choices.axes import Scope, Unit
from pruning.refused import LONGEST, Refused, RefusedType, RefusedValue, UnknownOption


@pytest.mark.parametrize(
    ("make", "kind", "fields"),
    [
        (lambda: Scope(n=5, m=4), ValueError, ("scope.n", 5, "must lie in [1, m] = [1, 4]: n of each m are KEPT.")),
        (lambda: Unit(size="2"), TypeError, ("unit.size", "2", "must be an int, not str.")),  # type: ignore[arg-type]
    ],
)
def test_a_refused_choice_has_its_key_value_and_rule(make: type, kind: type[Exception], fields: tuple[object]) -> None:
    with pytest.raises(kind) as caught:
        make()

    error = caught.value
    assert isinstance(error, Refused)
    assert (error.key, error.value, error.rule) == fields
    assert str(error) == f"`{error.key}` (={error.value!r}) {error.rule}"


@pytest.mark.parametrize("kind", [RefusedValue, RefusedType, UnknownOption])
def test_a_refused_choice_crosses_processes(kind: type[Refused]) -> None:
    error = pickle.loads(pickle.dumps(kind("scope.n", 5).because("must be 2.")))

    assert type(error) is kind
    assert error.named("n") == "`n` (=5) must be 2."


def test_a_long_value_is_cut() -> None:
    assert str(RefusedValue("scope.densities", "a" * 1000)) == f"`scope.densities` (='{'a' * (LONGEST - 1)}...) "
