"""Sparsity schedules: the overall sparsity to reach after each pruning round; standard library only.

With s the final sparsity, s0 the sparsity at the start, n the number of rounds and k = 1..n, the target of round k is

    one_shot    s
    geometric   1 - (1 - s0) ((1 - s) / (1 - s0))^(k/n)      an equal fraction of the survivors each round
    linear      s0 + (s - s0) k/n                            an equal number of entries each round
    cubic       s - (s - s0) (1 - k/n)^3                     more in early rounds (Zhu & Gupta, arXiv 1710.01878)

Targets never decrease, so that masks that follow them are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import MappingProxyType

from pruning.refused import RefusedType, RefusedValue

DECIMALS = 12
"""Decimals of a rounded target: equal targets get equal keys whatever the order of the arithmetic."""


def one_shot(sparsity: float, progress: float, start: float) -> float:  # noqa: ARG001 - one signature for all kinds
    """Reach the final sparsity in the first round; later rounds only fine-tune."""
    return sparsity


def geometric(sparsity: float, progress: float, start: float) -> float:
    """Prune an equal fraction of the survivors each round: density falls geometrically, as with repeated amounts."""
    return float(1 - (1 - start) * ((1 - sparsity) / (1 - start)) ** progress)


def linear(sparsity: float, progress: float, start: float) -> float:
    """Prune an equal number of entries each round."""
    return start + (sparsity - start) * progress


def cubic(sparsity: float, progress: float, start: float) -> float:
    """Prune fast while weights are redundant and slowly at the end (Zhu & Gupta, arXiv 1710.01878, equation 1)."""
    return sparsity - (sparsity - start) * (1 - progress) ** 3


KINDS: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType(
    {"one_shot": one_shot, "geometric": geometric, "linear": linear, "cubic": cubic}
)
"""Name of a schedule -> function (final sparsity, fraction of rounds done, sparsity at the start) -> sparsity."""


def targets(kind: str, sparsity: float, rounds: int, start: float = 0.0) -> tuple[float, ...]:
    """Return the overall sparsity to reach after each of `rounds` rounds; the last one is `sparsity` itself.

    Args:
        kind: a key of `KINDS`; the module docstring has the equations.
        sparsity: fraction of all prunable entries that is masked after the last round, in [0, 1).
        rounds: number of times to prune and fine-tune, at least 1.
        start: fraction that is masked before the first round, in [0, sparsity].

    Returns:
        `rounds` fractions that never decrease; all but the last are rounded to `DECIMALS` decimals.

    Raises:
        TypeError: `sparsity` or `start` is not a real number, or `rounds` is not an integer.
        ValueError: one of them is out of its range, or `kind` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` (={kind!r}) must be one of {', '.join(KINDS)}.")
    for name, value in (("sparsity", sparsity), ("start", start)):
        if not _is(Real, value):
            raise RefusedType(name, value).because("must be a number; pass a fraction such as 0.9.")
    if not _is(Integral, rounds):
        raise TypeError(f"`rounds` (={rounds!r}) must be an integer: how many times to prune and fine-tune.")
    if not 0 <= sparsity < 1:
        raise RefusedValue("sparsity", sparsity).because(
            "must lie in [0, 1): the fraction of entries that is masked at the end; pass 0.9 for 90%."
        )
    if rounds < 1:
        raise ValueError(f"`rounds` (={rounds!r}) must be at least 1; one round prunes once and fine-tunes once.")
    if not 0 <= start <= sparsity:
        raise ValueError(
            f"`start` (={start!r}) must lie in [0, sparsity] = [0, {sparsity!r}]; masked entries do not come back."
        )
    first, last = float(start), float(sparsity)
    exact = (KINDS[kind](last, k / rounds, first) for k in range(1, rounds))
    return (*(v if v == last else min(max(round(v, DECIMALS), first), last) for v in exact), last)


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def step_of(place: float, length: int) -> int:
    """Return the step of a place in a training of `length` steps: up to 1 a fraction of it, above 1 a step."""
    return round(place * length) if place <= 1 else int(place)
