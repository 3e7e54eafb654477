"""The overall sparsity to reach after each pruning round; standard library only.

With s the final sparsity, s0 the sparsity at the start, n the number of rounds and k = 1..n, the target of round k is

    one_shot    s
    geometric   1 - (1 - s0) ((1 - s) / (1 - s0))^(k/n)      an equal fraction of the survivors each round
    linear      s0 + (s - s0) k/n                            an equal number of entries each round
    cubic       s - (s - s0) (1 - k/n)^3                     much early, little late (Zhu & Gupta, arXiv 1710.01878)

Targets never decrease, so masks that follow them are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import MappingProxyType

DECIMALS = 12
"""Targets are rounded to this many decimals: equal targets get equal keys, whatever the order of the arithmetic."""


def one_shot(sparsity: float, progress: float, start: float) -> float:  # noqa: ARG001 - one signature for all kinds
    """Prune everything in the first round; later rounds find nothing to prune and only fine-tune."""
    return sparsity


def geometric(sparsity: float, progress: float, start: float) -> float:
    """Prune an equal fraction of the survivors each round: density falls geometrically, as repeated amounts compose."""
    return float(1 - (1 - start) * ((1 - sparsity) / (1 - start)) ** progress)


def linear(sparsity: float, progress: float, start: float) -> float:
    """Prune an equal number of entries each round."""
    return start + (sparsity - start) * progress


def cubic(sparsity: float, progress: float, start: float) -> float:
    """Prune fast while weights are redundant, slowly at the end: Zhu & Gupta, arXiv 1710.01878, equation 1."""
    return sparsity - (sparsity - start) * (1 - progress) ** 3


KINDS: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType(
    {"one_shot": one_shot, "geometric": geometric, "linear": linear, "cubic": cubic}
)
"""Name of a schedule -> the sparsity as a function of (final sparsity, fraction of the rounds done, start)."""


def targets(kind: str, sparsity: float, rounds: int, start: float = 0.0) -> tuple[float, ...]:
    """Return the overall sparsity to reach after each of `rounds` rounds; the last is `sparsity` itself.

    Arguments:
        kind: a key of `KINDS`; the equations are in the module's docstring.
        sparsity: fraction of all prunable entries that are masked after the last round, in [0, 1).
        rounds: how many times to prune and fine-tune, at least 1.
        start: fraction that is masked before the first round, in [0, sparsity].

    Returns:
        `rounds` fractions, never decreasing, each rounded to `DECIMALS` decimals.

    Raises:
        TypeError: `sparsity` or `start` is no real number, or `rounds` no integer.
        ValueError: one of them is out of its range, or `kind` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` (={kind!r}) must be one of {', '.join(KINDS)}.")
    for name, value in (("sparsity", sparsity), ("start", start)):
        if not _is(Real, value):
            raise TypeError(f"`{name}` (={value!r}) must be a number; give a fraction such as 0.9.")
    if not _is(Integral, rounds):
        raise TypeError(f"`rounds` (={rounds!r}) must be an integer: how many times to prune and fine-tune.")
    if not 0 <= sparsity < 1:
        raise ValueError(
            f"`sparsity` (={sparsity!r}) must lie in [0, 1): the fraction of entries that are masked at the end; "
            "give 90% as 0.9."
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
