"""How much to prune: validate an amount and resolve it to a count. Standard library only, so a plan needs no torch.

An amount is a fraction of the currently unpruned units when it is a float in [0, 1], and a number of units when it is
an int. `1` is one unit, `1.0` is all of them. A unit is an entry (unstructured) or a channel (structured).
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import SupportsFloat, TypeAlias, cast

Amount: TypeAlias = SupportsFloat
"""Any real number type: int, float, numpy scalar, Fraction. Tensors, Decimals and strings are refused."""


def validate_amount(amount: object) -> None:
    """Check what can be checked of `amount` before the tensor is known.

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
    """Return the number of units that `amount` stands for.

        count = amount                   if it is an int
        count = round(amount * tensor_size)     if it is a float, half to even

    Args:
        amount: fraction of the currently unpruned units, or their number.
        tensor_size: the number of currently unpruned units.
    """
    if isinstance(amount, Integral):
        return int(amount)
    return round(cast(float, amount) * tensor_size)


def resolve_amount(amount: Amount, tensor_size: int) -> int:
    """Return `count_to_prune(amount, tensor_size)`; raise `ValueError` when there are not so many units."""
    check_amount_fits(amount, tensor_size)
    return count_to_prune(amount, tensor_size)
