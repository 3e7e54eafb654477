"""Observation of all matrix products and convolutions that a forward computes, whichever torch function it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

FIRST = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1, "addbmm": 1}
"""Operation -> index of its first factor among the arguments; the second factor comes next."""
ATTENTION = ("_scaled_dot_product_", "flex_attention")
"""Name prefixes of attention kernels, which take queries, keys and values, each (..., heads, tokens, features)."""


class Product(NamedTuple):
    """Two factors, and the multiply-accumulates of their product; every entry of a factor is used equally often.

    The factors of a convolution are its input and weight; its border counts like its inside. Only the kernel of
    attention knows the attention weights, so for their product with the values both factors are the values.
    """

    one: Tensor
    other: Tensor
    macs: int


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that sees each operation of torch without importing torch's compiler."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch imports its compiler at the first operation, which costs 2 s and 80 MB."""
        return False


class Products(Watching):
    """Dispatch mode that calls `seen` with each product that is computed."""

    def __init__(self, seen: Callable[[Product], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, decomposed if it is composite, and report its products."""
        named = dict(kwargs or {})
        if isinstance(func, OpOverload):
            with self:  # under inference_mode composite operations arrive whole
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        result = func(*args, **named)
        for product in _products(func, args, result):
            self._seen(product)
        return result


def _products(func: Any, args: tuple[Any, ...], result: Any) -> Iterator[Product]:
    if isinstance(func, OpOverload) and func.namespace != "aten":
        return
    name = str(func.overloadpacket.__name__ if isinstance(func, OpOverload) else func.name())
    if name in FIRST:
        one, other = args[FIRST[name] :][:2]
        yield Product(one, other, other.numel() * (one.shape[-2] if one.ndim > 1 else 1))
    elif name == "convolution":
        inputs, weight, transposed = args[0], args[1], args[6]
        yield Product(inputs, weight, weight.numel() * ((inputs if transposed else result).numel() // weight.shape[0]))
    elif name.startswith(ATTENTION):
        queries, keys, values = (each.flatten(0, -3) for each in args[:3])
        keys, values = (each.repeat_interleave(len(queries) // len(each), 0) for each in (keys, values))
        yield Product(queries, keys, queries.numel() * keys.shape[1])
        yield Product(values, values, values.numel() * queries.shape[1])
