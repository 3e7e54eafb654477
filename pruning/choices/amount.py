"""Pruning amounts: validate an amount and resolve it to a count. Standard library only, so that a plan needs no torch.

A float amount in [0, 1] is a fraction of the currently unpruned units; an int amount is a number of units. `1` is one
unit, `1.0` is all units. A unit is an entry (unstructured) or a channel (structured).
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import SupportsFloat, TypeAlias, cast

Amount: TypeAlias = SupportsFloat
"""Any real number: int, float, numpy scalar, Fraction. Tensors, Decimals and strings are refused."""


def validate_amount(amount: object) -> None:
    """Check an amount as far as possible without the tensor.

    Raises:
        TypeError: `amount` is not a `numbers.Real`.
        ValueError: a float outside [0, 1] (NaN included), or a negative int.
    """
    if not isinstance(amount, Real):
        raise TypeError(
            f"`amount` (={amount!r}) must be an int or a float, not {type(amount).__name__}; "
            "pass a float in [0, 1] to prune a fraction, an int to prune a count."
        )
    if isinstance(amount, Integral):
        if int(amount) < 0:
            raise ValueError(
                f"`amount` (={amount!r}) must not be negative when it is an int; it counts units to prune."
            )
    elif not 0.0 <= float(amount) <= 1.0:
        raise ValueError(f"`amount` (={amount!r}) must lie in [0, 1] when it is a float; pass an int to prune a count.")


def check_amount_fits(amount: Amount, tensor_size: int) -> None:
    """Raise `ValueError` when an int `amount` exceeds `tensor_size`, the number of units that can still be pruned."""
    if isinstance(amount, Integral) and int(amount) > tensor_size:
        raise ValueError(
            f"`amount` (={amount!r}) must not exceed the {tensor_size} units that can still be pruned; "
            "pass a smaller int, or a float in [0, 1] to prune a fraction."
        )


def count_to_prune(amount: Amount, tensor_size: int) -> int:
    """Return the number of units to prune.

        count = amount                          for an int amount
        count = round(amount * tensor_size)     for a float amount, half to even

    Args:
        amount: fraction of the currently unpruned units, or number of units.
        tensor_size: the number of currently unpruned units.
    """
    if isinstance(amount, Integral):
        return int(amount)
    return round(cast(float, amount) * tensor_size)


def resolve_amount(amount: Amount, tensor_size: int) -> int:
    """Return `count_to_prune(amount, tensor_size)`; raise `ValueError` if the count exceeds `tensor_size`."""
    check_amount_fits(amount, tensor_size)
    return count_to_prune(amount, tensor_size)
