"""Tokens that a mixture routes to each expert, and the products that its experts compute, while a network runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pruning.holding.parameter import hooked, plain_modules
from pruning.mixtures.finding import Mixture


@dataclass(frozen=True)
class Routed:
    """Call of a mixture's experts.

    Args:
        hidden: (tokens, width), inputs of the experts.
        experts: int64 of (tokens, top_k), the experts of each token.
        weights: (tokens, top_k), the weights by which their outputs are multiplied.
    """

    hidden: Tensor
    experts: Tensor
    weights: Tensor

    def without_padding(self, counts: Tensor | None) -> Routed:
        """Return the call with the tokens that count, or itself if the positions of `counts` are not its tokens.

        Args:
            counts: nonzero where a position of the batch is no padding; None: all count.
        """
        if counts is None or not counts.numel() == len(self.hidden) == len(self.experts):
            return self
        real = counts.flatten().to(self.hidden.device) != 0
        return Routed(self.hidden[real], self.experts[real], self.weights[real])


@contextmanager
def routed(model: nn.Module, mixture: Mixture, on_call: Callable[[Routed], None]) -> Iterator[None]:
    """Call `on_call` with each call of a mixture's experts inside the context."""

    def read(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        on_call(routed_of(args, kwargs))

    with hooked([dict(plain_modules(model))[mixture.experts].register_forward_pre_hook(read, with_kwargs=True)]):
        yield


def routed_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Routed:
    """Return the arguments of a call of experts.

    Raises:
        ValueError: they are not the inputs, the experts of each token, and their weights.
    """
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    experts = next((each for each in given if not each.is_floating_point() and each.ndim == 2), None)
    weights = next(
        (t for t in given[1:] if experts is not None and t.is_floating_point() and t.shape == experts.shape), None
    )
    if experts is None or weights is None:
        raise ValueError("experts must be called with inputs, the experts of each token, and their weights.")
    return Routed(given[0], experts, weights)


def expert_outputs(experts: nn.Module, call: Routed, slot: int) -> Tensor:
    """Return the output of each token's expert in one of its slots, before its weight, (tokens, width).

    Hooks of the experts are not called: some number experts that a router of survivors chose, and `call` has them.
    """
    chosen = call.experts[:, slot : slot + 1]
    outputs: Tensor = experts.forward(call.hidden, chosen, torch.ones_like(call.weights[:, slot : slot + 1]))
    return outputs


def without_tokens(tokens: Mapping[str, Mapping[int, int]], effect: str, otherwise: str = "") -> str:
    """Return a sentence on experts that get no tokens; "" if all get some.

    Args:
        tokens: name of a stack -> expert -> number of its tokens.
        effect: what happens to the experts.
        otherwise: what to type, besides more batches.
    """
    empty = [f"{name}[{expert}]" for name, own in tokens.items() for expert, count in own.items() if not count]
    if not empty:
        return ""
    rarest = min((count for own in tokens.values() for count in own.values() if count), default=0)
    return (
        f"no token is routed to {', '.join(empty[:6])}{f' and {len(empty) - 6} more' if empty[6:] else ''}: {effect}; "
        f"the rarest of the other experts has {rarest} token{'' if rarest == 1 else 's'}; pass more batches, in a "
        f"sweep a larger score.examples{otherwise}"
    )


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Let the experts of transformers multiply by one expert's matrix at a time, as their classes are written."""
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_experts_implementation")}
    key = "_experts_implementation_internal"
    before = [(config, getattr(config, key)) for config in configs.values()]
    try:
        for config, _ in before:
            setattr(config, key, "eager")
        yield
    finally:
        for config, own in before:
            setattr(config, key, own)


class ProductsOfStacks(TorchFunctionMode):
    """Mode that calls `seen` with the inputs of each product by one expert's matrix.

    Args:
        stacks: name -> module whose own parameter of that name stacks the matrices; read at each product.
        seen: (name, index of the matrix, inputs of (tokens, inputs), whether they are all tokens in their order, as in
            a product by all matrices at once) -> None.
    """

    def __init__(self, stacks: Mapping[str, nn.Module], seen: Callable[[str, int, Tensor, bool], None]) -> None:
        super().__init__()
        self._stacks, self._seen = stacks, seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operation, and report the product that it is."""
        result = func(*args, **(kwargs or {}))
        if (name := getattr(func, "__name__", "")) in PRODUCTS:
            factors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            left, right = factors[1:3] if name in ("addmm", "baddbmm") else factors[:2]
            if name == "__rmatmul__":
                left, right = right, left
            if not self._report(right, left) and right.ndim > 1:
                self._report(left, right.mT)
        return result

    def _report(self, factor: Tensor, inputs: Tensor) -> bool:
        """Report a product if a factor is a stack, a matrix of it, or outputs of a matrix; return whether it is."""
        for name, module in self._stacks.items():
            whole = getattr(module, name.rpartition(".")[2])
            if factor.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                continue
            size = whole[0].numel()
            index = (factor.storage_offset() - whole.storage_offset()) // size
            if not 0 <= index < len(whole):
                continue
            if factor.numel() <= size:
                self._seen(name, index, inputs.reshape(-1, inputs.shape[-1]), False)
            else:
                for matrix, own in enumerate(inputs):
                    self._seen(name, index + matrix, own, True)
            return True
        return False


PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "addmm"}
"""Names of operations that multiply by a matrix."""
