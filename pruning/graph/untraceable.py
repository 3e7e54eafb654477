"""Advice for a network that torch.export cannot trace: the cause, as far as a plain call shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from pruning.holding.copies import to_run
from pruning.holding.parameter import hooked
from pruning.measure.macs import Inputs

ADVICE = "remove control flow that depends on data from the forward"


def is_known(leaf: Any) -> bool:
    """Return whether torch.export can take and return a value: it is of no class of the network's own."""
    return leaf is None or isinstance(leaf, Tensor | bool | int | float | str)


def advice(model: nn.Module, given: Inputs) -> str:
    """Return what to change in a network, or in its input, so that it can be traced.

    Args:
        model: a network that torch.export refused.
        given: inputs of the call.
    """
    packed: list[str] = []

    def note(path: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if any(isinstance(each, PackedSequence) for each in args):
            packed.append(path)

    hooks = (module.register_forward_pre_hook(partial(note, path)) for path, module in model.named_modules())
    try:
        with hooked(hooks), torch.no_grad():
            output = to_run(model)(*given[0], **given[1])
    except Exception:  # a forward may raise anything
        return "a plain call with `example` fails, too: pass an input that the network takes"
    inputs, outputs = tree_leaves(given), tree_leaves(output)
    if any(isinstance(leaf, Tensor) for leaf in outputs):  # then others may be caches, which are left out
        outputs = []
    for what, verb, leaves in (("an input", "pass", inputs), ("its output", "return", outputs)):
        if unknown := [type(leaf).__name__ for leaf in leaves if not is_known(leaf)]:
            return (
                f"{what} is of the class {unknown[0]}, which torch.export does not know: {verb} a tensor, tuple, dict "
                f"or NamedTuple, or, for a dataclass, call torch.export.register_dataclass({unknown[0]}) first"
            )
    if packed:
        return f"`{packed[-1]}` takes a packed sequence, whose sizes depend on values: pass it the padded sequence"
    return ADVICE
